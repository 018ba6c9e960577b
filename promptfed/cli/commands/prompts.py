"""`promptfed prompts`: prompts for new classes, from a generator that a federation has learned."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, Api, Json, Round
from promptfed.sdk import operations
from promptfed.sdk.files import write_file
from promptfed.sdk.output import print_json, tell
from promptfed.sdk.text import class_names, size
from promptfed.shared.api.api_schemas import TensorView
from promptfed.shared.plain_text import counted

group = app.group("prompts", "Make prompts with a generator that a federation has learned.", "Use a result")


@group.add()
def generate(
    federation: Annotated[str, typer.Option(help="name or id of a federation whose method learns a generator")],
    classes: Annotated[str, typer.Option(help="class names, separated by commas")],
    api: Api,
    allow_backbone: AllowBackbone,
    out: Annotated[Path | None, typer.Option(help="write safetensors here; default: print JSON")] = None,
    round: Round = "latest",
    as_json: Json = False,
) -> None:
    """Make a context for class names without any training, also for classes that no client has."""
    from promptfed.sdk.backbone import backbone_of, text_features

    names = class_names(classes)
    view = api.send(operations.get_federation(federation)).view
    features = text_features(backbone_of(view, allow_backbone), names)
    answer = api.send(operations.generate_prompts(federation, round, names, features))
    if out is None:
        print_json(answer.json)
        return
    prompts = answer.view
    content = _safetensors(prompts.tensors)
    write_file(out, content)
    written = {"file": str(out), "bytes": len(content), "round": prompts.round, "state_hash": prompts.state_hash}
    classes = counted(len(names), "class", "classes")
    tell(as_json, written, f"Wrote {out} ({size(len(content))}) for {classes}, from round {prompts.round}.")


def _safetensors(tensors: Mapping[str, TensorView]) -> bytes:
    import torch

    from promptfed.shared.tensors.torch_tensors import DTYPES, encode

    return encode({name: torch.tensor(view.data, dtype=DTYPES[view.dtype]) for name, view in tensors.items()})
