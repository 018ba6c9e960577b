"""Folders and tables as people have them: an evaluator's, with rare classes, with words, in other formats, huge."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.client_service.serving import prediction
from promptfed.client_service.serving.prediction import BadImage
from promptfed.client_service.training.data import domain_of
from promptfed.shared.data import DataError, image_files, open_source, public_sets
from promptfed.shared.data.image_files import LARGE, SHRUNK, read_image
from promptfed.shared.data.options import HuggingFaceOptions
from promptfed.shared.data.registry import SharedSources, class_names_of
from tests.support.own_images import picture, tiff_with_a_fraction_as_an_offset, write_folder


def digests(uri: str, role: str = "trainer", part: str = "test") -> set[str]:
    split = getattr(open_source(uri, role), part)
    return {split.digest(row) for row in range(len(split))}


def refused(uri: str, role: str = "trainer") -> str:
    with pytest.raises(DataError) as caught:
        open_source(uri, role)
    return str(caught.value)


# an evaluator's


def test_an_evaluators_folder_is_test_data_whole_with_splits_and_without(tmp_path: Path) -> None:
    plain = f"folder:{write_folder(tmp_path / 'plain', each=5)}"
    source = open_source(plain, "evaluator")
    assert (len(source.train), len(source.test)) == (0, 20)
    assert digests(plain, "evaluator") == digests(plain) | digests(plain, part="train")
    for part in ("train", "test"):
        write_folder(tmp_path / "parted" / part, each=2, seed=1 + (part == "test"))
    parted = f"folder:{tmp_path / 'parted'}"
    assert len(open_source(parted, "evaluator").test) == 16
    assert len(open_source(f"{parted}?test_on=test", "evaluator").test) == 8
    assert digests(f"{parted}?test_on=test", "evaluator") == digests(parted)


def test_an_evaluator_needs_no_train_folder_and_its_classes_may_have_one_image(tmp_path: Path) -> None:
    write_folder(tmp_path / "test", {"circle": 1, "square": 2})
    source = open_source(f"folder:{tmp_path}", "evaluator")
    assert (source.class_names, len(source.test)) == (("circle", "square"), 3)
    text = refused(f"folder:{tmp_path}")
    assert "has test but no train folder" in text
    assert "--role evaluator" in text


def test_an_evaluators_table_with_only_the_split_test_counts_whole(tmp_path: Path) -> None:
    write_folder(tmp_path, {"circle": 1, "bar": 2})
    lines = ["path,label,split", "circle/0.png,circle,test", "bar/0.png,bar,test", "bar/1.png,bar,test"]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    uri = f"csv:{tmp_path / 'labels.csv'}"
    assert len(open_source(uri, "evaluator").test) == 3
    assert len(SharedSources().open(uri, "evaluator").test) == 3
    text = refused(uri)
    assert "has only the split test; give train and test, or no split." in text
    assert "--role evaluator" in text


def test_shared_sources_keep_a_trainers_and_an_evaluators_apart(tmp_path: Path) -> None:
    uri = f"folder:{write_folder(tmp_path, each=5)}"
    shared = SharedSources()
    assert [len(shared.open(uri, role).test) for role in ("trainer", "evaluator", "trainer")] == [4, 20, 4]
    write_folder(tmp_path / "parted" / "test", each=2)
    parted = f"folder:{tmp_path / 'parted'}"
    assert len(shared.open(f"{parted}?test_on=test", "evaluator").test) == 8
    with pytest.raises(DataError, match="has test but no train folder"):
        shared.open(parted)
    drawn = SharedSources()
    assert [len(drawn.open("digits", role).test) for role in ("trainer", "evaluator", "trainer")] == [359, 359, 359]
    assert len(drawn._wholes) == 1, "a drawn source is the same for both"


def test_an_evaluators_part_of_a_partition_is_of_all_its_images(tmp_path: Path) -> None:
    uri = f"folder:{write_folder(tmp_path, each=5)}?partition={{}}&clients=2&client={{}}&shots=2"
    for kind in ("iid", "dirichlet&alpha=5", "pathological"):
        parts = [open_source(uri.format(kind, client), "evaluator") for client in (0, 1)]
        assert sum(len(part.test) for part in parts) == 20, kind
        assert not sum(len(part.train) for part in parts)


# classes that are too small


def test_all_problems_of_a_folder_come_in_one_message(tmp_path: Path) -> None:
    write_folder(tmp_path, {"circle": 1, "square": 1, "cross": 4})
    (tmp_path / "bar").mkdir()
    (tmp_path / "cross" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\n nothing")
    text = refused(f"folder:{tmp_path}")
    for part in (
        "bar is empty",
        "the class circle has one image",
        "the class square has",
        "broken.png",
        "min_per_class=2",
    ):
        assert part in text
    assert "\n" not in text


def test_only_and_min_per_class_leave_small_classes_out_before_they_can_fail(tmp_path: Path) -> None:
    write_folder(tmp_path, {"circle": 1, "square": 5, "cross": 8})
    (tmp_path / "circle" / "0.png").write_bytes(b"no image")
    (tmp_path / "bar").mkdir()
    for uri in (f"folder:{tmp_path}?min_per_class=2", f"folder:{tmp_path}?only=square,cross"):
        for source in (open_source(uri), SharedSources().open(uri), open_source(uri, "evaluator")):
            assert source.class_names == ("cross", "square")
            assert len(source.train) + len(source.test) == 13
    assert open_source(f"folder:{tmp_path}?min_per_class=8&only=cross,square").class_names == ("cross",)
    assert "leaves no class; the largest has 8 images" in refused(f"folder:{tmp_path}?min_per_class=9")
    assert "names the class 'ring'" in refused(f"folder:{tmp_path}?only=ring")


def test_a_class_is_split_alike_in_any_company(tmp_path: Path) -> None:
    write_folder(tmp_path, each=10)
    whole, part = open_source(f"folder:{tmp_path}"), open_source(f"folder:{tmp_path}?only=square")
    row = whole.class_names.index("square")
    theirs = {whole.test.digest(k) for k, label in enumerate(whole.test.labels.tolist()) if label == row}
    assert {part.test.digest(k) for k in range(len(part.test))} == theirs


def test_classes_that_a_split_lacks_are_named_together_and_can_be_left_out(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", each=2)
    write_folder(tmp_path / "test", ("circle",), each=2, seed=1)
    text = refused(f"folder:{tmp_path}")
    assert all(f"test has no folder for the class {name}." in text for name in ("bar", "cross", "square"))
    assert open_source(f"folder:{tmp_path}?min_per_class=1").class_names == ("circle",)


def test_every_source_takes_min_per_class() -> None:
    counts = torch.bincount(torch.cat([open_source("digits").train.labels, open_source("digits").test.labels]))
    least = int(counts.median()) + 1
    assert len(open_source(f"digits?min_per_class={least}").class_names) == int((counts >= least).sum())


def test_class_names_are_found_without_reading_an_image(tmp_path: Path) -> None:
    write_folder(tmp_path, {"circle": 2, "bar": 1})
    (tmp_path / "circle" / "broken.png").write_bytes(b"no image")
    assert class_names_of(f"folder:{tmp_path}") == ("bar", "circle")
    assert class_names_of(f"folder:{tmp_path}?validation=0.25&classes=base") == ("bar",)


# words


def test_words_for_a_folder_come_from_its_domain_txt(tmp_path: Path) -> None:
    write_folder(tmp_path / "thin_lines", each=2)
    uri = f"folder:{tmp_path}?domain=thin_lines"
    assert vars(open_source(uri).domain) == {"name": "thin_lines", "description": "a thin lines of a {}"}
    (tmp_path / "thin_lines" / "domain.txt").write_text("an icon of a {}\nin thin lines\n")
    assert vars(open_source(uri).domain) == {"name": "thin_lines", "description": "an icon of a {} in thin lines"}
    (tmp_path / "thin_lines" / "domain.txt").write_text("flat coloured icon")
    assert vars(open_source(f"folder:{tmp_path}/thin_lines").domain) == {
        "name": "",
        "description": "a {}, flat coloured icon",
    }
    (tmp_path / "thin_lines" / "domain.txt").write_text("{} and {}")
    assert "at most once" in refused(uri)


def test_a_folder_of_two_words_is_a_domain_that_can_be_declared(tmp_path: Path) -> None:
    """OfficeHome's folder "Real World" made five presets fail at enrolment."""
    write_folder(tmp_path / "Real World", each=2)
    found = open_source(f"folder:{tmp_path}?domain=Real World")
    declared = domain_of(found)
    assert declared is not None
    assert (declared.name, declared.description) == ("Real-World", "a Real World of a {}")


