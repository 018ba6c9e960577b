"""``emoji:`` what it holds, and what may be tested on."""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from promptfed.shared import messages
from promptfed.shared.data import DataError, Source, open_source
from promptfed.shared.data.emoji import pictures as store
from promptfed.shared.data.emoji import scenes
from promptfed.shared.data.emoji import source as emoji_source
from promptfed.shared.data.emoji.pictures import SIZE, STYLES
from promptfed.shared.data.emoji.source import domain_of
from promptfed.shared.data.emoji.splits import COMMON, FILE, POOLS, RARE, splits
from promptfed.shared.data.image_files import image_digest

PERMISSIVE = {"MIT", "Apache-2.0", "OFL-1.1"}


@pytest.fixture(scope="module")
def drawn() -> store.Drawn:
    return store.read()


@pytest.fixture(scope="module")
def everything() -> tuple[Source, set[str]]:
    """All styles, and the digests of their training images."""
    source = open_source("emoji:microsoft+google+mozilla")
    return source, digests(source, "train")


def digests(source: Source, part: str) -> set[str]:
    split = source.train if part == "train" else source.test
    return {split.digest(i) for i in range(len(split))}


# what is shipped


def test_seven_permissive_styles_are_shipped_with_their_notices(drawn: store.Drawn) -> None:
    index = json.loads((store.FOLDER / store.INDEX).read_text())
    assert tuple(drawn.styles) == tuple(STYLES)
    assert {source["licence"] for source in index["sources"]} == PERMISSIVE
    notice = (store.FOLDER / "NOTICE.txt").read_text()
    for source in index["sources"]:
        assert source["package"] in notice
    texts = {file.stem: file.read_text() for file in (store.FOLDER / "licences").iterdir()}
    assert set(texts) >= PERMISSIVE
    assert "Microsoft Corporation" in texts["MIT"]
    assert "Google LLC" in texts["OFL-1.1"]
    assert sum(file.stat().st_size for file in store.FOLDER.rglob("*") if file.is_file()) < 3_200_000


@pytest.mark.extended
def test_every_picture_is_there_unlike_others_and_shows_something(drawn: store.Drawn) -> None:
    assert len(drawn.things) >= 500
    assert len({thing.name for thing in drawn.things}) == len(drawn.things)
    for style, pictures in drawn.styles.items():
        assert len(pictures) == len(drawn.things) or style == "fxemoji"
        assert len(set(pictures.values())) == len(pictures)
        for place in pictures:
            image = drawn.image(style, place)
            assert image.size == (SIZE, SIZE)
            assert np.asarray(image).std() > 2


def test_a_known_thing_has_its_name_kind_and_colour(drawn: store.Drawn) -> None:
    place = next(i for i, thing in enumerate(drawn.things) if thing.name == "red apple")
    assert drawn.things[place] == store.Thing("1F34E", "red apple", "food-drink", "fruit", True)
    red, green, blue = np.asarray(drawn.image("flat", place))[40, 32]
    assert red > 200 > 100 > max(green, blue)
    assert np.asarray(drawn.image("contrast", place)).reshape(-1, 3).std(1).max() < 8  # black on white


# which pictures may be tested on


def test_a_thing_is_in_one_list_and_the_hashes_of_the_lists_hold() -> None:
    told = json.loads(FILE.read_text())
    alike = told.pop("near_copies")
    lists = [listed for by_pool in told.values() for listed in by_pool.values()]
    for listed in (alike, *lists):
        assert listed["sha256"] == hashlib.sha256("".join(f"{name}\n" for name in listed["names"]).encode()).hexdigest()
    names = [name for listed in lists for name in listed["names"]]
    assert len(set(names)) == len(names)


def test_no_style_that_may_be_tested_is_of_a_designer_whom_the_backbone_read_with_the_thing() -> None:
    known = splits()
    for purpose, by_pool in known.names.items():
        for pool, names in by_pool.items():
            for name in names:
                thing = store.Thing("", name, "", "", True)
                for style in STYLES.values():
                    read = [other for other in STYLES if STYLES[other].family == style.family]
                    read = [other for other in read if known.was_read(name, other)]
                    assert known.testable(thing, style.name, purpose) is (not read and name not in known.near_copies)
                    if style.family in POOLS[pool] or style.name in RARE:
                        assert not known.was_read(name, style.name)


def test_unseen_designers_were_never_read() -> None:
    known = splits()
    for style in STYLES.values():
        if style.family == "mozilla":
            assert style.name not in (*COMMON, *RARE)
            assert not known.was_read("red apple", style.name)


