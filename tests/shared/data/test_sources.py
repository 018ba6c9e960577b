"""Sources by URI: digits, folders, tables, the options common to all, and what is refused."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared.data import DataError, open_source
from promptfed.shared.data.registry import SharedSources, class_names_of
from tests.support.own_images import union_uri
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


# digits


def test_digits_split_and_domains() -> None:
    plain, inverted = open_source("digits"), open_source("digits?domain=inverted")
    assert len(plain.train) + len(plain.test) == 1797
    assert torch.equal(plain.test.labels, inverted.test.labels)
    assert np.array_equal(np.asarray(plain.test.image(3)), 255 - np.asarray(inverted.test.image(3)))
    assert plain.class_names[7] == "seven"
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


# folders


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


# tables


def table(root: Path, *lines: str) -> str:
    (root / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return f"csv:{root}/labels.csv"


def test_csv_with_split_and_domain(tmp_path: Path) -> None:
    for i in range(4):
        write_image(tmp_path / f"{i}", i)
    uri = table(
        tmp_path,
        "path,label,split,domain",
        "0.png,cat,train,ink",
        "1.png,cat,test,ink",
        "2.png,dog,train,ink",
        "3.png,dog,test,oil",
    )
    source = open_source(f"{uri}?domain=ink")
    assert source.class_names == ("cat", "dog")
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


# every URI


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        (
            "pictures:/x",
            "known are csv, dicom, digits, emoji, emoji-scenes, folder, hf, symbols, torchvision",
        ),
        ("", "unknown data source"),
        ("digits:/x", "takes nothing before its options"),
        ("digits?domain=green", "domain=green is not known; choose one of plain, inverted"),
        ("digits?shots=two", "shots=two is not a whole number"),
        ("digits?shots=0", "shots=0 is less than 1"),
        ("digits?shots=1&shots=2", "given twice"),
        ("digits?shots", "options are written"),
        ("digits?classes=half", "classes=half is not known"),
        ("digits?client=1", "client needs partition="),
        ("digits?partition=iid", "needs clients="),
        ("digits?partition=iid&clients=3", "needs client=0 to 2"),
        ("digits?partition=iid&clients=3&client=3", "not one of the 3 clients"),
        ("digits?partition=iid&clients=3&client=0&alpha=1", "alpha is for"),
        ("digits?partition=iid&clients=3&client=0&classes_per_client=1", "classes_per_client is for"),
        ("digits?partition=dirichlet&clients=3&client=0&alpha=x", "alpha=x is not a number"),
        ("digits?partition=pathological&clients=11&client=0", "10 classes cannot be disjoint over 11 clients"),
    ],
)
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
open_source({union_uri(["symbols:sketch?only=sun,cloud&per_class=2&test_per_class=1"] * 2)!r})
print([name for name in {heavy} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE)
    assert done.stdout == "[]\n"


# tables as people write them


def own_table(folder: Path, text: str, name: str = "labels.csv") -> str:
    for shade, of in enumerate(("red0", "red1", "red2", "blue0", "blue1", "blue2")):
        if not (folder / "i" / f"{of}.png").exists():
            (folder / "i").mkdir(exist_ok=True)
            Image.new("RGB", (32, 32 + shade), of[:-1]).save(folder / "i" / f"{of}.png")
    (folder / name).write_text(text)
    return f"csv:{folder / name}"


ROWS = "".join(f"i/{of}{k}.png,{of}\n" for of in ("red", "blue") for k in range(3))


@pytest.mark.parametrize(
    ("text", "says"),
    [
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
    ],
)
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
        for own in (uri, f"{uri}?split_seed=1", f"union:{quote(uri, safe='')}"):
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
