"""`promptfed predict`: the classes of images under learned prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, AskedLater, ClassNames, Json, Key
from promptfed.sdk.errors import CommandError, Exit


@app.add(section="Use a result")
def predict(
    images: Annotated[list[Path], typer.Argument(help="image files, or one folder of images")],
    asked: AskedLater,
    class_names: ClassNames,
    allow_backbone: AllowBackbone,
    export: Annotated[
        Path | None, typer.Option(help="folder that `promptfed export` has written, or the page's .zip")
    ] = None,
    key: Key = None,
    federation: Annotated[str | None, typer.Option(help="or a federation at a coordinator: its name or id")] = None,
    round: Annotated[int | None, typer.Option(min=0, help="with --federation: after this round")] = None,
    top: Annotated[int, typer.Option(min=1, help="classes that are shown")] = 5,
    out: Annotated[Path | None, typer.Option(help="with a folder: a file for the CSV; default: stdout")] = None,
    as_json: Json = False,
) -> None:
    """Classify images with what a federation learned, beside the same backbone's zero-shot answer."""
    if (export is None) == (federation is None):
        raise CommandError("say what to predict with: --export FOLDER or --federation NAME", Exit.USAGE)
    folders = [path for path in images if path.is_dir()]
    if (folders and (len(images) > 1 or as_json)) or (out is not None and not folders):
        text = "a folder is given alone, its answers are CSV (--out FILE); files are told one by one (--json)"
        raise CommandError(text, Exit.USAGE)
    from promptfed.cli import predicting

    if export is not None:
        model, names = predicting.model_of_export(export, class_names, key=key)
    else:
        assert federation is not None
        with asked.open() as api:
            model, names = predicting.model_of_federation(api, federation, round, class_names)
    if folders:
        predicting.predict_folder(model, names, folders[0], allow_backbone, out)
    else:
        predicting.predict(model, names, images, allow_backbone, top, as_json)
