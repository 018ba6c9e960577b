"""Data sets of torchvision's and of the Hugging Face library, by stand-ins that have what is asked of theirs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torchvision import datasets

from promptfed.shared.data import DataError, open_source, public_sets
from promptfed.shared.data.options import HuggingFaceOptions, Role, TorchvisionOptions
from promptfed.shared.data.registry import class_names_of
from tests.support.hub_rows import ClassLabel, Rows, Value, grey
from tests.support.hub_rows import Image as ImageKind

Hub = Callable[[Any], None]


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    """Has the library load what is given."""
    return lambda loaded: monkeypatch.setattr(public_sets, "_load_dataset", lambda body, options: loaded)


def rows(shades: list[int], labels: list[int] | None = None, names: tuple[str, ...] = ("red_fox", "owl")) -> Rows:
    kinds = {"picture": ImageKind(), "kind": ClassLabel(names), "id": Value()}
    given = labels or [k % 2 for k in range(len(shades))]
    return Rows(kinds, [{"picture": grey(shade), "kind": label} for shade, label in zip(shades, given, strict=True)])


def refused(uri: str) -> str:
    with pytest.raises(DataError) as caught:
        open_source(uri)
    return str(caught.value)


def shades(uri: str, role: Role = "trainer") -> list[list[int]]:
    source = open_source(uri, role)
    return [[np.asarray(part.image(row))[0, 0, 0] for row in range(len(part))] for part in (source.train, source.test)]


@pytest.mark.parametrize(("splits", "query", "parts"), [
    ({"train": 0, "validation": 1, "test": 2}, "", [0, 2]), ({"train": 0, "validation": 1}, "", [0, 1]),
    ({"train": 0, "validation": 1, "test": 2}, "?test=validation&train=test", [2, 1]),
    ({"train": 0, "other": 1}, "", None), (None, "", None),
])  # fmt: skip
def test_the_splits_of_a_hub(hub: Hub, splits: dict[str, int] | None, query: str, parts: list[int] | None) -> None:
    """Without a test split the training images are divided."""
    own = [10 * k for k in range(10)]
    hub(rows(own) if splits is None else {name: rows([k + part for k in own]) for name, part in splits.items()})
    found = shades(f"hf:owner/name{query}")
    if parts is None:
        assert [len(part) for part in found] == [8, 2]
        assert sorted(found[0] + found[1]) == own
        assert shades("hf:owner/name?split_seed=3") != found
    else:
        assert found == [[k + part for k in own] for part in parts]
    assert open_source("hf:owner/name").class_names == ("red fox", "owl")


@pytest.mark.parametrize(("loaded", "query", "says"), [
    ({"train": rows([1, 2])}, "?test=none", "has no split none; it has train"),
    ({"train": rows([1, 2])}, "?train=none", "has no split none; it has train"),
    (rows([1, 2]), "?image=id", "image=id is no column of Image; those are ['picture']"),
    (rows([1, 2]), "?label=picture", "label=picture is no column of ClassLabel; those are ['kind']"),
    (rows([1, 2], [0, -1]), "", "some images have no label; choose a labelled split"),
    (rows([1, 2], [0, 2]), "", "some images have no label"),
    (rows([1, 2], names=("red_fox", "red fox")), "", "would become one, 'red fox'"),
    (Rows({"a": ImageKind(), "b": ImageKind(), "c": ClassLabel(("x",))}, []), "", "of Image are ['a', 'b']; name"),
    (Rows({"a": ImageKind()}, []), "", "columns of ClassLabel are none; name one with label="),
    (rows([1, 2]), "?colour=red", "unknown option colour"),
])  # fmt: skip
def test_what_a_hub_has_not_is_refused(hub: Hub, loaded: Any, query: str, says: str) -> None:
    hub(loaded)
    assert says in refused(f"hf:owner/name{query}")
    assert "names no data set" in refused("hf:")


def test_a_column_of_several_is_named(hub: Hub) -> None:
    kinds = {"a": ImageKind(), "b": ImageKind(), "c": ClassLabel(("x",)), "d": ClassLabel(("y", "z"))}
    hub(Rows(kinds, [{"a": grey(k), "b": grey(100 + k), "c": 0, "d": k % 2} for k in range(4)]))
    assert sorted(chain(*shades("hf:x?image=b&label=d"))) == [100, 101, 102, 103]
    assert class_names_of("hf:x?image=b&label=d") == ("y", "z")


def test_grey_pictures_of_a_hub_have_one_scale(hub: Hub) -> None:
    def deep(*most: int) -> Rows:
        found = rows([0] * len(most))
        for row, value in zip(found.rows, most, strict=True):
            row["picture"] = Image.fromarray(np.full((4, 4), value, dtype=np.uint16))
        return found

    hub(deep(4000, 4001, 4002, 900))
    assert "1 file as 10 bits, 3 as 12 bits" in refused("hf:x")
    assert open_source("hf:x?grey=12").grey == (0, 4095)
    hub({"train": deep(4000, 4001), "test": deep(3000, 4095)})
    assert (open_source("hf:x").train.grey, open_source("hf:x").test.grey) == ((0, 4095), (0, 4095))
    late = rows([1, 2, 3, 4])
    late.rows[2]["picture"] = deep(4000).rows[0]["picture"]
    hub({"train": late, "test": late})
    with pytest.raises(DataError, match=r"row 2 is a grey picture that is read as 12 bits, .*as in grey=12"):
        [open_source("hf:x").test.image(row) for row in range(4)]
    assert open_source("hf:x?grey=12").grey == (0, 4095)


def test_a_split_of_a_hub_may_have_no_image_or_one(hub: Hub) -> None:
    hub({"train": rows([]), "test": rows([1])})
    assert [len(part) for part in shades("hf:x", "evaluator")] == [0, 1]
    assert "no image is left in train" in refused("hf:x")
    hub({"train": rows([]), "test": rows([])})
    assert "no image is left in train" in refused("hf:x?grey=12")


def test_a_row_without_an_image_is_named(hub: Hub) -> None:
    broken = rows([1, 2, 3, 4])
    broken.rows[1]["picture"] = None
    hub({"train": broken, "test": broken})
    with pytest.raises(DataError, match="row 1: column picture holds no readable image"):
        open_source("hf:x").train.image(1)


def test_class_names_of_a_hub_are_found_without_an_image(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = rows([1, 2, 3, 4])
    broken.rows[0]["picture"] = None
    hub({"train": broken, "test": broken})
    assert class_names_of("hf:x?grey=12") == ("red fox", "owl")
    monkeypatch.setattr(datasets, "Own", type("Own", (), {}), raising=False)
    for name in ("Own", "utils", "FakeData", "a-b"):
        assert f"torchvision has no data set {name!r}" in refused(f"torchvision:{name}?root=/tmp")


def test_a_hub_is_loaded_by_name_or_from_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    library: Any = ModuleType("datasets")
    library.load_from_disk = lambda folder: asked.append(folder)
    library.load_dataset = lambda name, config: asked.append((name, config))
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setenv("HOME", str(tmp_path))
    load = public_sets._load_dataset
    for body in ("owner/name", str(tmp_path), "~/own"):
        load(body, HuggingFaceOptions(uri="hf:x", config="fine"))
    assert asked == [("owner/name", "fine"), str(tmp_path), f"{tmp_path}/own"]
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=f"{tmp_path}/pipe: a pipe, a socket or a device cannot be read as data"):
        load(str(tmp_path), HuggingFaceOptions(uri="hf:x"))
    library.load_dataset = lambda name, config: 1 / 0
    with pytest.raises(DataError, match="hf:x: cannot be loaded: division by zero"):
        load("owner/name", HuggingFaceOptions(uri="hf:x"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="needs the datasets library"):
        load("owner/name", HuggingFaceOptions(uri="hf:x"))


class Listed:
    """A data set of torchvision's kind: images, and labels under the attributes that are given."""

    def __init__(self, given: list[Any], **attributes: Any) -> None:
        self.rows: list[tuple[Any, Any]] = [(grey(k), label) for k, label in enumerate(given)]
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> tuple[Any, Any]:
        return self.rows[row]


