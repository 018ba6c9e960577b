"""Answers of a round's replay, in JSON."""

from __future__ import annotations

from pydantic import BaseModel, Field


class ReplayedState(BaseModel):
    """A state of the round, computed again."""

    origin: str = Field(description="initial, join, or the phase that led to it")
    state_hash: str = Field(description="as it was committed")
    replayed_hash: str = Field(description="as it came out now")
    same: bool = Field(description="both are the same, and so is the state that it was computed from")


class ReplayReport(BaseModel):
    """A replayed round."""

    round: int
    states: list[ReplayedState]
