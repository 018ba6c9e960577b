"""Counts over all clients, in phases of their own: images of each class, and calibration scores.

`make_method` derives such a method from an ordinary one, so that a method's file says nothing about it. Before the
first training, clients count their training images of each class; the sums are part of every payload of training and of
`ClientContext.class_counts`. After the last one they count the scores of held-out images under the final state. Counts
are sent as updates are, so secure sums hide each client's. The state has the sums, divided by `UNIT`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.methods.core.interface.arithmetic import OF_THE_METHOD
from promptfed.shared.methods.core.interface.base import (
    Classifier,
    ClientContext,
    ClientInfo,
    Combine,
    Method,
    Phase,
    ServerContext,
    TrainResult,
    Updates,
)
from promptfed.shared.methods.core.interface.disclosures import Disclosed
from promptfed.shared.metrics.conformal import Histograms
from promptfed.shared.privacy.accounting import Event
from promptfed.shared.seeds import Draws
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

    from promptfed.shared.clip import Backbone

UNIT = 2.0**16
"""What stands for one image is 1/UNIT: secure sums take numbers up to 16, and a power of two keeps counts exact."""
COUNTS, CALIBRATION = "class_counts", "calibration"
"""The names of the two phases, and of their tensors."""
SITES = "calibration_sites"
"""The name of the tensor with the number of sites that counted, and the sum over them of (floor − 1)."""


class Statistics(BaseModel):
    """Which counts there are. In a resolved spec it is the part ``statistics`` of the method.

    ``several``: classes are counted as present and as absent. ``bins`` 0: no calibration. ``column``, ``values``:
    scores are counted for each value by itself. ``epsilon``: of the noise on each count. ``kept``: the state has the
    tensors of an export, and nothing is counted.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    classes: int = Field(ge=1, le=100_000)
    several: bool = False
    counts: bool = False
    bins: int = Field(0, ge=0, le=1000)
    by_class: bool = False
    column: str | None = None
    values: tuple[str, ...] = ()
    epsilon: float | None = Field(None, gt=0)
    kept: bool = False

    @classmethod
    def of(cls, spec: FederationSpec) -> Statistics | None:
        """What ``spec`` asks for; None for nothing, and without a common list of classes."""
        counts, asked = spec.loss.counts == "federation", spec.calibration
        if spec.class_names is None or not (counts or asked) or spec.validates:
            return None
        scores: dict[str, Any] = {}
        if asked is not None:
            scores = {
                "bins": asked.bins,
                "by_class": asked.by_class,
                "column": asked.column,
                "values": tuple(asked.values),
            }
        return cls(
            classes=len(spec.class_names),
            several=spec.task == "multi_label",
            counts=counts,
            epsilon=spec.privacy.evaluation_epsilon if spec.privacy.protects_records else None,
            **scores,
        )

    @property
    def histograms(self) -> Histograms:
        """The rows of the scores."""
        return Histograms(self.bins, self.classes if self.by_class else 0, self.column, self.values)

    @property
    def tensors(self) -> dict[str, tuple[TensorSpec, ...]]:
        """The tensors of each phase."""
        found: dict[str, tuple[TensorSpec, ...]] = {}
        if self.counts:
            found[COUNTS] = (TensorSpec(COUNTS, (2 if self.several else 1, self.classes), shared_with_clients=False),)
        if self.bins:
            histogram = TensorSpec(CALIBRATION, (self.histograms.rows, self.bins), shared_with_clients=False)
            found[CALIBRATION] = (histogram, TensorSpec(SITES, (2,), shared_with_clients=False))
        return found

    def cost(self, phase: str) -> Event | None:
        """What the noisy counts of ``phase`` cost; None without noise.

        An image counts in one place, or of several labels in one for each class. Replaced by another it changes two.
        """
        if self.epsilon is None:
            return None
        return Event("laplace", 1.0, self.epsilon, 2 * (self.classes if phase == COUNTS and self.several else 1))

    @property
    def disclosures(self) -> tuple[Disclosed, ...]:
        """What the sums tell."""
        told = []
        if self.counts:
            told.append(Disclosed("sites", "how many training images of each class all clients have together"))
        if self.bins:
            each = f", for each {self.column}" if self.column is not None else ""
            told.append(Disclosed("operator", f"how many of its held-out images have which calibration score{each}"))
        return tuple(told)


def counted_labels(labels: Tensor, statistics: Statistics) -> Tensor:
    """How many of ``labels`` (N,) are of each class ``(1, C)``; of (N, C): present and absent ``(2, C)``."""
    if labels.ndim == 2:
        return torch.stack([(labels == 1).sum(dim=0), (labels == 0).sum(dim=0)])
    return torch.bincount(labels[labels >= 0], minlength=statistics.classes)[None]


