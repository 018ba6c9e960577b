"""``emoji:`` what it holds, what may be tested on, and how the whole set is made out of packages."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared import messages
from promptfed.shared.data import DataError, Source, open_source
from promptfed.shared.data.emoji import build, packages, store
from promptfed.shared.data.emoji.render import RENDERER, SvgRenderer
from promptfed.shared.data.emoji.source import FOLDER, domain_of
from promptfed.shared.data.emoji.splits import FILE, POOLS, list_digest, make_splits, splits
from promptfed.shared.data.emoji.styles import COMMON, EMBEDDED, NAMES_PACKAGE, RARE, SIZE, STYLES, UNREAD_FAMILIES
from promptfed.shared.data.emoji.things import Thing, read_things, spellings

PERMISSIVE = {"MIT", "Apache-2.0", "OFL-1.1"}


@pytest.fixture(scope="module")
def drawn() -> store.Drawn:
    return store.read(FOLDER)


def digests(source: Source, part: str) -> set[str]:
    split = source.train if part == "train" else source.test
    return {split.digest(i) for i in range(len(split))}


# what is shipped


def test_seven_permissive_styles_are_shipped_with_their_notices(drawn: store.Drawn) -> None:
    index = json.loads((FOLDER / store.INDEX).read_text())
    assert tuple(drawn.styles) == EMBEDDED
    assert {source["licence"] for source in index["sources"]} == PERMISSIVE
    assert {STYLES[name].licence for name in EMBEDDED} == PERMISSIVE
    notice = (FOLDER / "NOTICE.txt").read_text()
    for source in index["sources"]:
        assert source["package"] in notice
    texts = {file.stem: file.read_text() for file in (FOLDER / "licences").iterdir()}
    assert set(texts) >= PERMISSIVE
    assert "Microsoft Corporation" in texts["MIT"]
    assert "Google LLC" in texts["OFL-1.1"]
    assert sum(file.stat().st_size for file in FOLDER.rglob("*") if file.is_file()) < 3_200_000


def test_every_picture_is_there_unlike_others_and_shows_something(drawn: store.Drawn) -> None:
    assert len(drawn.things) >= 500
    assert len({thing.name for thing in drawn.things}) == len(drawn.things)
    for style, pictures in drawn.styles.items():
        assert len(pictures) == len(drawn.things) or style == "fxemoji"
        assert len({drawn.digest(style, place) for place in pictures}) == len(pictures)
        for place in pictures:
            image = drawn.image(style, place)
            assert image.size == (SIZE, SIZE)
            assert np.asarray(image).std() > 2


def test_a_known_thing_has_its_name_kind_and_colour(drawn: store.Drawn) -> None:
    place = next(i for i, thing in enumerate(drawn.things) if thing.name == "red apple")
    assert drawn.things[place] == Thing("1F34E", "red apple", "food-drink", "fruit", True)
    red, green, blue = np.asarray(drawn.image("flat", place))[40, 32]
    assert red > 200 > 100 > max(green, blue)
    assert np.asarray(drawn.image("contrast", place)).reshape(-1, 3).std(1).max() < 8  # black on white


# which pictures may be tested on


def test_the_lists_are_those_that_the_rule_draws_and_their_hashes_hold(drawn: store.Drawn) -> None:
    told = json.loads(FILE.read_text())
    again = make_splits(drawn.things)
    alike = told.pop("near_copies")
    assert alike["sha256"] == list_digest(alike["names"])
    for purpose, by_pool in told.items():
        for pool, listed in by_pool.items():
            assert listed["sha256"] == list_digest(listed["names"])
            assert set(again[purpose][pool]) == set(listed["names"]) & {thing.name for thing in drawn.things}
    names = [name for by_pool in told.values() for listed in by_pool.values() for name in listed["names"]]
    assert len(set(names)) == len(names)


def test_no_style_that_may_be_tested_is_of_a_designer_whom_the_backbone_read_with_the_thing() -> None:
    known = splits()
    for purpose, by_pool in known.names.items():
        for pool, names in by_pool.items():
            for name in names:
                thing = Thing("", name, "", "", True)
                for style in STYLES.values():
                    read = [other for other in STYLES if STYLES[other].family == style.family]
                    read = [other for other in read if known.was_read(name, other)]
                    assert known.testable(thing, style.name, purpose) is (not read and name not in known.near_copies)
                    if style.family in POOLS[pool] or style.name in RARE:
                        assert not known.was_read(name, style.name)


def test_share_alike_and_unseen_designers_were_never_read() -> None:
    known = splits()
    for style in STYLES.values():
        if "SA" in style.licence or style.family in UNREAD_FAMILIES:
            assert style.name not in (*COMMON, *RARE)
            assert not known.was_read("red apple", style.name)


@pytest.mark.parametrize("style", EMBEDDED)
def test_kinds_are_tested_on_things_that_are_trained_on_in_no_style(style: str) -> None:
    source = open_source(f"emoji:{style}")
    assert source.domain is not None
    assert source.domain.description == STYLES[style].wording
    everything = open_source("emoji:microsoft+google+mozilla")
    assert not digests(source, "test") & digests(everything, "train")
    assert digests(source, "train") <= digests(everything, "train")
    assert source.class_names == everything.class_names
    assert torch.bincount(source.train.labels).min() > 0
    assert torch.bincount(source.test.labels).min() > 0


def test_names_are_tested_on_another_designer() -> None:
    source = open_source("emoji:noto+notov1?level=names&test=fxemoji")
    assert len(source.train) == 2 * len(source.class_names)
    assert len(source.test) == len(source.class_names)
    assert not digests(source, "train") & digests(source, "test")
    assert digests(source, "test") <= digests(open_source("emoji:fxemoji?level=names"), "test")
    few = open_source("emoji:microsoft+notov1?level=names&test=fxemoji&shots=3")
    assert torch.bincount(few.train.labels).tolist() == [3] * len(few.class_names)


@pytest.mark.parametrize("styles", ["noto+notov1", "microsoft+google+mozilla"])
def test_a_client_may_declare_the_domain_of_several_styles(styles: str) -> None:
    domain = open_source(f"emoji:{styles}").domain
    assert domain is not None
    assert messages.Domain(name=domain.name, description=domain.description).name.startswith(("noto-notov1", "flat-"))
    assert domain_of(list(STYLES)).name == "-".join(STYLES)[:64]


def test_names_of_a_designer_who_was_read_are_the_withheld_ones() -> None:
    known = splits()
    for purpose in ("test", "validation"):
        source = open_source(f"emoji:fxemoji?level=names&test=noto&purpose={purpose}")
        assert set(source.class_names) <= known.names[purpose]["first"]


def test_sites_of_one_federation_can_agree_on_their_names() -> None:
    options = "level=names&test=fxemoji&drawn_by=flat+noto+notov1"
    assert (
        open_source(f"emoji:flat?{options}").class_names
        == open_source(f"emoji:noto?{options}").class_names
        == open_source("emoji:fxemoji?level=names&drawn_by=flat+noto+notov1").class_names
    )


def test_a_source_to_be_tested_on_alone_shows_nothing_to_train_on() -> None:
    source = open_source("emoji:fxemoji?level=names&shots=1")
    assert source.test.image(0).size == (SIZE, SIZE)
    with pytest.raises(DataError, match="name another designer to test on"):
        source.train.image(0)
    assert digests(source, "train") == digests(source, "test"), "a run's record names what it was given"


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("emoji:sketch", "unknown style sketch; emoji has flat, three,"),
        ("emoji:twemoji", "promptfed data emoji --out DIR, then emoji:twemoji.folder=DIR"),
        ("emoji:flat?level=names&test=contrast", "the styles of microsoft share drawings"),
        ("emoji:flat?test=noto", "test is for level=names"),
        ("emoji:flat?level=groups", "choose one of kinds, names"),
        ("emoji:flat?folder=nowhere", "nowhere holds no drawn emoji"),
        ("emoji:flat?size=32", "unknown option size"),
    ],
)
def test_what_cannot_be_used_is_said(uri: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        open_source(uri)


# the store


def test_what_is_written_is_read_and_what_is_spoilt_is_refused(drawn: store.Drawn, tmp_path: Path) -> None:
    part = store.Drawn(drawn.things[:9], {"noto": {k: drawn.styles["noto"][k] for k in (0, 1, 2, 5, 8)}})
    store.write(tmp_path / "few", part, [])
    assert store.read(tmp_path / "few") == part
    file = tmp_path / "few" / "noto.webps"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    store.read.cache_clear()
    with pytest.raises(DataError, match="is not what its index says"):
        store.read(tmp_path / "few")


# the build

SQUARE = '<path fill="#c00" d="M4 4h24v24h-24z"/>'
NAMES = [
    {"hexcode": "1F34E", "label": "red apple", "group": 4, "subgroup": 42},
    {"hexcode": "1F408", "label": "cat", "group": 3, "subgroup": 34},
    {"hexcode": "1F468-200D-2640-FE0F", "label": "somebody", "group": 1, "subgroup": 23},
    {"hexcode": "1F1E6", "label": "regional indicator A"},
]
GROUPS = {
    "groups": {"1": "people-body", "3": "animals-nature", "4": "food-drink"},
    "subgroups": {"23": "person", "34": "animal-mammal", "42": "food-fruit"},
}


def write_package(root: Path, name: str, licence: str, files: dict[str, Any]) -> None:
    folder = packages.folder_of(root, name)
    told = {"name": name, "version": "1.0.0", "license": licence, "author": {"name": "somebody"}}
    for path, content in {"package.json": told, **files}.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (folder / path).write_bytes(content)
        else:
            (folder / path).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Packages of two styles: icons by name, of which one makes nothing, and files by code point."""
    root = tmp_path / "packages"
    names = {"en/data.json": NAMES, "meta/groups.json": GROUPS, "en/shortcodes/a.json": {"1F408": "kitty"}}
    write_package(root, NAMES_PACKAGE, "MIT", names)
    icons = {"red-apple": {"body": SQUARE}, "kitty": {"body": "<path"}}
    package = {"icons.json": {"width": 32, "height": 32, "icons": icons}, "chars.json": {}}
    info = {"license": {"spdx": "Apache-2.0"}, "author": {"name": "Google"}}
    write_package(root, STYLES["noto"].package, "Apache-2.0", {**package, "info.json": info})
    picture = Image.new("RGBA", (128, 64), (0, 0, 255, 255))
    picture.save(tmp_path / "cat.webp", "WEBP", lossless=True)
    files = {"assets/1f408.webp": (tmp_path / "cat.webp").read_bytes()}
    write_package(root, STYLES["three"].package, "MIT", files)
    for module in (build, packages):
        monkeypatch.setattr(module, "STYLES", {name: STYLES[name] for name in ("noto", "three")}, raising=False)
    monkeypatch.setattr(packages, "packages", lambda: [NAMES_PACKAGE, *(STYLES[n].package for n in ("noto", "three"))])
    return root


