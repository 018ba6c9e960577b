"""What the data owner agreed to, kept beside the private state, and compared with every task.

The terms consist of the coordinator's offer and of what the installed method declares. A task whose training terms
differ in any field is refused, and so is a task beyond the agreed rounds. Rounds only go forward, with one exception: a
coordinator that was restored from a backup asks for rounds again. A client follows one step back per coordinator
process; three in all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from pydantic import Field

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.canonical import canonical_json
from promptfed.shared.messages import FIGURES, MOST_PEERS, TEMPLATE_ECE, EnrolmentInfo, Message, Role, Task, Told
from promptfed.shared.methods import MULTI_LABEL, TASK, make_method
from promptfed.shared.methods.core import client_numbers
from promptfed.shared.methods.core.costs import allowed_rounds
from promptfed.shared.methods.core.interface import Method, Phase
from promptfed.shared.methods.core.several_labels import is_for_several_labels
from promptfed.shared.plain_text import counted, plain
from promptfed.shared.spec.sections import FINAL
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import TensorSpec

ROUNDS = 3  # that stand for all: the first, those in between, the last
FILE, ANSWERS, WITHDRAWN = "consent.json", "answers.json", "withdrawn"
ATTEMPTS = 5  # answers for one phase: an operator may let those whose update was refused try again
RESTORES = 3  # of the coordinator from a backup, without asking the owner
SHOWN = 200  # characters of a value that an owner is shown
SHOWN_DIFFERENCES = 20  # of a refused task
OF_THE_WEIGHTS = {"backbone": {"fingerprint", "shape"}}  # pinned once the weights are loaded, see `Agreement.pin`


def metrics_of(method: Method, info: EnrolmentInfo) -> list[str]:
    """Patterns of the numbers that leave with an update."""
    return client_numbers.of_training(method, info.privacy is not None, info.secure_aggregation is not None)


def tensors_of(method: Method) -> dict[str, list[str]]:
    """The tensors that each phase sends, with symbols in their shapes."""
    return {name: [_tensor(spec) for spec in phase.up] for name, (phase, _) in phases_of(method).items()}


def phases_of(method: Method) -> dict[str, tuple[Phase, list[int]]]:
    """The phases of a method by name, each with the rounds that have it: the first, a middle and the last one."""
    phases: dict[str, tuple[Phase, list[int]]] = {}
    for round in range(1, ROUNDS + 1):
        for phase in method.phases(round, ROUNDS):
            phases.setdefault(phase.name, (phase, []))[1].append(round)
    return phases


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} ({', '.join(map(str, spec.shape))}) {spec.dtype}"


def settings_of(method: Method) -> dict[str, Any]:
    """The method's name and hyperparameters."""
    task: dict[str, Any] = {TASK: MULTI_LABEL} if is_for_several_labels(method) else {}
    return {"name": method.name, **method.hyper.model_dump(mode="json"), **task}


class NotAgreed(ValueError):
    """A task differs from what the owner of the data agreed to; the text says how."""


class AgreedTerms(TrainingTerms):
    """All that taking part consists of; nothing else is done.

    ``most_peers``: how many clients a task may describe to this one, 0 where the method does not look at them.
    ``sends``: the tensors of each phase, with symbols in their shapes. ``metrics``: patterns of the numbers that are
    sent with them. ``accuracies``: the test sets that are measured; ``figures``: what is sent of them beside the
    accuracy.
    """

    coordinator: str
    federation_id: str
    federation: str
    role: Role
    method_package: str | None
    evaluate_every: int
    evaluation: Told = None
    most_peers: int
    sends: dict[str, list[str]]
    metrics: list[str]
    accuracies: list[str]
    figures: list[str]

    @property
    def offer(self) -> dict[str, Any]:
        """The terms that are not the owner's own choice. If they change, the owner is asked again."""
        return self.model_dump(mode="json", exclude={"coordinator", "accuracies"})

    @property
    def digest(self) -> str:
        """The name of just this offer, which ``--agree`` takes."""
        return hashlib.sha256(canonical_json(self.offer).encode()).hexdigest()[:16]


class SentAnswers(Message):
    """What was sent so far: a round's phases (``train prompts``) with how often, and whether they are over."""

    epoch: str = ""
    restores: int = 0
    round: int = 0
    sent: dict[str, int] = Field(default_factory=dict)
    settled: list[str] = Field(default_factory=list)


class Consent(Message):
    """What the owner agreed to, when, and the weights that were then loaded."""

    terms: AgreedTerms
    agreed_at: datetime
    fingerprint: str | None = None