class WithStatistics(Method):
    """What `with_statistics` adds to a method: phases that count, and their sums in its state."""

    server = OF_THE_METHOD
    statistics: Statistics

    @property
    def disclosures(self) -> tuple[Disclosed, ...]:
        """Also what the counts tell."""
        return (*super().disclosures, *(() if self.statistics.kept else self.statistics.disclosures))

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Also the sums."""
        sums = (spec for specs in self.statistics.tensors.values() for spec in specs)
        return (*super().state_tensors(), *sums)  # type: ignore[safe-super]

    def phases(self, round: int, rounds: int) -> tuple[Phase, ...]:
        """The method's, with the classes counted before the first one, and the scores after the last one."""
        own, tensors = super().phases(round, rounds), self.statistics.tensors
        if self.statistics.kept:
            return own
        if COUNTS in tensors:
            own = tuple(replace(phase, down=(*phase.down, *tensors[COUNTS])) for phase in own)
            if round == 1:
                own = (Phase(COUNTS, down=(), up=tensors[COUNTS], mean=True, total=True), *own)
        if CALIBRATION in tensors and round == rounds:
            down = self.payload_tensors(None)
            counted = Phase(CALIBRATION, down=down, up=tensors[CALIBRATION], ask="all", mean=True, total=True)
            own = (*own, counted)
        return own

    def payload_tensors(self, phase: Phase | None) -> tuple[TensorSpec, ...]:
        """Of a phase that counts its own; of the others the method's, and the class counts in training."""
        if phase is not None and phase.total:
            return phase.down
        given = super().payload_tensors(_inner(phase))
        return (*(spec for spec in given if spec.name != COUNTS), *_extra(phase))

    def payload(self, state: Tensors, phase: Phase | None, client: ClientInfo, context: ServerContext) -> Tensors:
        """As `payload_tensors`."""
        if phase is not None and phase.name == COUNTS:
            return {}
        counted = phase is not None and phase.name == CALIBRATION
        given = super().payload(self._own(state), None if counted else _inner(phase), client, context)
        return given | {spec.name: state[spec.name] for spec in _extra(phase)}

    def initial_state(self, context: ServerContext, draws: Draws) -> Tensors:
        """The sums are 0."""
        return self._with_sums(super().initial_state(context, draws), draws)

    def initial_state_with(self, backbone: Backbone, context: ServerContext, draws: Draws) -> Tensors:
        """The sums are 0."""
        return self._with_sums(super().initial_state_with(backbone, context, draws), draws)

    def _with_sums(self, state: Tensors, draws: Draws) -> Tensors:
        zeros = {
            spec.name: draws.xp.zeros(spec.resolve({}), dtype=draws.xp.float32)
            for specs in self.statistics.tensors.values()
            for spec in specs
        }
        return state | zeros

    def aggregate(
        self, state: Tensors, phase: Phase, updates: Updates, combine: Combine, context: ServerContext
    ) -> Tensors:
        """The sum of the counts, which weighs every client alike; of other phases the method's state."""
        if phase.total:
            return state | _total(phase, updates, combine)
        after = super().aggregate(self._own(state), replace(phase, down=_inner_down(phase)), updates, combine, context)
        return state | after

    def train(self, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        """The method's training, which may read the class counts."""
        counts = payload.get(COUNTS)
        given = {name: tensor for name, tensor in payload.items() if name != COUNTS}
        if counts is not None:
            context = replace(context, class_counts=counts * UNIT)
        return super().train(context, given, private)  # type: ignore[safe-super]

    def classifier(self, context: ClientContext, payload: Tensors, private: Tensors) -> Classifier:
        """The method's."""
        return super().classifier(context, self._own(payload), private)  # type: ignore[safe-super]

    def _own(self, state: Tensors) -> Tensors:
        added = {spec.name for specs in self.statistics.tensors.values() for spec in specs}
        return {name: tensor for name, tensor in state.items() if name not in added}


def _total(phase: Phase, updates: Updates, combine: Combine) -> Tensors:
    """The sums over ``updates``. A secure sum is known already, and ``combine`` gives it."""
    given = list(updates)
    if not given:
        return {name: _rounded(total) for name, total in combine(given).items()}
    names = [spec.name for spec in phase.up]
    return {name: _rounded(sum(update.tensors[name] for update in given)) for name in names}


def _rounded(total: Any) -> Any:
    return (total * UNIT).round() / UNIT


def _extra(phase: Phase | None) -> tuple[TensorSpec, ...]:
    """The class counts, where ``phase`` trains with them."""
    return () if phase is None or phase.total else tuple(spec for spec in phase.down if spec.name == COUNTS)


def _inner_down(phase: Phase) -> tuple[TensorSpec, ...]:
    return tuple(spec for spec in phase.down if spec.name != COUNTS)


def _inner(phase: Phase | None) -> Phase | None:
    return None if phase is None else replace(phase, down=_inner_down(phase))


@cache
def _derived(kind: type[Method]) -> type[Method]:
    flags = ("protects", "takes_losses", "takes_unlabelled", "several_labels")
    return type(kind.__name__, (WithStatistics, kind), {name: vars(kind).get(name, False) for name in flags})


def with_statistics(kind: type[Method], statistics: Statistics) -> Callable[[Any], Method]:
    """Makes methods of ``kind`` from hyperparameters, that have ``statistics`` too."""

    def made(hyper: Any) -> Method:
        method = _derived(kind)(hyper)
        assert isinstance(method, WithStatistics)
        method.statistics = statistics
        return method

    return made


def cost_of(method: Method, phase: Phase) -> Event | None:
    """What the noise of the counts of ``phase`` costs; None where it counts nothing, or without noise."""
    return method.statistics.cost(phase.name) if phase.total and isinstance(method, WithStatistics) else None


def statistics_of(method: Method) -> Statistics | None:
    """What clients of ``method`` count; None for nothing."""
    return method.statistics if isinstance(method, WithStatistics) else None
