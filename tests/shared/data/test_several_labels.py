"""Sources with several labels per image: drawn scenes, tables and data sets of the Hugging Face library."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared.data import DataError, Source, open_source
from promptfed.shared.data.folder import contact_sheet
from promptfed.shared.data.image_files import image_digest, read_image
from promptfed.shared.data.partition import class_counts, strata
from promptfed.shared.data.registry import SharedSources, class_names_of
from tests.support.own_images import SHAPES, write_scenes

SCENES = "emoji-scenes:flat?count=300&test_count=60"


def refused(uri: str) -> str:
    with pytest.raises(DataError) as error:
        open_source(uri)
    return " ".join(error.value.problems)


def test_scenes_show_one_to_five_kinds_and_follow_from_their_seed() -> None:
    scenes, again = open_source(SCENES), open_source(SCENES)
    assert scenes.train.labels.dtype == torch.int8
    assert scenes.train.labels.shape == (300, 11)
    assert set(scenes.train.labels.sum(1).tolist()) == {1, 2, 3, 4, 5}
    assert scenes.train.digest(7) == again.train.digest(7)
    assert torch.equal(scenes.test.labels, again.test.labels)
    assert open_source(SCENES + "&seed=1").train.digest(7) != scenes.train.digest(7)
    assert open_source("emoji-scenes:noto?count=300").train.digest(7) != scenes.train.digest(7)
    assert scenes.train.digest(7) != scenes.test.digest(7)
    seen = open_source(SCENES + "&purpose=train").test
    assert torch.equal(seen.labels, scenes.test.labels)
    assert seen.digest(3) != scenes.test.digest(3)
    pixels = np.asarray(scenes.train.image(0), dtype=float)
    assert pixels.shape == (64, 64, 3)
    assert np.abs(np.diff(pixels[:3], axis=1)).mean() > 5, "noise"
    assert contact_sheet(scenes.train, scenes.class_names, 8).width > 400


def test_images_are_divided_by_their_rarest_class() -> None:
    labels = torch.tensor([[1, 1, 0], [1, 0, 0], [1, -1, 1], [0, 0, 0], [1, 1, -1]], dtype=torch.int8)
    assert strata(labels).tolist() == [1, 0, 2, 3, 1]
    assert class_counts(labels, 3) == [4, 2, 1]
    parts = [open_source(f"{SCENES}&partition=dirichlet&alpha=0.3&clients=3&client={k}") for k in range(3)]
    assert sum(len(part.train) for part in parts) == 300
    assert sum(len(part.test) for part in parts) == 60
    digests = [part.train.digest(row) for part in parts for row in range(len(part.train))]
    assert len(set(digests)) == 300
    held = open_source(SCENES + "&validation=0.25")
    assert len(held.train) + len(held.test) == 300
    assert min(class_counts(held.test.labels, 11)) > 0
    shots = open_source(SCENES + "&shots=4")
    assert max(torch.bincount(strata(open_source(SCENES).train.labels)).tolist()) > 4
    assert len(shots.train) == 44


def test_classes_left_out_leave_their_images() -> None:
    part = open_source(SCENES + "&only=mammal,fruit")
    assert part.class_names == ("fruit", "mammal")
    assert part.train.labels.shape == (300, 2)
    whole = open_source(SCENES)
    assert torch.equal(part.train.labels, whole.train.labels[:, [5, 7]])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("partition=pathological&clients=2&client=0", "partition=pathological is for one label per image"),
        ("seed=-1", "seed=-1 is less than 0"),
        ("purpose=all", "choose one of test, train"),
    ],
)
def test_options_that_need_one_label_are_refused(options: str, text: str) -> None:
    assert text in refused(f"{SCENES}&{options}")


def test_clients_in_one_process_draw_the_same_scenes() -> None:
    shared = SharedSources()
    for uri in (f"{SCENES}&seed=10", f"{SCENES}&partition=iid&clients=2&client=1"):
        own, alone = shared.open(uri), open_source(uri)
        assert torch.equal(own.train.labels, alone.train.labels)
        assert own.train.digest(0) == alone.train.digest(0)


def table(folder: Path, *lines: str) -> str:
    """A table beside eight images a.png to h.png of different grey."""
    for shade, name in enumerate("abcdefgh"):
        Image.new("RGB", (8, 8), (30 * shade,) * 3).save(folder / f"{name}.png")
    (folder / "t.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"csv:{folder}/t.csv"


def rows(source: Source) -> dict[int, list[int]]:
    """The labels by the image's grey, training images first."""
    return {
        split.image(row).getpixel((0, 0))[0] // 30: split.labels[row].tolist()
        for split in (source.train, source.test)
        for row in range(len(split))
    }


