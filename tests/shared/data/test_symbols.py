"""Symbols: drawn alike every time and in every batch, in as many domains as promised."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from promptfed.shared.data import DataError, open_source
from promptfed.shared.data.symbols import (
    COMMON,
    RARE,
    STYLES,
    SYMBOLS,
    TOPIC_TEMPLATES,
    TOPICS,
    glyph,
    hash_keys,
    render,
)


def pixels(split: object, index: int) -> np.ndarray:
    return np.asarray(split.image(index))


def test_names_and_glyphs_are_distinct_and_plain() -> None:
    assert 60 <= len(SYMBOLS) <= 110
    assert len({s.name for s in SYMBOLS}) == len({s.codepoint for s in SYMBOLS}) == len(SYMBOLS)
    assert all(1 <= len(s.name.split()) <= 3 and s.name.replace(" ", "").isalpha() for s in SYMBOLS)
    masks = torch.stack([glyph(chr(s.codepoint)) for s in SYMBOLS]).flatten(1)
    unit = masks / masks.norm(dim=1, keepdim=True)
    likeness = unit @ unit.T - torch.eye(len(SYMBOLS))
    assert likeness.max() < 0.95


def test_at_least_seven_domains_of_which_four_are_rare() -> None:
    assert len(STYLES) >= 7
    assert len(RARE) >= 4
    assert set(COMMON) | set(RARE) == set(STYLES)


@pytest.mark.parametrize("style", list(STYLES))
def test_an_image_does_not_depend_on_its_batch(style: str) -> None:
    keys = hash_keys("test", np.arange(37))
    glyphs = torch.stack([glyph(chr(s.codepoint)) for s in SYMBOLS[:37]])
    together = render(glyphs, [style] * 37, keys)
    for row in (0, 17, 36):
        alone = render(glyphs[row : row + 1], [style], keys[row : row + 1])
        assert torch.equal(together[row], alone[0])
    mixed = render(glyphs, [style if i % 2 else "photo" for i in range(37)], keys)
    assert torch.equal(mixed[17], together[17])


@pytest.mark.parametrize("style", list(STYLES))
def test_a_style_shows_its_thing(style: str) -> None:
    """The same draws with and without a glyph differ: no style hides what it draws."""
    keys = hash_keys("test", np.arange(12))
    glyphs = torch.stack([glyph(chr(s.codepoint)) for s in SYMBOLS[:12]])
    shown = render(glyphs, [style] * 12, keys).float()
    empty = render(torch.zeros_like(glyphs), [style] * 12, keys).float()
    changed = ((shown - empty).abs().amax(1) > 24).float().mean((1, 2))
    assert changed.mean() > 0.05


def test_a_source_is_the_same_every_time() -> None:
    first = open_source("symbols:sketch?topic=weather&per_class=3&test_per_class=2")
    again = open_source("symbols:sketch?topic=weather&per_class=3&test_per_class=2")
    assert [first.train.digest(i) for i in range(len(first.train))] == [
        again.train.digest(i) for i in range(len(again.train))
    ]
    assert len(first.train) == 30
    assert len(first.test) == 20
    assert torch.equal(first.train.labels, torch.arange(10).repeat_interleave(3))


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


def test_image_is_rgb_of_48() -> None:
    image = open_source("symbols:photo?topic=faces&per_class=1").train.image(0)
    assert image.mode == "RGB"
    assert image.size == (48, 48)


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_is_a_data_set_of_its_own(topic: str) -> None:
    source = open_source(f"symbols:?topic={topic}&per_class=1")
    assert set(source.class_names) == {s.name for s in SYMBOLS if s.topic == topic}
    assert source.template == TOPIC_TEMPLATES[topic]
    assert source.template.count("{}") == 1
    assert source.domain is not None
    assert source.domain.name == "photo"


def test_the_domain_can_be_an_option() -> None:
    a = open_source("symbols:sketch?topic=music&per_class=1")
    b = open_source("symbols:?domain=sketch&topic=music&per_class=1")
    assert a.train.digest(0) == b.train.digest(0)
    assert a.domain is not None
    assert a.domain.description == "a sketch of a {}"


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("symbols:etching", "unknown domain etching; symbols has photo"),
        ("symbols:sketch?domain=neon", "two domains"),
        ("symbols:sketch?topic=cars", "topic=cars is not known; choose one of weather"),
        ("symbols:sketch?per_class=0", "per_class=0 is less than 1"),
        ("symbols:sketch?colour=red", "unknown option colour; accepted are alpha"),
    ],
)
def test_bad_uris_are_refused(uri: str, says: str) -> None:
    with pytest.raises(DataError, match=says):
        open_source(uri)
