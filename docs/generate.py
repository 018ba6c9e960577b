"""The reference pages of the spec, of the methods' options and of what a round costs, which are made from the code.

``python docs/generate.py`` writes them; with ``--check`` it ends with 1 if one is stale. `tests/docs` looks too.
"""

from __future__ import annotations

import inspect
import math
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from promptfed.shared.data import options as data_options
from promptfed.shared.data.options import MOST, Options
from promptfed.shared.data.schemes import SCHEMES
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import ClientInfo, ServerContext
from promptfed.shared.spec.spec import BackboneShape, FederationSpec, TrainingSpec
from promptfed.shared.tensors import TensorSpec
from promptfed.shared.tensors.torch_tensors import DTYPES

PAGES = Path(__file__).parent / "reference"
NOTE = "<!-- Made from the code by `python docs/generate.py`: change the code, not this page. -->\n\n"
SITES = tuple(
    ClientInfo(f"c{k}", "trainer", 1, ("a", "b"), Domain(name=f"d{k}", description=f"a d{k} of a {{}}"))
    for k in range(3)
)
VIT_B_16 = BackboneShape(
    d_t=512, d_v=768, d_e=512, text_layers=12, vision_layers=12, context_length=77, patch_size=16, patch_tokens=196,
    mlp_width=3072, positions=197, heads_v=12, heads_t=8,
)  # fmt: skip
FILLED_IN = ("backbone.shape", "origin")  # by programs, not by people: /openapi.json has their fields
OPTIONS = "<!-- Made from the code by `python docs/generate.py`: change the code, not this table. -->\n\n"
RANGES = "`whole 1–64` is a whole number from 1 to 64, `>0–1` a number above 0 and up to 1."


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def cell(text: Any) -> str:
    """Text for one cell of a table; words in angle brackets would be HTML."""
    plain = " ".join(str(text if text is not None else "").replace("``", "`").split())
    return plain.replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


def spec() -> str:
    """Each section of a spec as one table."""
    schema = FederationSpec.model_json_schema()
    sections = "".join(_sections(schema, schema["$defs"], ""))
    return (
        "# The spec of a federation\n\n"
        "A spec is YAML for the command and JSON for the API. Unknown keys are refused. What you leave out takes the "
        "method's default where it has one (`promptfed methods NAME`), else the default below, which stands first. "
        f"{RANGES} "
        "A run file is a spec with a list `clients` beside it ([run files](../guides/deploy.md#run-files)).\n\n"
        "```yaml\nname: pets\nmethod: {name: promptfl, m: 4}\nrounds: 20\n"
        "participation: {min_clients: 3, quorum: 0.7}\n```\n" + sections
    )


def _sections(schema: dict[str, Any], models: dict[str, Any], path: str) -> Iterable[str]:
    rows, inner = [], []
    for key, field in schema["properties"].items():
        full = f"{path}.{key}" if path else key
        model = _model(field)
        if model and full not in FILLED_IN:
            inner.append((models[model], full))
        if model and not field.get("description"):
            continue  # its own table follows
        shown = "required" if key in schema.get("required", ()) else "" if model else shown_value(field.get("default"))
        rows.append([f"`{key}`", _choices(shown, _values(field, models)), _meaning(full, field)])
    title = f"\n## {path}\n\n" if path else "\n## The whole\n\n"
    yield title + table(["key", "default, others", "meaning"], rows) + "\n"
    for model_schema, full in inner:
        yield from _sections(model_schema, models, full)


def _choices(default: str, values: str) -> str:
    """The default, and what else it may be."""
    first = default if default in ("required", "") else code(default)
    others = [value for value in values.split(", ") if value not in (first, "section")]
    return ", ".join(filter(None, [first, *others])).replace(", or ", " or ")


