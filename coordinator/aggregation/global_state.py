"""Global states, computed from stored tensors, for a commit or for a replay.

The server half of a method is called with numpy, or with torch where a method asks for it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import numpy as np
from sqlalchemy import bindparam, select
from sqlalchemy.orm import Session

from promptfed.coordinator.aggregation.rules import Rule, ServerOptimizer, fresh_moments, moment_tensors
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.tables import TaskRow, UpdateRow
from promptfed.shared import seeds
from promptfed.shared.methods.core.array_library import computed
from promptfed.shared.methods.core.interface import (
    ClientUpdate,
    Method,
    MethodError,
    NeedsBackbone,
    Phase,
    ServerContext,
    has_own,
)
from promptfed.shared.tensors import (
    SERVER,
    Array,
    Arrays,
    Shape,
    TensorError,
    TensorSpec,
    check,
    decode,
    decode_place,
    method_part,
)

GET_TORCH = "use an image of the target coordinator-torch, or `pip install torch` where it runs"
log = logging.getLogger("promptfed.coordinator")
READ_AT_ONCE = 16  # small updates lie in the database, and are no more than 4 MB together

Counted = tuple[str, float, str]
"""A counted update: its client, its weight, its digest."""

_COLUMNS = (TaskRow.client, TaskRow.weight, TaskRow.payload_sha256, UpdateRow.sha256, UpdateRow.stored)
_COUNTED = (
    select(*_COLUMNS)
    .join(UpdateRow, UpdateRow.task_id == TaskRow.id)
    .where(TaskRow.phase_id == bindparam("phase"), TaskRow.counted)
)


class NoTorch(MethodError):
    """A computation needs torch, which this coordinator does not have."""


class Combined:
    """A phase's ``Combine``: its rule or a known mean, then the step of the server optimizer."""

    def __init__(self, rule: Rule | dict[str, Any], optimizer: ServerOptimizer):
        self.rule, self.optimizer = rule, optimizer

    def in_torch(self) -> Combined:
        """A rule for torch tensors, with judgements of its own."""
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
        return self.optimizer.wrap(lambda updates: rule(updates) if isinstance(rule, Rule) else dict(rule))(updates)


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
    converted = tuple(_tensors(value) for value in arguments)
    result = _arrays(_call(method, name, converted, seeds.generator))
    for mine, other in zip(arguments, converted, strict=True):
        if isinstance(mine, Combined):
            mine.take_judgements(other)
    return result


def _call(method: Method, name: str, arguments: tuple[Any, ...], draws: seeds.DrawsOf) -> Any:
    values = [replace(value, draws_of=draws) if isinstance(value, ServerContext) else value for value in arguments]
    if name == "initial_state":
        values.append(draws(values[0].seed, seeds.INITIAL))
    return getattr(method, name)(*values)


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


def initial_state(blobs: Blobs, federation: Federation, context: ServerContext) -> Arrays:
    """The state of round 0: the method's, or the supplied one adapted to the clients of ``context``.

    Raises:
        NeedsBackbone, MethodError, TensorError: there is none for these clients and this backbone.
    """
    federation.method.check_clients(context)
    if federation.supplied_state is not None:
        supplied, _ = decode(blobs.read(federation.supplied_state))
        tensors = adopted(federation, supplied, context)
    elif federation.spec.continues is not None:
        text = f"{federation.spec.name} continues the state {federation.spec.continues}, which has not been supplied"
        raise NeedsBackbone(f"{text}: PUT the export's tensors to its initial-state")
    else:
        tensors = _made(federation, context)
    server = federation.spec.aggregation.server
    moments = moment_tensors(server, federation.method, federation.spec.rounds)
    tensors = tensors | fresh_moments(server, moments, federation.method.dims(context))
    check_state(federation, tensors, context)
    return tensors


def _made(federation: Federation, context: ServerContext) -> Arrays:
    try:
        made: Arrays = call(federation, "initial_state", context)
    except (MethodError, TensorError):
        raise
    except Exception as error:
        name = federation.method.name
        log.exception("initial_state of the method %s failed", name)
        why = f"{type(error).__name__}: {error}"
        raise MethodError(f"initial_state of {name} failed ({why}): the coordinator's log has the traceback") from None
    return made


def adopted(federation: Federation, supplied: Arrays, context: ServerContext) -> Arrays:
    """The supplied state of round 0, adapted to the clients of ``context``."""
    if not has_own(federation.method, "adopt"):
        return supplied
    adopted: Arrays = call(federation, "adopt", supplied, context)
    return adopted


def joined(federation: Federation, state: Arrays, roster: Sequence[str], newcomers: Iterable[str]) -> Arrays:
    """The state after ``newcomers`` joined those of ``roster`` one by one; each sees a roster that ends with itself."""
    present, moments = list(roster), server_part(state)
    state = method_part(state)
    for name in newcomers:
        present.append(name)
        if has_own(federation.method, "join"):
            state = call(federation, "join", state, federation.clients[name], federation.context(present))
    state = state | moments
    check_state(federation, state, federation.context(present))
    return state


