"""Preprocessed images in memory: made once, shared in the process, bounded, and let go."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import Tensor

from promptfed.client_service.training.data import ClientData
from promptfed.client_service.training.image_cache import HeldImages, ImageCache
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source


class Maker:
    """Makes images of 400 bytes and counts."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Tensor:
        self.made += 1
        return torch.full((100,), float(self.made))


def test_an_image_is_made_once_for_all_clients() -> None:
    cache, make = ImageCache(), Maker()
    one, other = HeldImages(cache), HeldImages(cache)
    assert one.get("a", make) is one.get("a", make) is other.get("a", make)
    assert not one.get("b", make).equal(one.get("a", make))
    assert make.made == 2
    assert cache.bytes == 800


def test_what_does_not_fit_is_made_anew_and_nothing_is_put_out() -> None:
    cache, make = ImageCache(max_bytes=900), Maker()
    held = HeldImages(cache)
    for _ in range(3):
        for key in "abc":
            assert held.get(key, make).shape == (100,)
    assert make.made == 2 + 3
    assert cache.bytes == 800


def test_room_comes_back_with_the_last_holder() -> None:
    cache, make = ImageCache(max_bytes=800), Maker()
    one, other = HeldImages(cache), HeldImages(cache)
    one.get("a", make)
    one.get("b", make)
    other.get("a", make)
    del one
    gc.collect()
    assert cache.bytes == 400
    other.get("c", make)
    other.get("c", make)
    assert make.made == 3


def test_a_client_s_images_are_drawn_once(tmp_path: Path, backbone: Backbone) -> None:
    source = open_source("symbols:sketch?per_class=2&test_per_class=1")
    drawn: list[int] = []
    draw = source.train.image

    def counting(index: int) -> object:
        drawn.append(index)
        return draw(index)

    features, images = FeatureCache(tmp_path), ImageCache()
    split = ClientData(source, backbone, features, images=images).split("train", source.class_names)
    rows = torch.tensor([4, 1, 7])
    wanted = torch.stack([backbone.preprocess(draw(int(row))) for row in rows])
    source.train.image = counting
    assert split.images(rows).equal(wanted)
    at_first = len(drawn)
    assert split.images(rows.flip(0)).equal(wanted.flip(0))
    assert len(drawn) == at_first
    without = ClientData(source, backbone, features, images=ImageCache(max_bytes=0)).split("train", source.class_names)
    assert without.images(rows).equal(wanted), "a cache without room gives the same bits"
    assert images.bytes == wanted.numel() * 4
