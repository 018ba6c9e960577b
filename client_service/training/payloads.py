"""Payloads are compared with the tensors that their method declares; updates get the dtype in which they are sent."""

from __future__ import annotations

from promptfed.client_service.privacy.agreement import ROUNDS
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.interface import ClientInfo, Method, MethodError, Phase, ServerContext
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Shape, Tensors, TensorSpec
from promptfed.shared.tensors.torch_tensors import check


def known_sizes(method: Method, shape: BackboneShape, class_names: tuple[str, ...] | None) -> dict[str, int]:
    """Numbers for the symbols in shapes, except those that depend on who takes part."""
    somebody = ClientInfo("somebody", "trainer", 1, class_names or (), Domain(name="d", description="{}"))
    alone = _dims(method, shape, class_names, (somebody,))
    nobody = _dims(method, shape, class_names, ())
    return {symbol: size for symbol, size in alone.items() if nobody.get(symbol) == size}


def _dims(
    method: Method, shape: BackboneShape, names: tuple[str, ...] | None, clients: tuple[ClientInfo, ...]
) -> dict[str, int]:
    try:
        return method.dims(ServerContext(TrainingSpec(), shape, names, clients, seed=0, rounds=ROUNDS))
    except MethodError:
        return {}


def check_payload(tensors: Tensors, method: Method, phase: Phase | None, sizes: dict[str, int]) -> None:
    """Refuse other tensors than ``phase`` (None: an evaluation) declares.

    A size that ``sizes`` lacks, such as how many clients there are, is free, but the same in all tensors.

    Raises:
        TensorError: which tensor is wrong, and how.
    """
    specs = method.payload_tensors(phase)
    numbers = dict(sizes)
    for spec in specs:
        shape = tuple(tensors[spec.name].shape) if spec.name in tensors else ()
        if len(shape) == len(spec.shape):
            for symbol, size in zip(spec.shape, shape, strict=True):
                if isinstance(symbol, str):
                    numbers.setdefault(symbol, size)
    check(tensors, {spec.name: (_shape(spec, numbers), spec.dtype) for spec in specs})


def _shape(spec: TensorSpec, numbers: dict[str, int]) -> Shape:
    """The shape in numbers; 0 for a symbol whose tensor is missing, or has another number of dimensions."""
    return tuple(numbers.get(size, 0) if isinstance(size, str) else size for size in spec.shape)


def phase_of(method: Method, round: int, rounds: int, name: str) -> Phase:
    """The method's phase of this name.

    Raises:
        MethodError: there is none in this round.
    """
    for phase in method.phases(round, rounds):
        if phase.name == name:
            return phase
    raise MethodError(f"round {round} of {rounds} of {method.name} has no phase {name!r}")
