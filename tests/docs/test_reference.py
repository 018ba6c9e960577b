"""What a round of each method costs, and the exit codes: both pages say what the code does."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable

from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import ClientInfo, ServerContext
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import TensorSpec
from promptfed.shared.tensors.torch_tensors import DTYPES
from tests import ROOT

REFERENCE = ROOT / "docs" / "reference"
CLIENTS = 3
VIT_B_16 = BackboneShape(
    d_t=512, d_v=768, d_e=512, text_layers=12, vision_layers=12, context_length=77, patch_size=16, patch_tokens=196,
    mlp_width=3072, positions=197, heads_v=12, heads_t=8,
)  # fmt: skip


def context() -> ServerContext:
    clients = tuple(
        ClientInfo(f"c{k}", "trainer", 1, ("a", "b"), Domain(name=f"d{k}", description=f"a d{k} of a {{}}"))
        for k in range(CLIENTS)
    )
    return ServerContext(TrainingSpec(), VIT_B_16, ("a", "b"), clients, seed=0, rounds=3)


def bytes_of(specs: Iterable[TensorSpec], sizes: dict[str, int]) -> int:
    return sum(math.prod(spec.resolve(sizes)) * DTYPES[spec.dtype].itemsize for spec in specs)


def row(name: str) -> str:
    """Numbers down and up, bytes of a round, and further bytes of the last one."""
    method = make_method({"name": name})
    sizes = {"K": CLIENTS, "E": getattr(method.hyper, "experts", 0), **method.dims(context())}
    middle, last = method.phases(2, 3), method.phases(3, 3)
    ways = [[spec for phase in middle for spec in getattr(phase, way)] for way in ("down", "up")]
    counts = [sum(math.prod(spec.resolve(sizes)) for spec in specs) for specs in ways]
    size = sum(bytes_of(specs, sizes) for specs in ways)
    once = sum(bytes_of((*phase.down, *phase.up), sizes) for phase in last) - size
    return " | ".join(
        [f"| `{name}`", *(f"{count:,}" for count in counts), f"{size:,}", f"{once:,} |" if once else " |"]
    )


def test_the_costs_are_those_of_the_code() -> None:
    shown = [line for line in (REFERENCE / "costs.md").read_text().splitlines() if line.startswith("| `")]
    assert shown == [row(name) for name in METHODS.own()]


def test_the_page_has_every_exit_code() -> None:
    text = (REFERENCE / "exit-codes.md").read_text()
    assert re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE) == [
        (str(int(one)), one.name.lower()) for one in Exit
    ]
