"""Predictions of an export or a federation's result for images and folders of them."""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from promptfed.client_service.serving.prediction import BadImage, Predictor, TooManyPixels
from promptfed.console.files import write_file
from promptfed.console.output import console, note, print_json, say, table
from promptfed.export.adapted_model import AdaptedModel, class_names_of, predictor_of
from promptfed.export.export import open_backbone_of
from promptfed.export.reading import read_export
from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import take
from promptfed.shared.data.errors import DataError
from promptfed.shared.data.image_files import conversion_of, read_image
from promptfed.shared.data.pixels import Unfaithful
from promptfed.shared.errors import BadInput, PromptfedError
from promptfed.shared.files import open_file
from promptfed.shared.plain_text import csv_cell, percent, plain
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".jp2", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm"})
BAR = 24  # columns of a whole bar
NO_NAMES = "nobody has named the classes: give them with --classes a,b or --data URI"


def model_of_export(
    folder: Path,
    class_names: tuple[str, ...] | None = None,
    otherwise: tuple[str, ...] | None = None,
    key: str | None = None,
) -> tuple[AdaptedModel, tuple[str, ...]]:
    """The model of an export, and the classes to choose among: ``class_names``, else its own, else ``otherwise``.

    With a coordinator's public ``key``, the export must have its signature.

    Raises:
        PromptfedError: it is no export, the key has not signed it, or nobody names classes.
    """
    model, own_names = read_export(folder, key)
    return model, _expect_names(class_names or own_names or otherwise)


def model_of_federation(
    api: Coordinator, federation: str, round: int | None, class_names: tuple[str, ...] | None
) -> tuple[AdaptedModel, tuple[str, ...]]:
    """The same as `model_of_export` for a federation at a coordinator.

    Raises:
        PromptfedError: the coordinator refuses, or nobody names classes.
    """
    result = api.run(take(federation, round))
    return AdaptedModel.of(result.facts, result.state), _expect_names(class_names or class_names_of(result))


def _expect_names(names: tuple[str, ...] | None) -> tuple[str, ...]:
    if names is None:
        raise BadInput(NO_NAMES)
    return names


def predict_folder(
    model: AdaptedModel,
    names: Sequence[str],
    folder: Path,
    allow_backbone: AllowedBackbones,
    out: Path | None,
    temperature: float = 1.0,
) -> None:
    """Classify all images below ``folder``, a line of CSV for each, to ``out`` or to stdout.

    A file that cannot be read is named on stderr and left out.

    Raises:
        PromptfedError: there is no image, or a backbone, class name or file that cannot be used.
    """
    model.check_alone()
    files = _files(folder)
    paths = [path for path in files if path.suffix.lower() in SUFFIXES]
    if not paths:
        raise BadInput(f"{folder} holds no image ({', '.join(sorted(SUFFIXES))})")
    predictor = predictor_of(model.serve(open_backbone_of(model, allow_backbone), names, temperature))
    text, unread = io.StringIO(newline=""), 0
    writer = csv.writer(text, lineterminator="\n")
    several = predictor.served is not None and predictor.served.several_labels
    columns = ["present", *names] if several else ["class", "probability", "zero_shot_class", "zero_shot_probability"]
    writer.writerow(["image", *map(csv_cell, columns)])
    for path in files:
        if path.suffix.lower() not in SUFFIXES and (advice := conversion_of(path)) is not None:
            note(f"{path} cannot be read as an image: {advice}.")
    for path in paths:
        try:
            answer = _predict(predictor, path, _read(path))
        except PromptfedError as error:
            note(error)
            unread += 1
            continue
        cells = _presences(answer, names) if several else [*_best(answer, "probability"), *_best(answer, "zero_shot")]
        writer.writerow([path.relative_to(folder), *cells])
    if unread == len(paths):
        raise BadInput(f"none of the {unread} images in {folder} can be read")
    if out is None:
        sys.stdout.write(text.getvalue())
        return
    write_file(out, text.getvalue().encode())
    left_out = f"; {unread} could not be read" if unread else ""
    say(f"Wrote {len(paths) - unread} answers to {out}{left_out}.")


