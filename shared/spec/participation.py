"""A spec's section ``participation``: who is asked, how many must answer, and how long they have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from promptfed.shared.service.reasons import NAME_PATTERN
from promptfed.shared.spec.spec_section import Section, ceil_fraction, left_out

Choice = Literal["uniform", "all_available", "round_robin", "power_of_choice", "oort"]
BY_LOSS: tuple[Choice, ...] = ("power_of_choice", "oort")
"""Choices by what clients report."""
SQUARED_LOSSES = "squared_losses"
"""The metric in which clients report the sum of their images' squared losses."""


class Requirements(Section):
    """What a client must have declared at its enrolment to train. Others take part in evaluations."""

    images: Annotated[int, left_out(0, ge=0, le=1 << 40, description="at least so many training images")] = 0
    gpu: Annotated[bool, left_out(False, description="it computes on a GPU")] = False
    domain: Annotated[str | None, left_out(pattern=NAME_PATTERN, description="its domain has this name")] = None

    def missing(self, images: int, device: str, domain: str | None) -> str | None:
        """The first requirement that a client does not meet, as a text; None if it meets all."""
        if images < self.images:
            return f"it has {images} training images, {self.images} are required"
        if self.gpu and device.startswith("cpu"):
            return "it computes on a CPU, a GPU is required"
        if self.domain is not None and domain != self.domain:
            return f"its domain is {domain or 'not declared'}, {self.domain} is required"
        return None


class ParticipationSpec(Section):
    """Who is asked, how many must answer, and how long they have."""

    min_clients: Annotated[int, Field(ge=1, le=100_000)] = 1
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    quorum: Annotated[float, Field(gt=0, le=1)] = 1.0
    deadline_seconds: Annotated[float, Field(gt=0, le=30 * 86400)] = 600.0
    on_missed_quorum: Literal["pause", "fail"] = "pause"
    draw: Annotated[
        Literal["secret", "public"],
        left_out(
            "secret",
            description="who is asked follows from a secret of the coordinator, shown at the end, or from the seed",
        ),
    ] = "secret"
    sampling: Annotated[
        Literal["fixed", "poisson"],
        left_out(
            "fixed",
            description="fixed: the same number each round; poisson: each client independently with probability "
            "fraction, by a secret that is never shown (with privacy.level client)",
        ),
    ] = "fixed"
    choice: Annotated[
        Choice,
        left_out(
            "uniform",
            description="who is asked. round_robin: who was asked longest ago; power_of_choice: the highest reported "
            "losses among candidates that are drawn; oort: the highest utilities, by losses, images and speed",
        ),
    ] = "uniform"
    candidates: Annotated[
        float,
        left_out(2.0, ge=1, le=1000, description="of power_of_choice: clients that are drawn for each that is asked"),
    ] = 2.0
    preferred_seconds: Annotated[
        float | None,
        left_out(gt=0, le=30 * 86400, description="of oort: clients that take longer lose utility; default: none does"),
    ] = None
    over_select: Annotated[
        float,
        left_out(1.0, ge=1, le=100, description="so many times the clients are asked; the first answers count"),
    ] = 1.0
    require: Annotated[
        Requirements | None, left_out(description="what a client must have declared to be asked to train")
    ] = None
    cool_down: Annotated[
        int,
        left_out(
            0,
            ge=0,
            le=100_000,
            description="rounds for which a client that was asked is not asked again, if there are enough others",
        ),
    ] = 0

    @property
    def is_secret(self) -> bool:
        """Whether who takes part in which round is told to operators alone."""
        return self.sampling == "poisson"

    @property
    def is_plain(self) -> bool:
        """Whether clients are drawn alike, as many as are needed."""
        return self.choice == "uniform" and self.over_select == 1 and self.cool_down == 0

    @property
    def least_answers(self) -> int:
        """The fewest updates that a round's first phase can close with."""
        return max(1, ceil_fraction(self.quorum, self.min_clients))