def terms_of(info: EnrolmentInfo, method: Method, coordinator: str, role: Role, tests: list[str]) -> AgreedTerms:
    """The terms of an offer. The backbone's fingerprint is left out: it is pinned once the weights are loaded."""
    offered = info.training_terms().model_copy(
        update={
            "method": settings_of(method),
            "backbone": info.backbone.model_copy(update={"fingerprint": None, "shape": None}),
        }
    )
    trains = role == "trainer"
    return AgreedTerms(
        **dict(offered),
        most_peers=MOST_PEERS if method.needs.domain_descriptions else 0,
        sends=tensors_of(method) if trains else {},
        metrics=metrics_of(method, info) if trains else [],
        coordinator=coordinator,
        federation_id=info.federation_id,
        federation=info.name,
        role=role,
        method_package=info.method_package,
        evaluate_every=info.evaluate_every,
        evaluation=info.evaluation,
        accuracies=["test", *sorted(tests)],
        figures=[*FIGURES, TEMPLATE_ECE],
    )


def differences(agreed: Any, offered: Any, path: str = "") -> list[str]:
    """``rounds is 9 instead of 3``, for each place where ``offered`` is not as it was ``agreed``; as plain text."""
    if isinstance(agreed, Mapping) and isinstance(offered, Mapping):
        keys = sorted({*agreed, *offered}, key=str)
        differing = []
        for key in keys:
            place = f"{path}.{key}" if path else str(key)
            differing += differences(agreed.get(key, "(nothing)"), offered.get(key, "(nothing)"), place)
        return differing
    if agreed == offered and type(agreed) is type(offered):
        return []
    return [f"{_short(path)} is {_short(offered)} instead of {_short(agreed)}"]


def _short(value: Any) -> str:
    text = plain(value)
    return text if len(text) <= SHOWN else text[:SHOWN] + "..."


