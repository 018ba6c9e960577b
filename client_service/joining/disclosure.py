"""What will leave this machine, told before anything is sent; it is made of the very request that enrols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from promptfed.shared.messages import Domain, EnrolmentInfo, EnrolRequest
from promptfed.shared.methods.core.base import ClientInfo, Method, MethodError, ServerContext
from promptfed.shared.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import DTYPES, TensorSpec

EACH, SOME = "in each round in which it is asked", "in round"
ROUNDS = 3  # that stand for all: the first, those in between, the last
NAMES = 6  # class names that are shown

NEVER = (
    "images, file names and folders, the labels of single images, image features, and what the method keeps private "
    "(`promptfed methods NAME` lists what it sends; everything else is)"
)


@dataclass(frozen=True)
class SentTensor:
    """One tensor of an update; a size that depends on who else takes part stands as its symbol, ``bytes`` then None."""

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    bytes: int | None


@dataclass(frozen=True)
class Exchange:
    """The tensors that go up in one phase, and when."""

    phase: str
    when: str
    tensors: tuple[SentTensor, ...]


@dataclass(frozen=True)
class Disclosure:
    """All that the coordinator will learn of this client, and to whom it goes."""

    coordinator: str
    federation: str
    method: str
    declared: EnrolRequest
    exchanges: tuple[Exchange, ...]
    test_sets: tuple[str, ...]

    def facts(self) -> dict[str, Any]:
        """For programs; the secret, which only the coordinator is told, is left out."""
        declared = self.declared.model_dump(exclude={"secret"})
        return asdict(self) | {"declared": declared, "never": NEVER}

    def lines(self) -> list[str]:
        """For people."""
        return [
            f'To join the federation "{self.federation}" (method {self.method}) at {self.coordinator}:',
            "",
            "Leaves this machine once, when it enrols:",
            *(f"  {name:<9} {value}" for name, value in self._declared()),
            *(line for exchange in self.exchanges for line in _exchange_lines(exchange)),
            "Leaves it after an evaluation:",
            f"  accuracy  on {', '.join(self.test_sets)}, with the number of images, and the template's beside it",
            "            seconds of computing; where the method mixes domains, their mean shares over the test images",
            f"Never leaves it: {NEVER}.",
        ]

    def _declared(self) -> list[tuple[str, str]]:
        declared = self.declared
        names = ", ".join(declared.class_names[:NAMES])
        more = f" and {len(declared.class_names) - NAMES} more" if len(declared.class_names) > NAMES else ""
        domain = f"{declared.domain.name}: {declared.domain.description!r}" if declared.domain else "none declared"
        kind = "training" if declared.role == "trainer" else "test"
        return [
            ("name", declared.name),
            ("role", declared.role),
            ("images", f"{declared.num_samples}, the number of {kind} images"),
            ("classes", f"{len(declared.class_names)}: {names}{more}"),
            ("domain", domain),
            (
                "backbone",
                f"{declared.backbone_fingerprint[:19]}..., the fingerprint of its weights, and its towers' sizes",
            ),
            ("device", declared.device),
            ("secret", "random, made here: by it the coordinator knows this client again"),
        ]


def _exchange_lines(exchange: Exchange) -> list[str]:
    lines = [f"Leaves it {exchange.when} (phase {exchange.phase}):"]
    for tensor in exchange.tensors:
        size = f"{tensor.bytes:,} bytes" if tensor.bytes is not None else "bytes by who takes part"
        lines.append(f"  tensor    {tensor.name} ({', '.join(map(str, tensor.shape))}) {tensor.dtype}, {size}")
    known = [tensor.bytes for tensor in exchange.tensors if tensor.bytes is not None]
    if len(known) == len(exchange.tensors) > 1:
        lines.append(f"            {sum(known):,} bytes in all")
    return [*lines, "  metrics   numbers about its training: loss, seconds of computing, what the method measures"]


def disclose(
    coordinator: str, info: EnrolmentInfo, method: Method, declared: EnrolRequest, tests: Sequence[str]
) -> Disclosure:
    """What ``declared`` and the method's phases send; an evaluator sends accuracies alone."""
    exchanges = _exchanges(method, declared, info) if declared.role == "trainer" else ()
    return Disclosure(coordinator, info.name, method.name, declared, exchanges, ("its test images", *tests))


def _exchanges(method: Method, declared: EnrolRequest, info: EnrolmentInfo) -> tuple[Exchange, ...]:
    sizes = _sizes(method, declared, info)
    found: dict[str, tuple[list[int], tuple[TensorSpec, ...]]] = {}
    for round in range(1, ROUNDS + 1):
        for phase in method.phases(round, ROUNDS):
            found.setdefault(phase.name, ([], phase.up))[0].append(round)
    return tuple(
        Exchange(name, _when(rounds), tuple(_sent(spec, sizes) for spec in up)) for name, (rounds, up) in found.items()
    )


def _when(rounds: list[int]) -> str:
    if len(rounds) == ROUNDS:
        return EACH
    return "after the last round" if rounds == [ROUNDS] else f"{SOME} {rounds[0]} and later"


def _sizes(method: Method, declared: EnrolRequest, info: EnrolmentInfo) -> dict[str, int]:
    """Numbers for the symbols in shapes, but for those that change with who takes part."""
    somebody = ClientInfo("somebody", "trainer", 1, tuple(declared.class_names), Domain(name="d", description="{}"))
    alone = _dims(method, declared.backbone_shape, info, (somebody,))
    nobody = _dims(method, declared.backbone_shape, info, ())
    return {symbol: size for symbol, size in alone.items() if nobody.get(symbol) == size}


def _dims(method: Method, shape: BackboneShape, info: EnrolmentInfo, clients: tuple[ClientInfo, ...]) -> dict[str, int]:
    names = tuple(info.class_names) if info.class_names else None
    try:
        return method.dims(ServerContext(TrainingSpec(), shape, names, clients, seed=0, rounds=ROUNDS))
    except MethodError:
        return {}


def _sent(spec: TensorSpec, sizes: dict[str, int]) -> SentTensor:
    shape = tuple(sizes.get(size, size) if isinstance(size, str) else size for size in spec.shape)
    numbers = [size for size in shape if isinstance(size, int)]
    whole = prod(numbers) * DTYPES[spec.dtype].itemsize if len(numbers) == len(shape) else None
    return SentTensor(spec.name, shape, spec.dtype, whole)
