"""Sources by URI: digits, folders, tables, the options common to all, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared.data import DataError, ImageDomain, Source, open_source, public_sets, symbols
from promptfed.shared.data.demo import DEMOS, Demo
from promptfed.shared.data.folder import contact_sheet
from promptfed.shared.data.image_files import image_digest, read_image
from promptfed.shared.data.partition import class_counts, strata
from promptfed.shared.data.registry import SharedSources, class_names_of
from promptfed.shared.data.schemes import SCHEMES
from promptfed.shared.spec.spec import TrainingSpec
from tests.support.own_images import SHAPES, write_scenes
from tests.support.waiting import PATIENCE


def write_image(path: Path, seed: int, suffix: str = "png") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = np.random.default_rng(seed).integers(0, 255, (9, 7, 3), dtype=np.uint8)
    Image.fromarray(grey).save(path.with_suffix(f".{suffix}"))


def class_folders(root: Path, classes: tuple[str, ...] = ("cat", "guinea_pig"), count: int = 5) -> Path:
    for c, name in enumerate(classes):
        for i in range(count):
            write_image(root / name / f"{i}", 100 * c + i)
    return root


def test_digits_split_and_domains() -> None:
    plain, inverted = open_source("digits"), open_source("digits?domain=inverted")
    assert len(plain.train) + len(plain.test) == 1797
    assert torch.equal(plain.test.labels, inverted.test.labels)
    assert np.array_equal(np.asarray(plain.test.image(3)), 255 - np.asarray(inverted.test.image(3)))
    assert plain.class_names[7] == "seven"
    known = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # of the UCI repository's test set
    assert (torch.bincount(plain.train.labels) + torch.bincount(plain.test.labels)).tolist() == known
    assert np.asarray(plain.test.image(3)).mean() > 128, "dark on white"
    assert plain.train.image(0).size == (48, 48)
    digests = {plain.train.digest(i) for i in range(len(plain.train))}
    assert not digests & {plain.test.digest(i) for i in range(len(plain.test))}


def test_clients_parts_are_disjoint_and_complete() -> None:
    for options in ("partition=iid", "partition=dirichlet&alpha=0.5", "partition=pathological"):
        parts = [open_source(f"digits?{options}&clients=3&client={k}") for k in range(3)]
        assert sum(len(p.train) for p in parts) == len(open_source("digits").train)
        assert sum(len(p.test) for p in parts) == len(open_source("digits").test)
        seen = [{p.train.digest(i) for i in range(0, len(p.train), 7)} for p in parts]
        assert not seen[0] & seen[1]


def test_pathological_parts_have_their_own_classes() -> None:
    first = open_source("digits?partition=pathological&classes_per_client=4&client=0")
    last = open_source("digits?partition=pathological&classes_per_client=4&client=1")
    assert set(first.train.labels.tolist()) == set(first.test.labels.tolist())
    assert len(set(first.train.labels.tolist())) == 4
    assert len(set(last.train.labels.tolist())) == 6
    assert len(first.class_names) == 4
    assert len(last.class_names) == 6
    assert not set(first.class_names) & set(last.class_names)
    whole = open_source("digits")
    digests = {whole.train.digest(row): whole.class_names[label] for row, label in enumerate(whole.train.labels)}
    for row, label in enumerate(first.train.labels[:20]):
        assert digests[first.train.digest(row)] == first.class_names[label]


def test_shots_cut_train_alone() -> None:
    source = open_source("digits?shots=2&split_seed=5")
    assert torch.bincount(source.train.labels).tolist() == [2] * 10
    assert len(source.test) == len(open_source("digits?split_seed=5").test)
    other = open_source("digits?shots=2&split_seed=6")
    assert {source.train.digest(i) for i in range(20)} != {other.train.digest(i) for i in range(20)}


def test_base_and_novel_halves() -> None:
    base, novel = open_source("digits?classes=base"), open_source("digits?classes=novel")
    assert base.class_names == ("zero", "one", "two", "three", "four")
    assert novel.class_names == ("five", "six", "seven", "eight", "nine")
    assert set(novel.test.labels.tolist()) == set(range(5))


def test_folder_of_class_folders(tmp_path: Path) -> None:
    source = open_source(f"folder:{class_folders(tmp_path)}")
    assert source.class_names == ("cat", "guinea pig")
    assert len(source.train) == 8
    assert len(source.test) == 2
    assert source.domain is None
    assert source.train.image(0).mode == "RGB"
    again = open_source(f"folder:{tmp_path}")
    assert [source.test.digest(i) for i in range(2)] == [again.test.digest(i) for i in range(2)]


def test_folder_with_train_and_test(tmp_path: Path) -> None:
    class_folders(tmp_path / "train", count=3)
    class_folders(tmp_path / "test", count=1)
    source = open_source(f"folder:{tmp_path}")
    assert (len(source.train), len(source.test)) == (6, 2)


def test_folder_of_domains(tmp_path: Path) -> None:
    class_folders(tmp_path / "sketch", count=4)
    class_folders(tmp_path / "art_painting", count=4)
    source = open_source(f"folder:{tmp_path}?domain=art_painting")
    assert source.domain is not None
    assert source.domain.description == "an art painting of a {}"
    with pytest.raises(DataError, match="no domain folder photo; it has art_painting, sketch"):
        open_source(f"folder:{tmp_path}?domain=photo")
    with pytest.raises(DataError, match="add domain=art_painting"):
        open_source(f"folder:{tmp_path}")
    (tmp_path / "none").mkdir()
    refuse(f"folder:{tmp_path / 'none'}?domain=photo", "has no domain folder photo; it has none.")


def test_digest_depends_on_pixels_not_on_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for i in range(2):
            write_image(tmp_path / "x" / name / f"{i}", i, "png")
            write_image(tmp_path / "y" / name / f"{i}", i, "bmp")
    x, y = open_source(f"folder:{tmp_path}/x"), open_source(f"folder:{tmp_path}/y")
    assert x.train.digest(0) == y.train.digest(0)


def refuse(uri: str, *says: str) -> None:
    with pytest.raises(DataError) as caught:
        open_source(uri)
    for part in says:
        assert part in str(caught.value)


def test_unreadable_images_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path)
    (tmp_path / "cat" / "broken.png").write_bytes(b"not an image")
    refuse(f"folder:{tmp_path}", "broken.png", "cannot be read")
    for number in range(4):
        (tmp_path / "cat" / f"notes-{number}.txt").write_text("not an image either")
    refuse(
        f"folder:{tmp_path}", "broken.png", "notes-0.txt", "notes-1.txt", "And 2 more; `promptfed data show` lists all"
    )


def test_what_file_managers_leave_is_no_image_of_the_class(tmp_path: Path) -> None:
    class_folders(tmp_path)
    before = open_source(f"folder:{tmp_path}")
    for name in ("Thumbs.db", "desktop.ini", ".DS_Store"):
        (tmp_path / "cat" / name).write_bytes(b"not an image")
    after = open_source(f"folder:{tmp_path}")
    assert torch.equal(after.train.labels, before.train.labels)


def test_truncated_images_are_named(tmp_path: Path) -> None:
    class_folders(tmp_path)
    write_image(tmp_path / "cat" / "9", 9, "jpg")
    whole = (tmp_path / "cat" / "9.jpg").read_bytes()
    (tmp_path / "cat" / "9.jpg").write_bytes(whole[: len(whole) - 30])
    refuse(f"folder:{tmp_path}", "9.jpg", "cannot be read")


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    refuse(f"folder:{tmp_path}/none", "there is no folder")
    refuse("folder:", "names no folder")
    refuse(f"folder:{tmp_path}", "has no class folder")
    class_folders(tmp_path)
    (tmp_path / "dog").mkdir()
    refuse(f"folder:{tmp_path}", "dog", "is empty")


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    class_folders(tmp_path, count=3)
    write_image(tmp_path / "dog" / "0", 1)
    refuse(f"folder:{tmp_path}", "dog", "one image")


def test_a_missing_split_is_refused(tmp_path: Path) -> None:
    class_folders(tmp_path / "train")
    refuse(f"folder:{tmp_path}", "has train but no test")
    class_folders(tmp_path / "test", classes=("cat",))
    refuse(f"folder:{tmp_path}", "no folder for the class guinea pig")


def table(root: Path, *lines: str) -> str:
    (root / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"csv:{root}/labels.csv"


def test_csv_with_split_and_domain(tmp_path: Path) -> None:
    for i in range(4):
        write_image(tmp_path / f"{i}", i)
    uri = table(
        tmp_path, "path,label,split,domain", "0.png,cat,train,ink", "1.png,cat,test,ink", "2.png,dog,train,ink",
        "3.png,dog,test,oil",
    )  # fmt: skip
    (tmp_path / "domain.txt").write_text("a stroke of {}")
    source = open_source(f"{uri}?domain=ink")
    assert source.class_names == ("cat", "dog")
    assert source.domain == ImageDomain("ink", "a stroke of {}")
    assert (len(source.train), len(source.test)) == (2, 1)
    refuse(f"{uri}?domain=wax", "no image of the domain wax")


def test_bad_tables_are_refused(tmp_path: Path) -> None:
    write_image(tmp_path / "0", 0)
    refuse(f"csv:{tmp_path}/labels.csv", "there is no file")
    refuse(table(tmp_path, "path,class", "0.png,cat"), "class is cat, not 1 (present)", "call a column of names label")
    refuse(table(tmp_path, "path,label"), "has no image")
    refuse(table(tmp_path, "path,label", "0.png,"), "line 2", "must not be empty")
    refuse(table(tmp_path, "path,label,split", "0.png,cat,dev"), "line 2", "dev")
    refuse(table(tmp_path, "path,label,split", "0.png,cat,train"), "only the split train")
    refuse(table(tmp_path, "path,label", "gone.png,cat", "0.png,cat"), "gone.png", "cannot be read")


BAD_URIS = [
    (
        "pictures:/x",
        "known are csv, dicom, digits, emoji, emoji-scenes, folder, hf, solar, stamps, symbols, torchvision",
    ), ("", "unknown data source"), ("digits:/x", "takes nothing before its options"),
    ("digits?domian=inverted", "unknown option domian"),
    ("digits?domain=green", "domain=green is not known; choose one of plain, inverted"),
    ("digits?shots=two", "shots=two is not a whole number"), ("digits?shots=0", "shots=0 is less than 1"),
    ("digits?shots=1&shots=2", "given twice"), ("digits?shots", "options are written"),
    ("digits?classes=half", "classes=half is not known"),
    ("digits?partition=dirichlet&clients=3&client=0&alpha=x", "alpha=x is not a number"),
    ("symbols:etching", "unknown domain etching; symbols has photo"), ("symbols:sketch?domain=neon", "two domains"),
    ("symbols:sketch?topic=cars", "topic=cars is not known; choose one of weather"),
    ("symbols:sketch?per_class=0", "per_class=0 is less than 1"),
    ("symbols:sketch?colour=red", "unknown option colour; accepted are alpha"),
    ("digits?partition=pathological&clients=11&client=0", "10 classes cannot be disjoint over 11 clients"),
]  # fmt: skip


@pytest.mark.parametrize(("uri", "says"), BAD_URIS)
def test_bad_uris_are_refused_in_one_sentence(uri: str, says: str) -> None:
    with pytest.raises(DataError) as caught:
        open_source(uri)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_validation_holds_out_training_images_and_leaves_the_test_images_alone() -> None:
    whole = open_source("digits")
    held = open_source("digits?validation=0.25")
    trained = {held.train.digest(row) for row in range(len(held.train))}
    tested = {held.test.digest(row) for row in range(len(held.test))}
    assert not trained & tested
    assert trained | tested == {whole.train.digest(row) for row in range(len(whole.train))}
    assert not tested & {whole.test.digest(row) for row in range(len(whole.test))}
    for label in range(10):
        count = int((whole.train.labels == label).sum())
        assert int((held.test.labels == label).sum()) == round(count / 4)


def test_validation_and_partition_go_together() -> None:
    parts = [
        open_source(f"digits?validation=0.5&partition=dirichlet&alpha=1&clients=3&client={client}")
        for client in range(3)
    ]
    held = open_source("digits?validation=0.5")
    assert sum(len(part.train) for part in parts) == len(held.train)
    assert sum(len(part.test) for part in parts) == len(held.test)


@pytest.mark.parametrize("share", ["0", "1", "-0.5", "nan", "half"])
def test_a_share_for_validation_lies_between_0_and_1(share: str) -> None:
    with pytest.raises(DataError, match="validation="):
        open_source(f"digits?validation={share}")


def test_only_some_classes_are_kept_in_the_source_s_order() -> None:
    whole, some = open_source("digits"), open_source("digits?only=nine, two")
    assert some.class_names == ("two", "nine")
    two, nine = whole.class_names.index("two"), whole.class_names.index("nine")
    assert len(some.train) == int(((whole.train.labels == two) | (whole.train.labels == nine)).sum())
    digests = {whole.train.digest(row): int(label) for row, label in enumerate(whole.train.labels)}
    assert all(digests[some.train.digest(row)] == (two, nine)[label] for row, label in enumerate(some.train.labels))
    with pytest.raises(DataError, match="names the class 'eleven'"):
        open_source("digits?only=two,eleven")


def test_a_template_of_the_uri_stands_in_for_the_data_sets_own() -> None:
    assert open_source("digits?template=the digit {}.&shots=1").template == "the digit {}."
    assert SharedSources().open("digits?template=the digit {}.").template == "the digit {}."
    assert open_source("digits").template != "the digit {}."
    with pytest.raises(DataError, match="exactly once"):
        open_source("digits?template=a digit")


@pytest.mark.extended
def test_libraries_of_hospitals_are_imported_by_their_sources_alone() -> None:
    heavy = ["pydicom", "pylibjpeg"]
    code = f"""
