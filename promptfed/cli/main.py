"""The ``promptfed`` command, made of the modules of `promptfed.cli.commands`."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Annotated, NoReturn

import typer

from promptfed.cli import commands
from promptfed.cli.app import app, show_version
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.console.output import MessageLines, note
from promptfed.coordinator.settings import Settings as CoordinatorSettings
from promptfed.sdk.client import CA_VARIABLE, PLAIN_VARIABLE, PROXY_VARIABLE
from promptfed.shared.service.environment import CLIENT, COORDINATOR, unread_variables
from promptfed.shared.service.streams import delivered, leave, standard_streams

__all__ = ["app", "main"]

for module in walk_packages(commands.__path__, f"{commands.__name__}."):
    import_module(module.name)


SERVICES = ("coordinator", "client", "join")  # they tell it in their logs


@app.callback()
def connection(
    context: typer.Context,
    ca_file: Annotated[
        Path | None, typer.Option(help=f"PEM file of the coordinator's authority; default: ${CA_VARIABLE}")
    ] = None,
    proxy: Annotated[
        str | None,
        typer.Option(
            help=f"proxy to the coordinator, or none; default: ${PROXY_VARIABLE}, else $HTTPS_PROXY, $ALL_PROXY and "
            "$NO_PROXY"
        ),
    ] = None,
    allow_plain_http: Annotated[
        bool, typer.Option(help=f"send the operator token unencrypted to another machine; default: ${PLAIN_VARIABLE}")
    ] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="print the version and end")
    ] = False,
) -> None:
    """Adapt a frozen CLIP-like model together, without the images ever leaving their owners."""
    settings = {COORDINATOR: CoordinatorSettings.model_fields, CLIENT: ClientSettings.model_fields}
    for line in unread_variables(settings) if context.invoked_subcommand not in SERVICES else ():
        note(line)
    # The environment, so that processes that the command starts know it too.
    if ca_file is not None:
        os.environ[CA_VARIABLE] = str(ca_file)
    if proxy is not None:
        os.environ[PROXY_VARIABLE] = proxy
    if allow_plain_http:
        os.environ[PLAIN_VARIABLE] = "1"


def command() -> NoReturn:
    """Entry point of the process: `main`, and the end at once.

    Threads are waited for and whoever asked to be called at the end is called, as Python does. It would then also take
    apart what torch and its like have made, for more than a second in which nothing happens any more.
    """
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, after telling the pools that it ends
    atexit._run_exitfuncs()
    leave(code)


def main() -> NoReturn:
    """The command. What a terminal's encoding lacks is written as its code."""
    standard_streams()
    logging.getLogger().addHandler(MessageLines(logging.WARNING))
    logging.captureWarnings(True)
    try:
        app()
    except SystemExit as ended:
        sys.exit(delivered(int(ended.code or 0)))
    sys.exit(delivered(0))
