"""Rules that take the mean's place where some updates may be bad, and steps of a server optimizer on what a rule made.

Of every update the rule says what it made of it. Optimizers: FedAvgM, FedAdagrad, FedAdam, FedYogi.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from promptfed.coordinator.aggregation.rows import Combined, Rows, Values, squared_distances
from promptfed.shared.methods.core.interface import ClientUpdate, Combine, Method
from promptfed.shared.spec.sections import AggregationSpec, ServerOptimizerSpec
from promptfed.shared.spec.weighting import capped
from promptfed.shared.tensors import LARGE, SERVER, Arrays, Room, TensorSpec, chunks, size_of
from promptfed.shared.tensors.arrays import argsort, double, in_namespace, namespace, single, take_along

ROUNDING = 1e-9  # of sums of weights, and of a share times a number
MOMENTUM, SQUARE = SERVER + "momentum.", SERVER + "square."


def weighted_mean(updates: Iterable[ClientUpdate], room: Room = np.empty) -> Values:
    """Σ weight·tensor over updates that come one by one, summed in float64, as float32.

    Large ones, which are mapped from files, are gone through side by side instead, some entries at a time, and the
    means written into ``room(shape)``: the same sums in the same order, so the same bits.

    Raises:
        ValueError: there is no update.
    """
    coming = iter(updates)
    first = next(coming, None)
    if first is not None and size_of(first.tensors) >= LARGE:
        return _mean_by_entry([first, *coming], room)
    return _mean_by_update([] if first is None else chain([first], coming))


def _mean_by_entry(updates: Sequence[ClientUpdate], room: Room) -> Values:
    means: Values = {}
    for name in sorted(updates[0].tensors):
        first = updates[0].tensors[name]
        means[name] = in_namespace(namespace(first), room(tuple(first.shape), dtype=np.float32))
        parts = [chunks(update.tensors[name]) for update in updates]
        for mean, *theirs in zip(chunks(means[name]), *parts, strict=True):
            total = double(theirs[0]) * updates[0].weight
            for update, part in zip(updates[1:], theirs[1:], strict=True):
                total += double(part) * update.weight
            mean[:] = total
    return means


def _mean_by_update(updates: Iterable[ClientUpdate]) -> Values:
    sums: dict[str, Any] = {}
    for update in updates:
        for name, tensor in update.tensors.items():
            first = name not in sums
            if first:
                xp = namespace(tensor)
                sums[name] = xp.empty(tuple(tensor.shape), dtype=xp.float64)
            for total, part in zip(chunks(sums[name]), chunks(tensor), strict=True):
                weighted = double(part) * update.weight
                if first:
                    total[:] = weighted
                else:
                    total += weighted
    if not sums:
        raise ValueError("there is no update to take the mean of")
    return {name: single(total) for name, total in sorted(sums.items())}


@dataclass(frozen=True)
class Judged:
    """What a rule made of one update.

    ``influence``: its share of the aggregate (of all coordinates where they have different ones); shares sum to 1.
    ``distance``: from the update as it was sent to the aggregate (L2, over all tensors); None: not measured.
    """

    verdict: Literal["counted", "clipped", "rejected"]
    influence: float
    distance: float | None


class Rule:
    """A phase's ``Combine`` by a spec's rule. Afterwards ``judged`` says what became of each client's update.

    ``base``: the state that the phase's clients began with. The plain mean needs no second look at the updates, which
    come one by one: it judges nothing.
    """

    def __init__(self, spec: AggregationSpec, base: Mapping[str, Any]):
        self.spec = spec
        self.base = base
        self.room: Room = np.empty  # where large vectors and tensors are written
        self.judged: dict[str, Judged] = {}

    def __call__(self, updates: Iterable[ClientUpdate]) -> Values:
        """The aggregate. Raises ValueError where there is no update."""
        if self.spec.is_plain_mean:
            return weighted_mean(updates, self.room)
        counted = list(updates)
        if not counted:
            raise ValueError("there is no update to aggregate")
        rows = Rows(counted, self.base, self.spec.clip_norm, self.room)
        weights = rows.xp.asarray([update.weight for update in counted], dtype=rows.xp.float64)
        point, influence = RULES[self.spec.rule](rows, weights / weights.sum(), self.spec)
        chosen = self.spec.rule not in ("krum", "multi_krum")
        distances = rows.distances_to(point).tolist()
        for update, factor, share, distance in zip(counted, rows.factors, influence.tolist(), distances, strict=True):
            taken = chosen or share > 0
            verdict: Literal["counted", "clipped", "rejected"]
            verdict = "rejected" if not taken else "clipped" if factor < 1 else "counted"
            self.judged[update.client] = Judged(verdict, share, distance)
        return rows.tensors(point)


def mean(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """Σ w_i·x_i: with clipped rows, one client moves it by no more than w_i times the clipping norm."""
    return rows.sum(weights), weights


def median(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """The weighted median of each coordinate, the middle of the x that minimise Σ w_i·|x − x_i|.

    With equal weights it is the median of Yin et al., "Byzantine-Robust Distributed Learning", 2018 (definition 1). It
    stays among the good values as long as these have more than half of the weight.
    """

    def kept(upto: Any, weight: Any) -> Any:
        below = upto - weight
        lower = (upto >= 0.5 - ROUNDING) & (below < 0.5 - ROUNDING)  # where the sum of weights reaches a half
        upper = (upto > 0.5 + ROUNDING) & (below <= 0.5 + ROUNDING)  # where it goes beyond
        return (double(lower) + double(upper)) / 2

    return _by_coordinate(rows, weights, kept)


def trimmed_mean(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """The mean of each coordinate without the share ``tolerate`` of the weight at either end.

    Yin et al., 2018 (definition 2); where the boundary falls into an update, the rest of its weight counts. Bad updates
    of no more weight than that lie between good values or count nothing.
    """
    assert spec.tolerate is not None
    cut = spec.tolerate

    def kept(upto: Any, weight: Any) -> Any:
        clip = namespace(upto).clip
        inside = clip(upto, None, 1 - cut) - clip(upto - weight, cut, None)
        return clip(inside, 0, None) / (1 - 2 * cut)

    return _by_coordinate(rows, weights, kept)


def _by_coordinate(rows: Rows, weights: Any, kept: Callable[[Any, Any], Any]) -> Combined:
    """A mean of each coordinate's sorted values by ``kept(sums of weights so far, own weights)``, all ``(K, n)``."""
    influence = rows.zeros(rows.count)

    def middle(values: Any) -> Any:
        nonlocal influence
        order = argsort(values)
        sorted_weights = weights[order]
        shares = kept(sorted_weights.cumsum(0), sorted_weights)
        influence += rows.xp.bincount(order.reshape(-1), shares.reshape(-1), rows.count)
        return (shares * take_along(values, order, 0)).sum(0)

    return rows.combined(middle), influence / rows.size


