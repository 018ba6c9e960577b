"""Global states, computed from stored tensors, for a commit or for a replay.

Nothing here writes. The same inputs give the same bytes: the updates come in order of client name.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from promptfed.coordinator.aggregation.rules import Rule
from promptfed.coordinator.aggregation.server_half import Combined, call
from promptfed.coordinator.aggregation.server_optimizer import ServerOptimizer, fresh_moments, moment_tensors
from promptfed.coordinator.domain.federation import Client, Federation
from promptfed.coordinator.store.blobs import Blobs
from promptfed.shared.methods.core.interface.base import ClientUpdate, MethodError, NeedsBackbone, Phase, ServerContext
from promptfed.shared.methods.core.interface.hooks import AdoptsStates, ChecksClients, ForgetsClients, GrowsWithClients
from promptfed.shared.methods.core.interface.insights import Measured, MeasuresUpdates
from promptfed.shared.tensors import (
    SERVER,
    Array,
    Arrays,
    Shape,
    TensorError,
    TensorSpec,
    check,
    decode,
    decode_file,
    method_part,
)

log = logging.getLogger("promptfed.coordinator")

READ_AT_ONCE = 16  # small updates lie in the database, and are no more than 4 MB together

Counted = tuple[str, float, str]
"""A counted update: its client, its weight, its digest."""


def initial_state(blobs: Blobs, federation: Federation, context: ServerContext) -> Arrays:
    """The state of round 0: the method's, or the supplied one adapted to the clients of ``context``.

    Raises:
        NeedsBackbone, MethodError, TensorError: there is none for these clients and this backbone.
    """
    if isinstance(federation.method, ChecksClients):
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
        told = f"{type(error).__name__}: {error}"
        raise MethodError(f"initial_state of {name} failed ({told}): the coordinator's log has the traceback") from None
    return made


def adopted(federation: Federation, supplied: Arrays, context: ServerContext) -> Arrays:
    """The supplied state of round 0, adapted to the clients of ``context``."""
    if not isinstance(federation.method, AdoptsStates):
        return supplied
    adopted: Arrays = call(federation, "adopt", supplied, context)
    return adopted


def joined(federation: Federation, state: Arrays, roster: Sequence[str], newcomers: Iterable[str]) -> Arrays:
    """The state after ``newcomers`` joined those of ``roster`` one by one; each sees a roster that ends with itself."""
    present, moments = list(roster), server_part(state)
    state = method_part(state)
    for name in newcomers:
        present.append(name)
        if isinstance(federation.method, GrowsWithClients):
            state = call(federation, "join", state, federation.clients[name].info(), federation.context(present))
    state = state | moments
    check_state(federation, state, federation.context(present))
    return state


def forgotten(federation: Federation, state: Arrays, client: str, context: ServerContext) -> Arrays:
    """The state without the client's own part; the same object if there is none."""
    own = method_part(state)
    if not isinstance(federation.method, ForgetsClients):
        return state
    after: Arrays = call(federation, "forget", own, federation.clients[client].info(), context)
    if after.keys() == own.keys() and all(np.array_equal(after[name], own[name]) for name in own):
        return state
    after = after | server_part(state)
    check_state(federation, after, context)
    return after


def rule_of(federation: Federation, before: Mapping[str, Array]) -> Rule:
    """The rule of a phase; ``before``: the state that it began with."""
    return Rule(federation.spec.aggregation, before)


def after_phase(
    federation: Federation,
    state: Arrays,
    phase: Phase,
    updates: Iterable[ClientUpdate],
    rule: Rule,
    context: ServerContext,
) -> tuple[Arrays, Measured]:
    """The state after ``phase`` of these updates, and what the method measures of them.

    ``rule`` makes them one where the method takes their mean. The spec's server optimizer takes its step on what the
    rule gives.
    """
    optimizer = ServerOptimizer(federation.spec.aggregation.server, state)
    given = method_part(state), phase, updates, Combined(rule, optimizer), context
    measured = Measured()
    if isinstance(federation.method, MeasuresUpdates):
        made, measured = call(federation, "aggregate_measured", *given)
    else:
        made = call(federation, "aggregate", *given)
    return _whole(federation, state, made, optimizer, context), measured


def common_payload(federation: Federation, state: Arrays, phase: Phase, context: ServerContext) -> Arrays:
    """The payload of all clients in ``phase``, for a method with one payload for all."""
    return payload(federation, state, phase, next(iter(federation.clients.values())), context)


def payload(
    federation: Federation, state: Arrays, phase: Phase | None, client: Client, context: ServerContext
) -> Arrays:
    """The payload of ``client`` in ``phase``; None: in an evaluation."""
    made: Arrays = call(federation, "payload", method_part(state), phase, client.info(), context)
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


def stored_updates(blobs: Blobs, updates: Iterable[Counted]) -> Iterator[ClientUpdate]:
    """Read the updates, some at a time. Raises DamagedBlob."""
    wanted = list(updates)
    for begin in range(0, len(wanted), READ_AT_ONCE):
        some = wanted[begin : begin + READ_AT_ONCE]
        places = blobs.places([sha256 for _, _, sha256 in some])
        for (client, weight, _), place in zip(some, places, strict=True):
            tensors, _ = decode(place) if isinstance(place, bytes) else decode_file(place)
            yield ClientUpdate(client, weight, tensors)