import sys
import promptfed.cli.main, promptfed.client_service.worker, promptfed.coordinator.app
from promptfed.shared.data import open_source
open_source("symbols:sketch?only=sun,cloud&per_class=2&test_per_class=1")
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout == "[]\n"


def own_table(folder: Path, text: str, name: str = "labels.csv") -> str:
    for shade, of in enumerate(("red0", "red1", "red2", "blue0", "blue1", "blue2")):
        if not (folder / "i" / f"{of}.png").exists():
            (folder / "i").mkdir(exist_ok=True)
            Image.new("RGB", (32, 32 + shade), of[:-1]).save(folder / "i" / f"{of}.png")
    (folder / name).write_text(text)
    return f"csv:{folder / name}"


ROWS = "".join(f"i/{of}{k}.png,{of}\n" for of in ("red", "blue") for k in range(3))


TREACHEROUS = [
    (f"path,label\n{ROWS}i/red1.png,red\n", "line 8: i/red1.png is the image of line 3 too; keep one line"),
    (f"path,label\n{ROWS}./i/../i/red1.png,blue\n", "line 8: ./i/../i/red1.png is the image of line 3 too"),
    (f"path,label\n{ROWS}\n\ni/link.png,red\n", "line 10: i/link.png is the image of line 2 too"),
    ("path,label,split\ni/red0.png,red,train\ni/red0.png,red,test\n", "line 3: i/red0.png is the image of line 2"),
    ("path,red,blue\ni/red0.png,1,0\ni/red0.png,0,1\n", "line 3: i/red0.png is the image of line 2"),
    (f"path,label,label\n{ROWS}", "labels.csv has the column label twice; rename or remove one of them"),
    ("path,red,red\ni/red0.png,1,0\n", "labels.csv has the column red twice"),
    (
        f"path,label\n{ROWS}".replace(",", ";"),
        "labels.csv separates its columns by semicolons; separate them by commas",
    ),
    (f"path,label\n{ROWS}".replace(",", "\t"), "separates its columns by tabs; separate them by commas"),
    (f"Path,label\n{ROWS}", "labels.csv calls its column 'Path'; call it path"),
    (f"path,Label\n{ROWS}", "labels.csv calls a column 'Label'; call it label"),
    (f"path, label\n{ROWS}", "labels.csv calls a column ' label'; call it label"),
    ("path,red,\ni/red0.png,1,0\n", "labels.csv has a column without a name"),
    ("path,label\ni\\red0.png,red\ni\\blue0.png,blue\n", r"line 2: there is no image i\\red0.png; write / between"),
    ("path,red,blue\ni\\red0.png,1,0\n", r"line 2: there is no image i\\red0.png; write / between"),
]