def krum(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """The one update whose K − f − 2 nearest others are nearest, f = ⌊tolerate·K⌋.

    Blanchard et al., "Machine Learning with Adversaries", 2017 (section 3). Of equals, the first in order of name.
    """
    best = int(argsort(_krum_scores(rows, spec))[0])
    influence = rows.zeros(rows.count)
    influence[best] = 1
    return rows.row(best), influence


def multi_krum(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """The weighted mean of the K − f − 2 updates with the best Krum scores (at least one).

    So many may be averaged without giving up resilience: El Mhamdi et al., "The Hidden Vulnerability of Distributed
    Learning in Byzantium", 2018.
    """
    best = argsort(_krum_scores(rows, spec))[: max(1, rows.count - _faulty(rows.count, spec) - 2)]
    chosen = {int(index): float(weights[index]) for index in sorted(best.tolist())}
    total = sum(chosen.values())
    influence = rows.zeros(rows.count)
    shares = {index: weight / total if total > 0 else 1 / len(chosen) for index, weight in chosen.items()}
    for index, share in capped(shares, spec.weight_cap(len(chosen))).items():
        influence[index] = share
    return rows.sum(influence), influence


def _faulty(count: int, spec: AggregationSpec) -> int:
    """f of Krum; no more than ``count`` updates allow (a spec that cannot keep K ≥ 2f + 3 is refused at creation)."""
    assert spec.tolerate is not None
    return max(0, min(int(spec.tolerate * count + ROUNDING), (count - 3) // 2))


def _krum_scores(rows: Rows, spec: AggregationSpec) -> Any:
    """``(K,)`` sums of squared distances to the K − f − 2 nearest others."""
    squares, each = squared_distances(rows), np.arange(rows.count)
    squares[each, each] = math.inf
    nearest = min(rows.count - 1, max(1, rows.count - _faulty(rows.count, spec) - 2))
    return take_along(squares, argsort(squares, 1)[:, :nearest], 1).sum(1)


RULES: dict[str, Callable[[Rows, Any, AggregationSpec], Combined]] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
}


def moment_tensors(spec: ServerOptimizerSpec, method: Method, rounds: int) -> tuple[TensorSpec, ...]:
    """The moments of every tensor that a phase of ``method`` sends up and takes the mean of."""
    if spec.optimizer == "none":
        return ()
    phases = [phase for round in sorted({1, 2, rounds}) for phase in method.phases(round, rounds)]
    averaged = {tensor.name: tensor for phase in phases if phase.mean for tensor in phase.up}
    kinds = (MOMENTUM,) if spec.optimizer == "momentum" else (MOMENTUM, SQUARE)
    return tuple(
        TensorSpec(kind + name, tensor.shape, shared_with_clients=False)
        for kind in kinds
        for name, tensor in sorted(averaged.items())
    )


def fresh_moments(spec: ServerOptimizerSpec, tensors: Iterable[TensorSpec], dims: Mapping[str, int]) -> Arrays:
    """m = 0 and v = τ²: the paper asks for v₋₁ ≥ τ²."""
    start = {MOMENTUM: 0.0, SQUARE: (spec.tau or 0.0) ** 2}
    made = {}
    for tensor in tensors:
        kind = MOMENTUM if tensor.name.startswith(MOMENTUM) else SQUARE
        made[tensor.name] = np.full(tensor.resolve(dims), start[kind], np.float32)
    return made


class ServerOptimizer:
    """A phase's step. Afterwards ``moments`` are those of the tensors that it moved."""

    def __init__(self, spec: ServerOptimizerSpec, state: Mapping[str, Any]):
        """state: as the phase's clients began with it, with the moments so far."""
        self.spec, self.state = spec, state
        self.moments: Values = {}

    def wrap(self, combine: Combine) -> Combine:
        """``combine``, followed by the step; itself where there is no optimizer."""
        if self.spec.optimizer == "none":
            return combine

        def stepped(updates: Iterable[ClientUpdate]) -> Values:
            return {name: self._step(name, aggregate) for name, aggregate in combine(updates).items()}

        return stepped

    def _step(self, name: str, aggregate: Any) -> Any:
        """x after the step, float32; Δ = aggregate − x points downhill and is added. Sums in float64."""
        spec, aggregate = self.spec, double(aggregate)
        # A tensor that is not part of the state is a change already, and has begun at zero.
        begun = double(self.state[name]) if name in self.state else aggregate * 0
        delta = aggregate - begun
        momentum = double(self.state[MOMENTUM + name])
        assert spec.learning_rate is not None
        if spec.optimizer == "momentum":
            assert spec.momentum is not None
            momentum = spec.momentum * momentum + delta
            moved = spec.learning_rate * momentum
        else:
            assert spec.beta1 is not None
            assert spec.tau is not None
            momentum = spec.beta1 * momentum + (1 - spec.beta1) * delta
            square = self._square(double(self.state[SQUARE + name]), delta * delta)
            moved = spec.learning_rate * momentum / (namespace(square).sqrt(square) + spec.tau)
            self.moments[SQUARE + name] = single(square)
        self.moments[MOMENTUM + name] = single(momentum)
        return single(begun + moved)

    def _square(self, square: Any, squared: Any) -> Any:
        """v after this Δ², by kind of optimizer."""
        spec = self.spec
        if spec.optimizer == "adagrad":
            return square + squared
        assert spec.beta2 is not None
        if spec.optimizer == "adam":
            return spec.beta2 * square + (1 - spec.beta2) * squared
        return square - (1 - spec.beta2) * squared * namespace(square).sign(square - squared)
