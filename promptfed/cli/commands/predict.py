"""`promptfed predict`, `score`, `pool`: an export's answers, figures on labelled images, and those of several sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import AllowBackbone, AskedLater, ClassNames, Json, Key, Written, refuse
from promptfed.console.files import expect_suffix
from promptfed.console.output import console, note, print_json, table
from promptfed.shared.errors import BadInput, Misused
from promptfed.shared.service.reasons import why


@app.add(section="Use a result")
def predict(
    images: Annotated[list[Path], typer.Argument(help="image files, or one folder of images")],
    asked: AskedLater,
    class_names: ClassNames,
    allow_backbone: AllowBackbone,
    written: Written,
    export: Annotated[
        Path | None, typer.Option(help="folder that `promptfed export` has written, or the page's .zip")
    ] = None,
    key: Key = None,
    federation: Annotated[str | None, typer.Option(help="or a federation at a coordinator: its name or id")] = None,
    round: Annotated[int | None, typer.Option(min=0, help="with --federation: after this round")] = None,
    top: Annotated[int, typer.Option(min=1, help="classes that are shown")] = 5,
    out: Annotated[Path | None, typer.Option(help="with a folder: a file for the CSV; default: stdout")] = None,
    temperature: Annotated[
        float, typer.Option(min=0.01, max=100, help="divides the logits; `promptfed score --fit-on` finds one")
    ] = 1.0,
    as_json: Json = False,
) -> None:
    """Classify images with what a federation learned, beside the same backbone's zero-shot answer."""
    if (export is None) == (federation is None):
        raise Misused("say what to predict with: --export FOLDER or --federation NAME")
    folders = [path for path in images if path.is_dir()]
    if (folders and (len(images) > 1 or as_json)) or (out is not None and not folders):
        text = "a folder is given alone, its answers are CSV (--out FILE); files are told one by one (--json)"
        raise Misused(text)
    if export is not None:
        refuse(written & {"round", "coordinator", "token_file"}, "for --federation; leave it out")
    else:
        refuse(written & {"key"}, "for --export; leave it out")
    refuse(written & {"top"} if folders or as_json else set(), "for a table of single images; leave it out")
    expect_suffix(out, ".csv", "CSV")
    from promptfed.cli import predicting

    if export is not None:
        model, names = predicting.model_of_export(export, class_names, key=key)
    else:
        assert federation is not None
        with asked.open() as api:
            model, names = predicting.model_of_federation(api, federation, round, class_names)
    if folders:
        predicting.predict_folder(model, names, folders[0], allow_backbone, out, temperature)
    else:
        predicting.predict(model, names, images, allow_backbone, top, as_json, temperature)


@app.add(section="Use a result")
def score(
    export: Annotated[Path, typer.Argument(help="folder that `promptfed export` has written, or the page's .zip")],
    data: Annotated[str, typer.Argument(help="data URI of labelled images, as in folder:/data/pets")],
    allow_backbone: AllowBackbone,
    out: Annotated[Path, typer.Option(help="a new folder for figures and the confusion matrix")] = Path("score"),
    state_dir: Annotated[
        list[Path] | None,
        typer.Option(
            help="a client's state folder, whose training images are left out, repeatable; default: those of this "
            "account's clients of the export's federation"
        ),
    ] = None,
    fit_on: Annotated[
        str | None, typer.Option(help="data URI whose training images the temperature of confidences is fitted on")
    ] = None,
    key: Key = None,
    as_json: Json = False,
) -> None:
    """Test an export on labelled images: accuracy, calibration error, and which class is taken for which.

    Images that a client here has trained on are left out.
    """
    from promptfed.cli.scoring import run_score

    run_score(export, data, out, allow_backbone, as_json, key, state_dir or (), fit_on)


@app.add(section="Use a result")
def pool(
    scores: Annotated[list[Path], typer.Argument(help="each site's score.json, or the folder that has it")],
    as_json: Json = False,
) -> None:
    """Pool what several sites have measured with `promptfed score`: random-effects means of accuracy and AUROCs."""
    from pydantic import TypeAdapter, ValidationError

    from promptfed.cli.scoring import SCORE_FILE, PresenceFigures, ScoreFigures
    from promptfed.shared.metrics.estimates import Estimate, interval_text
    from promptfed.shared.metrics.pooling import pool_estimates

    sites: TypeAdapter[ScoreFigures | PresenceFigures] = TypeAdapter(ScoreFigures | PresenceFigures)
    estimates_of: dict[str, list[Estimate]] = {}
    tested: dict[str, Path] = {}
    states, copies = set(), []
    for path in scores:
        file = path / SCORE_FILE if path.is_dir() else path
        try:
            content = file.read_bytes()
            site = sites.validate_json(content)
        except OSError as error:
            raise BadInput(f"cannot read {file}: {why(error)}") from None
        except ValidationError:
            raise BadInput(f"{file} is not a {SCORE_FILE}: `promptfed score` writes one") from None
        states.add(site.state)
        first = tested.setdefault(f"{site.state} {site.tested or site.model_dump_json()}", file)
        if first != file:
            copies.append(str(file))
            note(f"{file} counts with {first}: it is of the same images")
            continue
        accuracy = getattr(site, "accuracy_interval", None)
        site_figures = {"accuracy": accuracy, **{f"AUROC of {one.name}": one.auroc for one in site.classes}}
        for name, estimate in site_figures.items():
            estimates_of.setdefault(name, []).extend([estimate] if estimate is not None else [])
    if len(tested) < 2 or len(states) > 1 or None in states:
        reason = "give two sites or more" if len(tested) < 2 else "the sites have not scored the same export"
        raise BadInput(f"{reason}: each runs `promptfed score` on the same export")
    pooled = {name: mean for name, estimates in estimates_of.items() if (mean := pool_estimates(estimates)) is not None}
    if as_json:
        figures = {name: mean.model_dump() for name, mean in pooled.items()}
        print_json({"state": states.pop(), "figures": figures, "copies": copies})
        return
    rows = [
        [
            name,
            str(mean.sites),
            interval_text(Estimate(value=mean.mean, low=mean.low, high=mean.high)),
            "-" if mean.prediction is None else "{:.1f} to {:.1f}".format(*(100 * end for end in mean.prediction)),
            f"{100 * mean.i2:.0f} %",
        ]
        for name, mean in pooled.items()
    ]
    console.print(table(f"{len(tested)} sites", ["figure", "sites", "mean, 95 %", "next site", "I²"], rows))
