"""`promptfed coordinator`, `promptfed client` and `join`: the two services, whose options are their settings."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import options_of
from promptfed.client_service.joining.invited import GIVEN, accept
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.client_service.settings import make_settings
from promptfed.coordinator.settings import Settings as CoordinatorSettings
from promptfed.shared.service.invitation import COMMAND
from promptfed.shared.service.streams import leave


@app.add(section="Operate federations")
def coordinator(given: Annotated[dict[str, Any], Made(options_of(CoordinatorSettings))]) -> None:
    """Run a coordinator."""
    from promptfed.coordinator.__main__ import start

    leave(start(given))


@app.add(section="Take part with own data")
def client(given: Annotated[dict[str, Any], Made(options_of(ClientSettings))]) -> None:
    """Run a client, which takes part in a federation with this owner's data."""
    from promptfed.client_service.__main__ import start

    leave(start(make_settings(**given)))


@app.add(section="Take part with own data")
def join(
    invitation: Annotated[
        str, typer.Argument(help="-: asks for the text that the operator sent, which ps would show; or a file with it")
    ],
    given: Annotated[dict[str, Any], Made(options_of(ClientSettings, without=GIVEN))],
) -> None:
    """Accept an operator's invitation: run a client, which takes part in a federation with this owner's data."""
    from promptfed.client_service.__main__ import start

    leave(start(accept(_text_of(invitation), given)))


def _text_of(invitation: str) -> str:
    """The invitation: from standard input, a file, or as it is."""
    if invitation == "-":
        if sys.stdin.isatty():
            sys.stderr.write("Paste the invitation: ")
            sys.stderr.flush()
        return next((line for line in iter(sys.stdin.readline, "") if not line.strip().startswith(COMMAND)), "")
    with suppress(OSError, UnicodeDecodeError):  # no file: too long for a name, for one
        return Path(invitation).read_text()
    return invitation
