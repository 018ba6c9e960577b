"""A spec's section ``tuning``: candidates that are compared before round 1, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from promptfed.shared.spec.halving import Rung, ranked, rungs, survivors
from promptfed.shared.spec.spec_section import Section, left_out

MOST_CANDIDATES = 16
WORST = -1.0  # the score of a candidate that no client could evaluate


class Candidate(Section):
    """A method with its hyperparameters, and its own settings of training; once the spec is resolved, all of them."""

    method: dict[str, Any]
    training: Annotated[dict[str, Any], Field(default_factory=dict)]

    @property
    def title(self) -> str:
        """``promptfl (learning rate 0.002)``."""
        return f"{self.method.get('name')} (learning rate {self.training.get('learning_rate', 'by default')})"


class TuningSpec(Section):
    """Successive halving over methods before round 1. The spec's own method is the first candidate."""

    candidates: Annotated[
        list[Candidate],
        Field(
            min_length=1,
            max_length=MOST_CANDIDATES,
            description="what to compare: each has a `method` and, where it differs, a `training`",
        ),
    ]
    rounds: Annotated[int, Field(ge=1, le=1000, description="rounds that the last candidates train for")] = 3
    held_out: Annotated[
        float,
        Field(gt=0, lt=1, description="share of each trainer's training images that candidates are tested on"),
    ] = 0.25
    chosen: Annotated[
        int | None, left_out(ge=0, description="the chosen candidate, counted from 0; the coordinator sets it")
    ] = None

    @field_validator("chosen")
    @classmethod
    def _chosen_is_a_candidate(cls, chosen: int | None, info: ValidationInfo) -> int | None:
        if chosen is not None and chosen >= len(info.data.get("candidates", ())):
            raise ValueError("is no candidate's number")
        return chosen

    @property
    def rungs(self) -> tuple[Rung, ...]:
        """How many candidates train for how many rounds, from the first comparison to the last."""
        return rungs(len(self.candidates), self.rounds)


class TrialSpec(Section):
    """Of a federation that the coordinator makes to try one candidate of the federation ``of``."""

    of: Annotated[str, Field(max_length=100, description="the id of the federation whose method is chosen")]
    rung: Annotated[int, Field(ge=0, le=100, description="the comparison that it belongs to, from 0")]
    candidate: Annotated[int, Field(ge=0, lt=MOST_CANDIDATES, description="the candidate, from 0")]


def following(tuning: TuningSpec, scores: Mapping[tuple[int, int], float]) -> tuple[int, int] | int:
    """The next trial as (rung, candidate); once ``scores``, accuracies by trial, are complete, the chosen candidate."""
    alive = list(range(len(tuning.candidates)))
    for rung, after in enumerate([*tuning.rungs[1:], None]):
        for candidate in alive:
            if (rung, candidate) not in scores:
                return rung, candidate
        reached = {candidate: scores[rung, candidate] for candidate in alive}
        if after is None:
            return ranked(reached)[0]
        alive = sorted(survivors(reached, after.candidates, 0))
    raise AssertionError("there is a last rung")
