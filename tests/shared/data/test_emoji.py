"""``emoji:`` what it holds, and what may be tested on."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from promptfed.shared import messages
from promptfed.shared.data import DataError, Source, open_source
from promptfed.shared.data.emoji import pictures as store
from promptfed.shared.data.emoji import source as emoji_source
from promptfed.shared.data.emoji.pictures import SIZE, STYLES
from promptfed.shared.data.emoji.source import domain_of
from promptfed.shared.data.emoji.splits import COMMON, FILE, POOLS, RARE, UNREAD_FAMILIES, splits

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
        if style.family in UNREAD_FAMILIES:
            assert style.name not in (*COMMON, *RARE)
            assert not known.was_read("red apple", style.name)


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
