"""Rules that take the mean's place where some updates may be bad, and steps of a server optimizer on what a rule made.

Of every update the rule says what it made of it. Optimizers: FedAvgM, FedAdagrad, FedAdam, FedYogi.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np

from promptfed.coordinator.aggregation.rows import Combined, Rows, Values, squared_distances
from promptfed.shared.methods.core.checks import LARGE
from promptfed.shared.methods.core.interface import ClientUpdate, Combine, Method
from promptfed.shared.spec.sections import AggregationSpec, ServerOptimizerSpec, capped
from promptfed.shared.tensors import SERVER, Arrays, Room, TensorSpec, chunks, size_of
from promptfed.shared.tensors.arrays import argsort, double, in_namespace, namespace, single, solve, take_along


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


log = logging.getLogger("promptfed.coordinator")

ROUNDING = 1e-9  # of sums of weights, and of a share times a number
GRADIENT = 1e-9  # length of the geometric median's gradient, of at most 1, at which it is found
PLAIN_STEPS = 10  # of Weiszfeld's, before Newton's are tried
MOST_STEPS = 1000
HALVINGS = 12  # of one of Newton's steps, before Weiszfeld's is taken


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
        given = list(updates)
        if not given:
            raise ValueError("there is no update to aggregate")
        rows = Rows(given, self.base, self.spec.clip_norm, self.room)
        weights = rows.xp.asarray([update.weight for update in given], dtype=rows.xp.float64)
        point, influence = RULES[self.spec.rule](rows, weights / weights.sum(), self.spec)
        chosen = self.spec.rule not in ("krum", "multi_krum")
        distances = rows.distances_to(point).tolist()
        for update, factor, share, distance in zip(given, rows.factors, influence.tolist(), distances, strict=True):
            taken = chosen or share > 0
            verdict: Literal["counted", "clipped", "rejected"]
            verdict = "rejected" if not taken else "clipped" if factor < 1 else "counted"
            self.judged[update.client] = Judged(verdict, share, distance)
        return rows.tensors(point)


def mean(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """Σ w_i·x_i: with clipped rows, one client moves it by no more than w_i times the clipping norm."""
    return rows.sum(weights), weights


def median(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """Of each coordinate the weighted median, the middle of the x that minimise Σ w_i·|x − x_i|.

    With equal weights it is the median of Yin et al., "Byzantine-Robust Distributed Learning", 2018 (definition 1). It
    stays among the good values as long as these have more than half of the weight.
    """

    def kept(upto: Any, own: Any) -> Any:
        below = upto - own
        lower = (upto >= 0.5 - ROUNDING) & (below < 0.5 - ROUNDING)  # where the sum of weights reaches a half
        upper = (upto > 0.5 + ROUNDING) & (below <= 0.5 + ROUNDING)  # where it goes beyond
        return (double(lower) + double(upper)) / 2

    return _by_coordinate(rows, weights, kept)


def trimmed_mean(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """Of each coordinate the mean without the share ``tolerate`` of the weight at either end.

    Yin et al., 2018 (definition 2); where the boundary falls into an update, the rest of its weight counts. Bad updates
    of no more weight than that lie between good values or count nothing.
    """
    assert spec.tolerate is not None
    cut = spec.tolerate

    def kept(upto: Any, own: Any) -> Any:
        clip = namespace(upto).clip
        inside = clip(upto, None, 1 - cut) - clip(upto - own, cut, None)
        return clip(inside, 0, None) / (1 - 2 * cut)

    return _by_coordinate(rows, weights, kept)


def _by_coordinate(rows: Rows, weights: Any, kept: Callable[[Any, Any], Any]) -> Combined:
    """A mean of each coordinate's sorted values by ``kept(sums of weights so far, own weights)``, all ``(K, n)``."""
    influence = rows.zeros(rows.count)

    def middle(values: Any) -> Any:
        nonlocal influence
        order = argsort(values)
        own = weights[order]
        shares = kept(own.cumsum(0), own)
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


