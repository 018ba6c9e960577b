"""The reference pages that are made from the code: the spec and the settings.

``python docs/generate.py`` writes them; ``--check`` only names those that are stale. `tests/docs` does that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

os.environ.pop("PROMPTFED_COORDINATOR", None)  # options that take a variable would show it as their default

from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.coordinator.settings import Settings as CoordinatorSettings
from promptfed.shared.spec.spec import FederationSpec

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Made from the code by `python docs/generate.py`: change the code, not this page. -->\n\n"
# What the spec's schema does not say itself.
MEANINGS = {
    "name": "name of the federation at its coordinator",
    "method": "`name`, and the method's own options beside it: `promptfed methods NAME` lists them",
    "class_names": "the classes to choose among; default: each client's own",
    "template": "the sentence of zero-shot; `{}` is the class name",
    "rounds": "how many rounds there are",
    "retention": "keep the updates, payloads and states of all rounds, or of the last one only",
    "start": "`when_ready`: the coordinator starts the rounds once `min_clients` have enrolled",
    "seed": "all random draws of the federation follow from it",
    "backbone.model": "an open_clip model, or `timm:NAME` for methods without text",
    "backbone.pretrained": "open_clip's tag of the weights; `embedded` for promptfed's own",
    "backbone.precision": "number format of the frozen towers",
    "backbone.fingerprint": "SHA-256 of the weights; default: that of the first client that enrols",
    "backbone.shape": "see [backbone.shape](#backboneshape); default: as the first client says",
    "backbone.shape.text_layers": "blocks of the text tower",
    "backbone.shape.vision_layers": "blocks of the vision tower",
    "backbone.shape.context_length": "positions of the text tower",
    "training.epochs": "passes over the training images in one task",
    "training.batch_size": "images in one step",
    "training.optimizer": "a new one for each task",
    "training.learning_rate": "step size; `promptfed tune` chooses one for your data",
    "training.momentum": "of SGD",
    "training.weight_decay": "decay of the trained tensors",
    "training.schedule": "course of the learning rate over the rounds",
    "training.threads": "torch threads of one task",
    "training.deterministic": "only deterministic algorithms, so that a GPU gives the same bits again",
    "participation.min_clients": "trainers that must have enrolled before `start`",
    "participation.fraction": "share of the trainers that each round asks",
    "participation.quorum": "share of the asked clients that must answer",
    "participation.deadline_seconds": "how long a phase waits for answers",
    "participation.on_missed_quorum": "what happens if the quorum is missed after one extension",
    "evaluation.every": "rounds between evaluations; the first and the last state are always evaluated",
    "admission.max_bytes": "largest body of an update",
    "admission.max_update_norm": "largest L2 norm of an update's change",
    "aggregation.server.optimizer": "a step on the aggregated change: FedAvgM, FedAdagrad, FedAdam or FedYogi",
    "secure_aggregation.threshold": "share of a phase's clients that can open the sum, above a half",
    "secure_aggregation.minimum": "fewest clients in a sum",
    "secure_aggregation.step_seconds": "time for each of the four exchanges after training",
}  # fmt: skip

# Variables beside those of the settings.
VARIABLES = {
    "PROMPTFED_COORDINATOR": "the coordinator's address, for the operator's commands",
    "PROMPTFED_OPERATOR_TOKEN": "the operator token, for the operator's commands",
    "PROMPTFED_CA_FILE": "PEM file of the authority that signed the coordinator's certificate",
    "PROMPTFED_ALLOW_PLAIN_HTTP": "`1`: send the operator token unencrypted to another machine",
    "PROMPTFED_BACKBONE_FILE": "file of the backbone's weights, for commands that load a backbone",
    "PROMPTFED_SIGNING_KEY": "the coordinator's public key, for `verify`, `predict` and `score`",
}


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---"] * len(head), *rows])


def cell(text: Any) -> str:
    """Text for one cell of a table; words in angle brackets would be HTML."""
    plain = " ".join(str(text if text is not None else "").replace("``", "`").split())
    return plain.replace("|", "\\|").replace("<", "&lt;")


def code(text: str) -> str:
    return f"`{cell(text)}`" if text else ""


# spec.md


def spec() -> str:
    """Each section of a spec as one table."""
    schema = FederationSpec.model_json_schema()
    sections = "".join(_sections(schema, schema["$defs"], ""))
    return (
        "# The spec of a federation\n\n"
        "A spec is YAML for the command and JSON for the API. Unknown keys are refused. What you leave out takes the "
        "method's default where it has one (`promptfed methods NAME`), else the default below. A run file is a spec "
        "with a list `clients` beside it ([run files](../guides/deploy.md#run-files)).\n" + sections
    )


def _sections(schema: dict[str, Any], models: dict[str, Any], path: str) -> Iterable[str]:
    rows, inner = [], []
    for key, field in schema["properties"].items():
        full = f"{path}.{key}" if path else key
        model = _model(field)
        if model:
            inner.append((models[model], full))
        default = field.get("default")
        shown = "required" if key in schema.get("required", ()) else "" if model else shown_value(default)
        rows.append(
            [f"`{key}`", shown if shown == "required" else code(shown), _values(field, models), _meaning(full, field)]
        )
    title = f"\n## {path}\n\n" if path else "\n## The whole\n\n"
    yield title + table(["key", "default", "may be", "meaning"], rows) + "\n"
    for model_schema, full in inner:
        yield from _sections(model_schema, models, full)


def _meaning(path: str, field: dict[str, Any]) -> str:
    said = field.get("description") or MEANINGS.get(path)
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
    """The values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return ", or ".join(in_words(choice) for choice in schema["anyOf"])
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