class Pretender(SvgRenderer):
    """Draws everything as a red square, but what is no SVG; for machines without the renderer."""

    def __init__(self) -> None:
        self._process = None

    def draw(self, svg: str) -> Image.Image | None:
        return Image.new("RGBA", (SIZE, SIZE), (200, 0, 0, 255)) if svg.count("<path") == svg.count("/>") else None


def test_the_whole_set_is_drawn_from_packages(unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec(RENDERER) is None:
        monkeypatch.setattr(build, "SvgRenderer", Pretender)
    told: list[str] = []
    build.build(unpacked, tmp_path / "out", told.append)
    assert told == ["noto: 1 pictures", "three: 1 pictures"]  # the broken icon is left out
    whole = store.read(tmp_path / "out")
    assert [thing.name for thing in whole.things] == ["red apple", "cat"]
    apple, cat = np.asarray(whole.image("noto", 0)), np.asarray(whole.image("three", 1))
    assert apple[32, 32, 0] > 150 > apple[32, 32, 1]
    assert cat[32, 32, 2] > 200 > cat[32, 32, 0]
    assert cat[2, 32].min() > 240  # a wide picture lies in the middle of a square
    assert "Google, Apache-2.0" in (tmp_path / "out" / "NOTICE.txt").read_text()
    with pytest.raises(DataError, match="is not empty"):
        build.build(unpacked, tmp_path / "out", told.append)


def test_a_package_under_another_licence_is_refused(unpacked: Path, tmp_path: Path) -> None:
    write_package(unpacked, STYLES["three"].package, "GPL-3.0", {})
    with pytest.raises(DataError, match=r"says it is under GPL-3\.0, not MIT"):
        build.build(unpacked, tmp_path / "out", print)
    assert not (tmp_path / "out").exists()


def test_without_npm_the_missing_packages_are_named(
    unpacked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    packages.fetch(unpacked)  # nothing is missing
    (packages.folder_of(unpacked, STYLES["three"].package) / "package.json").unlink()
    with pytest.raises(DataError, match="@lobehub/fluent-emoji-3d as lobehub-fluent-emoji-3d"):
        packages.fetch(unpacked)


@pytest.mark.skipif(importlib.util.find_spec(RENDERER) is None, reason="resvg-py is an extra: promptfed[emoji]")
def test_a_renderer_that_ends_over_a_picture_draws_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32" width="32" height="32">{SQUARE}</svg>'
    with SvgRenderer() as renderer:
        first = renderer.draw(svg)
        assert first is not None
        assert np.asarray(first)[32, 32].tolist() == [204, 0, 0, 255]
        assert np.asarray(first)[1, 1, 3] == 0
        assert renderer._process is not None
        renderer._process.kill()
        renderer._process.wait()
        assert renderer.draw("no svg") is None
        assert np.array_equal(np.asarray(renderer.draw(svg)), np.asarray(first))


def test_names_are_spelled_as_packages_may_spell_them() -> None:
    pin = Thing("1F4CD", "round pushpin", "objects", "office supply", True)
    assert spellings(pin, {"1F4CD": ["round_pushpin", "drop-pin"]}) == ["roundpushpin", "droppin"]
    assert spellings(dataclasses.replace(pin, name="red pin"), {}) == ["redpin", "roundpushpin"]


def test_people_letters_and_parts_of_sequences_are_no_things(unpacked: Path) -> None:
    things = read_things(packages.folder_of(unpacked, NAMES_PACKAGE))
    assert [(thing.name, thing.kind) for thing in things] == [("red apple", "fruit"), ("cat", "mammal")]
    assert things[0].text == "\N{RED APPLE}"