def forgotten(federation: Federation, state: Arrays, client: str, context: ServerContext) -> Arrays:
    """The state without the client's own part; the same object if there is none."""
    part = method_part(state)
    if not has_own(federation.method, "forget"):
        return state
    after: Arrays = call(federation, "forget", part, federation.clients[client], context)
    if after.keys() == part.keys() and all(np.array_equal(after[name], part[name]) for name in part):
        return state
    after = after | server_part(state)
    check_state(federation, after, context)
    return after


def after_phase(
    federation: Federation,
    state: Arrays,
    phase: Phase,
    updates: Iterable[ClientUpdate],
    rule: Rule,
    context: ServerContext,
) -> Arrays:
    """The state after ``phase`` of these updates.

    ``rule`` makes them one where the method takes their mean. The spec's server optimizer takes its step on what the
    rule gives.
    """
    optimizer = ServerOptimizer(federation.spec.aggregation.server, state)
    positional = method_part(state), phase, updates, Combined(rule, optimizer), context
    return _whole(federation, state, call(federation, "aggregate", *positional), optimizer, context)


def common_payload(federation: Federation, state: Arrays, phase: Phase, context: ServerContext) -> Arrays:
    """The payload of all clients in ``phase``, for a method with one payload for all."""
    return payload(federation, state, phase, next(iter(federation.clients.values())), context)


def payload(
    federation: Federation, state: Arrays, phase: Phase | None, client: Client, context: ServerContext
) -> Arrays:
    """The payload of ``client`` in ``phase``; None: in an evaluation."""
    made: Arrays = call(federation, "payload", method_part(state), phase, client, context)
    return made


def after_mean(federation: Federation, state: Arrays, phase: Phase, mean: Arrays, context: ServerContext) -> Arrays:
    """The state after ``phase`` from a known ``mean``: of a secure sum, or a noised one."""
    optimizer = ServerOptimizer(federation.spec.aggregation.server, state)
    made = call(federation, "aggregate", method_part(state), phase, [], Combined(mean, optimizer), context)
    return _whole(federation, state, made, optimizer, context)


def _whole(
    federation: Federation, state: Arrays, made: Arrays, optimizer: ServerOptimizer, context: ServerContext
) -> Arrays:
    """The method's state with the server optimizer's moments, checked. Raises as `check_state`."""
    after = made | server_part(state) | optimizer.moments
    check_state(federation, after, context)
    return after


def server_part(state: Arrays) -> Arrays:
    """The moments of the server optimizer."""
    return {name: tensor for name, tensor in state.items() if name.startswith(SERVER)}


def check_state(federation: Federation, tensors: Arrays, context: ServerContext) -> None:
    """Refuse tensors that are not a global state of this federation. Raises TensorError, MethodError.

    A symbol that the method's dims do not have is free: as many prompts as clients have answered, for one.
    """
    dims = federation.method.dims(context)
    moments = moment_tensors(federation.spec.aggregation.server, federation.method, federation.spec.rounds)
    expected = {
        spec.name: (_shape(spec, tensors.get(spec.name), dims), spec.dtype)
        for spec in (*federation.method.state_tensors(), *moments)
    }
    check(tensors, expected)


def _shape(spec: TensorSpec, tensor: Array | None, dims: Mapping[str, int]) -> Shape:
    actual = tuple(tensor.shape) if tensor is not None and tensor.ndim == len(spec.shape) else (0,) * len(spec.shape)
    return tuple(
        dims.get(size, n) if isinstance(size, str) else size for size, n in zip(spec.shape, actual, strict=True)
    )


def stored_updates(
    blobs: Blobs, updates: Iterable[Counted], changes: dict[str, float] | None = None
) -> Iterator[ClientUpdate]:
    """The updates, those that are not in memory since their admission read some at a time.

    ``changes`` gets the norms of the changes that the admission has measured, by client.

    Raises:
        DamagedBlob: one cannot be read.
    """
    ordered = list(updates)
    for begin in range(0, len(ordered), READ_AT_ONCE):
        some = ordered[begin : begin + READ_AT_ONCE]
        admitted = {sha256: decoded for _, _, sha256 in some if (decoded := blobs.admitted.get(sha256)) is not None}
        left = [sha256 for _, _, sha256 in some if sha256 not in admitted]
        places = dict(zip(left, blobs.places(left), strict=True)) if left else {}
        blobs.admitted.forget(admitted)
        for client, weight, sha256 in some:
            if sha256 in admitted:
                tensors, change = admitted[sha256]
                if changes is not None:
                    changes[client] = change
            else:
                tensors, _ = decode_place(places[sha256])
            yield ClientUpdate(client, weight, tensors)


@dataclass(frozen=True)
class Given:
    """The updates in order of client name, and by client: the digest of the payload that each started from.

    ``gone``: clients whose updates were removed, by retention or on request.
    """

    updates: tuple[Counted, ...] = ()
    payloads: Mapping[str, str] = field(default_factory=dict)
    gone: frozenset[str] = frozenset()


NOTHING = Given()


def given(session: Session, federation: Federation, phase_id: int) -> Given:
    """The counted updates of a phase."""
    rows = session.connection().execute(_COUNTED, {"phase": phase_id}).all()
    return Given(
        tuple(sorted((row.client, row.weight or 0.0, row.sha256) for row in rows)),
        {row.client: row.payload_sha256 for row in rows},
        frozenset(row.client for row in rows if not row.stored),
    )
