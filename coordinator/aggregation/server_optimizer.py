"""A step of the coordinator's own on what a rule made of a phase's updates: FedAvgM, FedAdagrad, FedAdam, FedYogi.

Sources: Hsu et al., "Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification",
2019 (FedAvgM); Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (the others). Methods know
nothing of it: their ``combine`` returns the stepped tensors. The moments stand in the global state beside the method's
tensors, so that its hash, replay and every restart cover them; clients, reports and exports never see them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from promptfed.coordinator.aggregation.rows import Values
from promptfed.shared.methods.core.interface.base import ClientUpdate, Combine, Method
from promptfed.shared.spec.spec_aggregation import ServerOptimizerSpec
from promptfed.shared.tensors import SERVER, Arrays, TensorSpec
from promptfed.shared.tensors.arrays import double, namespace, single

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