@pytest.mark.parametrize(("own", "labels"), [
    (Listed([9, 9], targets=[1, 0]), [1, 0]), (Listed([9, 9], targets=[1], labels=np.array([[0], [1]])), [0, 1]),
    (Listed([9, 9], targets=None, y=[1, 1]), [1, 1]), (Listed([9, 9], samples=[("a", 2), ("b", "0")]), [2, 0]),
    (Listed([9, 9], samples=[("a", 2)], imgs=[("a", 0), ("b", 1)]), [0, 1]), (Listed([1, 0]), [1, 0]),
    (Listed([1, {"box": 2}]), None),
])  # fmt: skip
def test_labels_are_found_where_a_library_has_them(own: Listed, labels: list[int] | None) -> None:
    if labels is None:
        with pytest.raises(DataError, match="torchvision's X has no class for each image"):
            public_sets._labels("X", own)
    else:
        assert public_sets._labels("X", own).tolist() == labels


@pytest.mark.parametrize(("name", "own", "names"), [
    ("SVHN", {}, tuple("0123456789")),
    ("EuroSAT", {"classes": ["AnnualCrop", "SeaLake"]}, ("Annual Crop", "Sea Lake")),
    ("X", {"classes": ["AnnualCrop"]}, ("AnnualCrop",)),
    ("MNIST", {"classes": ["0 - zero", "1 - one"]}, ("zero", "one")),
    ("X", {"classes": None, "categories": ["polka/dotted", "x_y", ("a", "b")]}, ("polka dotted", "x y", "a")),
    ("X", {"classes": ["crane", "owl", "crane", "crane"]}, ("crane", "owl", "crane 2", "crane 3")),
    ("X", {"classes": [f"n{k}" for k in range(1000)]}, tuple(f"n{k}" for k in range(1000))),
    ("X", {}, "torchvision's X names no classes"),
    ("X", {"classes": ["a_b", "a b"]}, "the classes .* would become one, 'a b'"),
])  # fmt: skip
def test_class_names_are_words(name: str, own: dict[str, Any], names: Any) -> None:
    if isinstance(names, str):
        with pytest.raises(DataError, match=names):
            public_sets._class_names(name, SimpleNamespace(**own))
    else:
        assert public_sets._class_names(name, SimpleNamespace(**own)) == names


