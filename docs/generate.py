"""The reference pages that are made from the code: spec, commands, settings, exit codes, refusals and backbones.

``python docs/generate.py`` writes them; ``--check`` only names those that are stale. `tests/docs` does that.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import typer
from pydantic_settings import BaseSettings

os.environ.pop("PROMPTFED_COORDINATOR", None)  # options that take a variable would show it as their default

from promptfed.cli import main as command
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.coordinator.app import create_app
from promptfed.coordinator.problems.base import Refusal
from promptfed.coordinator.settings import Settings as CoordinatorSettings
from promptfed.shared.service import exit_codes
from promptfed.shared.spec.spec import FederationSpec

FOLDER = Path(__file__).parent / "reference"
NOTE = "<!-- Made from the code by `python docs/generate.py`: change the code, not this page. -->\n\n"
SERVICES = {"client", "coordinator"}  # their options are the settings

# What the spec's schema does not say itself.
MEANINGS = {
    "name": "name of the federation at its coordinator",
    "method": "`name`, and the method's own options beside it: `promptfed methods NAME` lists them",
    "backbone": "see [backbone](#backbone)",
    "class_names": "the classes to choose among; default: each client's own",
    "template": "the sentence of zero-shot; `{}` is the class name",
    "rounds": "how many rounds there are",
    "retention": "keep the updates, payloads and states of all rounds, or of the last one only",
    "start": "`when_ready`: the coordinator starts the rounds once `min_clients` have enrolled",
    "seed": "all random draws of the federation follow from it",
    "training": "see [training](#training)",
    "participation": "see [participation](#participation)",
    "aggregation": "see [aggregation](#aggregation)",
    "secure_aggregation": "see [secure_aggregation](#secure_aggregation)",
    "evaluation": "see [evaluation](#evaluation)",
    "admission": "see [admission](#admission)",
    "privacy": "see [privacy](#privacy)",
    "tuning": "see [tuning](#tuning) and [the guide](../guides/operate.md#compare-methods-before-round-1)",
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
    "aggregation.server": "see [aggregation.server](#aggregationserver)",
    "aggregation.server.optimizer": "a step on the aggregated change: FedAvgM, FedAdagrad, FedAdam or FedYogi",
    "secure_aggregation.threshold": "share of a phase's clients that can open the sum, above a half",
    "secure_aggregation.minimum": "fewest clients in a sum",
    "secure_aggregation.step_seconds": "time for each of the four exchanges after training",
    "secure_aggregation.attempts": "attempts at a phase, with the same training",
    "secure_aggregation.neighbours": "clients that share masks with one client; default: all up to 128, then as needed",
    "secure_aggregation.colluding_share": "share of the clients that may be on the operator's side",
    "secure_aggregation.dropping_share": "share of the clients that may fail during the sum",
    "privacy.adaptive_clip": "see [privacy.adaptive_clip](#privacyadaptive_clip)",
}  # fmt: skip

# Variables beside those of the settings.
VARIABLES = {
    "PROMPTFED_COORDINATOR": "the coordinator's address, for the operator's commands",
    "PROMPTFED_OPERATOR_TOKEN": "the operator token, for the operator's commands",
    "PROMPTFED_CA_FILE": "PEM file of the authority that signed the coordinator's certificate",
    "PROMPTFED_ALLOW_PLAIN_HTTP": "`1`: send the operator token unencrypted to another machine",
    "PROMPTFED_BACKBONE_FILE": "file of the backbone's weights, for commands that load a backbone",
    "PROMPTFED_SIGNING_KEY": "the coordinator's public key, for `verify`, `pull`, `predict` and `score`",
}


def neighbour(name: str) -> ModuleType:
    """Another module of this folder, which is no package."""
    from importlib.util import module_from_spec, spec_from_file_location

    found = spec_from_file_location(name, Path(__file__).parent / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return module


TABLES = neighbour("tables")


def cell(text: Any) -> str:
    """Text for one cell of a table; words in angle brackets would be HTML."""
    plain = " ".join(str(text if text is not None else "").replace("``", "`").split())
    return str(TABLES._cell(plain)).replace("<", "&lt;")


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
        shown = "required" if key in schema.get("required", ()) else "" if model else TABLES._json(default)
        rows.append(
            [f"`{key}`", shown if shown == "required" else code(shown), _values(field, models), _meaning(full, field)]
        )
    title = f"\n## {path}\n\n" if path else "\n## The whole\n\n"
    yield title + str(TABLES._table(["key", "default", "may be", "meaning"], rows)) + "\n"
    for model_schema, full in inner:
        yield from _sections(model_schema, models, full)


def _meaning(path: str, field: dict[str, Any]) -> str:
    said = field.get("description") or MEANINGS.get(path)
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
    return str(TABLES._range(field))


# commands.md


def commands() -> str:
    """Every command: what it does in one table, then the options of each."""
    found = list(_commands(typer.main.get_command(command.app), "promptfed"))
    overview = TABLES._table(
        ["command", "what it does"],
        [[f"[`{name}`](#{_anchor(name)})", cell(program.help)] for name, program in found],
    )
    whole = typer.main.get_command(command.app)
    return (
        "# Commands\n\n"
        "`promptfed COMMAND --help` shows the same at a terminal. Arguments, in capitals, stand in the order of their "
        "rows; options of `promptfed` itself stand before the command. [Settings](settings.md) has the options of "
        "`promptfed client` and `promptfed coordinator`, and the environment variables; [exit codes](exit-codes.md) "
        "has the codes.\n\n"
        f"{_options(whole)}\n\n## All commands\n\n{overview}\n"
        + "".join(_command(name, program) for name, program in found)
    )


def _commands(group: Any, path: str) -> Iterable[tuple[str, Any]]:
    for name, program in sorted(group.commands.items()):
        if getattr(program, "hidden", False):
            continue
        if hasattr(program, "commands"):
            yield from _commands(program, f"{path} {name}")
        else:
            yield f"{path} {name}", program


def _anchor(name: str) -> str:
    return name.replace(" ", "-")


def _command(name: str, program: Any) -> str:
    if name.split()[-1] in SERVICES:
        return f"\n## {name}\n\nIts options are the [settings](settings.md#promptfed-{name.split()[-1]}).\n"
    return f"\n## {name}\n\n{_options(program)}\n"


def _options(program: Any) -> str:
    rows = []
    for param in program.params:
        if param.name == "help" or getattr(param, "hidden", False):
            continue
        if param.param_type_name == "argument":
            names = param.name.upper() + ("..." if param.nargs == -1 else "")
        else:
            names = ", ".join(sorted(param.opts, key=len, reverse=True))
        default = param.default() if callable(param.default) else param.default
        rows.append([code(names), _default(default, param), cell(getattr(param, "help", ""))])
    return str(TABLES._table(["option", "default", "meaning"], rows)) if rows else ""


def _default(value: Any, param: Any) -> str:
    if getattr(param, "required", False):
        return "required"
    if value is None or value is False or value == [] or value == ():
        return ""
    return code("yes" if value is True else str(getattr(value, "value", value)))


# settings.md


def settings() -> str:
    """Options and variables of the two services, and the variables of the command."""
    variables = TABLES._table(["variable", "meaning"], [[f"`{name}`", said] for name, said in VARIABLES.items()])
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
    return str(TABLES._table(["option", "default", "meaning"], rows))


# exit-codes.md


def codes() -> str:
    """The exit codes with the comments that stand beside them."""
    said = dict(re.findall(r"^    (\w+) = \d+  # (.+)$", inspect.getsource(exit_codes.Exit), re.MULTILINE))
    rows = [[str(int(exit)), f"`{exit.name.lower()}`", cell(said[exit.name])] for exit in exit_codes.Exit]
    own = [
        ["0", "it was asked to end"],
        ["2", "it cannot start: options, a folder or database in use, tables of another version, rights, a port"],
        ["3", "the database did not answer within `--database-wait-seconds`; a later start may succeed"],
        ["130", "it was asked to end while it waited for the database"],
    ]
    return (
        "# Exit codes\n\n"
        "The last line on standard error says what happened and what to do.\n\n"
        f"## The command and the client\n\n{TABLES._table(['code', 'name', 'meaning'], rows)}\n\n"
        f"## The coordinator\n\n{TABLES._table(['code', 'meaning'], own)}\n\n"
        "`promptfed coordinator --verify` ends with 0 if everything is as it was stored, 1 if something is damaged, "
        "2 if it could not look, and 3 if the database did not answer.\n"
    )


# refusals.md


def refusals() -> str:
    """Every kind of refusal that the coordinator has."""
    create_app(CoordinatorSettings())  # which imports all of them
    found: dict[tuple[str, str], str] = {}
    for refusal in _kinds(Refusal):  # a narrower class of the same kind comes after the general one
        found.setdefault((str(getattr(refusal, "status", "4xx")), refusal.kind), refusal.title)
    rows = [[status, f"`{kind}`", cell(title)] for (status, kind), title in sorted(found.items())]
    return (
        "# Refusals of the coordinator\n\n"
        "Every refusal is `application/problem+json`. Its `type` ends in the kind, `title` is the text below, and "
        "`detail` says what is wrong in this case.\n\n" + str(TABLES._table(["status", "kind", "title"], rows)) + "\n"
    )


def _kinds(parent: type[Refusal]) -> Iterable[type[Refusal]]:
    for kind in parent.__subclasses__():
        yield kind
        yield from _kinds(kind)


def backbones() -> str:
    """Families of backbones: how their authors use them, speed and memory, and which methods run with them."""
    numbers = json.loads((FOLDER.parents[1] / "benchmarks" / "families.json").read_text(encoding="utf-8"))
    return str(neighbour("families").page(numbers["families"], cell, TABLES._table))


PAGES: dict[str, Callable[[], str]] = {
    "spec.md": spec,
    "commands.md": commands,
    "settings.md": settings,
    "exit-codes.md": codes,
    "refusals.md": refusals,
    "backbones.md": backbones,
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