def _meaning(path: str, field: dict[str, Any]) -> str:
    said = field.get("description")
    if said is None and _model(field):
        said = f"see [{path}](#{path.replace('.', '')})"
    if said is None:
        raise SystemExit(f"nothing says what {path} means: give its field a description")
    return cell(said)


def _model(field: dict[str, Any]) -> str | None:
    """The name of the model that a field holds."""
    for choice in [field, *field.get("anyOf", ())]:
        if "$ref" in choice:
            return str(choice["$ref"]).rsplit("/", 1)[1]
    return None


def _values(field: dict[str, Any], models: dict[str, Any]) -> str:
    if "anyOf" in field:
        kinds = [_values(choice, models) for choice in field["anyOf"]]
        return ", or ".join(kind for kind in kinds if kind != "nothing") or "nothing"
    if "$ref" in field:
        return "section"
    if "const" in field:
        return f"`{field['const']}`"
    if field.get("type") == "array":
        return "list"
    return in_words(field)


def in_words(schema: dict[str, Any]) -> str:
    """The values that a JSON schema allows, in words; ``RANGES`` explains them."""
    if "anyOf" in schema:
        return ", or ".join(in_words(choice) for choice in schema["anyOf"])
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    kind = {"integer": "whole", "number": "", "boolean": "`true`, `false`", "null": "nothing", "object": "mapping"}
    low = [f"{sign}{schema[key]:g}" for key, sign in (("minimum", ""), ("exclusiveMinimum", ">")) if key in schema]
    high = [f"{sign}{schema[key]:g}" for key, sign in (("maximum", ""), ("exclusiveMaximum", "<")) if key in schema]
    high = [] if schema.get("maximum") == MOST else high
    limits = "–".join(low + high) if high else f"≥{low[0]}".replace("≥>", ">") if low else ""
    return " ".join(filter(None, [kind.get(schema.get("type", ""), "text"), limits])) or "number"


def shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ""
    if value is None or isinstance(value, bool):  # 1.0 == True: a dictionary would confuse them
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)


def options() -> str:
    """The options of all methods: a row for the methods that have the same ones with the same meaning."""
    taken: dict[tuple[str, str], dict[str, list[str]]] = {}
    for name in sorted(METHODS):
        for key, field in METHODS[name].Hyper.model_json_schema()["properties"].items():
            meaning = cell(field.get("description"))
            taken.setdefault((key, meaning), {}).setdefault(_default(field, meaning), []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}
    for (key, meaning), defaults in sorted(taken.items()):
        usual = max(defaults, key=lambda default: len(defaults[default]))
        others = [f"{', '.join(map(code, defaults[each]))}: {each or 'none'}" for each in defaults if each != usual]
        told = "; ".join(filter(None, [usual, *others]))
        names = tuple(sorted(name for each in defaults.values() for name in each))
        rows.setdefault(names, []).append(f"`{key}`{f' ({told})' if told else ''}: {meaning}")
    return (
        "# Options of methods\n\nThey stand beside `name` under `method` in a [spec](spec.md), as in "
        "`method: {name: plan, alpha: 0.5}`. In brackets is the default; a value out of range is refused with its "
        "range.\n\n"
        + table(["methods", "options"], sorted([_named(names), "<br>".join(told)] for names, told in rows.items()))
        + "\n"
    )


def _named(names: Sequence[str]) -> str:
    """Methods by name, or those that are missing where these are fewer."""
    missing = [name for name in sorted(METHODS) if name not in names]
    if len(names) <= len(missing):
        return ", ".join(map(code, names))
    return f"all but {', '.join(map(code, missing))}" if missing else "all"


def _default(field: dict[str, Any], meaning: str) -> str:
    """The default, unless the meaning says it, and the words to choose among that it does not say."""
    default, said = shown_value(field.get("default")), meaning.replace(":", "").split()
    words = [f"`{value}`" for value in field.get("enum", ()) if value not in (default, *said)]
    silent = default in ("", "none") and not words
    return "" if silent else " or ".join([code(default), *words])


