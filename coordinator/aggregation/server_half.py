"""Calls the server half of a method with numpy, or with torch where a method asks for it.

All arguments and results are numpy arrays, whichever it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from promptfed.coordinator.aggregation.rules import Rule
from promptfed.coordinator.aggregation.server_optimizer import ServerOptimizer
from promptfed.coordinator.domain.federation import Federation
from promptfed.shared import seeds
from promptfed.shared.methods.core.interface.arithmetic import computed
from promptfed.shared.methods.core.interface.base import ClientUpdate, Method, MethodError, ServerContext

GET_TORCH = "use an image of the target coordinator-torch, or `pip install torch` where it runs"


class NoTorch(MethodError):
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
        rule = Rule(self.rule.spec, _tensors(self.rule.base))
        rule.room = self.rule.room
        return Combined(rule, optimizer)

    def take_judgements(self, other: Combined) -> None:
        """Take over what the same ``Combine`` has judged elsewhere."""
        self.optimizer.moments = _arrays(other.optimizer.moments)
        if isinstance(self.rule, Rule) and isinstance(other.rule, Rule):
            self.rule.judged = other.rule.judged

    def __call__(self, updates: Iterable[ClientUpdate]) -> dict[str, Any]:
        """The aggregate."""
        rule = self.rule
        return self.optimizer.wrap(lambda given: rule(given) if isinstance(rule, Rule) else dict(rule))(updates)


def has_torch() -> bool:
    """Whether torch is installed."""
    return find_spec("torch") is not None


def call(federation: Federation, name: str, *arguments: Any) -> Any:
    """The result of the server function ``name`` of the federation's method.

    For ``initial_state`` only the context is given: the draws follow from the seed. Afterwards, a `Combined` among the
    arguments has judged the updates.

    Raises:
        NoTorch: it needs torch, which is not installed.
        Others: as the function.
    """
    if computed(federation.method, name) == "numpy":
        return _arrays(_call(federation.method, name, arguments, seeds.draws))
    if not has_torch():
        raise NoTorch(
            f"{federation.method.name} computes {name} with torch, which this coordinator does not have: {GET_TORCH}"
        )
    return call_with_torch(federation.method, name, arguments, federation.spec.training.threads)


def call_with_torch(method: Method, name: str, arguments: tuple[Any, ...], threads: int) -> Any:
    """Call a server function with torch tensors in place of arrays; the result has arrays.

    Torch is imported here, in the job's thread: a coordinator whose methods need none has none in memory.
    """
    import torch

    torch.set_num_threads(threads)  # The order of sums, and so their bits, depends on it.
    given = tuple(_tensors(value) for value in arguments)
    result = _arrays(_call(method, name, given, seeds.generator))
    for mine, other in zip(arguments, given, strict=True):
        if isinstance(mine, Combined):
            mine.take_judgements(other)
    return result


def _call(method: Method, name: str, arguments: tuple[Any, ...], draws: seeds.DrawsOf) -> Any:
    given = [replace(value, draws_of=draws) if isinstance(value, ServerContext) else value for value in arguments]
    if name == "initial_state":
        given.append(draws(given[0].seed, seeds.INITIAL))
    return getattr(method, name)(*given)


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
