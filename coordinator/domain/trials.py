"""The trials of a federation that chooses its method: federations that each try one candidate, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from promptfed.coordinator.domain.federation import Federation
from promptfed.shared.messages import ENDED
from promptfed.shared.spec.tuning import TrialSpec, TuningSpec


def trials_of(federations: Iterable[Federation], id: str) -> dict[tuple[int, int], Federation]:
    """The trials of the federation ``id`` by rung and candidate, in the order in which they were made."""
    found = ((federation, federation.spec.trial) for federation in federations)
    return {(trial.rung, trial.candidate): made for made, trial in found if trial is not None and trial.of == id}


def current(trials: dict[tuple[int, int], Federation]) -> Federation | None:
    """The trial that has not ended; None between two of them."""
    return next((trial for trial in trials.values() if trial.run.state not in ENDED), None)


def takes_part(parent: Federation, trials: dict[tuple[int, int], Federation], name: str) -> bool:
    """Whether the trainer ``name`` is in the trials: those who enrol after the first has started wait for round 1."""
    first = next(iter(trials.values()))
    waits = first.run.state != "enrolling" and name not in first.run.members
    return name in parent.run.trainers() and not waits


def everybody_is_in(parent: Federation, trials: dict[tuple[int, int], Federation], trial: Federation) -> bool:
    """Whether every trainer that takes part has enrolled in ``trial``."""
    return all(name in trial.run.members for name in parent.run.trainers() if takes_part(parent, trials, name))


def trial_of(parent: Federation, rung: int, candidate: int) -> dict[str, object]:
    """The spec of a trial, as it is created."""
    spec = parent.with_candidate(candidate).spec
    tuning = spec.tuning
    assert isinstance(tuning, TuningSpec)
    rounds = tuning.rungs[rung].rounds
    own = {
        "name": f"{parent.name[:32]}.{parent.id[-8:]}.{rung + 1}-{candidate + 1}",
        "rounds": rounds,
        "evaluation": spec.evaluation.model_copy(update={"every": rounds}),
        "held_out": tuning.held_out,
        "tuning": None,
        "trial": TrialSpec(of=parent.id, rung=rung, candidate=candidate),
        "start": "manual",
        "backbone": parent.training_terms().backbone,
    }
    return spec.model_copy(update=own).model_dump(mode="json")