def data_uris() -> str:
    """The page of data URIs with its table of options: a row for the sources that take the same ones."""
    head, begin, rest = (PAGES / "data-uris.md").read_text(encoding="utf-8").partition(OPTIONS)
    rows = []
    for kind in vars(data_options).values():
        if not (isinstance(kind, type) and issubclass(kind, Options)):
            continue
        schemes = [f"`{name}`" for name, scheme in SCHEMES.items() if issubclass(scheme.options, kind)]
        lines = re.sub(r"\n {8,}", " ", inspect.getdoc(kind) or "").splitlines()
        words = dict(line.strip().split(": ", 1) for line in lines if line.startswith("    "))
        fields = kind.model_json_schema()["properties"]
        told = []
        for name in inspect.get_annotations(kind):
            default, values = shown_value(fields[name].get("default")), _values(fields[name], {})
            choices = _choices("" if default == "none" else default, "" if values == "text" else values)
            told.append(f"`{name}=`{f' ({choices})' if choices else ''}: {cell(words[name])}")
        rows.append(["all" if kind is Options else ", ".join(schemes), "<br>".join(told)])
    return head + begin + table(["of", "options (default, others)"], rows) + rest[rest.index("\n\n") :]


def costs() -> str:
    """What a round of each method costs a client."""
    head = ["methods", "numbers down", "numbers up", "bytes both ways", "further bytes, once, at the end"]
    rows: dict[tuple[str, ...], list[str]] = {}
    for name in METHODS.own():
        rows.setdefault(_cost(name), []).append(f"`{name}`")
    return (
        "# What a round costs\n\n"
        "What one client receives and sends in a round, with ViT-B/16, two class names, three clients of a domain each "
        "and each method's defaults; metrics are not counted. `promptfed methods NAME` names the "
        "tensors. Ten clients and twenty rounds of `promptfl` are 200 times its row: 3.3 MB.\n\n"
        + table(head, [[", ".join(names), *cost] for cost, names in rows.items()])
        + "\n"
    )


def _cost(name: str) -> tuple[str, ...]:
    """Numbers down and up, bytes of a round, and further bytes of the last one."""
    method = make_method({"name": name})
    context = ServerContext(TrainingSpec(), VIT_B_16, ("a", "b"), SITES, seed=0, rounds=3)
    sizes = {"K": len(SITES), "E": getattr(method.hyper, "experts", 0), **method.dims(context)}
    middle, last = method.phases(2, 3), method.phases(3, 3)
    ways = [[spec for phase in middle for spec in getattr(phase, way)] for way in ("down", "up")]
    counts = [sum(math.prod(spec.resolve(sizes)) for spec in specs) for specs in ways]
    size = sum(_bytes(specs, sizes) for specs in ways)
    once = sum(_bytes((*phase.down, *phase.up), sizes) for phase in last) - size
    return (*(f"{count:,}" for count in (*counts, size)), f"{once:,}" if once else "")


def _bytes(specs: Iterable[TensorSpec], sizes: dict[str, int]) -> int:
    return sum(math.prod(spec.resolve(sizes)) * DTYPES[spec.dtype].itemsize for spec in specs)


def pages() -> dict[Path, str]:
    """The pages as they should be."""
    made = {}
    for name, text in (("spec.md", spec()), ("options.md", options()), ("costs.md", costs())):
        title, _, rest = text.partition("\n")
        made[PAGES / name] = f"{title}\n\n{NOTE}{rest.lstrip()}"
    return made | {PAGES / "data-uris.md": data_uris()}


def stale() -> bool:
    """Whether a page is not what the code says."""
    return any(not path.is_file() or path.read_text(encoding="utf-8") != text for path, text in pages().items())


def main() -> int:
    """Renew the pages, or with ``--check`` say whether one is stale."""
    if "--check" in sys.argv:
        return int(stale())
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