@pytest.mark.parametrize(("text", "says"), TREACHEROUS)
def test_a_table_that_says_something_else_than_it_seems_is_refused(tmp_path: Path, text: str, says: str) -> None:
    uri = own_table(tmp_path, text)
    (tmp_path / "i" / "link.png").symlink_to("red0.png")
    for role in ("trainer", "evaluator"):
        with pytest.raises(DataError, match=says):
            open_source(uri, role)
        with pytest.raises(DataError, match=says):
            class_names_of(uri, role)


def test_a_file_is_in_one_class_folder_and_in_one_split(tmp_path: Path) -> None:
    own_table(tmp_path, "")
    (tmp_path / "d" / "red").mkdir(parents=True)
    (tmp_path / "d" / "blue").symlink_to(tmp_path / "i")
    for k in range(3):
        (tmp_path / "d" / "red" / f"{k}.png").symlink_to(tmp_path / "i" / f"red{k}.png")
    with pytest.raises(DataError, match=r"red/0\.png is the same file as .*blue/red0\.png; keep one of them"):
        open_source(f"folder:{tmp_path / 'd'}")


def test_a_path_may_hold_a_question_mark(tmp_path: Path) -> None:
    for name, written in (("what?", "what%3F"), ("a%3Fb", "a%253Fb"), ("a%20b", "a%20b"), ("50%", "50%")):
        (tmp_path / name).mkdir()
        uri = own_table(tmp_path / name, f"path,label\n{ROWS}").replace(name, written)
        for own in (uri, f"{uri}?split_seed=1"):
            assert open_source(own).class_names == ("blue", "red")
    with pytest.raises(DataError, match=r"a \? of a path is written %3F"):
        open_source(f"folder:{tmp_path}/what?/i")


