"""A client's part in secure sums. It is on disk before it is sent, and shares are revealed for one sum per phase only.

Files in the state folder, each written by rename after fsync: ``secure-work.safetensors`` (the change and its private
tensors), ``secure-attempt.json`` (keys, shares, the exact bytes of every answer), ``secure-masked.safetensors``, and
two that are never deleted: ``secure-markers.json``, the phases for which this client has revealed shares, and the
payloads that it has trained from, and ``secure-sums.safetensors`` (`earlier_sums`). The difference of two sums whose
sets differ by one client is that client's change. So a client that has revealed shares joins no other attempt at that
phase, not even after a restart, and no sum of nearly the same payload with other members.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy.earlier_sums import EarlierSum, EarlierSums, shapes_of, sketched
from promptfed.client_service.privacy.identity import Met, identity_of, meet
from promptfed.client_service.privacy.secure_records import (
    AttemptAbout,
    KeptAttempt,
    KeptChange,
    LastAnswer,
    Markers,
    OfPhase,
)
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.shared.messages import SpendReport, Task, TaskKind
from promptfed.shared.secagg import SecureError, member, messages
from promptfed.shared.secagg.member import Secrets
from promptfed.shared.secagg.vectors import blurred, encoded, flat_change
from promptfed.shared.service.fault_points import point
from promptfed.shared.spec.weighting import Weighting
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import arrays_of, decode, encode

WORK, ATTEMPT = "secure-work.safetensors", "secure-attempt.json"
MASKED, MARKERS = "secure-masked.safetensors", "secure-markers.json"
STEPS: tuple[TaskKind, ...] = ("train", "share", "mask", "confirm", "unmask")


@dataclass(frozen=True)
class Trained:
    """The result of training. ``update`` never leaves in the clear; ``private`` is committed if the sum includes it."""

    update: Tensors
    private: Tensors
    provenance: TensorOrigin
    metrics: Mapping[str, float] = field(default_factory=dict)
    spent: SpendReport | None = None


@dataclass(frozen=True)
class Cost:
    """What a kept change costs its data set, by its ``release``: the SHA-256 of its file, the same in every attempt."""

    release: str
    spent: SpendReport | None
    provenance: TensorOrigin


@dataclass(frozen=True)
class StepAnswer:
    """The exact bytes that answer a task; they are on the disk."""

    task_id: str
    kind: TaskKind
    body: bytes


class SecureWork:
    """One client's secure sums. What a method returns may be sent; nothing else leaves.

    ``samples``: what it trains on, told where the terms weigh clients by their samples.
    """

    def __init__(
        self, state: PrivateState, federation_id: str, limits: messages.Limits | None = None, samples: int = 1
    ):
        self._state = state
        self._federation = federation_id
        self._limits = limits or messages.Limits()
        self.samples = samples
        self.met: Met | None = None

    # Step 0

    def is_trained(self, task: Task) -> bool:
        """Whether the change for this phase is there already, so that another attempt need not train."""
        kept = self._work()[1]
        return kept is not None and kept.payload == task.payload.sha256 and kept.is_of(task) and kept.shapes != ""

    def expect(self, task: Task) -> None:
        """Refuse a task that could make this client part of a second sum.

        Raises:
            Failure: already-revealed, or payload-repeated.
        """
        assert task.secure is not None
        markers, where = self._markers(), _name(task)
        revealed = markers.revealed.get(where)
        if revealed is not None and (task.kind == "train" or revealed[0] != task.secure.attempt):
            text = f"this client has revealed its shares for attempt {revealed[0]} of round {task.round}"
            raise Failure("already-revealed", f"{text}: two sums would tell what it has changed")
        if task.kind != "train":
            return
        served = markers.payloads.get(task.payload.sha256)
        if served is not None and served != where:
            raise Failure("payload-repeated", f"the same payload was served for {served}: the difference would be told")
        if task.round < markers.round:
            raise Failure("payload-repeated", f"round {task.round} is asked for after round {markers.round}")

    def keep(self, task: Task, payload: Tensors, trained: Trained) -> None:
        """Make a trained change durable. It is never kept where updates are sent from.

        Raises:
            Failure: out-of-range.
        """
        update, before = arrays_of(trained.update), arrays_of(payload)
        try:
            numbers = blurred(flat_change(update, before), update)
        except SecureError as error:
            raise Failure(error.kind, str(error)) from None
        about = KeptChange(
            round=task.round,
            phase=task.phase,
            payload=task.payload.sha256,
            shapes=shapes_of(before),
            length=float(np.linalg.norm(numbers)),
            provenance=trained.provenance,
            privacy=trained.spent,
        )
        private = {f"private.{name}": tensor.detach().clone() for name, tensor in trained.private.items()}
        sketch = torch.from_numpy(sketched(identity_of(self._state), before))
        content = {"change": torch.from_numpy(numbers), "sketch": sketch, **private}
        self._state.write_file(WORK, encode(content, about.model_dump()))
        point("secure-work-written")
        markers = self._markers()
        markers.payloads[task.payload.sha256] = _name(task)
        markers.round = max(markers.round, task.round)
        self._state.write_as(MARKERS, markers)

    def keys(self, task: Task) -> StepAnswer:
        """The answer of step 0: this attempt's keys, signed; they are made once."""
        assert task.secure is not None
        about = AttemptAbout(
            federation_id=self._federation,
            round=task.round,
            phase=task.secure.phase,
            attempt=task.secure.attempt,
            samples=1 if _weighting(task).is_uniform else self.samples,
            payload_sha256=task.payload.sha256,
            terms=task.config.terms(),
        )
        attempt = self._attempt()
        if attempt is not None and attempt.about == about:
            return self._answer(attempt, task)
        if attempt is not None and attempt.about.is_of(task) and attempt.about.attempt >= task.secure.attempt:
            raise Failure("bad-roster", f"attempt {task.secure.attempt} is over, or asked otherwise than before")
        fresh = Secrets.fresh(identity_of(self._state))
        secrets = {"mask_key": fresh.mask_key, "share_key": fresh.share_key, "seed": fresh.seed}
        limits = self._limits if self._limits != messages.Limits() else None
        body = member.signed_entry(fresh, about.model_dump()).model_copy(update={"limits": limits}).model_dump_json()
        answer = self._answer(KeptAttempt(about=about, secrets=secrets, answers={"train": body}), task)
        point("keys-written")
        return answer

    # Steps 1 to 4

    def answer(self, task: Task, payload: bytes | Path) -> StepAnswer:
        """The answer to a later step, of its task's ``payload``: computed once, on the disk before it is returned.

        Raises:
            Failure: the payload cannot be of a sum that this client takes part in; nothing was computed.
        """
        assert task.secure is not None
        attempt = self._attempt()
        if attempt is None or not attempt.about.is_of(task) or attempt.about.attempt != task.secure.attempt:
            text = f"this client has no keys for attempt {task.secure.attempt} of round {task.round}"
            raise Failure("bad-roster", f"{text}: it answers the next attempt, or the next round")
        if task.kind in attempt.answers:
            return self._answer(attempt, task)
        before = STEPS[STEPS.index(task.kind) - 1]
        if before not in attempt.answers:
            raise Failure("bad-roster", f"step {task.kind} is asked for before step {before} was answered")
        steps = {"share": self._share, "mask": self._mask, "confirm": self._confirm, "unmask": self._unmask}
        try:
            content = payload if isinstance(payload, bytes) else payload.read_bytes()
            attempt.answers[task.kind] = steps[task.kind](attempt, task, content)
        except SecureError as error:
            raise Failure(error.kind, str(error)) from None
        except ValueError as error:
            raise Failure("bad-roster", f"what step {task.kind} tells is not understood: {str(error)[:300]}") from None
        answer = self._answer(attempt, task)
        point(f"{task.kind}-written")
        return answer

    def _share(self, attempt: KeptAttempt, task: Task, payload: bytes) -> str:
        attempt.roster = payload.decode()
        roster, place, secrets = self._read(attempt, task)
        self._expect_apart(task, roster, roster.entries)
        answer, attempt.own = member.share_secrets(secrets, roster, place)
        others = (entry.identity_key for other, entry in roster.entries.items() if other != place)
        self.met = meet(self._state, others, task.round, self._limits.peers)
        return answer.model_dump_json()

    def _mask(self, attempt: KeptAttempt, task: Task, payload: bytes) -> str:
        roster, place, secrets = self._read(attempt, task)
        job = messages.MaskJob.model_validate_json(payload)
        received = member.open_boxes(secrets, roster, place, job, self._least(task))
        assert attempt.own is not None
        attempt.held = {place: attempt.own, **received}
        attempt.sharing = job.sharing
        tensors, kept = self._work()
        if kept is None or kept.payload != attempt.about.payload_sha256 or not kept.shapes:
            raise SecureError("bad-roster", "the change that this attempt is about is not here any more")
        self._expect_apart(task, roster, job.sharing)
        vector = encoded(tensors["change"].numpy(), roster.weights[place])
        masked = member.mask_vector(secrets, roster, place, job.sharing, vector.view(np.uint64))
        about = {"roster_sha256": roster.sha256.hex(), **kept.model_dump(include={"privacy"})}
        self._state.write_file(MASKED, encode({"masked": torch.from_numpy(masked.view(np.int64))}, about))
        self._note_sum(attempt)
        return ""

    def _confirm(self, attempt: KeptAttempt, task: Task, payload: bytes) -> str:
        roster, place, secrets = self._read(attempt, task)
        job = messages.ConfirmJob.model_validate_json(payload)
        answer = member.confirm_list(secrets, roster, place, attempt.sharing, job, self._least(task))
        self._expect_apart(task, roster, job.alive, final=True)
        self._note_sum(attempt, [roster.entries[alive].identity_key for alive in job.alive])
        attempt.confirm = payload.decode()
        return answer.model_dump_json()

    def _unmask(self, attempt: KeptAttempt, task: Task, payload: bytes) -> str:
        roster, place, _ = self._read(attempt, task)
        confirm = messages.ConfirmJob.model_validate_json(attempt.confirm)
        answer = member.reveal_shares(
            roster, place, confirm, attempt.held, messages.UnmaskJob.model_validate_json(payload)
        )
        markers = self._markers()
        mark = attempt.about.attempt, messages.alive_digest([roster.hashes[alive] for alive in confirm.alive])
        if markers.revealed.setdefault(_name(task), mark) != mark:
            raise SecureError("already-revealed", "this client has revealed its shares for another list")
        self._state.write_as(MARKERS, markers)
        point("reveal-marked")
        return answer.model_dump_json()

    def _expect_apart(self, task: Task, roster: messages.Roster, places: Iterable[int], final: bool = False) -> None:
        """No second sum of nearly an earlier payload with other members. Raises SecureError: payload-repeated."""
        tensors, kept = self._work()
        if kept is not None and kept.shapes:
            members = [roster.entries[place].identity_key for place in places]
            EarlierSums(self._state, self._limits.min_move).expect_apart(
                _name(task), tensors["sketch"].numpy(), kept.shapes, members, final
            )

    def _note_sum(self, attempt: KeptAttempt, members: Collection[str] = ()) -> None:
        """Note what the masked change may now be summed to; ``members``: once they are known."""
        tensors, kept = self._work()
        if kept is not None and kept.shapes:
            about = EarlierSum(round=kept.round, shapes=kept.shapes, change=kept.length)
            EarlierSums(self._state, self._limits.min_move).note(
                _name(kept), attempt.about.attempt, tensors["sketch"].numpy(), about, members
            )

    def _least(self, task: Task) -> messages.Limits:
        """What this client insists on: no sum of fewer than the spec promises, nor than its owner's policy asks for."""
        spec = task.config.secure_aggregation
        assert spec is not None
        return replace(self._limits, minimum=max(spec.minimum, self._limits.minimum))

    def _read(self, attempt: KeptAttempt, task: Task) -> tuple[messages.Roster, int, Secrets]:
        """The attempt's roster, checked; this client's place in it; its secrets."""
        spec = task.config.secure_aggregation
        assert spec is not None
        signed = messages.KeysAnswer.model_validate_json(attempt.answers["train"])
        message = messages.RosterMessage.model_validate_json(attempt.roster)
        roster = messages.read_roster(message, signed, spec, self._least(task).minimum, _weighting(task))
        place = roster.place_of(signed.entry)
        member.expect_roster(roster, place, self._limits)
        return roster, place, Secrets(identity_of(self._state), **attempt.secrets)

    # What it costs

    def cost(self) -> Cost | None:
        """What the kept change costs, which is noted before it first leaves under masks; None where none is kept."""
        content, (_, kept) = self._state.read_file(WORK), self._work()
        if content is None or kept is None:
            return None
        return Cost(hashlib.sha256(content).hexdigest(), kept.privacy, kept.provenance)

    def drop(self) -> None:
        """Forget the kept change, and this attempt with it."""
        for name in (ATTEMPT, MASKED, WORK):
            self._state.remove_note(name)

    # After an answer

    def unsent(self) -> StepAnswer | None:
        """The last answer that this client does not know to be accepted."""
        attempt = self._attempt()
        if attempt is None or attempt.last is None or attempt.last.kind in attempt.accepted:
            return None
        return self._last_answer(attempt, attempt.last)

    def note_accepted(self, answer: StepAnswer) -> None:
        """The coordinator has it. Only of a masked change it matters later; another answer is sent again at worst."""
        attempt = self._attempt() if answer.kind == "mask" else None
        if attempt is not None and answer.kind not in attempt.accepted:
            attempt.accepted.append(answer.kind)
            self._state.write_as(ATTEMPT, attempt)

    def note_refused(self, answer: StepAnswer) -> None:
        """The coordinator will never have it: it is not sent again."""
        attempt = self._attempt()
        if attempt is not None:
            attempt.last = None
            self._state.write_as(ATTEMPT, attempt)

    def settle(self, task: Task) -> None:
        """A task of a later phase, or an evaluation, has come: commit the private tensors of a change that was summed.

        Keys, shares and the change itself are deleted; the markers stay.
        """
        tensors, kept = self._work()
        if kept is None or (task.secure is not None and kept.is_of(task)):
            return
        attempt = self._attempt()
        if attempt is not None and attempt.about.is_of(kept) and "mask" in attempt.accepted:
            private = {n.removeprefix("private."): t for n, t in tensors.items() if n.startswith("private.")}
            self._state.commit_prepared(private, kept.provenance)
        self.drop()

    # Files

    def _answer(self, attempt: KeptAttempt, task: Task) -> StepAnswer:
        """Note for which task the answer is about to leave."""
        attempt.last = LastAnswer(task_id=task.task_id, kind=task.kind)
        self._state.write_as(ATTEMPT, attempt)
        return self._last_answer(attempt, attempt.last)

    def _last_answer(self, attempt: KeptAttempt, last: LastAnswer) -> StepAnswer:
        body = attempt.answers[last.kind].encode() if last.kind != "mask" else self._state.read_file(MASKED)
        if body is None:
            raise self._state.damaged(MASKED)
        return StepAnswer(last.task_id, last.kind, body)

    def _work(self) -> tuple[Tensors, KeptChange | None]:
        content = self._state.read_file(WORK)
        if content is None:
            return {}, None
        try:
            tensors, about = decode(content)
            return tensors, KeptChange.model_validate(about)
        except ValueError:
            raise self._state.damaged(WORK) from None

    def _attempt(self) -> KeptAttempt | None:
        return self._state.read_as(ATTEMPT, KeptAttempt)

    def _markers(self) -> Markers:
        return self._state.read_as(MARKERS, Markers) or Markers()


def _weighting(task: Task) -> Weighting:
    """The agreed rule of weights.

    Raises:
        Failure: bad-roster, where the task has none.
    """
    if task.config.weighting is None:
        raise Failure("bad-roster", "the task does not say how much each client of its secure sum counts")
    return task.config.weighting


def _name(task: Task | OfPhase) -> str:
    return f"round {task.round}, {task.phase}"
