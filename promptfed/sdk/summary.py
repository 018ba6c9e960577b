"""What lists, watchers and waits read of a federation, and no more.

A coordinator of another version may know states, rules or optimizers that this promptfed does not: nobody who only
waits for the end of a federation is to fail over them.
"""

from __future__ import annotations

from pydantic import BaseModel

from promptfed.shared.api_schemas import Awaited, ClientCounts


class BackboneName(BaseModel):
    """The backbone that the spec names."""

    model: str


class BackboneSummary(BaseModel):
    """The backbone that clients must have."""

    fingerprint: str | None
    confirmed: bool


class SpecSummary(BaseModel):
    """What of a spec is shown beside a state."""

    method: dict[str, object]
    rounds: int
    backbone: BackboneName


class FederationSummary(BaseModel):
    """One federation."""

    id: str
    name: str
    state: str
    reason: str | None
    round: int
    phase: str | None
    spec: SpecSummary
    backbone: BackboneSummary
    clients: ClientCounts
    answered: list[str]
    awaited: list[Awaited]


class FederationList(BaseModel):
    """A page of federations."""

    federations: list[FederationSummary]
    next: str | None
