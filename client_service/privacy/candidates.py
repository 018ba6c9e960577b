"""What a method does and sends, as a data owner agrees to it; of several methods where one is still to be chosen."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from promptfed.shared.messages import MOST_PEERS, EnrolmentInfo
from promptfed.shared.methods import MULTI_LABEL, TASK, make_method
from promptfed.shared.methods.core.interface.base import Method, Phase
from promptfed.shared.methods.core.several_labels import is_for_several_labels
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import TensorSpec

ROUNDS = 3  # that stand for all: the first, those in between, the last
MEASURED = ("train_seconds", "trained_parameters")  # numbers that every method's update carries
PROTECTED = ("steps", "trained_parameters")  # all that protected training reports: neither depends on data


class AgreedCandidate(BaseModel):
    """A method that may be chosen, with its training and what it sends, as in `AgreedTerms`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    method: dict[str, Any]
    training: TrainingSpec
    most_peers: int
    sends: dict[str, list[str]]
    metrics: list[str]


class AgreedTuning(BaseModel):
    """How one of the ``candidates`` becomes the method: each trains for ``rounds``, some again for the later ones."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    held_out: float
    rounds: list[int]
    candidates: list[AgreedCandidate]


def candidate_terms(info: EnrolmentInfo, method: Method, trains: bool) -> AgreedCandidate:
    """What the federation of ``info`` does with ``method``; an evaluator sends nothing of it."""
    sends = {name: [_tensor(spec) for spec in phase.up] for name, (phase, _) in phases_of(method).items()}
    return AgreedCandidate(
        method=settings_of(method),
        training=info.training,
        most_peers=MOST_PEERS if method.needs.domain_descriptions else 0,
        sends=sends if trains else {},
        metrics=_metrics(method, info) if trains else [],
    )


def tuning_terms(info: EnrolmentInfo, trains: bool) -> AgreedTuning | None:
    """The candidates of ``info``; None where the method is settled from the beginning."""
    if info.tuning is None:
        return None
    offers = [info.with_candidate(number) for number in range(len(info.tuning.candidates))]
    return AgreedTuning(
        held_out=info.tuning.held_out,
        rounds=[rung.rounds for rung in info.tuning.rungs],
        candidates=[candidate_terms(offer, make_method(offer.method), trains) for offer in offers],
    )


def _metrics(method: Method, info: EnrolmentInfo) -> list[str]:
    """Patterns of the numbers that leave; under protection those that depend on no data, with secure sums none."""
    if info.secure_aggregation is not None:
        return []
    if info.privacy is not None:
        return sorted(PROTECTED)
    return sorted({*method.metrics, *MEASURED})


def phases_of(method: Method) -> dict[str, tuple[Phase, list[int]]]:
    """The phases of a method by name, each with the rounds that have it: the first, a middle and the last one."""
    phases: dict[str, tuple[Phase, list[int]]] = {}
    for round in range(1, ROUNDS + 1):
        for phase in method.phases(round, ROUNDS):
            phases.setdefault(phase.name, (phase, []))[1].append(round)
    return phases


def _tensor(spec: TensorSpec) -> str:
    return f"{spec.name} ({', '.join(map(str, spec.shape))}) {spec.dtype}"


def settings_of(method: Method) -> dict[str, Any]:
    """The method's name and hyperparameters."""
    task: dict[str, Any] = {TASK: MULTI_LABEL} if is_for_several_labels(method) else {}
    return {"name": method.name, **method.hyper.model_dump(mode="json"), **task}