def test_a_class_folder_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    own_table(tmp_path, "")
    (tmp_path / "d" / "red").mkdir(parents=True)
    odd = tmp_path / "d" / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    for k in range(3):
        shutil.copy(tmp_path / "i" / f"red{k}.png", tmp_path / "d" / "red")
        shutil.copy(tmp_path / "i" / f"blue{k}.png", odd)
    for read in (open_source, class_names_of, SharedSources().open):
        with pytest.raises(DataError, match=r"the class name 'caf\\udce9' is not UTF-8; rename its folder"):
            read(f"folder:{tmp_path / 'd'}")


def pixels(split: object, index: int) -> np.ndarray:
    return np.asarray(split.image(index))


@pytest.mark.parametrize(("uri", "most"), [
    ("symbols:neon?per_class=", 1000), ("symbols:neon?test_per_class=", 1000), ("symbols:neon?test_seed=", 2**31 - 1),
    ("emoji-scenes:flat?count=", 20_000), ("emoji-scenes:flat?test_count=", 20_000),
    *((f"digits?{name}=", 2**31 - 1) for name in ("shots", "split_seed", "min_per_class", "validation_seed")),
    *((f"digits?partition=iid&{name}=", 2**31 - 1) for name in ("clients", "client", "partition_seed")),
])  # fmt: skip
def test_whole_numbers_have_a_bound(uri: str, most: int) -> None:
    """`per_class=99999999` took all memory."""
    name = uri.rpartition("&")[2].rpartition("?")[2].removesuffix("=")
    options = SCHEMES[uri.partition("?")[0].partition(":")[0]].options.parse(uri, f"{name}={most}")
    assert getattr(options, name) == most
    needed = {"validation_seed": "&validation=0.5", "client": "&clients=2", "partition_seed": "&clients=2&client=0"}
    with pytest.raises(DataError, match=f"{name}={most + 1} is more than {most}, the most"):
        open_source(f"{uri}{most + 1}{needed.get(name, '')}")


