"""The ``promptfed`` command. Control commands import no torch; what needs it is imported where it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.federation import federation_app
from promptfed.output import reporting_errors

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    help="Adapt a frozen CLIP-like model together, without the images ever leaving their owners.",
)
app.add_typer(federation_app, name="federation")

Json = Annotated[bool, typer.Option("--json", help="print one JSON object last, for programs")]


@app.command()
def demo(
    method: Annotated[str, typer.Option(help="a method of `promptfed methods`")] = "promptfl",
    rounds: Annotated[int | None, typer.Option(min=1, help="rounds; default: what suits the data")] = None,
    data: Annotated[str, typer.Option(help="symbols or digits")] = "symbols",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    keep: Annotated[Path | None, typer.Option(help="keep the services' folders and logs here")] = None,
    as_json: Json = False,
) -> None:
    """Run a whole federation on this machine: one coordinator, three clients, an unseen domain; no download."""
    from promptfed.demo import run_demo

    with reporting_errors():
        run_demo(method=method, rounds=rounds, data=data, seed=seed, keep=keep, as_json=as_json)


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="one method, in full")] = None, as_json: Json = False
) -> None:
    """List the methods, or describe one: what travels in each phase, hyperparameters with their defaults."""
    from promptfed.methods import show_methods

    with reporting_errors():
        show_methods(name, as_json)


PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True}


@app.command(context_settings=PASS_ON, add_help_option=False)
def coordinator(context: typer.Context) -> None:
    """Run a coordinator (`promptfed coordinator --help` lists its options)."""
    from coordinator.__main__ import main as run_coordinator
    from shared.leaving import leave

    leave(run_coordinator(context.args))


@app.command(context_settings=PASS_ON, add_help_option=False)
def client(context: typer.Context) -> None:
    """Run a client of a federation (`promptfed client --help` lists its options)."""
    from client_service.__main__ import main as run_client
    from shared.leaving import leave

    leave(run_client(context.args))


def main() -> None:
    """Entry point of the command."""
    app()


if __name__ == "__main__":
    main()
