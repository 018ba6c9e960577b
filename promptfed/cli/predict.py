"""`promptfed predict`: the classes of images under learned prompts, beside those of the template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from promptfed.client_service.serving.prediction import BadImage, Predictor, TooManyPixels
from promptfed.export.adapted_model import Learned, class_names_of, given_class_names, predictor_of
from promptfed.export.export import open_backbone_of, read_export
from promptfed.sdk.client import CommandError, Coordinator
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.output import console, percent, print_json, table
from promptfed.sdk.snapshot import take
from promptfed.shared.tensors import decode

BAR = 24  # columns of a whole bar
NO_NAMES = "nobody has named the classes: give them with --classes a,b or --data URI"


def learned_from_export(folder: Path, classes: str | None, data: str | None) -> tuple[Learned, tuple[str, ...]]:
    """What an export holds, and the class names to choose among.

    Raises:
        CommandError: it is no export, or nobody names classes.
    """
    learned, own = read_export(folder)
    names = given_class_names(classes, data) or own
    if names is None:
        raise CommandError(NO_NAMES, Exit.BAD_INPUT)
    return learned, names


def learned_from_coordinator(
    api: Coordinator, federation: str, round: int | None, classes: str | None, data: str | None
) -> tuple[Learned, tuple[str, ...]]:
    """As `learned_from_export`, of a federation at a coordinator.

    Raises:
        CommandError: the coordinator refuses, or nobody names classes.
    """
    taken = take(api, federation, round)
    names = given_class_names(classes, data) or class_names_of(taken)
    if names is None:
        raise CommandError(NO_NAMES, Exit.BAD_INPUT)
    return Learned.of(taken, decode(taken.body)[0]), names


def predict(
    learned: Learned, names: Sequence[str], images: Sequence[Path], allow_backbone: bool, top: int, as_json: bool
) -> None:
    """Classify ``images`` and print the ``top`` classes of each.

    Raises:
        CommandError: an image, backbone or class name that cannot be used, or a result that classifies nothing.
    """
    learned.check_alone()
    contents = [_read(path) for path in images]
    predictor = predictor_of(learned.serve(open_backbone_of(learned, allow_backbone), names))
    found = [_predict(predictor, path, content) for path, content in zip(images, contents, strict=True)]
    if as_json:
        print_json([{"image": str(path), **one} for path, one in zip(images, found, strict=True)])
        return
    for path, one in zip(images, found, strict=True):
        console.print(_table(path, one, top))
        if one["domains"]:
            console.print(_domains(one["domains"]), highlight=False, markup=False, soft_wrap=True)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}", Exit.BAD_INPUT) from None


def _predict(predictor: Predictor, path: Path, content: bytes) -> dict[str, Any]:
    try:
        return predictor.predict(content)
    except BadImage:
        text = f"{path} cannot be read as an image: give a PNG, JPEG or another common format"
        raise CommandError(text, Exit.BAD_INPUT) from None
    except TooManyPixels as error:
        raise CommandError(f"{path}: {error}", Exit.BAD_INPUT) from None


def _table(path: Path, found: dict[str, Any], top: int) -> Table:
    title = f"{escape(path.name)}: {escape(found['class_name'])} ({found['method']}, round {found['round']})"
    rows = [
        [row["name"], bar(row["probability"]), percent(row["probability"]), percent(row["zero_shot"])]
        for row in found["classes"][:top]
    ]
    made = table(title, ["class", "", "adapted", "zero-shot"], rows)
    made.columns[1].justify = "left"
    return made


def _domains(found: list[dict[str, Any]]) -> str:
    told = ", ".join(f"{one['name']} {percent(one['share'])}" for one in found)
    return f"looks like the domains: {told}"


def bar(share: float) -> str:
    """A share of 1 as a bar of text."""
    eighths = round(share * BAR * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]
