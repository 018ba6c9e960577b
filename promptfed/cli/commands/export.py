"""`promptfed export`, `onnx`, `verify`, `serve`: a federation's result as files, their check, and answers over HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import (
    KEY_VARIABLE,
    AllowBackbone,
    AskedLater,
    ClassNames,
    Federation,
    Json,
    Key,
    Written,
    refuse,
)
from promptfed.console.files import expect_new
from promptfed.console.output import say, tell
from promptfed.sdk.operations import take
from promptfed.shared.errors import Misused
from promptfed.shared.machine import on_signals
from promptfed.shared.plain_text import plain

if TYPE_CHECKING:
    from fastapi import FastAPI


@app.add(section="Use a result")
def export(
    federation: Federation,
    asked: AskedLater,
    class_names: ClassNames,
    allow_backbone: AllowBackbone,
    out: Annotated[Path, typer.Option(help="a new folder")],
    round: Annotated[int | None, typer.Option(min=0, help="after this round; default: the last finished one")] = None,
    anonymous: Annotated[bool, typer.Option(help="number the clients in the card instead of naming them")] = False,
    merged: Annotated[
        bool, typer.Option(help="of methods that change weights: also open_clip's model with the changes in it")
    ] = False,
    as_json: Json = False,
) -> None:
    """Export what a federation learned: prompts, class weights for plain open_clip code, and a card."""
    from promptfed.export.export import ExportOptions, check_new, show_export
    from promptfed.export.export import export as write_export

    check_new(out)
    options = ExportOptions(class_names, anonymous, allow_backbone, merged)
    with asked.open() as api:
        show_export(write_export(api.run(take(federation, round)), out, options, coordinator=api), out, as_json)


@app.add(section="Use a result")
def onnx(
    folder: Annotated[Path, typer.Argument(help="folder that `promptfed export` has written, or the page's .zip")],
    out: Annotated[Path, typer.Option(help="file for the model, .onnx; a .json beside it describes it")],
    class_names: ClassNames,
    allow_backbone: AllowBackbone,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Write an export's classifier as an ONNX model, and check that it answers as Python does (promptfed[onnx])."""
    for file in (out, out.with_suffix(".json")):
        expect_new(file)
    from promptfed.cli.predicting import model_of_export
    from promptfed.export.export import open_backbone_of
    from promptfed.export.onnx_graph import write_onnx

    model, names = model_of_export(folder, class_names, key=key)
    described = write_onnx(model, names, open_backbone_of(model, allow_backbone), out)
    apart = f"its logits differ from Python's by at most {described['largest_difference']:.1e} of the largest"
    tell(as_json, described, f"Wrote {out} and {out.with_suffix('.json').name}: {apart}.")


@app.add(section="Use a result")
def verify(
    folder: Annotated[Path, typer.Argument(help="folder that `promptfed export` has written, or the page's .zip")],
    allow_backbone: AllowBackbone,
    written: Written,
    key: Annotated[
        str | None,
        typer.Option(envvar=KEY_VARIABLE, help="the coordinator's public key, as `GET /v1/signing-key` once told it"),
    ] = None,
    recompute: Annotated[
        bool, typer.Option(help="load the backbone and compute the class weights and the merged model again")
    ] = True,
) -> None:
    """Check that an export is, file by file, what its card says and what the coordinator with this key has signed."""
    from promptfed.export.verification import verify_export

    unused = set() if recompute else written & {"allow_backbone", "backbone_file"}
    refuse(unused, "no backbone is loaded with --no-recompute; leave it out")
    verified = verify_export(folder, key, recompute=recompute, allow_backbone=allow_backbone)
    federation, round = verified.card.federation, verified.card.round
    where = f"{federation.name} ({federation.id}) after round {round}"
    unsigned = "by its own card; whether a coordinator has signed it was not checked: give its --key"
    signed = f"signed by {key}" if key is not None else unsigned
    for line in (f"{folder} is whole: {where}, {signed}", *verified.remarks):
        say(plain(line))


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
    from promptfed.shared.service.process import unfit_server

    if (unfit := unfit_server()) is not None:
        raise Misused(unfit)
    from promptfed.client_service.exits import ClientError
    from promptfed.client_service.serving.api import create_export_app
    from promptfed.client_service.settings import read_token
    from promptfed.export.adapted_model import predictor_of
    from promptfed.export.export import open_backbone_of
    from promptfed.shared.service.addresses import is_loopback

    if token_file is None and not is_loopback(host):
        raise Misused(f"a service on {host} needs --token-file: only loopback is open to all")
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
        raise Misused(str(error)) from None


async def _serve(api: FastAPI, host: str, port: int) -> None:
    from promptfed.client_service.serving.server import running_api

    stopped = asyncio.Event()
    on_signals(asyncio.get_running_loop(), lambda number: stopped.set())
    async with running_api(api, host, port, "--port") as url:
        say(f"Serving on {url}: the page is there, images go to {url}/v1/predict. Ctrl-C ends it.")
        await stopped.wait()