def test_names_and_glyphs_are_distinct_and_plain() -> None:
    assert 60 <= len(symbols.SYMBOLS) <= 110
    assert len({s.name for s in symbols.SYMBOLS}) == len({s.codepoint for s in symbols.SYMBOLS}) == len(symbols.SYMBOLS)
    assert all(1 <= len(s.name.split()) <= 3 and s.name.replace(" ", "").isalpha() for s in symbols.SYMBOLS)
    masks = torch.stack([symbols.glyph(chr(s.codepoint)) for s in symbols.SYMBOLS]).flatten(1)
    unit = masks / masks.norm(dim=1, keepdim=True)
    likeness = unit @ unit.T - torch.eye(len(symbols.SYMBOLS))
    assert likeness.max() < 0.95


@pytest.mark.parametrize("trouble", ["none", "damaged", "cut", "a folder", "read-only", "no home"])
def test_kept_pictures_are_those_drawn(trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever has become of the cache, which is only ever a shorter way to the same pixels."""

    def digests() -> list[str]:
        source = open_source("symbols:chalk?topic=weather&per_class=9&test_per_class=1")
        return [split.digest(row) for split in (source.train, source.test) for row in range(len(split))]

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder, made = tmp_path / "promptfed" / "symbols", []
    real = symbols.render
    monkeypatch.setattr(symbols, "render", lambda *given: made.append(1) or real(*given))
    first = digests()
    files, batches = sorted(folder.iterdir()), len(made)
    assert len(files) == batches > 2
    whole = files[0].read_bytes()
    if trouble in ("damaged", "cut"):
        files[0].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if trouble == "damaged" else whole[:7])
    elif trouble == "a folder":
        files[0].unlink()
        files[0].mkdir()
    elif trouble == "read-only":
        shutil.rmtree(folder)
        monkeypatch.setattr(symbols, "write_whole", lambda *given, **more: (_ for _ in ()).throw(PermissionError()))
    elif trouble == "no home":
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "expanduser", lambda path: (_ for _ in ()).throw(RuntimeError("no home")))
    made.clear()
    assert digests() == first
    again = {"none": 0, "damaged": 1, "cut": 1, "a folder": 1, "read-only": batches, "no home": batches}
    assert len(made) == again[trouble]
    if trouble in ("damaged", "cut"):
        assert files[0].read_bytes() == whole
    if trouble == "none":
        monkeypatch.setattr(symbols, "_MOST_KEPT", 2)
        open_source("symbols:neon?topic=weather&per_class=9").train.image(0)
        assert len(list(folder.iterdir())) == 2


def test_pictures_do_not_depend_on_the_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are drawn in one, and the caller's number is back afterwards."""
    before, drawn = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / str(threads)))
            source = open_source("symbols:painting?topic=weather&per_class=9&test_per_class=1")
            drawn.append([source.train.digest(row) for row in range(len(source.train))])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("style", list(symbols.STYLES))
