"""`promptfed data`: the sources of images, and a look at one of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from promptfed.cli.app import app, with_options
from promptfed.cli.common import Json
from promptfed.console.files import expect_suffix
from promptfed.console.output import console, listing, note, print_json, say, table
from promptfed.shared.data import DataError
from promptfed.shared.data.schemes import SCHEMES
from promptfed.shared.errors import BadInput
from promptfed.shared.plain_text import counted, look_alikes, percent, plain, quoted, scale_text
from promptfed.shared.service.reasons import why

if TYPE_CHECKING:
    from PIL.Image import Image

    from promptfed.shared.data import Source, Split

group = app.group(
    "data",
    "List the sources of images, or look at one.",
    "Take part with own data",
    invoke_without_command=True,
    no_args_is_help=False,
)

MOST_COPIES = 20  # pictures that are printed
NAMED, AT_ONCE, NAMING_SECONDS = 100, 10, 10.0
"""Images that the embedded backbones name, how many of them at once, and how long all of this may take."""


def sources(context: typer.Context, as_json: Json = False) -> None:
    """List the sources of images, if no command follows."""
    if context.invoked_subcommand is None:
        list_sources(as_json)


@group.add("list")
def list_sources(as_json: Json = False) -> None:
    """List the sources of images."""
    if as_json:
        print_json([{"scheme": name, "example": one.example, "holds": one.holds} for name, one in SCHEMES.items()])
        return
    listing([(one.example, f"{one.holds} ({one.where})") for one in SCHEMES.values()])


group.callback()(with_options(sources))


@group.add()
def show(
    uri: Annotated[str, typer.Argument(help="data URI, as in emoji:flat")],
    out: Annotated[Path, typer.Option(help="the picture's file, .png")] = Path("sheet.png"),
    count: Annotated[int, typer.Option(min=1, help="images that are shown, spread over the classes")] = 48,
    part: Annotated[str | None, typer.Option(help="train or test; default: both")] = None,
    role: Annotated[Literal["trainer", "evaluator"], typer.Option(help="what the data are for")] = "trainer",
    as_json: Json = False,
) -> None:
    """Draw a sheet of a source's images with their classes and parts, copies first, and count each class's images."""
    from promptfed.shared.data import open_source
    from promptfed.shared.data.folder import contact_sheet
    from promptfed.shared.data.source import joined

    if part not in (None, "train", "test"):
        raise BadInput(f"there is no part {part!r}: use train or test")
    expect_suffix(out, ".png", "a PNG picture")
    with _listing_problems(uri, as_json):
        source = open_source(uri, role)
        both = {"train": source.train, "test": source.test}
        if part is None and (why_not := _untrainable(source)):
            note(f"Training images are not shown: {plain(why_not)}")
            part = "test"
        parts = both if part is None else {part: both[part]}
        split = joined(*parts.values())
        if not len(split):
            raise BadInput(f"{uri} has no image in {part or 'train and test'}: give --part test")
        alike_rows = _copies(split) if SCHEMES[uri.partition("?")[0].partition(":")[0]].of_files else []
        notes = [name for name, own in parts.items() for _ in range(len(own))]
        sheet = contact_sheet(split, source.class_names, count, notes, [row for group in alike_rows for row in group])
    places = [f"{kind}: {split.path(row) or f'image {row}'}" for row, kind in enumerate(notes)]
    _save(sheet, out)
    counts, alike = _counts(source), look_alikes(source.class_names)
    kind = "training" if len(source.train) and not _untrainable(source) else "test"
    named = _named(source, source.train if kind == "training" else source.test)
    if as_json:
        domain = source.domain.description if source.domain is not None else None
        about = {
            "uri": uri,
            "domain": domain,
            "template": source.template,
            "left_out": list(source.left_out),
            "look_alikes": [list(group) for group in alike],
            "grey": source.grey,
            "duplicates": [[places[row] for row in group] for group in alike_rows],
            "zero_shot": {name: {"right": right, "of": of} for name, (right, of) in named.items()},
        }
        print_json({**about, "classes": counts, "sheet": str(out)})
        return
    unlike = {name for group in alike for name in group}  # else a space at the end is not seen
    spelt = dict(zip(counts, quoted(counts), strict=True))
    rows = [[spelt[name] if name in unlike else name, *map(str, of.values())] for name, of in counts.items()]
    columns = ["train", "test", *(["unknown"] if source.train.labels.ndim == 2 else [])]
    rows.append(["all images", str(len(source.train)), str(len(source.test)), ""][: 1 + len(columns)])
    console.print(table(None, ["class", *columns], rows))
    for problem in source.left_out:
        say(f"Left out: {plain(problem)}")
    if source.grey is not None:
        say(f"Grey pictures of more than 8 bits are read as {scale_text(source.grey)}.")
    for group in alike_rows[:MOST_COPIES]:
        say(plain(f"The same picture: {', '.join(places[row] for row in group)}"))
    if len(alike_rows) > MOST_COPIES:
        say(f"And {counted(len(alike_rows) - MOST_COPIES, 'further picture')} with copies; --json lists all.")
    if named:
        accuracies = ", ".join(f"{name} {percent(right / of)} of {of}" for name, (right, of) in named.items())
        say(f"Named right without training: {accuracies} {kind} images; a guess {percent(1 / len(counts))}.")
    say(f"{out}: {counted(min(count, len(split)), 'image')} of {uri}")


def _named(source: Source, split: Split) -> dict[str, tuple[int, int]]:
    """How many images of ``split`` each embedded backbone names right by the template, and of how many.

    They are spread over the classes, and as many as there is time for.
    """
    import torch

    from promptfed.shared.clip import BackboneError, load_backbone
    from promptfed.shared.clip.embedded import EMBEDDED
    from promptfed.shared.data.folder import spread
    from promptfed.shared.methods.core.text_features import template_features

    found: dict[str, tuple[int, int]] = {}
    rows = spread(split.labels, NAMED) if split.labels.ndim == 1 else []
    for name, embedded in EMBEDDED.items():
        began, right, done = time.monotonic(), 0, 0
        with suppress(BackboneError, DataError):
            backbone = load_backbone(name, embedded.PRETRAINED)
            texts = template_features(backbone, source.template, source.class_names)
            while done < len(rows) and time.monotonic() < began + NAMING_SECONDS / len(EMBEDDED):
                some = rows[done : done + AT_ONCE]
                images = torch.stack([backbone.preprocess(split.image(row)) for row in some])
                best = (backbone.encode_images(images) @ texts.T).argmax(dim=1)
                right, done = right + int((best == split.labels[some]).sum()), done + len(some)
        if done:
            found[name] = right, done
    return found


@contextmanager
def _listing_problems(uri: str, as_json: bool) -> Iterator[None]:
    """List all problems of the data, on lines of their own or with ``as_json`` as a JSON value."""
    try:
        yield
    except DataError as error:
        if as_json:
            print_json({"uri": uri, "problems": list(error.problems)})
        if len(error.problems) < 2:
            raise
        for problem in () if as_json else error.problems:
            say(plain(problem))
        raise BadInput(f"{uri} has {counted(len(error.problems), 'problem')}") from None


def _counts(source: Source) -> dict[str, dict[str, int]]:
    """Images by class and split; with several labels per image also the training images of which it is unknown."""
    from promptfed.shared.data.partition import class_counts

    names, labels = source.class_names, source.train.labels
    counts = {"train": class_counts(labels, len(names)), "test": class_counts(source.test.labels, len(names))}
    if labels.ndim == 2:
        counts["unknown"] = (labels < 0).sum(0).tolist()
    return {name: {part: of[k] for part, of in counts.items()} for k, name in enumerate(names)}


def _untrainable(source: Source) -> str:
    """Why the first training image is not shown, as of a source that is only to be tested on; empty if it is."""
    try:
        if len(source.train):
            source.train.image(0)
    except DataError as error:
        return str(error)
    return ""


def _copies(split: Split) -> list[list[int]]:
    """The rows of each picture that there is several times."""
    rows: dict[str, list[int]] = {}
    for row in range(len(split)):
        rows.setdefault(split.digest(row), []).append(row)
    return [group for group in rows.values() if len(group) > 1]


def _save(sheet: Image, out: Path) -> None:
    try:
        sheet.quantize(128).save(out, "PNG", optimize=True)
    except OSError as error:
        raise BadInput(f"{out} cannot be written: {why(error)}") from None
