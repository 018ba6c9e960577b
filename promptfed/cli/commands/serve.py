"""`promptfed serve`: an export's answers over HTTP."""

from __future__ import annotations

import asyncio
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, ClassNames, Key
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import say

if TYPE_CHECKING:
    from fastapi import FastAPI


@app.add(section="Use a result")
def serve(
    export: Annotated[Path, typer.Argument(help="folder that `promptfed export` has written, or the page's .zip")],
    class_names: ClassNames,
    allow_backbone: AllowBackbone,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 takes any free one")] = 8082,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the token that every request must carry; needed off loopback")
    ] = None,
    key: Key = None,
) -> None:
    """Answer over HTTP with what a federation learned: a page to drop an image on, and POST /v1/predict."""
    from promptfed.cli.predicting import model_of_export
    from promptfed.client_service.exits import ClientError
    from promptfed.client_service.serving.api import create_export_app
    from promptfed.client_service.settings import read_token
    from promptfed.export.adapted_model import predictor_of
    from promptfed.export.export import open_backbone_of
    from promptfed.shared.service.net import is_loopback

    if token_file is None and not is_loopback(host):
        raise CommandError(f"a service on {host} needs --token-file: only loopback is open to all", Exit.USAGE)
    try:
        token = None if token_file is None else read_token(token_file, "token")
        model, names = model_of_export(export, class_names, key=key)
        served = model.serve(open_backbone_of(model, allow_backbone), names)
        about = {
            "stage": "serving",
            "name": served.method,
            "federation": export.resolve().name.removesuffix(".zip"),
            "round": served.round,
        }
        asyncio.run(_serve(create_export_app(about, predictor_of(served), token, host), host, port))
    except ClientError as error:
        raise CommandError(str(error), Exit.USAGE) from None


async def _serve(api: FastAPI, host: str, port: int) -> None:
    from promptfed.client_service.serving.api import running_api

    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        with suppress(NotImplementedError):  # Windows
            asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with running_api(api, host, port, "--port") as url:
        say(f"Serving on {url}: the page is there, images go to {url}/v1/predict. Ctrl-C ends it.")
        await stopped.wait()
