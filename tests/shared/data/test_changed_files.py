"""Files that change after the data were opened: what is kept under a digest is of the image that has the digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.client_service.training.data import TEST, ClientData
from promptfed.client_service.training.images import ImageCache, Views
from promptfed.shared.clip import FeatureCache, image_reading, load_backbone
from promptfed.shared.clip.image_reading import ImageSplit
from promptfed.shared.data import DataError, Source, Split, open_source
from promptfed.shared.data import readers as data_readers
from promptfed.shared.data.source import joined
from tests.shared.data.test_sources import oxford_pets

CHANGED = "is not what it was when the data were opened; start again"


def write_classes(root: Path) -> Path:
    """Two class folders; every picture is noise of its own."""
    for number, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for k in range(3):
            pixels = np.random.default_rng([number, k]).integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(root / name / f"{k}.png")
    return root


def exchange(first: Path, second: Path) -> None:
    """Give two folders or files each other's names."""
    aside = first.with_name("aside")
    first.rename(aside)
    second.rename(first)
    aside.rename(second)


def table(root: Path, column: str) -> Path:
    rows = [f"{folder}/{k}.png,{folder}" for folder in ("cat", "dog") for k in range(3)]
    (root / "t.csv").write_text("\n".join([f"path,{column}", *rows]) + "\n")
    return root / "t.csv"


OPENED: dict[str, Callable[[Path], str]] = {
    "folder": lambda root: f"folder:{root}",
    "one label": lambda root: f"csv:{table(root, 'label')}",
    "several labels": lambda root: f"csv:{table(root, 'labels')}",
}


@pytest.mark.parametrize("kind", OPENED)
def test_another_image_is_refused_by_its_file_and_the_first_one_is_read_again(tmp_path: Path, kind: str) -> None:
    uri = OPENED[kind](write_classes(tmp_path))
    for source in (open_source(uri), open_source(f"{uri}&test_on=all".replace("&", "?"), "evaluator")):
        split = joined(source.train, source.test)
        exchange(tmp_path / "cat", tmp_path / "dog")
        for row in range(len(split)):
            with pytest.raises(DataError, match=f"{split.path(row)} {CHANGED}"):
                split.image(row)
        exchange(tmp_path / "cat", tmp_path / "dog")
        assert [split.image(row).size for row in range(len(split))] == [(40, 40)] * len(split)


def test_a_librarys_image_is_the_one_of_its_first_reading(tmp_path: Path) -> None:
    oxford_pets(tmp_path)
    found = open_source(f"torchvision:OxfordIIITPet?root={tmp_path}").train
    digest = found.digest(0)
    exchange(*(tmp_path / "oxford-iiit-pet" / "images" / f"{name}_1.jpg" for name in ("Abyssinian", "great_dane")))
    with pytest.raises(DataError, match=f"image 0 of torchvision's OxfordIIITPet {CHANGED}"):
        found.image(0)
    assert found.digest(0) == digest
    shades = iter([10, 10, 20])
    split = Split(torch.zeros(3), lambda row: Image.new("RGB", (2, 2), (next(shades), row, 0)))
    assert split.image(2).getpixel((0, 0)) == split.image(2).getpixel((0, 0))
    with pytest.raises(DataError, match=f"image 2 {CHANGED}"):
        split.image(2)


Compute = Callable[[FeatureCache, Any, ImageSplit], object]
COMPUTED: dict[str, Compute] = {
    "features": lambda cache, backbone, split: cache.features(backbone, split),
    "patches": lambda cache, backbone, split: cache.patches.fill(backbone, split, range(len(split))),
}


@pytest.mark.parametrize(("what", "apart"), [("features", False), ("features", True), ("patches", False)])
def test_no_row_is_kept_of_an_image_that_was_exchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, apart: bool
) -> None:
    """Of images that threads read, or other processes."""
    monkeypatch.setattr(image_reading, "apart_on", lambda device: apart)
    monkeypatch.setattr(data_readers, "_readers", {})
    backbone, root = load_backbone("promptfed-tiny", None), write_classes(tmp_path / "d")
    wanted = FeatureCache(tmp_path / "true").features(backbone, open_source(f"folder:{root}", "evaluator").test)
    split, shared = open_source(f"folder:{root}", "evaluator").test, tmp_path / "shared"
    exchange(root / "cat", root / "dog")
    with pytest.raises(DataError, match=CHANGED):
        COMPUTED[what](FeatureCache(shared), backbone, split)
    exchange(root / "cat", root / "dog")
    again = open_source(f"folder:{root}", "evaluator").test
    cache = FeatureCache(shared)
    COMPUTED[what](cache, backbone, again)
    assert torch.equal(cache.features(backbone, again), wanted)
    assert {cache.images_computed, cache.patches.images_computed} <= {0, 6}, "no row of the first try was kept"
    if apart:
        data_readers.readers().close()


def test_no_pixels_are_held_and_no_view_is_drawn_of_an_image_that_was_exchanged(tmp_path: Path) -> None:
    root, backbone, held = write_classes(tmp_path / "d"), load_backbone("promptfed-tiny", None), ImageCache()
    source = open_source(f"folder:{root}", "evaluator")

    def first_image(of: Source) -> Any:
        data = ClientData(of, backbone, FeatureCache(tmp_path / "cache"), images=held)
        return data, data.split(TEST, of.class_names).images(torch.tensor([0]))

    wanted = first_image(source)[1].clone()
    exchange(root / "cat", root / "dog")
    views = Views(source.test, backbone, 2, "a test")
    with pytest.raises(DataError, match=CHANGED):
        views.image(0)
    with pytest.raises(DataError, match=CHANGED):
        views.pixels(torch.tensor([0]))
    with pytest.raises(DataError, match=CHANGED):
        first_image(source)
    exchange(root / "cat", root / "dog")
    assert torch.equal(first_image(source)[1], wanted)
