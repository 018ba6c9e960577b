"""Requests and answers of a round's replay, in JSON."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from promptfed.shared.messages import Message
from promptfed.shared.spec.spec_aggregation import AggregationSpec


class ReplayRequest(Message):
    """What to change; without any change the round is computed again as it was."""

    aggregation: AggregationSpec | None = Field(
        None, description="in the place of the spec's, whose max_weight_share stays unless another is given"
    )
    without: list[Annotated[str, Field(max_length=100)]] = Field(
        [], max_length=100_000, description="names of clients whose updates do not count"
    )


class ReplayedUpdate(BaseModel):
    """An update as it counted now; influence and distance as in a round's report."""

    client: str
    weight: float
    verdict: str
    influence: float | None
    distance: float | None


class ReplayedState(BaseModel):
    """A state of the round, computed again."""

    origin: str = Field(description="initial, join, or the phase that led to it")
    state_hash: str = Field(description="as it was committed")
    replayed_hash: str = Field(description="as it came out now")
    same: bool = Field(description="both are the same, and so is the state that it was computed from")
    moved: float = Field(description="L2 distance from the state before to the committed one")
    distance: float = Field(description="L2 distance from the committed state to the one of now")
    updates: list[ReplayedUpdate]


class ReplayReport(BaseModel):
    """A replayed round."""

    round: int
    aggregation: AggregationSpec
    without: list[str]
    states: list[ReplayedState]
    note: str | None = Field(description="how to read it, where something was otherwise or nothing computed")
