"""The tables in docs/reference/methods/*.md that are made from the code, so that they cannot go stale.

``python docs/tables.py`` writes them between their markers; ``--check`` only says which are stale. `tests/docs` does.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, describe, make_method
from promptfed.shared.methods.core.interface.base import ClientInfo, Phase, ServerContext
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import TensorSpec
from promptfed.shared.tensors.torch_tensors import DTYPES

FOLDER = Path(__file__).parent / "reference" / "methods"
MARKED = re.compile(r"<!-- table: (\w+) (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
CLIENTS = 3  # trainers, each with a domain of its own, in the numbers
VIT_B_16 = BackboneShape(
    d_t=512,
    d_v=768,
    d_e=512,
    text_layers=12,
    vision_layers=12,
    context_length=77,
    patch_size=16,
    patch_tokens=196,
    mlp_width=3072,
    positions=197,
    heads_v=12,
    heads_t=8,
)
MOST_NAMES = 6  # tensors that are named one by one
EVERY, LAST = "every round", "after the last round"
SYMBOLS = {"depth_t": "L_t", "depth_v": "L_v", "depth": "L", "d_v3": "3d_v", "classes": "C"}


def options(name: str) -> str:
    """Every hyperparameter with its default, what it may be, and what it means; then keys of the spec."""
    about = describe(name)
    rows = [
        [f"`{key}`", f"`{_json(schema.get('default'))}`", _range(schema), _cell(schema.get("description", ""))]
        for key, schema in about["hyperparameters"]["properties"].items()
    ]
    rows += [
        [f"`{key}`", f"`{_json(value)}`", "", "a key of the [spec](../spec.md), with this method's default"]
        for key, value in _flat(about["defaults"])
    ]
    return _table(["option", "default", "may be", "what it is"], rows)


def cost(name: str) -> str:
    """What travels in each phase and direction for one client: tensors, numbers as a formula, and with ViT-B/16."""
    method = make_method({"name": name})
    context = _context()
    sizes = {"K": CLIENTS, "E": getattr(method.hyper, "experts", 0), **method.dims(context)}  # E: the most experts
    travelling: dict[tuple[str, str], tuple[str, tuple[TensorSpec, ...]]] = {}
    for phase, when in _phases(method.phases):
        for way, specs in (("down", phase.down), ("up", phase.up)):
            travelling[(phase.name, way)] = (when, specs)
    if not any(specs for _, specs in travelling.values()):
        return "Nothing travels but metrics."
    rows = [_cost_row(phase, way, when, specs, sizes) for (phase, way), (when, specs) in travelling.items()]
    return _table(["phase", "", "when", "tensors", "numbers", "with ViT-B/16", "bytes"], rows)


def _phases(phases: Callable[[int, int], tuple[Phase, ...]]) -> Iterable[tuple[Phase, str]]:
    """Every phase with when it is: those of a middle round, then those that the last one adds."""
    middle = {phase.name for phase in phases(2, 3)}
    for phase in phases(3, 3):
        yield phase, EVERY if phase.name in middle else LAST


def _context() -> ServerContext:
    clients = tuple(
        ClientInfo(f"c{k}", "trainer", 1, ("a", "b"), Domain(name=f"d{k}", description=f"a d{k} of a {{}}"))
        for k in range(CLIENTS)
    )
    return ServerContext(TrainingSpec(), VIT_B_16, ("a", "b"), clients, seed=0, rounds=3)


def _cost_row(phase: str, way: str, when: str, specs: tuple[TensorSpec, ...], sizes: dict[str, int]) -> list[str]:
    if not specs:
        return [phase, way, when, "-", "0", "0", "0"]
    counts = [math.prod(spec.resolve(sizes)) for spec in specs]
    size = sum(count * DTYPES[spec.dtype].itemsize for spec, count in zip(specs, counts, strict=True))
    names = ", ".join(f"`{spec.name}`" for spec in specs) if len(specs) <= MOST_NAMES else f"{len(specs)} tensors"
    return [phase, way, when, names, _formula(specs), f"{sum(counts):,}", f"{size:,}"]


def _formula(specs: tuple[TensorSpec, ...]) -> str:
    terms = Counter("·".join(_symbols(spec)) or "1" for spec in specs)
    return " + ".join(f"{count}·{term}" if count > 1 else term for term, count in terms.items())


def _symbols(spec: TensorSpec) -> list[str]:
    """Sizes as symbols, equal ones as a power."""
    counted = Counter(SYMBOLS.get(str(size), str(size)) for size in spec.shape)
    return [symbol + ("²" if count == 2 else "") for symbol, count in counted.items()]


def _flat(section: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _range(schema: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return ", or ".join(_range(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = {
        "integer": "whole number",
        "number": "number",
        "boolean": "`true`, `false`",
        "null": "nothing",
        "object": "mapping",
    }.get(schema.get("type", ""), "text")
    bounds = {"minimum": "from", "exclusiveMinimum": "above", "maximum": "to", "exclusiveMaximum": "below"}
    limits = [f"{word} {schema[key]:g}" for key, word in bounds.items() if key in schema]
    return " ".join([kind, *limits])


def _json(value: Any) -> str:
    if isinstance(value, list):
        return ""
    if value is None or isinstance(value, bool):  # 1.0 == True: a dictionary would confuse them
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


TABLES: dict[str, Callable[[str], str]] = {"options": options, "cost": cost}


def renewed(text: str) -> str:
    """A page with all its tables made anew."""

    def make(match: re.Match[str]) -> str:
        kind, name = match.groups()
        return f"<!-- table: {kind} {name} -->\n{TABLES[kind](name)}\n<!-- end of table -->"

    return MARKED.sub(make, text)


def shown() -> dict[str, set[str]]:
    """Which methods have which table on some page."""
    methods: dict[str, set[str]] = {kind: set() for kind in TABLES}
    for page in FOLDER.glob("*.md"):
        for kind, name in MARKED.findall(page.read_text(encoding="utf-8")):
            methods[kind].add(name)
    return methods


def stale() -> list[Path]:
    """Pages whose tables are not what the code says."""
    pages = sorted(FOLDER.glob("*.md"))
    return [page for page in pages if renewed(page.read_text(encoding="utf-8")) != page.read_text(encoding="utf-8")]


def main() -> int:
    """Renew all pages, or with ``--check`` name the stale ones."""
    pages = stale()
    for page in pages:
        if "--check" in sys.argv:
            print(f"{page.name} is stale: run python docs/tables.py")
        else:
            page.write_text(renewed(page.read_text(encoding="utf-8")), encoding="utf-8")
    missing = [f"{kind} {name}" for kind, names in shown().items() for name in sorted(set(METHODS.own()) - names)]
    if missing:
        print(f"no page shows: {', '.join(missing)}")
    return int(bool(missing) or ("--check" in sys.argv and bool(pages)))


if __name__ == "__main__":
    sys.exit(main())
