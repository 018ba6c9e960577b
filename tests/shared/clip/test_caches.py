"""The feature cache: each image once, the same bits in any order, in any process, after any accident."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from promptfed.shared import __version__
from promptfed.shared.clip import FeatureCache, caches, feature_files, image_reading, load_backbone
from promptfed.shared.clip.backbone import Halves
from promptfed.shared.clip.caches import features_in
from promptfed.shared.clip.slots import BATCH, DEVICE_BATCH, agreeing_slots
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data import readers as data_readers
from promptfed.shared.data.image_files import middle
from promptfed.shared.data.readers import Readers
from tests.shared.clip.conftest import CONFIGS, Noise
from tests.support.equality import assert_values
from tests.support.far_device import far_device, waits
from tests.support.small_timm import of_timm
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("timm_models")

SLOW = pytest.param("small-timm", marks=pytest.mark.extended)
TOWERS = ["small-vit", "small-bidirectional", "small-coca", "small-resnet", SLOW]
SCRIPT = """
import sys, torch
from pathlib import Path
import open_clip
from promptfed.shared.clip import FeatureCache, load_backbone
from tests.shared.clip.conftest import Noise
torch.set_num_threads(1)
open_clip.add_model_config(Path(sys.argv[1]))
cache = FeatureCache(Path(sys.argv[2]))
split = Noise(150)
order = list(range(150)) if sys.argv[3] == "up" else list(range(149, -1, -1))
features = cache.features(load_backbone("small-vit", None), split, indices=order)
torch.save(features, sys.argv[4])
"""


@pytest.mark.parametrize("name", TOWERS)
def test_features_are_those_of_the_tower(small: Any, tmp_path: Any, name: Any) -> None:
    backbone, split = small(name), Noise(5)
    images = torch.stack([backbone.preprocess(split.image(index)) for index in range(5)])
    features = FeatureCache(tmp_path).features(backbone, split)
    assert features.dtype == torch.float32
    assert_values(features, backbone.encode_images(images))


@pytest.mark.parametrize("name", TOWERS)
def test_the_same_bits_whatever_is_kept_already(small: Any, tmp_path: Any, name: Any) -> None:
    backbone, split = small(name), Noise(75)
    whole = FeatureCache(tmp_path / "whole").features(backbone, split)
    order = torch.randperm(75, generator=torch.Generator().manual_seed(3)).tolist()
    cache = FeatureCache(tmp_path / "parts")
    for first in (0, 1, 4, 40):
        part = order[first : first * 2 + 7]
        assert torch.equal(cache.features(backbone, split, indices=part), whole[part])
    assert torch.equal(cache.features(backbone, split), whole)
    assert cache.images_computed == 75


@pytest.mark.parametrize("name", TOWERS)
def test_what_else_is_in_a_batch_changes_no_bit(small: Any, name: Any) -> None:
    backbone = small(name)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, *backbone.image_size, generator=generator)
    together = backbone.encode_images(images)
    slots = agreeing_slots(backbone)
    for slot in (slots[0], slots[-1]):
        alone = torch.zeros_like(images)
        alone[slot] = images[slot]
        assert torch.equal(backbone.encode_images(alone)[slot], together[slot])


def test_each_image_goes_through_the_tower_once(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Noise(40)
    cache = FeatureCache(tmp_path)
    cache.features(backbone, split, indices=[3, 3, 5])
    assert cache.images_computed == 2
    cache.features(backbone, split)
    cache.features(backbone, split)
    assert cache.images_computed == 40
    again = FeatureCache(tmp_path)
    again.features(backbone, split)
    assert again.images_computed == 0
    assert cache.features(backbone, split, indices=[]).shape == (0, backbone.d_e)
    FeatureCache(tmp_path / "none").features(backbone, split, indices=[])
    assert not (tmp_path / "none").exists(), "no row, no folder"


def test_who_fills_holds_no_row(small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    compute = FeatureCache._compute

    def watched(cache: FeatureCache, *given: Any, **how: Any) -> Any:
        made.append(compute(cache, *given, **how))
        assert cache._lock.locked()
        return made[-1]

    monkeypatch.setattr(FeatureCache, "_compute", watched)
    backbone, cache = small("small-vit"), FeatureCache(tmp_path)
    cache.fill(backbone, Noise(3), [0, 2])
    assert made == [{}]
    assert cache.images_computed == 2
    cache.rows(backbone, Noise(3), [0, 1, 2])
    assert cache.images_computed == 3


def test_rows_that_are_held_in_blocks_are_those_of_the_files(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(feature_files, "BLOCK", 4)
    monkeypatch.setattr(caches, "PART", 3)
    backbone, split = small("small-vit"), Noise(10)
    cache = FeatureCache(tmp_path)
    whole = torch.cat([cache.features(backbone, split, indices=part) for part in ([7, 2, 9], [0, 1, 7, 3, 4, 5, 6, 8])])
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert torch.equal(cache.features(backbone, split, indices=[7, 2, 9, 0, 1, 7, 3, 4, 5, 6, 8]), whole)
    assert cache.images_computed == 10
    other = FeatureCache(tmp_path / "other")
    assert torch.equal(other.features(backbone, split), cache.features(backbone, split))
    again = FeatureCache(tmp_path / "other")
    again.features(backbone, split, indices=[0])
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert torch.equal(again.features(backbone, split), cache.features(backbone, split))
    assert again.images_computed == 9


def test_a_device_without_room_for_a_batch_computes_it_in_parts(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = small("small-vit")
    wanted, encode = FeatureCache(tmp_path / "all").features(backbone, Noise(5)), backbone.encode_images
    room = BATCH // 4
    passed: list[int] = []

    def with_little_room(images: Tensor, **options: bool) -> Tensor:
        passed.append(len(images))
        if len(images) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(images, **options)

    monkeypatch.setattr(backbone, "encode_images", with_little_room)
    assert_values(FeatureCache(tmp_path / "parts").features(backbone, Noise(5)), wanted)
    assert set(passed) == {BATCH, BATCH // 2, room}
    room = 0
    with pytest.raises(torch.OutOfMemoryError, match="no room for the features of one image"):
        FeatureCache(tmp_path / "none").features(backbone, Noise(5))


def test_other_weights_and_other_transforms_have_their_own_features(small: Any, tmp_path: Any) -> None:
    split, cache = Noise(3), FeatureCache(tmp_path)
    first = cache.features(small("small-vit"), split)
    second = cache.features(small("small-quick"), split)
    assert cache.images_computed == 6
    assert not torch.equal(first, second)
    assert len(list(tmp_path.iterdir())) == 2


def test_places_that_disagree_are_not_used(small: Any, tmp_path: Any, monkeypatch: Any) -> Any:
    backbone, split = small("small-vit"), Noise(70)
    exact = backbone.encode_images

    def uneven(images: Any, **options: Any) -> Any:
        features = exact(images, **options).clone()
        features[-3:] = torch.nextafter(features[-3:], torch.full_like(features[-3:], torch.inf))
        return features

    wanted, slots = FeatureCache(tmp_path / "even").features(backbone, split), agreeing_slots(backbone)
    monkeypatch.setattr(backbone, "encode_images", uneven)
    assert agreeing_slots(backbone) == [slot for slot in slots if slot < BATCH - 3]
    assert torch.equal(FeatureCache(tmp_path / "uneven").features(backbone, split), wanted)


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[len(data) // 2 :]
    elif kind == "flipped":
        data[-3] ^= 1
    else:
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty"])
def test_a_damaged_file_is_computed_again(small: Any, tmp_path: Any, kind: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(caches, "FILE_ROWS", 1)  # a file for each batch
    backbone = small("small-vit")
    whole = len(agreeing_slots(backbone))  # how many images a file holds is the CPU's
    split = Noise(whole + 1)
    wanted = FeatureCache(tmp_path).features(backbone, split)
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 2
    damage(files[0], kind)
    cache = FeatureCache(tmp_path)
    assert torch.equal(cache.features(backbone, split), wanted)
    assert cache.images_computed in (1, whole)
    assert sorted(tmp_path.glob("*/*.safetensors")) == files


def test_an_interrupted_write_leaves_nothing_behind(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    backbone, split = small("small-vit"), Noise(3)
    cache = FeatureCache(tmp_path)
    cache.features(backbone, split, indices=[0])
    before = sorted(tmp_path.rglob("*"))

    def fail(source: Any, target: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.features(backbone, split)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_size_bound_drops_what_was_unused_longest(small: Any, tmp_path: Any) -> None:
    backbone = small("small-vit")
    whole = len(agreeing_slots(backbone))
    splits = [Noise(whole, seed) for seed in range(3)]
    FeatureCache(tmp_path).features(backbone, splits[0])
    (first,) = tmp_path.glob("*/*.safetensors")
    FeatureCache(tmp_path).features(backbone, splits[1])
    second = next(path for path in tmp_path.glob("*/*.safetensors") if path != first)
    for age, path in ((100, second), (200, first)):
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    bounded = FeatureCache(tmp_path, max_bytes=2 * first.stat().st_size + 100)
    bounded.features(backbone, splits[0])  # used now: the second split's file is the oldest
    bounded.features(backbone, splits[2])
    assert first.exists()
    assert not second.exists()
    assert bounded.images_computed == whole
    row = (backbone.d_e + 1) * bounded.dtype.itemsize
    of_a_file = [FeatureCache(tmp_path, max_bytes=most)._rows_of_a_file(backbone) for most in (8 * row, 1 << 60, None)]
    assert of_a_file == [2, caches.FILE_ROWS, caches.FILE_ROWS], "four files at least"


@pytest.mark.extended
def test_several_processes_share_a_folder(small: Any, tmp_path: Any) -> None:

    (tmp_path / "small-vit.json").write_text(json.dumps(CONFIGS["small-vit"]))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "small-vit.json"), str(tmp_path / "cache")]
    running = [subprocess.Popen([*command, way, str(tmp_path / way)]) for way in ("up", "down")]
    assert [process.wait(timeout=PATIENCE) for process in running] == [0, 0]
    up, down = torch.load(tmp_path / "up"), torch.load(tmp_path / "down")
    assert torch.equal(up, down.flip(0))
    here = FeatureCache(tmp_path / "cache")
    assert torch.equal(here.features(small("small-vit"), Noise(150)), up)
    assert here.images_computed == 0


class Watched(Noise):
    """Notes which images were asked for; ``broken`` cannot be read."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        super().__init__(count)
        self.asked: set[int] = set()
        self.second_batch = threading.Event()
        self._broken = broken

    def image(self, index: int) -> Image.Image:
        self.asked.add(index)
        if index >= BATCH:
            self.second_batch.set()
        if index == self._broken:
            raise DataError(f"image {index} cannot be read")
        return super().image(index)


