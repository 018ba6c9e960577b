"""`promptfed doctor`: whether a site is ready to take part."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer

from promptfed.cli.app import Made, app
from promptfed.cli.common import Json, Written, options_of, refuse, use_backbone_file
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.console.output import console, print_json, say
from promptfed.shared.errors import BadInput
from promptfed.shared.methods.core.default_backbone import default_backbone
from promptfed.shared.spec.spec import BackboneSpec

COLOURS = {"pass": "green", "warn": "yellow", "fail": "red"}
CHECKED = {
    *("coordinator", "federation", "enrolment_token_file", "data", "domain", "role", "device", "state_dir"),
    *("allow_backbone", "backbone_file", "policy", "ca_file", "proxy", "allow_plain_http"),
}
"""Settings of `promptfed client` that can be checked."""
UNCHECKED = ClientSettings.model_fields.keys() - CHECKED


@app.add(section="Take part with own data")
def doctor(
    given: Annotated[dict[str, Any], Made(options_of(ClientSettings, UNCHECKED, required=False))],
    written: Written,
    model: Annotated[
        str | None, typer.Option(help="backbone to load where no coordinator names it; default: what suits the data")
    ] = None,
    pretrained: Annotated[
        str | None, typer.Option(help="its weights; default: embedded, or those that the model brings")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check data, GPU, backbone and coordinator, and show what would leave this machine, without joining."""
    from promptfed.client_service.joining.doctor import Examination

    if "coordinator" in given:
        refuse(written & {"model", "pretrained"}, "the coordinator names the backbone; leave it out")
    use_backbone_file(given.get("backbone_file"))
    model = model or default_backbone(None, [given["data"]] if given.get("data") else [])[0]
    usual_weights = None if ":" in model else BackboneSpec().pretrained  # hf-hub:, local-dir:
    examination = Examination.of(BackboneSpec(model=model, pretrained=pretrained or usual_weights), **given)
    examination.run()
    if as_json:
        disclosure = examination.disclosure.facts() if examination.disclosure is not None else None
        print_json({"checks": [asdict(check) for check in examination.checks], "leaves": disclosure})
    else:
        _show(examination)
    failed = [check.name for check in examination.checks if check.verdict == "fail"]
    if failed:
        raise BadInput(f"not ready: {', '.join(failed)}")


def _show(examination: Any) -> None:
    for check in examination.checks:
        console.print(check.line(), style=COLOURS[check.verdict], highlight=False, markup=False, soft_wrap=True)
    if examination.disclosure is not None:
        for line in ("", *examination.disclosure.lines()):
            say(line)