def shown_value(value: Any) -> str:
    if isinstance(value, list):
        return ""
    if value is None or isinstance(value, bool):  # 1.0 == True: a dictionary would confuse them
        return {None: "none", True: "true", False: "false"}[value]
    return str(value)


# settings.md


def settings() -> str:
    """Options and variables of the two services, and the variables of the command."""
    variables = table(["variable", "meaning"], [[f"`{name}`", said] for name, said in VARIABLES.items()])
    return (
        "# Settings\n\n"
        "Each option of a service is also an environment variable: `--data-dir` is "
        "`PROMPTFED_COORDINATOR_DATA_DIR`, and `--state-dir` is `PROMPTFED_CLIENT_STATE_DIR`. An option wins over its "
        "variable. A repeatable option is a JSON list in its variable.\n\n"
        f"## promptfed coordinator\n\n{_settings(CoordinatorSettings)}\n\n"
        f"## promptfed client\n\n{_settings(ClientSettings)}\n\n"
        f"## The command\n\n{variables}\n"
    )


def _settings(model: type[BaseSettings]) -> str:
    rows = []
    for name, field in model.model_fields.items():
        said = field.description or ""
        default = field.get_default(call_default_factory=True)
        if field.is_required():
            shown = "" if "default: " in said else "required"
        elif default is None or default is False or default == []:
            shown = ""
        elif default is True:
            shown = "`yes`"
        else:
            shown = code(f"{default:o}" if name.endswith("_mode") else str(default))
        rows.append([f"`--{name.replace('_', '-')}`", shown, cell(said)])
    return table(["option", "default", "meaning"], rows)


PAGES: dict[str, Callable[[], str]] = {
    "spec.md": spec,
    "settings.md": settings,
}


def page(name: str) -> str:
    """A page as it should be."""
    title, _, rest = PAGES[name]().partition("\n")
    return f"{title}\n\n{NOTE}{rest.lstrip()}"


def stale() -> list[str]:
    """Pages that are not what the code says."""
    return [
        name
        for name in PAGES
        if not (FOLDER / name).is_file() or (FOLDER / name).read_text(encoding="utf-8") != page(name)
    ]


def main() -> int:
    """Renew the pages, or with ``--check`` name the stale ones."""
    names = stale()
    for name in names:
        if "--check" in sys.argv:
            print(f"{name} is stale: run python docs/generate.py")
        else:
            FOLDER.mkdir(exist_ok=True)
            (FOLDER / name).write_text(page(name), encoding="utf-8")
    return int("--check" in sys.argv and bool(names))


if __name__ == "__main__":
    sys.exit(main())