def test_the_next_images_are_read_while_the_tower_runs(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    backbone, split = small("small-vit"), Watched(BATCH + 8)
    cache = FeatureCache(tmp_path)
    cache.features(backbone, Noise(1, seed=5))  # the places of a batch are measured
    real = backbone.encode_images
    waited: list[bool] = []

    def encode(images: Any, **options: Any) -> Any:
        waited.append(split.second_batch.wait(PATIENCE))
        return real(images, **options)

    monkeypatch.setattr(backbone, "encode_images", encode)
    features = cache.features(backbone, split)
    assert waited == [True, True]
    monkeypatch.undo()
    assert torch.equal(features, FeatureCache(tmp_path / "other").features(backbone, Noise(BATCH + 8)))


@pytest.mark.parametrize("size", [(320, 240), (240, 320), (224, 224), (97, 311), (48, 20), (1000, 7)])
def test_the_two_halves_of_a_preprocessing_give_its_bits(small: Any, size: tuple[int, int]) -> None:
    """Of each kind of resizing: the shorter side, also of a side that is cut, and both sides."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    squashed = {"size": 32, "resize_mode": "squash", "interpolation": "bilinear"}
    for given in ({"size": 32}, {"size": 32, "interpolation": "bilinear"}, squashed):
        cfg = PreprocessCfg(**given)
        whole, halves = image_transform_v2(cfg, is_train=False), Halves.of_config(asdict(cfg))
        assert halves is not None
        for shown in (image, image.convert("L"), image.convert("RGBA")):
            cut = torch.from_numpy(halves.cut.pixels(shown))
            assert cut.dtype == torch.uint8
            assert torch.equal(halves.numbers(cut[None], torch.device("cpu"))[0], whole(middle(shown)))
    for loaded in (small("small-vit"), of_timm("small_plain")):
        assert loaded.pixels(image).dtype == torch.uint8
        assert torch.equal(loaded.preprocess(image), loaded._transform(middle(image)))
        assert torch.equal(loaded.images(loaded.pixels(image)[None])[0], loaded.preprocess(image))
    padded = asdict(PreprocessCfg(size=32, resize_mode="longest"))
    assert Halves.of_config(padded) is None, "it does more than scale and cut"


@pytest.mark.extended
def test_other_processes_read_the_same_images(small: Any, tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    """Also where no package for medical images is installed."""
    hiding = tmp_path / "absent" / "pydicom"
    hiding.mkdir(parents=True)
    (hiding / "__init__.py").write_text("raise ModuleNotFoundError('pydicom')")
    monkeypatch.syspath_prepend(hiding.parent)
    monkeypatch.setattr(data_readers, "_readers", {})
    backbone, pictures = small("small-vit"), Noise(11)
    for number in range(len(pictures)):
        place = tmp_path / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pictures.image(number).save(place / f"{number}.png")
    split = open_source(f"folder:{tmp_path}/images", "evaluator").test
    wanted = FeatureCache(tmp_path / "here").features(backbone, split)
    monkeypatch.setattr(image_reading, "apart_on", lambda device: True)
    asked: list[Any] = []
    submit = Readers.submit
    monkeypatch.setattr(Readers, "submit", lambda *given: asked.append(given[1]) or submit(*given))
    assert torch.equal(FeatureCache(tmp_path / "apart").features(backbone, split), wanted)
    assert [len(request.settings["paths"]) for request in asked] == [8, 3]
    monkeypatch.setattr(caches, "kept_slots", lambda *given: [1, 2, 4, 8, 9, 10, 11, 12, 13])
    assert torch.equal(FeatureCache(tmp_path / "places").features(backbone, split), wanted)
    assert not caplog.records, "they were read apart"
    path = split.path(4)
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot be read as an image"):
        FeatureCache(tmp_path / "again").features(backbone, split)
    data_readers.readers().close()


def test_a_device_is_only_waited_for_by_what_reads_rows_back(small: Any, tmp_path: Any) -> None:
    split = Noise(DEVICE_BATCH + 40)
    wanted = FeatureCache(tmp_path / "cpu").features(small("small-vit"), split)
    with far_device() as device:
        backbone, cache = load_backbone("small-vit", None).to(device), FeatureCache(tmp_path / "device")
        cache.features(backbone, Noise(1, seed=5))  # the places of a batch are measured
        with waits() as counted:
            found = cache.features(backbone, split)
    assert_values(found, wanted)
    assert not counted, "it waits for its own copies alone, which arrive no sooner"
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) == 1 + 1 + 1, (
        "the CPU's and the device's are not the same rows"
    )


def test_many_batches_share_a_file_and_what_was_computed_is_kept(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    backbone, split = small("small-vit"), Noise(4 * BATCH)
    told: list[int] = []

    def stop(images: int) -> None:
        told.append(images)
        if len(told) == 3:
            raise KeyboardInterrupt

    cache = FeatureCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.features(backbone, split, done=stop)
    assert sum(told) == cache.images_computed < len(split)
    (_,) = tmp_path.glob("*/*.safetensors")
    again = FeatureCache(tmp_path)
    again.features(backbone, split)
    assert again.images_computed == len(split) - sum(told)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    monkeypatch.setattr(caches, "FILE_SECONDS", 0)
    FeatureCache(tmp_path / "slow").features(backbone, split)
    assert len(list(tmp_path.glob("slow/*/*.safetensors"))) >= 4, "a kill costs little where a tower is slow"


def test_an_image_that_cannot_be_read_ends_the_reading(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Watched(4 * BATCH, broken=3)
    before = threading.active_count()
    with pytest.raises(DataError, match="image 3 cannot be read"):
        FeatureCache(tmp_path).features(backbone, split)
    assert max(split.asked) < 2 * BATCH
    assert threading.active_count() == before


def test_features_of_embedded_pictures_alone_lie_in_the_user_s_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, usual, given = tmp_path / "own", tmp_path / "usual", tmp_path / "given"
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    embedded = ["symbols:neon?topic=weather", "digits", "emoji:flat"]
    shared = features_in(None, usual, embedded)
    assert shared._root == own / "promptfed" / "features" / __version__
    assert shared._root.stat().st_mode & 0o777 == 0o700
    assert shared._max_bytes == caches.OWN_BYTES
    assert features_in(None, usual, [*embedded, "folder:symbols"])._root == usual, "a site's own pictures stay there"
    assert features_in(None, usual, embedded, patches=True)._root == usual
    assert features_in(given, usual, embedded)._root == given
    with monkeypatch.context() as full:
        full.setattr(caches, "OWN_BYTES", 1 << 60)  # more than any disk has free
        assert features_in(None, usual, embedded)._root == usual
    own.joinpath("file").write_text("")
    for nowhere in (own / "file", Path("/proc/none")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
        assert features_in(None, usual, embedded)._root == usual
