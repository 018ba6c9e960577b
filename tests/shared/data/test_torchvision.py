"""Data sets of torchvision and of the Hugging Face library, in small made-up copies of their layouts."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from promptfed.shared.data import DataError, Source, open_source


def picture(path: Path, shade: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((12, 12, 3), shade, dtype=np.uint8)
    pixels[shade % 12] = 255 - shade  # no two alike
    Image.fromarray(pixels).save(path)


def lines(path: Path, texts: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{text}\n" for text in texts))


def shades(source: Source, split: str) -> list[tuple[str, int]]:
    """Class name and shade of every image."""
    part = getattr(source, split)
    pixels = [np.bincount(np.asarray(part.image(row))[:, :, 0].ravel()).argmax() for row in range(len(part))]
    return [(source.class_names[label], int(shade)) for label, shade in zip(part.labels.tolist(), pixels, strict=True)]


def oxford_pets(root: Path) -> None:
    base = root / "oxford-iiit-pet"
    rows = {"trainval": [("Abyssinian_1", 1, 10), ("great_dane_1", 2, 20)], "test": [("Abyssinian_2", 1, 30)]}
    for split, items in rows.items():
        lines(base / "annotations" / f"{split}.txt", (f"{name} {label} 1 1" for name, label, _ in items))
        for name, _, shade in items:
            picture(base / "images" / f"{name}.jpg", shade)
    (base / "annotations" / "list.txt").touch()


def test_oxford_pets(tmp_path: Path) -> None:
    oxford_pets(tmp_path)
    found = open_source(f"torchvision:OxfordIIITPet?root={tmp_path}")
    assert found.class_names == ("Abyssinian", "Great Dane")
    assert found.template == "a photo of a {}, a type of pet."
    assert [name for name, _ in shades(found, "train")] == ["Abyssinian", "Great Dane"]
    assert [name for name, _ in shades(found, "test")] == ["Abyssinian"]
    assert abs(shades(found, "test")[0][1] - 30) <= 3  # JPEG


def test_textures_have_their_splits_in_files(tmp_path: Path) -> None:
    base = tmp_path / "dtd" / "dtd"
    for split, shade in (("train", 10), ("test", 20), ("val", 30)):
        names = [f"{kind}/{kind}_{split}.png" for kind in ("banded", "polka-dotted")]
        lines(base / "labels" / f"{split}1.txt", names)
        for number, name in enumerate(names):
            picture(base / "images" / name, shade + number)
    found = open_source(f"torchvision:DTD?root={tmp_path}")
    assert shades(found, "train") == [("banded", 10), ("polka-dotted", 11)]
    assert shades(found, "test") == [("banded", 20), ("polka-dotted", 21)]
    assert found.template == "{} texture."


def test_a_data_set_without_splits_gets_a_seeded_one(tmp_path: Path) -> None:
    for number, name in enumerate(("AnnualCrop", "SeaLake")):
        for index in range(5):
            picture(tmp_path / "eurosat" / "2750" / name / f"{index}.png", 20 * number + index)
    found = open_source(f"torchvision:EuroSAT?root={tmp_path}")
    assert found.class_names == ("Annual Crop", "Sea Lake")
    assert (len(found.train), len(found.test)) == (8, 2)
    everything = sorted(shades(found, "train") + shades(found, "test"))
    assert everything == sorted((name, 20 * k + i) for k, name in enumerate(found.class_names) for i in range(5))
    other = open_source(f"torchvision:EuroSAT?root={tmp_path}&split_seed=3")
    assert shades(other, "test") != shades(found, "test")


def test_caltech_has_the_hundred_classes_of_coop_s_split(tmp_path: Path) -> None:
    """Its images of Faces_easy are those of Faces, cut out: they would stand on both sides of a split."""
    names = ["Faces", "Faces_easy", "accordion"]
    for folder in ("101_ObjectCategories/BACKGROUND_Google", *(f"Annotations/{name}" for name in names)):
        (tmp_path / "caltech101" / folder).mkdir(parents=True)
    for number, name in enumerate(names):
        for index in range(1, 6):
            picture(tmp_path / "caltech101/101_ObjectCategories" / name / f"image_{index:04}.jpg", 60 * number + index)
    found = open_source(f"torchvision:Caltech101?root={tmp_path}")
    assert found.class_names == ("Faces", "accordion")
    assert {round(shade / 60) for name, shade in shades(found, "train") if name == "accordion"} == {2}
    assert (len(found.train), len(found.test)) == (8, 2)


def test_food_keeps_its_labels_in_json(tmp_path: Path) -> None:
    base = tmp_path / "food-101"
    for split, shade in (("train", 40), ("test", 50)):
        names = {"apple_pie": [f"apple_pie/{split}"], "sushi": [f"sushi/{split}"]}
        (base / "meta").mkdir(parents=True, exist_ok=True)
        (base / "meta" / f"{split}.json").write_text(json.dumps(names))
        for name in ("apple_pie", "sushi"):
            picture(base / "images" / name / f"{split}.jpg", shade)
    found = open_source(f"torchvision:Food101?root={tmp_path}&classes=novel")
    assert found.class_names == ("sushi",)
    assert (len(found.train), len(found.test)) == (1, 1)


def test_an_image_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    oxford_pets(tmp_path)
    (tmp_path / "oxford-iiit-pet" / "images" / "Abyssinian_2.jpg").write_text("no image")
    found = open_source(f"torchvision:OxfordIIITPet?root={tmp_path}")
    with pytest.raises(DataError, match="image 0 of torchvision's OxfordIIITPet cannot be read"):
        found.test.image(0)


@pytest.mark.parametrize(
    ("uri", "complaint"),
    [
        ("torchvision:OxfordIIITPet", "needs root="),
        ("torchvision:Nothing?root=/tmp", "has no data set 'Nothing'"),
        ("torchvision:VisionDataset?root=/tmp", "has no data set"),
        ("torchvision:folder.os?root=/tmp", "has no data set"),
        ("torchvision:EuroSAT?root={empty}", "EuroSAT is not in"),
        ("torchvision:OxfordIIITPet?root={empty}", "download=True"),
        ("torchvision:CocoDetection?root={empty}", "is not in"),
    ],
)
def test_what_cannot_be_opened_is_told_in_one_line(tmp_path: Path, uri: str, complaint: str) -> None:
    with pytest.raises(DataError, match=complaint) as refused:
        open_source(uri.format(empty=tmp_path))
    assert "\n" not in str(refused.value)


def hub_folder(tmp_path: Path, splits: tuple[str, ...]) -> Path:
    datasets = pytest.importorskip("datasets", reason="Hugging Face data: pip install '.[hf]'")
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["red_fox", "owl"]),
            "id": datasets.Value("int32"),
        }
    )
    made = {}
    for number, split in enumerate(splits):
        images = [Image.new("RGB", (8, 8), (40 * number + 4 * k,) * 3) for k in range(6)]
        columns = {"picture": images, "kind": [0, 1] * 3, "id": list(range(6))}
        made[split] = datasets.Dataset.from_dict(columns, features=features)
    folder = tmp_path / "hub"
    datasets.DatasetDict(made).save_to_disk(str(folder))
    return folder


def test_a_hub_data_set_with_its_splits(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path, ("train", "validation"))
    found = open_source(f"hf:{folder}")
    assert found.class_names == ("red fox", "owl")
    assert shades(found, "train") == [(("red fox", "owl")[k % 2], 4 * k) for k in range(6)]
    assert shades(found, "test") == [(("red fox", "owl")[k % 2], 40 + 4 * k) for k in range(6)]
    named = open_source(f"hf:{folder}?train=validation&test=train&image=picture&label=kind")
    assert shades(named, "test") == shades(found, "train")


def test_a_hub_data_set_without_a_test_split_is_divided(tmp_path: Path) -> None:
    found = open_source(f"hf:{hub_folder(tmp_path, ('train',))}")
    assert (len(found.train), len(found.test)) == (4, 2)


@pytest.mark.parametrize(
    ("query", "complaint"),
    [
        ("train=none", "has no split none; it has train"),
        ("image=id", "image=id is no column of Image"),
        ("label=picture", "label=picture is no column of ClassLabel"),
        ("colour=red", "unknown option colour"),
    ],
)
def test_a_hub_data_set_that_does_not_fit_is_refused(tmp_path: Path, query: str, complaint: str) -> None:
    folder = hub_folder(tmp_path, ("train",))
    with pytest.raises(DataError, match=complaint):
        open_source(f"hf:{folder}?{query}")
    with pytest.raises(DataError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nowhere'}")
