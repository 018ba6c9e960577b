"""`promptfed prompts`: prompts for classes that no client need have, from a generator that a federation has learned."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from promptfed.cli.federation import Json, TokenFile, Url
from promptfed.sdk.client import CommandError, open_coordinator
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.output import console, print_json, reporting_errors, size, write_file

prompts_app = typer.Typer(no_args_is_help=True, help="Make prompts with what a federation has learned.")


@prompts_app.command()
def generate(
    federation: Annotated[str, typer.Option(help="name or id of a federation whose method learns a generator")],
    classes: Annotated[str, typer.Option(help="class names, separated by commas")],
    out: Annotated[Path | None, typer.Option(help="write safetensors here; default: print JSON")] = None,
    round: Annotated[str, typer.Option(help="a round's number, or latest")] = "latest",
    allow_backbone: Annotated[bool, typer.Option(help="allow a backbone outside open_clip's registry")] = False,
    coordinator: Url = None,
    token_file: TokenFile = None,
    as_json: Json = False,
) -> None:
    """Make a context for class names, without any training: the newcomer's start."""
    with reporting_errors():
        names = class_names(classes)
        with open_coordinator(coordinator, token_file) as api:
            found = api.get(f"/v1/federations/{federation}")
            features = text_features(found, names, allow_backbone)
            body = {"class_names": names, "text_features": features}
            made = api.post(f"/v1/federations/{federation}/prompts/generate", body, params={"round": round})
        if out is None:
            print_json(made)
            return
        content = _safetensors(made["tensors"])
        write_file(out, content)
        written = {"file": str(out), "bytes": len(content), "round": made["round"], "state_hash": made["state_hash"]}
        if as_json:
            print_json(written)
        else:
            told = f"Wrote {out} ({size(len(content))}) for {len(names)} classes, from round {made['round']}."
            console.print(told, highlight=False)


def class_names(text: str) -> list[str]:
    """The names of ``a, b, c``.

    Raises:
        CommandError: none, or one twice.
    """
    from promptfed.shared.spec import check_class_names

    try:
        return check_class_names([name.strip() for name in text.split(",") if name.strip()])
    except ValueError as error:
        raise CommandError(f"--classes {error}", Exit.BAD_INPUT) from None


def text_features(federation: dict[str, Any], names: list[str], allow_backbone: bool) -> list[list[float]]:
    """Normalised features of the bare names ``(C, d_e)``, by the federation's own backbone.

    Raises:
        CommandError: the backbone cannot be loaded or is another one here, or a name does not fit into it.
    """
    from promptfed.sdk.backbone import check_fingerprint, open_backbone
    from promptfed.shared.clip import BackboneError
    from promptfed.shared.methods.core.text_features import name_features

    backbone = open_backbone(federation["spec"], allow_backbone=allow_backbone)
    check_fingerprint(backbone, federation["backbone"]["fingerprint"])
    try:
        features = name_features(backbone, names).cpu()
    except BackboneError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None
    # Nine digits are all that a float32 has; Python would write seventeen.
    return [[float(f"{value:.9g}") for value in row] for row in features.tolist()]


def _safetensors(tensors: dict[str, Any]) -> bytes:
    import torch

    from promptfed.shared.tensors import DTYPES, encode

    return encode({name: torch.tensor(one["data"], dtype=DTYPES[one["dtype"]]) for name, one in tensors.items()})
