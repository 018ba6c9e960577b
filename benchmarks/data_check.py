"""How many of the defects that are planted in images `promptfed data check` finds, and how much else it names.

``python -m benchmarks.data_check`` plants twelve kinds in a folder, a table and DICOM files, and prints precision and
recall as a table of Markdown.
"""

from __future__ import annotations

import argparse
import csv
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image, ImageChops, ImageDraw, ImageFont

from promptfed.cli.checking import Checked, check
from promptfed.shared.data import open_source
from promptfed.shared.data.medical.check import KINDS
from promptfed.shared.data.medical.phantoms import dataset
from promptfed.shared.spec.spec import BackboneSpec

SYMBOLS = ("umbrella", "snowman", "scissors", "anchor", "key", "airplane")
EACH, PLANTED = 60, 6
SIDE = 128


@dataclass
class Picture:
    """One image to be written, with the kinds of defects that it has."""

    image: Image.Image
    label: str
    split: str
    patient: str
    kinds: set[str] = field(default_factory=set)
    broken: bool = False


def clean(draws: np.random.Generator) -> list[Picture]:
    """Drawn symbols of patients with two images each, three quarters for training."""
    source = open_source(f"symbols:sketch?only={','.join(SYMBOLS)}&per_class={EACH}&test_per_class=1")
    pictures = []
    for row in range(len(source.train)):
        shown = source.train.image(row).convert("L").resize((SIDE, SIDE))
        noisy = np.asarray(shown, dtype=float) * 0.7 + 30 + draws.normal(0, 4, (SIDE, SIDE))
        label = source.class_names[int(source.train.labels[row])]
        split = "test" if row // 2 % 4 == 0 else "train"
        image = Image.fromarray(np.clip(noisy, 20, 235).astype(np.uint8))
        pictures.append(Picture(image, label, split, f"p{row // 2:04d}"))
    return pictures


def nearly(image: Image.Image, draws: np.random.Generator) -> Image.Image:
    """The image a little brighter, moved by a pixel, with noise."""
    moved = np.asarray(ImageChops.offset(image, 1, 0), dtype=float) * 1.05 + draws.normal(0, 3, (SIDE, SIDE))
    return Image.fromarray(np.clip(moved, 20, 235).astype(np.uint8))


def lettered(image: Image.Image, number: int) -> Image.Image:
    """The image with a name burnt in."""
    image = image.copy()
    font = ImageFont.load_default(11 + number)
    ImageDraw.Draw(image).text((4, 4 + 14 * number), f"DOE JANE {1950 + number}", fill=(255, 0)[number % 2], font=font)
    return image


def planted(draws: np.random.Generator) -> list[Picture]:
    """Clean pictures, and `PLANTED` of each kind of defect."""
    pictures = clean(draws)
    order = [pictures[int(row)] for row in draws.permutation(len(pictures))]
    fresh = iter(order)
    other = {"train": "test", "test": "train"}
    added: list[Picture] = []

    def copied(kind: str, change: Callable[[Image.Image], Image.Image], across: bool, relabelled: bool = False) -> None:
        for _ in range(PLANTED):
            one = next(fresh)
            label = SYMBOLS[SYMBOLS.index(one.label) - 1] if relabelled else one.label
            kinds = {kind, *(["duplicate"] if relabelled else [])}
            split = other[one.split] if across else one.split
            one.kinds |= kinds
            own = {*kinds, *(["label error"] if relabelled else [])}
            added.append(Picture(change(one.image), label, split, f"c{len(added):04d}", own))

    copied("duplicate", lambda image: image, False)
    copied("duplicate across splits", lambda image: image, True)
    copied("near duplicate", lambda image: nearly(image, draws), False)
    copied("near duplicate across splits", lambda image: nearly(image, draws), True)
    copied("conflicting labels", lambda image: image, False, relabelled=True)
    for number in range(PLANTED):
        own, moved = next(fresh), next(fresh)
        moved.split = other[own.split]
        for one in pictures:
            if one.patient in (own.patient, moved.patient):
                one.split = own.split
        moved.split, moved.patient = other[own.split], own.patient
        for one in pictures:
            if one.patient == own.patient:
                one.kinds.add("patient in both splits")
        wrong, odd, flat, text = next(fresh), next(fresh), next(fresh), next(fresh)
        wrong.label = SYMBOLS[SYMBOLS.index(wrong.label) - 2]
        wrong.kinds.add("label error")
        odd.image, odd.kinds = (
            odd.image.resize(((20, 128), (300, 300), (400, 90))[number % 3]),
            odd.kinds | {"odd size"},
        )
        flat.image, flat.kinds = Image.new("L", (SIDE, SIDE), 30 * number + 20), flat.kinds | {"uniform"}
        text.image, text.kinds = lettered(text.image, number), text.kinds | {"text"}
        next(fresh).broken = True
    rare = open_source("symbols:sketch?only=sun&per_class=3&test_per_class=1").train
    for row in range(3):
        image = rare.image(row).convert("L").resize((SIDE, SIDE)).point(lambda level: level * 0.7 + 30)
        added.append(Picture(image, "sun", "train", f"r{row}", {"rare class"}))
    return [*pictures, *added]


