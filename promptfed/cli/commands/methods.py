"""`promptfed methods`: the methods, and what each sends."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json
from promptfed.sdk.client import CommandError, Exit
from promptfed.sdk.output import console, listing, print_json, table
from promptfed.shared.spec.spec import SpecError


@app.add(section="Try and simulate")
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, in full")] = None, as_json: Json = False
) -> None:
    """List the methods, or describe one: the tensors of each phase, and hyperparameters with their defaults."""
    from promptfed.shared.methods import METHODS, describe

    if name is None:
        listed = [describe(known) for known in sorted(METHODS)]
        if as_json:
            print_json(listed)
            return
        listing([(method["name"], _summary(method)) for method in listed])
        return
    try:
        method = describe(name)
    except SpecError as error:
        raise CommandError(error.errors[0]["detail"], Exit.BAD_INPUT) from None
    if as_json:
        print_json(method)
        return
    console.print(f"[bold]{name}[/bold]: {_summary(method)}\n{method['paper']}\n", highlight=False)
    console.print(table("Hyperparameters", ["name", "default", "meaning"], _hyperparameters(method)))
    rows = [
        [phase["name"], "; ".join(map(_tensor, phase["down"])) or "-", "; ".join(map(_tensor, phase["up"])) or "-"]
        for phase in method["phases"]
    ]
    console.print(table("What travels", ["phase", "down", "up"], rows))


def _summary(method: dict[str, Any]) -> str:
    from promptfed.shared.methods import METHODS

    package = METHODS.package(method["name"])
    return f"{method['summary']} (from {package})" if package else str(method["summary"])


def _tensor(tensor: dict[str, Any]) -> str:
    return f"{tensor['name']} ({', '.join(map(str, tensor['shape']))}) {tensor['dtype']}"


def _hyperparameters(method: dict[str, Any]) -> list[list[str]]:
    return [
        [key, str(schema.get("default", "-")).replace("None", "none"), schema.get("description", "")]
        for key, schema in method["hyperparameters"].get("properties", {}).items()
    ]
