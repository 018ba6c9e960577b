"""A spec's section ``participation``: who is asked, how many must answer, and how long they have."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from promptfed.shared.spec.spec_section import Section, ceil_fraction, left_out


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

    @property
    def is_secret(self) -> bool:
        """Whether who takes part in which round is told to operators alone."""
        return self.sampling == "poisson"

    @property
    def least_answers(self) -> int:
        """The fewest updates that a round's first phase can close with."""
        return max(1, ceil_fraction(self.quorum, self.min_clients))