@dataclass
class Agreement:
    """The consent of one client. Every task passes `expect`, and every answer is noted before it is sent.

    Consent and notes are on the client's disk, unless no other process will continue with its folder.
    """

    state: PrivateState
    consent: Consent
    sent: SentAnswers

    @classmethod
    def kept(cls, state: PrivateState) -> Agreement | None:
        """The consent in the folder; None before the first one.

        Raises:
            ClientError: STATE where it is damaged.
        """
        raw = state.read_note(FILE)
        if raw is None:
            return None
        try:
            return cls(state, Consent.model_validate_json(raw), _sent_so_far(state))
        except ValueError:
            raise state.damaged(FILE) from None

    @classmethod
    def made(cls, state: PrivateState, terms: AgreedTerms) -> Agreement:
        """A new consent. What was sent under an earlier one stays counted."""
        sent = _sent_so_far(state).model_copy(update={"restores": 0})
        agreement = cls(state, Consent(terms=terms, agreed_at=datetime.now(UTC)), sent)
        agreement._note(sent)
        agreement._change()
        state.remove_note(WITHDRAWN)
        return agreement

    @property
    def figures(self) -> tuple[str, ...]:
        """The figures of a test set that may be sent beside its accuracy."""
        return tuple(self.consent.terms.figures)

    @property
    def last_round(self) -> int:
        """The round after which the federation is finished: a privacy budget may end before the rounds do."""
        terms = self.consent.terms
        return allowed_rounds(make_method(terms.method), terms) or terms.rounds

    def changes(self, terms: AgreedTerms) -> list[str]:
        """The reasons to ask the owner again; empty if the consent covers ``terms``."""
        changed = differences(self.consent.terms.offer, terms.offer)
        at = self.state.read_note(WITHDRAWN)
        if at is not None:
            changed.insert(0, f"consent was withdrawn at {at}")
        if self.sent.restores >= RESTORES:
            changed.append(f"the coordinator went back to earlier rounds {RESTORES} times")
        return changed

    def pin(self, fingerprint: str) -> None:
        """The weights that were loaded: tasks for others are refused."""
        if self.consent.fingerprint != fingerprint:
            self._change(fingerprint=fingerprint)

    def expect(self, task: Task) -> None:
        """Refuse a task that was not agreed to.

        Raises:
            NotAgreed: it differs, or is one more than the rounds allow.
            ClientError: WITHDRAWN if consent was withdrawn meanwhile.
        """
        self.expect_consent()
        terms = self.consent.terms
        self._expect_terms(task)
        final = task.kind == "evaluate" and task.phase == FINAL and terms.selection is not None
        if final != (task.selected is not None) or (task.selected or 0) > terms.rounds:
            agreed = f"one of {terms.rounds} rounds" if final else "none"
            raise NotAgreed(f"selected is {task.selected} instead of {agreed}")
        if task.kind != "evaluate":
            self._expect_training(task)
        elif task.round > terms.rounds or not (task.round % terms.evaluate_every == 0 or task.round == self.last_round):
            raise NotAgreed(f"no evaluation was agreed to after round {task.round} of {terms.rounds}")
        self._expect_turn(task)

    def expect_consent(self) -> None:
        """Raise ClientError (WITHDRAWN) if consent was withdrawn meanwhile."""
        if self.state.read_note(WITHDRAWN) is not None:
            raise ClientError(Exit.WITHDRAWN, "this client's owner has withdrawn consent: it no longer takes part")

    def _expect_terms(self, task: Task) -> None:
        """Every training term is as agreed, and the weights and the number of peers are."""
        terms, config = self.consent.terms, task.config
        differing = differences(_compared(terms), _compared(config) | {"method": _method_of(config)})
        fingerprint, peers = config.backbone.fingerprint, len(config.peers)
        if fingerprint not in (None, self.consent.fingerprint):
            differing.append(f"backbone.fingerprint is {_short(fingerprint)} instead of {self.consent.fingerprint}")
        if peers > terms.most_peers:
            differing.append(f"peers describes {counted(peers, 'client')} instead of {terms.most_peers:,} at most")
        if differing:
            more = f"; and {len(differing) - SHOWN_DIFFERENCES} more" if len(differing) > SHOWN_DIFFERENCES else ""
            listed = "; ".join(differing[:SHOWN_DIFFERENCES]) + more
            raise NotAgreed(f"the task is not what this client's owner agreed to: {listed}")

    def _expect_training(self, task: Task) -> None:
        terms = self.consent.terms
        if terms.role != "trainer":
            raise NotAgreed("this client evaluates: its owner agreed to no training")
        if (task.secure is None) != (terms.secure_aggregation is None) or (
            task.secure is None and task.kind != "train"
        ):
            raise NotAgreed("the task is not one of the secure sums that were agreed to, or there are none")
        names = [phase.name for phase in make_method(terms.method).phases(task.round, terms.rounds)]
        if not 1 <= task.round <= terms.rounds or task.phase not in names:
            raise NotAgreed(
                f"round {task.round} of {terms.rounds} has no phase {plain(task.phase)!r}; agreed: {', '.join(names)}"
            )

    def _expect_turn(self, task: Task) -> None:
        """Rounds go forward and each phase is answered once, unless the coordinator was restored from a backup."""
        sent, key = self.sent, _key(task)
        if not self.goes_back(task):
            if task.round == sent.round and sent.sent.get(key, 0) >= ATTEMPTS:
                raise NotAgreed(f"round {task.round}, {plain(key)}, was answered {ATTEMPTS} times")
            return
        if task.epoch == sent.epoch:
            raise NotAgreed(f"round {task.round}, {plain(key)}, is over: this client has answered it, or a later round")
        if sent.restores >= RESTORES:
            raise NotAgreed(
                f"the coordinator asks for round {task.round} again; it went back {RESTORES} times before, "
                "and this client's owner has to agree to more"
            )

    def goes_back(self, task: Task) -> bool:
        """Whether a task that `expect` let pass is one of a federation that has gone back."""
        sent = self.sent
        return task.round < sent.round or (task.round == sent.round and _key(task) in sent.settled)

    def note_sending(self, task: Task) -> None:
        """Count an answer before it is sent."""
        before, key = self.sent, _key(task)
        back = self.goes_back(task)
        fresh = back or task.round > before.round
        sent, settled = ({}, []) if fresh else (dict(before.sent), before.settled)
        sent[key] = sent.get(key, 0) + 1
        restores = before.restores + back
        self._note(SentAnswers(epoch=task.epoch, restores=restores, round=task.round, sent=sent, settled=settled))

    def note_settled(self, kind: str, round: int, phase: str) -> None:
        """The answer counts, or came too late: this phase is not answered again."""
        sent, key = self.sent, _name(kind, phase)
        if round > sent.round:  # made before a kill, and sent only now
            sent = sent.model_copy(update={"round": round, "sent": {key: 1}, "settled": []})
        if key not in sent.settled:
            self._note(sent.model_copy(update={"settled": [*sent.settled, key]}))

    def metrics(self, measured: Mapping[str, float]) -> dict[str, float]:
        """The ``measured`` numbers that were agreed to."""
        return client_numbers.declared(measured, self.consent.terms.metrics)

    def _change(self, **changes: Any) -> None:
        self.consent = self.consent.model_copy(update=changes)
        self._write(FILE, self.consent)

    def _note(self, sent: SentAnswers) -> None:
        self.sent = sent
        self._write(ANSWERS, sent)

    def _write(self, file: str, value: Message) -> None:
        if self.state.resumable:
            self.state.write_as(file, value)


def _key(task: Task) -> str:
    return _name(task.kind, task.phase)


def _name(kind: str, phase: str) -> str:
    return f"{kind} {phase}"


def _sent_so_far(state: PrivateState) -> SentAnswers:
    return state.read_as(ANSWERS, SentAnswers) or SentAnswers()


def _compared(terms: TrainingTerms) -> dict[str, Any]:
    """Every training term as plain values, except what is pinned with the loaded weights."""
    return terms.training_terms().model_dump(mode="json", exclude=OF_THE_WEIGHTS)


def _method_of(terms: TrainingTerms) -> dict[str, Any]:
    """The method's settings, with defaults filled in as they were in the offer."""
    try:
        return settings_of(make_method(terms.method))
    except (SpecError, KeyError, TypeError):
        return {"name": "(none of this machine)", **terms.method}
