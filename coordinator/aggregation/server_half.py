"""Calls the server half of a method: with numpy here, or with torch in the tensor worker.

All arguments and results are numpy arrays, whichever it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from promptfed.coordinator.aggregation.rules import Rule
from promptfed.coordinator.aggregation.server_optimizer import ServerOptimizer
from promptfed.coordinator.aggregation.tensor_worker import WORKER, CannotCompute
from promptfed.coordinator.domain.federation import Federation
from promptfed.shared import seeds
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.arithmetic import TORCH, computed
from promptfed.shared.methods.core.interface.base import ClientUpdate, Method, ServerContext

GET_TORCH = "use an image of the target coordinator-torch, or `pip install torch` where it runs"


class NoTorch(CannotCompute):
    """A computation needs torch, which this coordinator does not have."""


class Combined:
    """A phase's ``Combine``: its rule or a known mean, then the step of the server optimizer."""

    def __init__(self, rule: Rule | dict[str, Any], optimizer: ServerOptimizer):
        self.rule, self.optimizer = rule, optimizer

    def in_torch(self) -> Combined:
        """The same for torch tensors, with judgements of its own."""
        optimizer = ServerOptimizer(self.optimizer.spec, _tensors(self.optimizer.state))
        if not isinstance(self.rule, Rule):
            return Combined(_tensors(self.rule), optimizer)
        rule = Rule(self.rule.spec, _tensors(self.rule.base), self.rule.seed)
        rule.room = self.rule.room
        return Combined(rule, optimizer)

    def take_judgements(self, other: Combined) -> None:
        """Take over what the same ``Combine`` has judged elsewhere."""
        self.optimizer.moments = _arrays(other.optimizer.moments)
        if isinstance(self.rule, Rule) and isinstance(other.rule, Rule):
            self.rule.judged, self.rule.measured = other.rule.judged, other.rule.measured

    def __call__(self, updates: Iterable[ClientUpdate]) -> dict[str, Any]:
        """The aggregate."""
        rule = self.rule
        return self.optimizer.wrap(lambda given: rule(given) if isinstance(rule, Rule) else dict(rule))(updates)

    @property
    def differs_by_rounding(self) -> bool:
        """Whether numpy and torch give other last digits."""
        return isinstance(self.rule, Rule) and not self.rule.spec.is_plain_mean


def has_torch() -> bool:
    """Whether torch is installed, so that the tensor worker can run."""
    return find_spec("torch") is not None


def call(federation: Federation, name: str, *arguments: Any) -> Any:
    """The result of the server function ``name`` of the federation's method.

    For ``initial_state`` only the context is given: the draws follow from the seed. Afterwards, a `Combined` among the
    arguments has judged the updates.

    Raises:
        NoTorch: it needs torch, which is not installed.
        WorkerDied: the tensor worker ended before it answered.
        Others: as the function.
    """
    how = computed(federation.method, name)
    changes_digits = how == "by version" or name == "initial_state"
    changes_digits |= any(isinstance(argument, Combined) and argument.differs_by_rounding for argument in arguments)
    if how != "torch" and not (federation.arithmetic == TORCH and changes_digits):
        return _arrays(_call(federation.method, name, arguments, seeds.draws))
    threads = federation.spec.training.threads
    if "torch" in sys.modules:
        return call_with_torch(federation.method, name, arguments, threads)
    if not has_torch():
        raise NoTorch(
            f"{federation.method.name} computes {name} with torch, which this coordinator does not have: {GET_TORCH}"
        )
    result, after = WORKER.run(call_in_worker, federation.spec.method, name, _listed(arguments), threads)
    _take_judgements(arguments, after)
    return result


def call_in_worker(method: dict[str, Any], name: str, arguments: tuple[Any, ...], threads: int) -> tuple[Any, Any]:
    """The result of `call_with_torch` for the method of a spec, and the arguments as it left them."""
    return call_with_torch(make_method(method), name, arguments, threads), arguments


def call_with_torch(method: Method, name: str, arguments: tuple[Any, ...], threads: int) -> Any:
    """Call a server function with torch tensors in place of arrays; the result has arrays."""
    import torch

    torch.set_num_threads(threads)  # The order of sums, and so their bits, depends on it.
    given = tuple(_tensors(value) for value in arguments)
    result = _arrays(_call(method, name, given, seeds.generator))
    _take_judgements(arguments, given)
    return result


def _call(method: Method, name: str, arguments: tuple[Any, ...], draws: seeds.DrawsOf) -> Any:
    given = [replace(value, draws_of=draws) if isinstance(value, ServerContext) else value for value in arguments]
    if name == "initial_state":
        given.append(draws(given[0].seed, seeds.INITIAL))
    return getattr(method, name)(*given)


def _listed(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as they can be sent: updates that come one by one are read."""
    return tuple(list(value) if isinstance(value, Iterator) else value for value in arguments)


def _take_judgements(arguments: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    for mine, other in zip(arguments, after, strict=True):
        if isinstance(mine, Combined):
            mine.take_judgements(other)


def _tensors(value: Any) -> Any:
    """An argument with torch tensors in place of arrays."""
    from promptfed.shared.tensors.torch_tensors import tensor_of

    if isinstance(value, np.ndarray):
        return tensor_of(value)
    if isinstance(value, ClientUpdate):
        return replace(value, tensors=_tensors(dict(value.tensors)))
    if isinstance(value, dict):
        return {name: _tensors(part) for name, part in value.items()}
    if isinstance(value, Combined):
        return value.in_torch()
    if isinstance(value, Iterator | list | tuple):
        return (_tensors(part) for part in value)
    return value


def _arrays(value: Any) -> Any:
    """A result with arrays in place of torch tensors and numpy's scalars."""
    if isinstance(value, Mapping):
        return {name: _arrays(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_arrays(part) for part in value)
    if isinstance(value, np.generic):
        return np.asarray(value)
    if hasattr(value, "detach"):
        from promptfed.shared.tensors.torch_tensors import array_of

        return array_of(value)
    return value