class Lists:
    """The rules of ``splits.json``, one after the other, for each thing and style."""

    told = json.loads(FILE.read_text())
    near = told.pop("near_copies")["names"]
    families = (("first", ("microsoft", "google")), ("second", ("twitter", "joypixels")))

    def purpose(self, name: str) -> str | None:
        found = [purpose for purpose in self.told for pool in self.told[purpose].values() if name in pool["names"]]
        return found[0] if found else None

    def read(self, name: str, style: str) -> bool:
        if style in ("contrast", "notomono"):
            return self.purpose(name) is None
        withheld = [
            family for pools in self.told.values() for pool, families in self.families
            if name in pools[pool]["names"] for family in families
        ]  # fmt: skip
        return style != "fxemoji" and STYLES[style].family not in withheld

    def testable(self, thing: store.Thing, style: str, purpose: str) -> bool:
        read = any(self.read(thing.name, other) for other in STYLES if STYLES[other].family == STYLES[style].family)
        fits = self.purpose(thing.name) in ([purpose, None] if purpose == "test" else [purpose])
        return thing.testable and thing.name not in self.near and not read and fits

    def kinds(self, drawn: store.Drawn) -> list[str]:
        things, found = [thing for thing in drawn.things if thing.testable], []
        for kind in sorted({thing.kind for thing in things}):
            own = [thing.name for thing in things if thing.kind == kind]
            tested = [len(set(own) & set(pool["names"])) for pool in self.told["test"].values()]
            if sum(self.purpose(name) is None for name in own) >= 4 and min(tested) >= 2:
                found.append(kind)
        return found


def test_the_lists_say_what_was_read_and_may_be_tested(drawn: store.Drawn) -> None:
    known, lists = splits(), Lists()
    for thing in drawn.things:
        assert [known.was_read(thing.name, style) for style in STYLES] == [lists.read(thing.name, s) for s in STYLES]
        for purpose in ("test", "validation"):
            found = [known.testable(thing, style, purpose) for style in STYLES]
            assert found == [lists.testable(thing, style, purpose) for style in STYLES]


@pytest.mark.parametrize(("style", "purpose"), [("flat", "test"), ("notomono", "validation"), ("fxemoji", "test")])
def test_kinds_have_all_things_that_they_may_have(drawn: store.Drawn, style: str, purpose: str) -> None:
    source, lists = open_source(f"emoji:{style}?purpose={purpose}"), Lists()
    assert list(source.class_names) == lists.kinds(drawn)
    own = [(place, drawn.things[place]) for place in sorted(drawn.styles[style])]
    own = [(place, thing) for place, thing in own if thing.testable and thing.kind in source.class_names]
    trained = [place for place, thing in own if lists.purpose(thing.name) is None]
    tested = [
        place for place, thing in own if lists.purpose(thing.name) == purpose and lists.testable(thing, style, purpose)
    ]
    for split, places in ((source.train, trained), (source.test, tested)):
        assert [split.digest(row) for row in range(len(split))] == [
            image_digest(drawn.image(style, place)) for place in places
        ]
        kinds = [source.class_names[label] for label in split.labels.tolist()]
        assert kinds == [drawn.things[place].kind for place in places]


@pytest.mark.parametrize(("styles", "tested"), [(["flat"], ["noto", "fxemoji"]), (["noto", "notov1"], ["fxemoji"])])
def test_names_are_those_that_all_draw_and_all_may_be_tested_in(
    drawn: store.Drawn, styles: list[str], tested: list[str]
) -> None:
    names = sorted(
        thing.name
        for place, thing in enumerate(drawn.things)
        if all(place in drawn.styles[style] for style in (*styles, *tested))
        and all(Lists().testable(thing, style, "test") for style in tested)
    )
    source = open_source(f"emoji:{'+'.join(styles)}?level=names&test={'+'.join(tested)}")
    assert list(source.class_names) == names


class Fixed:
    """In the place of a generator: what it is asked, and what it draws."""

    def __init__(self, *drawn: Any) -> None:
        self.drawn, self.asked = list(drawn), list[Any]()

    def integers(self, *asked: Any) -> Any:
        self.asked.append(asked)
        return self.drawn.pop(0)

    normal = integers


def test_a_scene_is_its_things_seen_through_where_they_are_white() -> None:
    thing = Image.new("RGB", (22, 22), (100, 0, 0))
    thing.putpixel((0, 0), (245, 255, 255))
    thing.putpixel((1, 0), (255, 244, 255))
    noise = np.zeros((64, 64, 3))
    noise[0, 0], noise[0, 1], noise[0, 2] = 300, -300, 0.6
    draws = Fixed(np.array([200, 255, 230]), 22, np.array([3, 5]), noise)
    drawn = SimpleNamespace(image=lambda style, place: thing if (style, place) == ("flat", 7) else None)
    scene = np.asarray(scenes._scene(cast(Any, drawn), [("flat", 7)], cast(Any, draws)))
    assert draws.asked == [(200, 256, 3), (22, 38), (0, 43, 2), (0, 20.0, (64, 64, 3))]
    wanted = np.full((64, 64, 3), (200, 255, 230), dtype=np.uint8)
    wanted[5:27, 3:25] = (100, 0, 0)
    wanted[5, 3], wanted[5, 4] = (200, 255, 230), (255, 244, 255)
    wanted[0, :3] = (255,) * 3, (0,) * 3, (201, 255, 231)
    assert np.array_equal(scene, wanted)


