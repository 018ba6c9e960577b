"""`promptfed doctor`: whether this machine can join a federation, a line for each check."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import AllowedNames, BackboneFile, Json, use_backbone_file
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import console, print_json, say
from promptfed.shared.spec.spec import BackboneSpec

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True)
class ClientOptions:
    """Settings of `promptfed client` that can be checked."""

    coordinator: Annotated[str | None, typer.Option(help="address of the coordinator that you want to join")] = None
    federation: Annotated[str | None, typer.Option(help="name or id of the federation there")] = None
    enrolment_token_file: Annotated[Path | None, typer.Option(help="file with the token the operator sent")] = None
    data: Annotated[str | None, typer.Option(help="data URI, as in folder:/data/pets")] = None
    domain: Annotated[str | None, typer.Option(help="words for the images, as in 'a sketch of a {}'")] = None
    role: Annotated[Literal["trainer", "evaluator"], typer.Option(help="what the data is for")] = "trainer"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")] = "auto"
    state_dir: Annotated[Path | None, typer.Option(help="the client's state folder; default: in your home")] = None
    allow_backbone: AllowedNames = None
    backbone_file: BackboneFile = None
    policy: Annotated[Path | None, typer.Option(help="this site's policy; default: as of `promptfed client`")] = None
    ca_file: Annotated[Path | None, typer.Option(help="PEM file of the coordinator's authority")] = None
    proxy: Annotated[str | None, typer.Option(help="proxy to the coordinator; default: that of the environment")] = None
    allow_plain_http: Annotated[bool, typer.Option(help="permit http:// to another machine")] = False


@app.add(section="Take part with own data")
def doctor(
    options: Annotated[ClientOptions, Made(ClientOptions)],
    model: Annotated[str, typer.Option(help="backbone to load where no coordinator names it")] = "promptfed-tiny",
    pretrained: Annotated[str, typer.Option(help="its weights")] = "embedded",
    as_json: Json = False,
) -> None:
    """Check data, GPU, backbone, clock and coordinator, and show what would leave this machine, without joining.

    With --coordinator alone: whether a coordinator answers there.
    """
    from promptfed.client_service.joining.doctor import Examination

    use_backbone_file(options.backbone_file)
    examination = Examination.of(BackboneSpec(model=model, pretrained=pretrained), **asdict(options))
    examination.run()
    if as_json:
        disclosure = examination.disclosure.facts() if examination.disclosure is not None else None
        print_json({"checks": [asdict(check) for check in examination.checks], "leaves": disclosure})
    else:
        _show(examination)
    failed = [check.name for check in examination.checks if check.verdict == "fail"]
    if failed:
        raise CommandError(f"not ready: {', '.join(failed)}", Exit.BAD_INPUT)


def _show(examination: Any) -> None:
    for check in examination.checks:
        console.print(check.line(), style=COLOURS[check.verdict], highlight=False, markup=False, soft_wrap=True)
    if examination.disclosure is not None:
        for line in ("", *examination.disclosure.lines()):
            say(line)
