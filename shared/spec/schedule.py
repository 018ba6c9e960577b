"""A spec's section ``schedule``: asynchronous rounds with a buffer (FedBuff)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from promptfed.shared.spec.spec_section import Section

HINGE_FROM, HINGE_SLOPE = 4, 10.0  # b and a of Xie et al., "Asynchronous Federated Optimization", 2019


class ScheduleSpec(Section):
    """Buffered asynchronous rounds (Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", 2022).

    Clients train all the time. As soon as ``buffer`` of them have answered, their changes give the next state, which
    counts as a round. A change is relative to the state that its client received; its staleness τ is the number of
    states that have come since.
    """

    kind: Annotated[Literal["buffered"], Field(description="rounds with a buffer (FedBuff)")]
    buffer: Annotated[int, Field(ge=1, le=100_000, description="K, the number of changes in a new state")]
    concurrency: Annotated[
        int | None,
        Field(ge=1, le=100_000, description="M, the number of clients that train at a time; default: all trainers"),
    ] = None
    max_staleness: Annotated[
        int, Field(ge=0, le=100_000, description="a change with a larger τ is refused, and its client starts anew")
    ] = 20
    staleness: Annotated[
        Literal["polynomial", "constant", "hinge"],
        Field(
            description="factor of a change: 1/√(1 + τ), 1, or 1 up to τ = "
            f"{HINGE_FROM} and 1/(1 + {HINGE_SLOPE:g}·(τ - {HINGE_FROM})) beyond"
        ),
    ] = "polynomial"

    @field_validator("concurrency")
    @classmethod
    def _the_buffer_can_be_filled(cls, concurrency: int | None, info: ValidationInfo) -> int | None:
        buffer = info.data.get("buffer")
        if concurrency is not None and buffer is not None and concurrency < buffer:
            raise ValueError(f"must be at least the buffer ({buffer}): a client answers once for each state")
        return concurrency

    def factor(self, staleness: int) -> float:
        """The factor of a change with this staleness, at most 1."""
        if self.staleness == "polynomial":
            return float((1 + staleness) ** -0.5)
        if self.staleness == "hinge" and staleness > HINGE_FROM:
            return 1 / (1 + HINGE_SLOPE * (staleness - HINGE_FROM))
        return 1.0