def _files(folder: Path) -> list[Path]:
    """All files below ``folder`` that are not hidden, in order. Raises BadInput for a folder that cannot be listed."""

    def refuse(error: OSError) -> None:
        raise BadInput(f"{error.filename} cannot be listed ({why(error)}); make it readable")

    found = list[Path]()
    for place, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        found += [Path(place, name) for name in names if not name.startswith(".")]
    return sorted(found)


def _presences(answer: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """The classes that are present, separated by |, and the probability of each class."""
    by_name = {row["name"]: f"{row['probability']:.6f}" for row in answer["classes"]}
    return [csv_cell("|".join(answer["present"])), *(by_name[name] for name in names)]


def _best(answer: Mapping[str, Any], column: str) -> list[str]:
    """The likeliest class of a column and its probability; empty if there is no such column."""
    rows = [row for row in answer["classes"] if row[column] is not None]
    if not rows:
        return ["", ""]
    best = max(rows, key=lambda row: row[column])
    return [csv_cell(best["name"]), f"{best[column]:.6f}"]


def predict(
    model: AdaptedModel,
    names: Sequence[str],
    images: Sequence[Path],
    allow_backbone: AllowedBackbones,
    top: int,
    as_json: bool,
    temperature: float = 1.0,
) -> None:
    """Classify ``images`` and print the ``top`` classes of each.

    Raises:
        PromptfedError: an image, backbone or class name that cannot be used, or a result that classifies nothing.
    """
    model.check_alone()
    contents = [_read(path) for path in images]
    predictor = predictor_of(model.serve(open_backbone_of(model, allow_backbone), names, temperature))
    answers = [_predict(predictor, path, content) for path, content in zip(images, contents, strict=True)]
    if as_json:
        print_json([{"image": str(path), **answer} for path, answer in zip(images, answers, strict=True)])
        return
    for path, answer in zip(images, answers, strict=True):
        console.print(_table(path, answer, top))
        if answer["domains"]:
            domains = ", ".join(f"{domain['name']} {percent(domain['share'])}" for domain in answer["domains"])
            say(plain(f"looks like the domains: {domains}"))


def _read(path: Path) -> bytes:
    try:
        with open_file(path) as file:
            return file.read()
    except OSError as error:
        raise BadInput(f"cannot read {path}: {why(error)}") from None


def _predict(predictor: Predictor, path: Path, content: bytes) -> dict[str, Any]:
    try:
        return predictor.predict(content)
    except BadImage as error:
        unfaithful = isinstance(error.__cause__, Unfaithful)
        raise BadInput(f"{path}: {error}" if unfaithful else _why_unreadable(path)) from None
    except TooManyPixels as error:
        raise BadInput(f"{path}: {error}") from None


def _why_unreadable(path: Path) -> str:
    """What `promptfed data show` says of the file."""
    try:
        read_image(path)
    except DataError as error:
        return str(error)
    return f"{path} cannot be read as an image: give a PNG, JPEG or another common format"


def _table(path: Path, answer: Mapping[str, Any], top: int) -> Table:
    answer_text = ", ".join(answer["present"]) or "none of the classes" if "present" in answer else answer["class_name"]
    title = escape(plain(f"{path.name}: {answer_text} ({answer['method']}, round {answer['round']})"))
    rows = [
        [row["name"], bar(row["probability"]), percent(row["probability"]), percent(row["zero_shot"])]
        for row in answer["classes"][:top]
    ]
    shown = table(title, ["class", "", "adapted", "zero-shot"], rows)
    shown.columns[1].justify = "left"
    return shown


def bar(share: float) -> str:
    """A share of 1 as a bar of text."""
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