def test_a_table_with_a_column_for_each_class(tmp_path: Path) -> None:
    uri = table(
        tmp_path,
        "path,patient,pleural_effusion,mass,split",
        "a.png,p,1,0,train",
        "b.png,p,,1.0,train",
        "c.png,q,0,,test",
        "d.png,q,0.0,1,test",
    )
    source = open_source(f"{uri}?group=patient")
    assert source.class_names == ("pleural effusion", "mass")
    assert source.train.labels.dtype == torch.int8
    assert rows(source) == {0: [1, 0], 1: [-1, 1], 2: [0, -1], 3: [0, 1]}
    assert (source.train.groups, source.test.groups) == (("p", "p"), ("q", "q"))
    assert open_source(f"{uri}?columns=mass").class_names == ("mass",)
    assert class_names_of(f"{uri}?group=patient") == source.class_names
    evaluated = open_source(f"{uri}?group=patient&only=mass", "evaluator")
    assert evaluated.test.labels.tolist() == [[0], [1], [-1], [1]]


def test_a_table_with_a_column_of_names(tmp_path: Path) -> None:
    lines = [
        f"{name}.png,{labels}"
        for name, labels in zip("abcdefgh", ["cat| dog", "", *["dog"] * 3, *["cat"] * 3], strict=False)
    ]
    uri = table(tmp_path, "path,labels", *lines)
    source = open_source(uri)
    assert source.class_names == ("cat", "dog")
    assert rows(source) == {0: [1, 1], 1: [0, 0], **{k: [0, 1] for k in (2, 3, 4)}, **{k: [1, 0] for k in (5, 6, 7)}}
    named = table(tmp_path, "path,Finding Labels,age", *[f"{line},57" for line in lines])
    assert rows(open_source(f"{named}?labels=Finding Labels")) == rows(source)


@pytest.mark.parametrize(
    ("header", "line", "options", "text"),
    [
        ("path,cat,age", "a.png,1,57", "", "t.csv, line 2: age is 57, not 1 (present), 0 (absent) or empty (unknown)"),
        ("path,labels", "a.png,cat||dog", "", "line 2: labels is cat||dog, with an empty name; write names"),
        ("path,labels", "a.png,", "", "the column labels names no class; write some"),
        ("path,cat", "gone.png,1", "", "line 2: there is no image gone.png; correct the path, or remove the line"),
        ("path,cat", "a.png", "", "line 2: cat is missing: give every line 2 cells"),
        ("path,cat", ",1", "", "line 2: path must not be empty"),
        ("path,cat", "a.png,1", "?columns=dog", "t.csv has no column dog; choose one of path, cat"),
        ("path,cat", "a.png,1", "?labels=cat&columns=cat", "give labels= or columns=, not both"),
        ("path", "a.png", "", "t.csv has no column label"),
        ("path,cat", "t.csv,1", "", "t.csv cannot be read as an image"),
    ],
)
def test_wrong_tables_name_the_line_and_what_to_do(
    tmp_path: Path, header: str, line: str, options: str, text: str
) -> None:
    assert text in refused(table(tmp_path, header, line) + options)


def test_a_hub_data_set_with_lists_of_labels(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="Hugging Face data: pip install '.[hf]'")
    kinds = datasets.Sequence(datasets.ClassLabel(names=["red_fox", "owl"]))
    features = datasets.Features({"picture": datasets.Image(), "kinds": kinds})
    images = [Image.new("RGB", (8, 8), (30 * k,) * 3) for k in range(4)]
    made = datasets.Dataset.from_dict({"picture": images, "kinds": [[0, 1], [], None, [1]]}, features=features)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(tmp_path / "hub"))
    source = open_source(f"hf:{tmp_path / 'hub'}")
    assert source.class_names == ("red fox", "owl")
    assert source.train.labels.tolist()[:2] == [[1, 1], [0, 0]]
    assert source.train.labels.tolist()[3] == [0, 1]
    assert source.train.labels.dtype == torch.int8


def test_columns_of_subgroups_stay_with_their_images(tmp_path: Path) -> None:
    write_scenes(tmp_path, 24, seed=4)
    scanner = {}
    with (tmp_path / "labels.csv").open() as lines:
        for number, row in enumerate(csv.DictReader(lines)):
            image = read_image(tmp_path / row["path"])
            image.putpixel((0, 0), (number, 0, 0))  # each image is another
            image.save(tmp_path / row["path"])
            scanner[image_digest(image)] = row["scanner"]
    uri = f"csv:{tmp_path}/labels.csv?group=patient&groups=scanner,patient"
    source, whole = open_source(uri), open_source(uri, "evaluator").test
    assert source.class_names == tuple(SHAPES)
    for split in (source.train, source.test, whole):
        assert split.subgroups["scanner"] == tuple(scanner[split.digest(row)] for row in range(len(split)))
        assert split.subgroups["patient"] == split.groups
    assert len(whole) == 24
    with pytest.raises(DataError, match="has no column site"):
        open_source(f"csv:{tmp_path}/labels.csv?groups=site")