def test_an_image_does_not_depend_on_its_batch(style: str) -> None:
    keys = symbols.hash_keys("test", np.arange(37))
    glyphs = torch.stack([symbols.glyph(chr(s.codepoint)) for s in symbols.SYMBOLS[:37]])
    together = symbols.render(glyphs, [style] * 37, keys)
    for row in (0, 17, 36):
        alone = symbols.render(glyphs[row : row + 1], [style], keys[row : row + 1])
        assert torch.equal(together[row], alone[0])
    mixed = symbols.render(glyphs, [style if i % 2 else "photo" for i in range(37)], keys)
    assert torch.equal(mixed[17], together[17])


# Three images of each style: the mean and the deviation of red, green and blue in 4 x 4 squares. Published figures are
# of these pictures.
GOLDEN = json.loads(Path(__file__).with_name("drawn_symbols.json").read_text())


@pytest.mark.parametrize("style", list(symbols.STYLES))
def test_a_drawn_picture_stays_the_same(style: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawn anew: not what this machine has kept of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    drawn = open_source(f"symbols:{style}?topic=weather&per_class=2&test_per_class=1").train
    for row, (means, deviations) in zip((0, 5, 9), GOLDEN[style], strict=True):
        squares = np.asarray(drawn.image(row)).reshape(4, 12, 4, 12, 3).astype(float)
        assert squares.mean((1, 3)).reshape(-1).tolist() == pytest.approx(means, abs=1.01)
        assert squares.std((1, 3)).reshape(-1).tolist() == pytest.approx(deviations, abs=1.01)


class Still(symbols.Draws):
    """Draws an angle, the middle of every other range, and even noise."""

    def __init__(self, angle: float, level: float) -> None:
        super().__init__(np.zeros(1, np.uint64))
        self.angle, self.level = angle, level

    def uniform(self, low: float = 0.0, high: float = 1.0, count: int = 1) -> torch.Tensor:
        return torch.full((1, count, 1, 1), self.angle if high == math.pi else (low + high) / 2)

    def noise(self, size: int = symbols.SIZE, channels: int = 1) -> torch.Tensor:
        return torch.full((1, channels, size, size), self.level)

    def cells(self, cells: int, channels: int = 1) -> torch.Tensor:
        return self.noise(channels=channels) * 0


def test_strokes_move_a_thing_along_their_direction_alone() -> None:
    """Even noise is a stroke over the whole picture, which it also brightens by 0.13 of its strength, 2.2."""
    bar = torch.zeros(1, 1, symbols.SIZE, symbols.SIZE)
    bar[..., 16:32, :] = 1
    for angle, along in ((0.0, bar), (math.pi / 2, bar.mT)):
        for thing, stays in ((along, True), (along.mT, False)):
            plain, moved = (symbols._painting(thing, Still(angle, level)) - 0.13 * 2.2 * level for level in (0.0, 1.0))
            change = (moved - plain)[..., 8:-8, 8:-8].abs().max()  # beyond the picture there is no thing
            assert (float(change) < 1e-4) is stays


def test_stripes_are_a_wave_across_a_direction() -> None:
    """Their phase is drawn from 0 to 6.28."""
    x, y = symbols.grid()
    wanted = torch.sin(38 * (math.cos(0.3) * x + math.sin(0.3) * y) + 3.14)
    torch.testing.assert_close(symbols._waves(Still(0.3, 0.0), 38.0), wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("style", list(symbols.STYLES))
def test_a_style_shows_its_thing(style: str) -> None:
    """The same draws with and without a glyph differ: no style hides what it draws."""
    keys = symbols.hash_keys("test", np.arange(12))
    glyphs = torch.stack([symbols.glyph(chr(s.codepoint)) for s in symbols.SYMBOLS[:12]])
    shown = symbols.render(glyphs, [style] * 12, keys).float()
    empty = symbols.render(torch.zeros_like(glyphs), [style] * 12, keys).float()
    changed = ((shown - empty).abs().amax(1) > 24).float().mean((1, 2))
    assert changed.mean() > 0.05


def test_train_and_test_share_no_image() -> None:
    source = open_source("symbols:quickdraw?topic=games&per_class=8&test_per_class=8")
    train = {source.train.digest(i) for i in range(len(source.train))}
    test = {source.test.digest(i) for i in range(len(source.test))}
    assert len(train) == len(source.train)
    assert not train & test


def test_more_images_per_class_keep_the_first_ones() -> None:
    few = open_source("symbols:neon?topic=music&per_class=2")
    many = open_source("symbols:neon?topic=music&per_class=5")
    assert few.train.digest(2) == many.train.digest(5)


def test_a_part_has_the_images_of_the_whole() -> None:
    whole = open_source("symbols:chalk?topic=signs&per_class=4")
    part = open_source("symbols:chalk?topic=signs&per_class=4&classes=novel")
    offset = len(whole.class_names) - len(part.class_names)
    assert part.class_names == whole.class_names[offset:]
    assert part.train.labels.min() == 0
    assert part.train.digest(0) == whole.train.digest(4 * offset)


@pytest.mark.parametrize("topic", symbols.TOPICS)
def test_a_topic_is_a_data_set_of_its_own(topic: str) -> None:
    source = open_source(f"symbols:?topic={topic}&per_class=1")
    assert set(source.class_names) == {s.name for s in symbols.SYMBOLS if s.topic == topic}
    assert source.template == symbols.TOPIC_TEMPLATES[topic]
    assert source.template.count("{}") == 1
    assert source.domain is not None
    assert source.domain.name == "photo"


def test_the_domain_can_be_an_option() -> None:
    a = open_source("symbols:sketch?topic=music&per_class=1")
    b = open_source("symbols:?domain=sketch&topic=music&per_class=1")
    assert a.train.digest(0) == b.train.digest(0)
    assert a.domain is not None
    assert a.domain.description == "a sketch of a {}"


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


def test_imagenet_has_the_names_that_clip_s_authors_gave_it() -> None:
    """Of torchvision's 1,000 tuples and of a hub's synonyms; two classes of one curated name keep their own words."""
    words = {n: f"class {n}" for n in range(1000)} | {0: "tench", 134: "crane", 657: "missile", 744: "projectile"}
    tuples = SimpleNamespace(classes=[(words[n], "synonym") for n in range(1000)])
    found = public_sets._class_names("ImageNet", tuples)
    assert [found[n] for n in (0, 1, 134, 517, 657, 744)] == [
        "tench", "goldfish", "crane bird", "construction crane", "missile", "projectile",
    ]  # fmt: skip
    assert len(set(found)) == 1000
    assert public_sets._curated([f"{words[n]}, synonym" for n in range(1000)]) == list(found)
    assert public_sets._class_names("Imagenette", SimpleNamespace(classes=tuples.classes[:10]))[1] == "class 1"


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


UNOPENABLE = [
    ("torchvision:OxfordIIITPet", "needs root="),
    ("torchvision:Nothing?root=/tmp", "has no data set 'Nothing'"),
    ("torchvision:VisionDataset?root=/tmp", "has no data set"),
    ("torchvision:folder.os?root=/tmp", "has no data set"),
    ("torchvision:EuroSAT?root={empty}", "EuroSAT is not in"),
    ("torchvision:OxfordIIITPet?root={empty}", "download=True"),
    ("torchvision:CocoDetection?root={empty}", "is not in"),
]


@pytest.mark.parametrize(("uri", "complaint"), UNOPENABLE)
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
    with pytest.raises(DataError, match="cannot be loaded"):
        open_source(f"hf:{tmp_path / 'nowhere'}")


@pytest.mark.parametrize("demo", [demo for demo in DEMOS.values() if not demo.scans], ids=lambda demo: demo.unseen[0])
def test_clients_share_classes_and_template_but_not_the_unseen_domain(demo: Demo) -> None:
    if demo.unseen[1].startswith("solar") and find_spec("elpv_dataset") is None:
        pytest.skip("promptfed[photos] is not installed")
    sources = [open_source(uri) for _, uri in demo.clients]
    unseen = open_source(demo.unseen[1])
    assert len({name for name, _ in [*demo.clients, demo.unseen]}) == len(demo.clients) + 1
    assert {s.class_names for s in sources} == {unseen.class_names}
    assert demo.class_names in (None, unseen.class_names)
    assert {s.template for s in [*sources, unseen]} == {demo.template}
    assert unseen.domain is not None
    assert unseen.domain not in [s.domain for s in sources]


@pytest.mark.parametrize("demo", DEMOS.values(), ids=list(DEMOS))
def test_training_settings_are_a_spec_s(demo: Demo) -> None:
    for method in (demo.method, *demo.others, "promptfl"):
        assert TrainingSpec.model_validate(dict(demo.training(method))).epochs == 1


def test_the_settings_are_read_without_torch() -> None:
    code = "import promptfed.shared.data.demo, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Sources with several labels per image: drawn scenes, tables and data sets of the Hugging Face library.


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
    assert strata(torch.tensor([[0, 1], [0, 1]])).tolist() == [1, 1], "all images have it, and none the rarer one"
    parts = [open_source(f"{SCENES}&partition=dirichlet&alpha=0.3&clients=3&client={k}") for k in range(3)]
    assert sum(len(part.train) for part in parts) == 300
    given = torch.cat([part.train.labels for part in parts])
    assert class_counts(given, 11) == class_counts(open_source(SCENES).train.labels, 11)
    digests = [part.test.digest(row) for part in parts for row in range(len(part.test))]
    assert len(digests) == len(set(digests)) == 60
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


OF_ONE_LABEL = [
    ("partition=pathological&clients=2&client=0", "partition=pathological is for one label per image"),
    ("seed=-1", "seed=-1 is less than 0"),
    ("purpose=all", "choose one of test, train"),
]


@pytest.mark.parametrize(("options", "text"), OF_ONE_LABEL)
def test_options_that_need_one_label_are_refused(options: str, text: str) -> None:
    assert text in refused(f"{SCENES}&{options}")


def test_clients_in_one_process_draw_the_same_scenes() -> None:
    shared = SharedSources()
    for uri in (f"{SCENES}&seed=10", f"{SCENES}&partition=iid&clients=2&client=1"):
        own, alone = shared.open(uri), open_source(uri)
        assert torch.equal(own.train.labels, alone.train.labels)
        assert own.train.digest(0) == alone.train.digest(0)


def table_of_several_labels(folder: Path, *lines: str) -> str:
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
    uri = table_of_several_labels(
        tmp_path, "path,patient,pleural_effusion,mass,split", "a.png,p,1,0,train", "b.png,p,,1.0,train",
        "c.png,q,0,,test", "d.png,q,0.0,1,test",
    )  # fmt: skip
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
    uri = table_of_several_labels(tmp_path, "path,labels", *lines)
    source = open_source(uri)
    assert source.class_names == ("cat", "dog")
    assert rows(source) == {0: [1, 1], 1: [0, 0], **{k: [0, 1] for k in (2, 3, 4)}, **{k: [1, 0] for k in (5, 6, 7)}}
    named = table_of_several_labels(tmp_path, "path,Finding Labels,age", *[f"{line},57" for line in lines])
    assert rows(open_source(f"{named}?labels=Finding Labels")) == rows(source)


WRONG_TABLES = [
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
]


@pytest.mark.parametrize(("header", "line", "options", "text"), WRONG_TABLES)
def test_wrong_tables_name_line_and_what_to_do(tmp_path: Path, header: str, line: str, options: str, text: str) -> None:
    assert text in refused(table_of_several_labels(tmp_path, header, line) + options)


def test_unreadable_images_of_several_labels_are_told_beside_wrong_lines(tmp_path: Path) -> None:
    (tmp_path / "x.png").write_bytes(b"not an image")
    told = refused(table_of_several_labels(tmp_path, "path,cat", "a.png,2", "gone.png,1", "x.png,1"))
    for text in ("line 2: cat is 2", "line 3: there is no image gone.png", "x.png cannot be read as an image"):
        assert told.count(text) == 1
    assert told.count("gone.png") == 1


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