def kind(parameter: str | None = None) -> Any:
    """A class of torchvision's kind whose images are divided by ``split`` or ``train``, or are whole."""

    def opened(self: Listed, root: str, way: Any = None) -> None:
        if root == "/missing":
            raise ImportError("no", name="scipy")
        self.rows = [(grey(k + 100 * (way in ("test", "val", False))), k % 2) for k in range(10)]

    starts: dict[str | None, Any] = {
        None: lambda self, root: opened(self, root),
        "split": lambda self, root, split: opened(self, root, split),
        "train": lambda self, root, train: opened(self, root, train),
    }
    return type("Own", (Listed,), {"__init__": starts[parameter], "classes": ("a", "b")})


@pytest.mark.parametrize(("parameter", "name"), [("split", "X"), ("train", "X"), ("split", "ImageNet"), (None, "X")])
def test_a_librarys_own_splits_are_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parameter: str | None, name: str
) -> None:
    own = kind(parameter)
    monkeypatch.setattr(public_sets, "_kind", lambda body, options: own)
    source = public_sets.open_torchvision(name, TorchvisionOptions(uri="torchvision:X", root=str(tmp_path)))
    both = [[part.image(row).getpixel((0, 0))[0] for row in range(len(part))] for part in (source.train, source.test)]
    if parameter is None:
        assert ([len(part) for part in both], sorted(both[0] + both[1])) == ([8, 2], list(range(10)))
    else:
        assert both == [list(range(10)), list(range(100, 110))]


def test_what_a_librarys_data_set_lacks_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = kind()
    monkeypatch.setattr(public_sets, "_kind", lambda body, options: own)
    with pytest.raises(DataError, match="Own needs the package scipy; install it"):
        public_sets.open_torchvision("X", TorchvisionOptions(uri="torchvision:X", root="/missing"))
    own.classes = ("a",)
    (tmp_path / "deep").mkdir()
    os.mkfifo(tmp_path / "deep" / "pipe")
    with pytest.raises(DataError, match=f"{tmp_path}/deep/pipe: a pipe, a socket or a device cannot be read as data"):
        public_sets.open_torchvision("X", TorchvisionOptions(uri="torchvision:X", root=str(tmp_path)))
    (tmp_path / "deep" / "pipe").unlink()
    with pytest.raises(DataError, match="X has labels beyond its 1 class names"):
        public_sets.open_torchvision("X", TorchvisionOptions(uri="torchvision:X", root=str(tmp_path)))
    clip = Listed([0])
    clip.rows = [(np.zeros((2, 2)), 0)]
    with pytest.raises(DataError, match=r"image 0 of torchvision's X cannot be read \(it is ndarray, no image\)"):
        public_sets._torchvision_split("X", clip).image(0)