def test_scenes_show_the_kinds_of_their_labels(drawn: store.Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(scenes, "_scene", lambda own, things, draws: shown.append(things) or Image.new("RGB", (1, 1)))
    for purpose in ("test", "train"):
        source, lists = open_source(f"emoji-scenes:flat+noto?count=99&test_count=99&purpose={purpose}"), Lists()
        assert list(source.class_names) == lists.kinds(drawn)
        for split, tested in ((source.train, False), (source.test, purpose == "test")):
            shown.clear()
            for row in range(len(split)):
                split.image(row)
            for things, labels in zip(shown, split.labels.tolist(), strict=True):
                kinds = [source.class_names.index(drawn.things[place].kind) for _, place in things]
                assert sorted(kinds) == [kind for kind, label in enumerate(labels) if label == 1]
            assert {len(things) for things in shown} == {1, 2, 3, 4, 5}
            for style, place in (cell for things in shown for cell in things):
                thing = drawn.things[place]
                assert lists.purpose(thing.name) == ("test" if tested else None)
                assert lists.testable(thing, style, "test") if tested else thing.testable
    for style, purpose in (("flat", None), ("noto", "test")):
        cells = scenes._drawings(drawn, [style], source.class_names, purpose)
        usable = [
            (style, place) for place, thing in enumerate(drawn.things)
            if place in drawn.styles[style] and thing.kind in source.class_names
            and lists.purpose(thing.name) == purpose
            and (thing.testable if purpose is None else lists.testable(thing, style, purpose))
        ]  # fmt: skip
        assert sorted(cell for kind in cells for cell in kind) == usable


@pytest.mark.parametrize("lacking", [(), (None,), ("test",)])
def test_scenes_need_a_thing_of_every_kind(monkeypatch: pytest.MonkeyPatch, lacking: tuple[str | None, ...]) -> None:
    def drawings(drawn: Any, styles: Any, names: Any, purpose: str | None) -> Any:
        return [[] if purpose in lacking and not kind else [("flat", 0)] for kind in range(len(names))]

    monkeypatch.setattr(scenes, "_drawings", drawings)
    if lacking:
        with pytest.raises(DataError, match=r"flat has no .* to draw scenes of; add a style"):
            open_source("emoji-scenes:flat?count=1&test_count=1")
    else:
        assert len(open_source("emoji-scenes:flat?count=1&test_count=1").train) == 1


def test_without_a_style_the_emoji_are_flat() -> None:
    for scheme, style in (("emoji:", ""), ("emoji", ""), ("emoji-scenes:?", ""), ("emoji-scenes:noto?", "noto")):
        domain = open_source(f"{scheme}count=2&test_count=2" if "?" in scheme else scheme).domain
        assert domain is not None
        assert domain.name == (style or "flat")


def test_a_sign_is_not_trained_on(drawn: store.Drawn, monkeypatch: pytest.MonkeyPatch) -> None:
    before, lists = len(open_source("emoji:flat").train), Lists()
    kinds = lists.kinds(drawn)
    trained = (thing.kind in kinds and thing.testable and lists.purpose(thing.name) is None for thing in drawn.things)
    place = list(trained).index(True)
    things = [*drawn.things]
    things[place] = replace(things[place], testable=False)
    monkeypatch.setattr(emoji_source, "read", lambda: replace(drawn, things=tuple(things)))
    assert len(open_source("emoji:flat").train) == before - 1


@pytest.mark.parametrize("style", list(STYLES))
def test_kinds_are_tested_on_things_that_are_trained_on_in_no_style(
    style: str, everything: tuple[Source, set[str]]
) -> None:
    source = open_source(f"emoji:{style}")
    assert source.domain is not None
    assert source.domain.description == STYLES[style].wording
    assert not digests(source, "test") & everything[1]
    assert digests(source, "train") <= everything[1]
    assert source.class_names == everything[0].class_names
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


UNUSABLE = [
    ("emoji:sketch", "unknown style sketch; emoji has flat, three,"),
    ("emoji:flat?level=names&test=contrast", "the styles of microsoft share drawings"),
    ("emoji:flat?test=noto", "test is for level=names"),
    ("emoji:flat?level=groups", "choose one of kinds, names"),
    ("emoji:flat?folder=nowhere", "unknown option folder"),
    ("emoji:flat?size=32", "unknown option size"),
]


@pytest.mark.parametrize(("uri", "why"), UNUSABLE)
def test_what_cannot_be_used_is_said(uri: str, why: str) -> None:
    with pytest.raises(DataError, match=why):
        open_source(uri)


# the store


def test_what_is_spoilt_is_refused(tmp_path: Path) -> None:
    shutil.copytree(store.FOLDER, tmp_path / "copy")
    store.read.cache_clear()
    assert store.read(tmp_path / "copy") == store.read(store.FOLDER)
    file = tmp_path / "copy" / "noto.webps"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(DataError, match="is not what its index says"):
        store.read(tmp_path / "copy")
    with pytest.raises(DataError, match="holds no emoji"):
        store.read(tmp_path / "nowhere")


def test_styles_without_a_thing_that_may_be_tested_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emoji_source, "splits", lambda: SimpleNamespace(testable=lambda *_: False))
    with pytest.raises(DataError, match="no thing that all of flat, noto draw may be tested in noto; take fewer"):
        open_source("emoji:flat?level=names&test=noto")
