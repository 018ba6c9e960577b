"""Sizes of a method's exchanges in bytes, and the limits, deadlines and disk space that follow from them."""

from __future__ import annotations

import math

from promptfed.shared.methods.core.interface.base import Method, MethodError, ServerContext
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.tensors import DTYPES, TensorSpec

DEFAULT_LIMIT = 64 << 20  # admission.max_bytes where nobody says otherwise
LARGEST = 1 << 31  # bytes of an update
HEADER = 1 << 20  # beside the tensors of an update: names, metadata
BYTES_PER_SECOND = 1 << 20  # the slowest line that is reckoned with
LARGE = 16 << 20  # bytes from which tensors are worked on in files
MOST_SORTED = 1 << 28  # numbers of all updates together that are sorted, or gone through a thousand times
MOST_IN_MEMORY = 1 << 24  # numbers of one update of which several vectors are held in float64
NOISY = 10.0  # times the usual limit of changes, where clients add noise
SORTING = ("median", "trimmed_mean", "geometric_median")


def exchanged(method: Method, context: ServerContext) -> tuple[int, int]:
    """The most bytes of tensors that a client takes, and sends, in any phase. Raises MethodError as ``dims`` does."""
    dims = method.dims(context)
    phases = [phase for round in (1, 2, context.rounds) for phase in method.phases(round, max(2, context.rounds))]
    down = max((_bytes(phase.down, dims) for phase in phases), default=0)
    return down, max((_bytes(phase.up, dims) for phase in phases), default=0)


def update_limit(spec: FederationSpec, method: Method, context: ServerContext) -> int:
    """How many bytes an update may have: the spec's, or where that is the default as many as the method's needs."""
    given = spec.admission.max_bytes
    if given != DEFAULT_LIMIT:
        return given
    return max(given, min(LARGEST, int(1.1 * exchanged(method, context)[1]) + HEADER))


def change_limit(spec: FederationSpec, method: Method, numbers: int) -> float:
    """L2 norm that a change of ``numbers`` numbers may have: the spec's, or else the method's c·√numbers.

    At level ``sample`` clients add noise to each step of the training, so their changes may be longer.
    """
    given = spec.admission.max_update_norm
    if given is not None:
        return given
    longer = NOISY if spec.privacy.protects_records else 1.0
    return longer * method.change_per_number * math.sqrt(numbers)


def needed_bytes(spec: FederationSpec, method: Method, context: ServerContext, clients: int) -> int:
    """Disk that a federation of ``clients`` takes while its method's exchanges are large; 0 where they are not.

    Updates and states of the round and of the one before, its payload, and what is being written.
    """
    down, up = exchanged(method, context)
    if max(down, up) < LARGE:
        return 0
    kept = 2 if spec.retention == "last_round" else spec.rounds
    return kept * (clients * up + down) + 2 * down


def check_sizes(spec: FederationSpec, method: Method, context: ServerContext, clients: int) -> None:
    """Raise MethodError where updates of ``clients`` are too large for the spec's limits, times or rule."""
    down, up = exchanged(method, context)
    if up + HEADER > LARGEST:
        raise MethodError(
            f"an update would have {up:,} bytes, and {LARGEST:,} is the most: train less (trainable: last_k), send "
            "transport: bfloat16, or take a smaller backbone"
        )
    if up > spec.admission.max_bytes != DEFAULT_LIMIT:
        raise MethodError(
            f"an update has {up:,} bytes, and admission.max_bytes allows {spec.admission.max_bytes:,}: leave it out"
        )
    seconds = math.ceil((down + up) / BYTES_PER_SECOND)
    if max(down, up) >= LARGE and spec.participation.deadline_seconds < seconds:
        raise MethodError(
            f"{down:,} bytes down and {up:,} up take {seconds} s at 1 MB/s, and participation.deadline_seconds is "
            f"{spec.participation.deadline_seconds:g}: raise it, for the training as well"
        )
    rule = spec.aggregation.rule
    held = rule == "geometric_median" and up // 4 > MOST_IN_MEMORY
    if held or (rule in SORTING and clients * up // 4 > MOST_SORTED):
        raise MethodError(
            f"the rule {rule} goes through all numbers of all updates many times, and {clients} updates of {up // 4:,} "
            "are too many for it: take krum, multi_krum or clip_norm"
        )


def _bytes(specs: tuple[TensorSpec, ...], dims: dict[str, int]) -> int:
    """Bytes of ``specs``; a size that depends on who answers counts as 1."""
    return sum(
        math.prod(dims.get(size, 1) if isinstance(size, str) else size for size in spec.shape)
        * DTYPES[spec.dtype].itemsize
        for spec in specs
    )
