"""The ``promptfed`` command, made of the modules of `promptfed.cli.commands`."""

from __future__ import annotations

import atexit
import io
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
from promptfed.sdk.client import CA_VARIABLE, PLAIN_VARIABLE, PROXY_VARIABLE, Exit
from promptfed.sdk.output import MessageLines, messages
from promptfed.shared.service.reasons import why

__all__ = ["app", "main"]

for module in walk_packages(commands.__path__, f"{commands.__name__}."):
    import_module(module.name)


@app.callback()
def connection(
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
    code: int | str | None = None
    try:
        main()
    except SystemExit as ended:
        code = ended.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, after telling the pools that it ends
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def main() -> None:
    """The command. What a terminal's encoding lacks is written as its code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    lines = MessageLines(logging.WARNING)
    logging.getLogger().addHandler(lines)
    logging.captureWarnings(True)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except OSError as error:
        # Python would flush again at its end, and fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        ended = error.__context__
        if isinstance(error, BrokenPipeError) or (isinstance(ended, SystemExit) and ended.code):
            sys.exit(ended.code if isinstance(ended, SystemExit) else Exit.FAILED)  # what is wrong is told
        messages.print(f"promptfed: the output cannot be written: {why(error)}", highlight=False, soft_wrap=True)
        sys.exit(Exit.BAD_INPUT)
