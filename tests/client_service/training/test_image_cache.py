"""Preprocessed images in memory: made once, shared in the process, bounded, and let go."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from promptfed.client_service.training import images as images_module
from promptfed.client_service.training.data import ClientData
from promptfed.client_service.training.images import HeldImages, ImageCache, ReadAhead
from promptfed.shared.clip import Backbone, FeatureCache, loading
from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.data import DataError, open_source
from tests.support.durable import Second
from tests.support.waiting import PATIENCE


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


def test_the_image_that_is_there_is_held_and_another_as_far_as_there_is_room() -> None:
    cache, make = ImageCache(max_bytes=800), Maker()
    first, equal, second, third = (make() for _ in range(4))
    assert cache.keep("a", first) is first
    assert (cache.keep("a", equal) is first, cache.bytes) == (True, 400)
    assert (cache.keep("b", second) is second, cache.bytes) == (True, 800), "just the room that there is"
    assert (cache.keep("c", third), cache.bytes) == (None, 800)
    assert cache.keep("a", third) is first
    del second
    gc.collect()
    assert cache.keep("c", third) is third, "its room was free again"


def test_one_thread_at_a_time_counts_what_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, image = ImageCache(), torch.zeros(100)
    second, settle = Second(lambda: cache.bytes), cache._settle

    def slowly() -> None:
        settle()
        second.inside()

    monkeypatch.setattr(cache, "_settle", slowly)
    assert cache.keep("a", image) is image
    assert second.end()


def test_images_of_a_batch_that_is_passed_over_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Future[Tensor]]()

    def submit(read: object, row: int) -> Future[Tensor]:
        made.append(Future())
        return made[-1]

    monkeypatch.setattr(images_module, "readers", lambda: SimpleNamespace(submit=submit))
    ahead = ReadAhead(lambda row: torch.zeros(1))
    assert ahead.take([]) == []
    for rows in ([1, 2], [3]):
        ahead.begin(rows)
    assert [image.cancelled() for image in made] == [True, True, False]


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


def test_the_next_images_are_made_while_a_step_computes() -> None:
    """Reading image 3 does not end before the step that uses images 0 and 1 has begun to compute."""
    step_computes, threads = threading.Event(), set()

    def read(row: int) -> Tensor:
        threads.add(threading.get_ident())
        if row == 3:
            assert step_computes.wait(PATIENCE)
        return torch.full((3, 2, 2), float(row))

    ahead = ReadAhead(read)
    assert [float(image.mean()) for image in ahead.take([0, 1])] == [0, 1]
    ahead.begin([3, 2])
    step_computes.set()
    assert [float(image.mean()) for image in ahead.take([3, 2])] == [3, 2]
    assert threading.get_ident() not in threads


def test_a_task_that_looks_at_no_image_reads_none(tmp_path: Path, backbone: Backbone) -> None:
    source, images = open_source("digits:"), ImageCache(1 << 20)
    split = ClientData(source, backbone, FeatureCache(tmp_path), images=images).split("train", source.class_names)
    split.soon(torch.tensor([0, 1]))
    assert images.bytes == 0
    split.images(torch.tensor([0, 1]))
    split.soon(torch.tensor([2]))
    wanted = backbone.preprocess(source.train.image(2))
    assert torch.equal(split.images(torch.tensor([2]))[0], wanted)


def test_an_image_that_cannot_be_read_is_told_when_it_is_asked_for() -> None:
    def read(row: int) -> Tensor:
        raise DataError("image 7 is damaged")

    ahead = ReadAhead(read)
    ahead.begin([7])
    with pytest.raises(DataError, match="image 7 is damaged"):
        ahead.take([7])


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="this system cannot fork")
def test_a_fork_reads_with_threads_of_its_own() -> None:
    ahead = ReadAhead(lambda row: torch.full((3, 2, 2), float(row)))
    ahead.take([0, 1])
    fork = multiprocessing.get_context("fork").Process(target=ahead.take, args=([2, 3],))
    fork.start()
    fork.join(PATIENCE)
    fork.kill()
    assert fork.exitcode == 0


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    kept = torch.get_num_threads(), torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_num_threads(kept[0])
    torch.set_float32_matmul_precision(kept[1])
    torch.backends.cudnn.allow_tf32 = kept[2]
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("way", ["rows", "fill"])
def test_features_are_computed_by_one_thread_at_a_time(way: str, tmp_path: Path, backbone: Backbone) -> None:
    split = open_source("symbols:sketch?topic=weather&per_class=1&test_per_class=1").train
    cache = FeatureCache(tmp_path)
    compute = getattr(cache, way)
    second = Second(lambda: compute(backbone, split, [0, 1]))
    compute(backbone, split, [0, 1], second.inside)
    assert second.end()
    assert cache.images_computed == 2, "the second found them"


def test_cublas_is_told_before_a_gpu_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    told: list[str | None] = []

    def refuse(device: str) -> None:
        told.append(loading.os.environ.get("CUBLAS_WORKSPACE_CONFIG"))
        raise BackboneError("stop here")

    monkeypatch.setattr(loading, "expect_device", refuse)
    for device in ("cpu", "cuda:0"):
        with pytest.raises(BackboneError, match="stop here"):
            loading.load_backbone("promptfed-tiny", "embedded", device=device)
    assert told == [None, ":4096:8"]