def geometric_median(rows: Rows, weights: Any, spec: AggregationSpec) -> Combined:
    """The point that minimises Σ w_i·‖x_i − y‖ over whole updates (RFA: Pillutla et al., 2022), to convergence.

    Weiszfeld's algorithm as Vardi and Zhang (2000) mend it: where it comes upon an update, that update is the answer or
    is left again. Every update that was the nearest one is tried itself, since steps towards it would become ever
    shorter. After the first steps Newton's are taken where they shorten the gradient: Weiszfeld's become tiny where
    updates lie in clusters or far apart. Found where the gradient (a mean of unit vectors) is shorter than 1e-9, which
    puts Σ w_i·‖x_i − y‖ within 1e-9 times the distance to the minimum of its least value. Updates that all lie within
    1e-4 of a straight line, as no prompts of more than two clients do, may need more than the steps there are: the log
    then tells the gradient.
    """
    point = rows.row(int(rows.distances_to(rows.sum(weights), clipped=True).argmin()))
    tried: set[int] = set()
    for number in range(MOST_STEPS):
        distances = rows.distances_to(point, clipped=True)
        nearest = int(distances.argmin())
        if nearest not in tried and distances[nearest] > 0:
            candidate = rows.row(nearest)
            step = _weiszfeld(rows, weights, candidate, rows.distances_to(candidate, clipped=True))
            if step.is_minimum:
                return candidate, step.influence
        tried.add(nearest)
        step = _weiszfeld(rows, weights, point, distances)
        if step.is_minimum:
            return point, step.influence
        nearer = _newton(rows, weights, point, distances, step.gradient) if number >= PLAIN_STEPS else None
        point = step.point if nearer is None else nearer
    log.warning("the geometric median was not found in %d steps: its gradient is %.1e", MOST_STEPS, step.gradient)
    return point, step.influence


@dataclass(frozen=True)
class _Step:
    """From a point of the Weiszfeld algorithm to the next."""

    point: Any
    influence: Any
    gradient: float
    is_minimum: bool


def _weiszfeld(rows: Rows, weights: Any, point: Any, distances: Any) -> _Step:
    here = distances == 0
    own = float(weights[here].sum())
    pulls = rows.xp.where(here, 0.0, weights / rows.xp.where(here, 1.0, distances))
    total = float(pulls.sum())
    if total == 0:
        return _Step(point, weights, 0.0, True)  # All that weigh anything are the same.
    target = rows.sum(pulls) / total
    gradient = total * float(rows.xp.linalg.norm(target - point))
    held = min(1.0, own / gradient) if gradient > 0 else 1.0
    minimum = gradient <= own + GRADIENT
    influence = rows.xp.where(here, weights, 0.0) / own if own > 0 and minimum else pulls / total
    return _Step(target + held * (point - target), influence, gradient, minimum)


def _newton(rows: Rows, weights: Any, point: Any, distances: Any, gradient: float) -> Any | None:
    """Newton's step from ``point``, halved until it shortens the gradient; None where it does not.

    With u_i the unit vectors to the rows and c_i = w_i/d_i, the gradient is −Σ w_i·u_i and the Hessian
    (Σ c_i)·I − Σ c_i·u_i·u_iᵀ. The step lies in the span of the u_i: its coefficients β solve the K equations
    ((Σ c_i)·I − diag(c)·U·Uᵀ)·β = w.
    """
    if float(distances.min()) == 0:
        return None
    pulls = weights / distances
    cosines = rows.products_at(point) / distances[:, None] / distances
    matrix = pulls.sum() * rows.xp.eye(rows.count, dtype=rows.xp.float64) - pulls[:, None] * cosines
    solved = solve(matrix, weights)
    if solved is None or not rows.xp.isfinite(solved / distances).all():
        return None
    along = solved / distances
    direction = rows.sum(along) - along.sum() * point
    for halving in range(HALVINGS):
        length = 0.5**halving
        tried = point + length * direction
        there = _weiszfeld(rows, weights, tried, rows.distances_to(tried, clipped=True))
        if there.is_minimum or there.gradient < (1 - length / 4) * gradient:
            return tried
    return None


RULES: dict[str, Callable[[Rows, Any, AggregationSpec], Combined]] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
}


MOMENTUM, SQUARE = SERVER + "momentum.", SERVER + "square."


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
