"""What a client keeps of its secure sums, as it lies in the state folder."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, PlainSerializer

from promptfed.client_service.state.private_state import TensorOrigin
from promptfed.shared.messages import SpendReport, Task, TaskKind
from promptfed.shared.spec.section import left_out

HexBytes = Annotated[
    bytes,
    BeforeValidator(lambda value: bytes.fromhex(value) if isinstance(value, str) else value),
    PlainSerializer(bytes.hex, return_type=str),
]
Pair = tuple[HexBytes, HexBytes]
"""A share of a member's seed, and one of its mask key."""


class OfPhase(BaseModel):
    """Something that belongs to one phase of one round."""

    round: int
    phase: str

    def is_of(self, other: Task | OfPhase) -> bool:
        """Whether both belong to the same phase of the same round."""
        return (self.round, self.phase) == (other.round, other.phase)


class KeptChange(OfPhase):
    """The metadata of a kept change; ``shapes`` are the payload's, ``length`` is that of the change."""

    payload: str
    shapes: str = ""
    length: float = 0.0
    provenance: TensorOrigin
    privacy: Annotated[SpendReport | None, left_out()] = None


class AttemptAbout(OfPhase):
    """What an attempt is about, as this client's entry in the roster says it (`Entry`)."""

    federation_id: str
    attempt: int
    samples: int
    payload_sha256: str
    terms: str


class LastAnswer(BaseModel):
    """For which task the last answer is."""

    task_id: str
    kind: TaskKind


class KeptAttempt(BaseModel):
    """One attempt at a sum: its keys, every answer so far, and what later steps need of earlier ones.

    Attributes:
        answers: the body of each step's answer; that of ``mask`` is a file of its own.
        accepted: steps whose answer the coordinator is known to have.
        last: the answer that may be under way.
        roster: as the coordinator told it in step ``share``.
        own: the shares that this client holds of its own secrets.
        held: the shares that it holds of each member's secrets, by the member's place.
        sharing: the places of all who have shared.
        confirm: the lists that step ``confirm`` told.
    """

    about: AttemptAbout
    secrets: dict[str, HexBytes]
    answers: dict[TaskKind, str]
    accepted: list[TaskKind] = []
    last: LastAnswer | None = None
    roster: str = ""
    own: Pair | None = None
    held: dict[int, Pair] = {}
    sharing: list[int] = []
    confirm: str = ""


class Markers(BaseModel):
    """What outlives every attempt.

    Attributes:
        revealed: by phase, the attempt for which shares were revealed, and the digest of the list of who counts.
        payloads: by digest, the phase for which a payload was served.
        round: the last round that was trained for.
    """

    revealed: dict[str, tuple[int, str]] = {}
    payloads: dict[str, str] = {}
    round: int = 0
