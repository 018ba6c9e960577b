"""What a method does and sends, as a data owner agrees to it."""

from __future__ import annotations

from typing import Any

from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.methods import MULTI_LABEL, TASK
from promptfed.shared.methods.core.interface.base import Method, Phase
from promptfed.shared.methods.core.several_labels import is_for_several_labels
from promptfed.shared.tensors import TensorSpec

ROUNDS = 3  # that stand for all: the first, those in between, the last
MEASURED = ("train_seconds", "trained_parameters")  # numbers that every method's update carries
PROTECTED = ("steps", "trained_parameters")  # all that protected training reports: neither depends on data


def metrics_of(method: Method, info: EnrolmentInfo) -> list[str]:
    """Patterns of the numbers that leave; under protection those that depend on no data, with secure sums none."""
    if info.secure_aggregation is not None:
        return []
    if info.privacy is not None:
        return sorted(PROTECTED)
    return sorted({*method.metrics, *MEASURED})


def tensors_of(method: Method) -> dict[str, list[str]]:
    """The tensors that each phase sends, with symbols in their shapes."""
    return {name: [_tensor(spec) for spec in phase.up] for name, (phase, _) in phases_of(method).items()}


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