def write_images(pictures: list[Picture], root: Path, by_folders: bool) -> list[Path]:
    """PNG files in class folders of train and test, or all in one folder; the patient begins each name."""
    paths = []
    for number, one in enumerate(pictures):
        folder = root / one.split / one.label if by_folders else root
        folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"{one.patient}_{number:04d}.png")
        one.image.save(paths[-1])
    return paths


def folder(pictures: list[Picture], root: Path) -> tuple[str, list[Path]]:
    return f"folder:{root}?group=^([a-z]\\d%2B)_", write_images(pictures, root, True)


def table(pictures: list[Picture], root: Path) -> tuple[str, list[Path]]:
    paths = write_images(pictures, root, False)
    rows = [[path.name, one.label, one.split, one.patient] for path, one in zip(paths, pictures, strict=True)]
    _write_table(root, ["path", "label", "split", "patient"], rows)
    return f"csv:{root}/labels.csv?group=patient", paths


def dicom(pictures: list[Picture], root: Path) -> tuple[str, list[Path]]:
    root.mkdir(parents=True)
    paths, rows = [], []
    for number, one in enumerate(pictures):
        data = dataset(np.asarray(one.image), one.patient)
        paths.append(root / f"{number:04d}.dcm")
        data.save_as(paths[-1], enforce_file_format=True)
        rows.append([data.SOPInstanceUID, one.label, one.split])
    _write_table(root, ["SOPInstanceUID", "label", "split"], rows)
    return f"dicom:{root}?index={root.parent}/index", paths


def _write_table(root: Path, head: list[str], rows: list[list[str]]) -> None:
    with (root / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([head, *rows])


FORMATS = {"folder": folder, "csv": table, "dicom": dicom}


def measure(kind: str, root: Path, seed: int = 0) -> dict[str, tuple[int, int, int]]:
    """For each kind of defect: images found that have it, all found, all that have it."""
    pictures = planted(np.random.default_rng(seed))
    uri, paths = FORMATS[kind](pictures, root / kind)
    for one, path in zip(pictures, paths, strict=True):
        if one.broken:
            path.write_bytes(path.read_bytes()[:700])
    truth = {
        name: {str(p) for one, p in zip(pictures, paths, strict=True) if name in one.kinds and not one.broken}
        for name in KINDS
    }
    sides: dict[str, set[str]] = {}  # of patients, without unreadable images
    for one in pictures:
        sides.setdefault(one.patient, set()).update([] if one.broken else [one.split])
    whole = {str(p) for one, p in zip(pictures, paths, strict=True) if len(sides[one.patient]) < 2}
    truth["patient in both splits"] -= whole
    truth["unreadable"] = {str(path) for one, path in zip(pictures, paths, strict=True) if one.broken}
    checked = check(uri, BackboneSpec())
    return {name: _counts(truth[name], _found(checked, name)) for name in KINDS}


def _found(checked: Checked, kind: str) -> set[str]:
    if kind == "unreadable":
        files = (problem.partition(": ")[0].partition(" cannot")[0] for problem in checked.left_out)
        return {name for name in files if Path(name).is_absolute()}
    return {checked.looks.origins[row].path for one in checked.found if one.kind == kind for row in one.rows}


def _counts(truth: set[str], found: set[str]) -> tuple[int, int, int]:
    return len(truth & found), len(found), len(truth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    seed = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as root:
        measured = {kind: measure(kind, Path(root).resolve(), seed) for kind in FORMATS}
    print("| kind | " + " | ".join(f"`{kind}:` precision | recall" for kind in FORMATS) + " |")
    print("|---" * (1 + 2 * len(FORMATS)) + "|")
    for name in KINDS:
        cells = []
        for kind in FORMATS:
            right, found, all_of = measured[kind][name]
            cells += [
                f"{right / found:.2f} ({right}/{found})" if found else "–",
                f"{right / all_of:.2f} ({right}/{all_of})",
            ]
        print(f"| {name} | " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