# formats


TO_CONVERT = [
    ("sun.svg", b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "it is SVG; draw it"),
    ("sun.png", b"<svg width='3'></svg>", "rsvg-convert -w 512 sun.png -o sun.png"),
    ("sun.heic", b"\0\0\0\x18ftypheic" + bytes(40), "it is HEIC; convert it, as in: heif-convert sun.heic"),
    ("sun.avif", b"\0\0\0\x18ftypavif" + bytes(40), "avifdec sun.avif sun.png"),
    ("sun.pdf", b"%PDF-1.7\n", "pdftoppm -png"),
    ("sun.psd", b"8BPS" + bytes(40), "it is PSD; convert it, as in: magick sun.psd sun.png"),
    ("scan.dcm", bytes(128) + b"DICM" + bytes(8), "it is DICOM"),
    ("notes.txt", b"hello", "repair or remove it"),
    ("sun.tiff", tiff_with_a_fraction_as_an_offset(), "repair or remove it"),
]


@pytest.mark.parametrize(("name", "content", "says"), TO_CONVERT)
def test_what_is_refused_says_how_to_convert_it(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match="cannot be read as an image") as caught:
        read_image(tmp_path / name)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("mode", "suffix"), [("RGB", "jpg"), ("RGB", "png"), ("L", "png"), ("RGBA", "png"), ("P", "gif")]
)
def test_a_huge_image_is_read_smaller_and_looks_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, suffix: str
) -> None:
    """Bounds are a sixteenth of the real ones: an image of that size would take 300 MB here."""
    monkeypatch.setattr(image_files, "LARGE", LARGE // 16)
    monkeypatch.setattr(image_files, "SHRUNK", SHRUNK // 16)
    across = np.linspace(0, 255, 2000, dtype=np.uint8)
    image = Image.fromarray(np.broadcast_to(across, (1025, 2000))).convert("RGB").convert(mode)
    assert image.width * image.height > LARGE // 16
    image.save(tmp_path / f"huge.{suffix}")
    small = read_image(tmp_path / f"huge.{suffix}")
    assert small.mode == "RGB"
    assert small.width * small.height < LARGE / 16 / 3
    assert abs(small.width / small.height - 2000 / 1025) < 0.01
    there = np.asarray(small.resize((8, 4)).convert("L")).astype(int)
    assert np.abs(there - np.asarray(image.convert("RGB").resize((8, 4)).convert("L")).astype(int)).max() <= 6


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_an_image_without_a_finite_number_is_refused(tmp_path: Path, value: float) -> None:
    pixels = np.full((40, 30), value, dtype=np.float32)
    Image.fromarray(pixels).save(tmp_path / "a.tiff")
    with pytest.raises(DataError, match=r"a\.tiff cannot be read as an image; repair or remove it \(none of its"):
        read_image(tmp_path / "a.tiff")
    with pytest.raises(BadImage):
        prediction.read_image((tmp_path / "a.tiff").read_bytes())
    pixels[20, 20] = 100
    Image.fromarray(pixels).save(tmp_path / "b.tiff")
    assert read_image(tmp_path / "b.tiff").getpixel((20, 20)) == (100, 100, 100)


def test_a_library_gives_no_image_without_a_finite_number() -> None:
    image = Image.fromarray(np.full((8, 8), np.nan, dtype=np.float32))
    rows = {"label": [0], 0: {"image": image}}
    with pytest.raises(DataError, match=r"column image holds no readable image \(none of its pixels"):
        public_sets._dataset_split(rows, "image", "label", ("a", "b"), HuggingFaceOptions(uri="hf:own")).image(0)
    with pytest.raises(DataError, match=r"image 0 of torchvision's own cannot be read \(none of its pixels"):
        public_sets._torchvision_split("own", [(image, 0)]).image(0)


def test_an_ordinary_image_is_read_as_it_is(tmp_path: Path) -> None:
    image = picture("circle", 3).resize((2000, 1500))
    image.save(tmp_path / "a.png")
    assert read_image(tmp_path / "a.png").tobytes() == image.tobytes()


MEASURE = """
import resource, sys
from pathlib import Path
from promptfed.shared.data.image_files import read_image
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
read_image(Path(sys.argv[1]))
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["jpg", "png"])
def test_the_largest_image_that_is_read_takes_less_than_a_gigabyte(tmp_path: Path, suffix: str) -> None:
    Image.new("RGB", (13000, 13000), "teal").save(tmp_path / f"huge.{suffix}")
    command = [sys.executable, "-c", MEASURE, str(tmp_path / f"huge.{suffix}")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert int(done.stdout) < 1000


# what is no file


BLOCKED = """
import sys
from promptfed.shared.data import DataError, open_source
try:
    open_source(sys.argv[1])
except DataError as error:
    print(error)
"""


def refused_in_time(uri: str) -> str:
    """The refusal, by a process that is ended where it waits for a pipe."""
    command = [sys.executable, "-c", BLOCKED, uri]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.extended
def test_a_pipe_among_images_is_named_beside_all_else_that_is_wrong(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "own", each=3)
    inside = next(path for path in sorted(folder.iterdir()) if path.is_dir())
    os.mkfifo(inside / "pipe.png")
    (inside / "linked.png").symlink_to(inside / "pipe.png")
    (inside / "notes.txt").write_text("hello")
    said = refused_in_time(f"folder:{folder}")
    assert f"{inside / 'pipe.png'} cannot be read as an image: it is a pipe, a socket or a device" in said
    assert f"{inside / 'linked.png'} cannot be read as an image: it is a pipe" in said
    assert f"{inside / 'notes.txt'} cannot be read as an image" in said


def test_a_socket_in_a_table_and_a_pipe_for_words_are_named(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s.png"))
        picture("circle", 1).save(tmp_path / "a.png")
        (tmp_path / "table.csv").write_text("path,label\na.png,a\ns.png,b\n/dev/zero,c\n")
        said = refused(f"csv:{tmp_path / 'table.csv'}")
    assert f"{tmp_path / 's.png'} cannot be read as an image: it is a pipe, a socket or a device" in said
    assert "/dev/zero cannot be read as an image: it is a pipe, a socket or a device" in said
    os.mkfifo(tmp_path / "pipe.csv")
    assert f"{tmp_path / 'pipe.csv'} is not a readable file" in refused(f"csv:{tmp_path / 'pipe.csv'}")
    folder = write_folder(tmp_path / "own", each=3)
    os.mkfifo(folder / "domain.txt")
    assert f"{folder / 'domain.txt'} cannot be read: " in refused(f"folder:{folder}")


@pytest.mark.extended
@pytest.mark.parametrize("uri", ["torchvision:MNIST?root={}", "hf:{}"])
def test_a_pipe_under_a_librarys_folder_is_named(tmp_path: Path, uri: str) -> None:
    if uri.startswith("hf"):
        pytest.importorskip("datasets")
    (tmp_path / "deep").mkdir()
    os.mkfifo(tmp_path / "deep" / "images")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    said = refused(uri.format(tmp_path))
    assert f"{tmp_path / 'deep' / 'images'}: a pipe, a socket or a device cannot be read" in said
