"""Attempts of a secure sum played in one process, with clients that are lost in a step of one's choice."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from promptfed.shared.secagg import member, messages, opening
from promptfed.shared.secagg.keys import new_identity
from promptfed.shared.secagg.masks import Words
from promptfed.shared.secagg.messages import KeysAnswer, MaskJob, RosterMessage, SharesAnswer, UnmaskAnswer
from promptfed.shared.secagg.vectors import LARGEST_CHANGE, Whole, blurred, encoded, flat_change
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.weighting import Weighting
from promptfed.shared.tensors import Array

UNIFORM, BY_SAMPLES = Weighting(weighting="uniform"), Weighting(weighting="samples", max_weight_share=1.0)
STEPS = ("keys", "share", "mask", "confirm", "unmask")
ABOUT = {
    "federation_id": "fed-1", "round": 1, "phase": "prompts", "attempt": 1, "payload_sha256": "sha256:" + "1" * 64,
    "terms": "2" * 64,
}  # fmt: skip


def encode_change(update: Mapping[str, Array], payload: Mapping[str, Array], weight: float = 1.0) -> Whole:
    """``(d,)`` int64: the blurred `flat_change` with ``weight`` 0…1, as integers."""
    return encoded(blurred(flat_change(update, payload), update), weight)


@dataclass
class Member:
    """One simulated client, which reads and answers messages as JSON."""

    change: NDArray[np.float64]
    samples: int
    spec: SecureAggregationSpec
    about: Mapping[str, object] = field(default_factory=lambda: ABOUT)
    limits: messages.Limits = field(default_factory=messages.Limits)
    rule: Weighting = UNIFORM
    sent: int = 0
    received: int = 0

    def __post_init__(self) -> None:
        self.secrets = member.Secrets.fresh(new_identity())
        self.entry = member.signed_entry(self.secrets, {**self.about, "samples": self.samples})

    def _out(self, text: str) -> str:
        self.sent += len(text)
        return text

    def _in(self, text: str) -> str:
        self.received += len(text)
        return text

    def keys(self) -> str:
        return self._out(self.entry.model_dump_json())

    @property
    def vector(self) -> Words:
        """What it adds to the sum: its change by its weight in the roster, in whole numbers."""
        return encoded(self.change, self.roster.weights[self.place]).view(np.uint64)

    def share(self, message: str) -> str:
        told = RosterMessage.model_validate_json(self._in(message))
        self.roster = messages.read_roster(told, self.entry, self.spec, self.limits.minimum, self.rule)
        self.place = self.roster.place_of(self.entry.entry)
        answer, self.own = member.share_secrets(self.secrets, self.roster, self.place)
        return self._out(answer.model_dump_json())

    def mask(self, message: str) -> Words:
        job = MaskJob.model_validate_json(self._in(message))
        pairs = member.open_boxes(self.secrets, self.roster, self.place, job, self.limits)
        self.held, self.sharing = {self.place: self.own, **pairs}, job.sharing
        vector = member.mask_vector(self.secrets, self.roster, self.place, job.sharing, self.vector)
        self.sent += vector.nbytes
        return vector

    def confirm(self, message: str) -> str:
        self.list = opening.ConfirmJob.model_validate_json(self._in(message))
        answer = member.confirm_list(self.secrets, self.roster, self.place, self.sharing, self.list, self.limits)
        return self._out(answer.model_dump_json())

    def unmask(self, message: str) -> str:
        job = opening.UnmaskJob.model_validate_json(self._in(message))
        return self._out(member.reveal_shares(self.roster, self.place, self.list, self.held, job).model_dump_json())


@dataclass
class Played:
    """What came of an attempt: the sum, who counts (indices of the clients), and all that the coordinator was sent."""

    total: Words
    counted: list[int]
    messages: messages.Roster
    told: list[bytes]


def lost(count: int, share: float, step: str, seed: int = 0) -> dict[str, set[int]]:
    """``share`` of ``count`` clients, who answer up to ``step`` and not in it."""
    return {step: set(random.Random(seed).sample(range(count), int(share * count)))}


def play(members: Sequence[Member], spec: SecureAggregationSpec, gone: Mapping[str, set[int]]) -> Played:
    """One attempt; ``gone`` says who is lost in which step."""
    told: list[bytes] = []
    there = set(range(len(members)))

    def left(step: str) -> list[int]:
        there.difference_update(gone.get(step, ()))
        return sorted(there)

    answers = {i: KeysAnswer.model_validate_json(_kept(told, members[i].keys())) for i in left("keys")}
    made, signed = messages.make_roster(answers.values(), spec, members[0].rule)
    place = {i: made.place_of(answers[i].entry) for i in answers}
    shares = {}
    for i in left("share"):
        text = members[i].share(made.message(signed).model_dump_json())
        shares[place[i]] = SharesAnswer.model_validate_json(_kept(told, text))
        opening.check_shares(made, place[i], shares[place[i]])
    vectors = {}
    for i in left("mask"):
        vectors[place[i]] = members[i].mask(opening.mask_job(made, place[i], shares).model_dump_json())
        told.append(vectors[place[i]].tobytes())
    counted = sorted(there)
    confirm = opening.confirm_job(shares, vectors)
    signatures = {}
    for i in left("confirm"):
        text = _kept(told, members[i].confirm(confirm.model_dump_json()))
        signatures[place[i]] = opening.ConfirmAnswer.model_validate_json(text)
        opening.check_confirmation(made, place[i], confirm.alive, signatures[place[i]])
    reveals = {}
    for i in left("unmask"):
        text = members[i].unmask(opening.unmask_job(signatures).model_dump_json())
        reveals[place[i]] = UnmaskAnswer.model_validate_json(_kept(told, text))
        opening.check_reveal(made, place[i], confirm, reveals[place[i]], shares)
        if len(reveals) >= made.threshold:
            break
    assert len(reveals) >= made.threshold
    ordered = (vectors[one] for one in confirm.alive)
    return Played(opening.open_sum(made, confirm, ordered, reveals, shares), counted, made, told)


def _kept(told: list[bytes], text: str) -> str:
    told.append(text.encode())
    return text


def members(count: int, size: int, spec: SecureAggregationSpec, samples: Sequence[int] | None = None) -> list[Member]:
    """Clients with changes of ``size`` numbers up to the largest; by ``samples``, or all of the same weight."""
    some = np.random.default_rng(7).uniform(-LARGEST_CHANGE, LARGEST_CHANGE, (count, size))
    rule = UNIFORM if samples is None else BY_SAMPLES
    return [Member(some[i], 1 if samples is None else samples[i], spec, rule=rule) for i in range(count)]


def clear_sum(members: Sequence[Member], counted: Sequence[int]) -> Words:
    """The sum of the vectors themselves, in Python's whole numbers."""
    columns = zip(*(members[i].vector.view(np.int64).tolist() for i in counted), strict=True)
    return np.array([sum(column) for column in columns], dtype=np.int64).view(np.uint64)
