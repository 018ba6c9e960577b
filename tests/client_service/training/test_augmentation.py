"""Crops and flips: what a view may be, that it is the same everywhere, what it costs, and that methods train on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from promptfed.client_service.training.data import ClientData
from promptfed.client_service.training.images import ImageCache, Views, crop_box, crop_flip
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source
from promptfed.shared.spec.spec import TrainingSpec

DATA = "symbols:neon?topic=weather&per_class=2&test_per_class=1"


@pytest.mark.parametrize("size", [(48, 48), (300, 40), (1, 100), (37, 53)])
def test_a_crop_lies_within_the_image(size: tuple[int, int]) -> None:
    draws = torch.Generator().manual_seed(0)
    shares = []
    for _ in range(300):
        left, upper, right, lower = crop_box(*size, draws)
        assert 0 <= left < right <= size[0]
        assert 0 <= upper < lower <= size[1]
        shares.append((right - left) * (lower - upper) / (size[0] * size[1]))
        if size == (48, 48):
            assert 0.65 < (right - left) / (lower - upper) < 1.55  # 3:4 to 4:3, whole pixels
    if size == (48, 48):
        assert min(shares) < 0.15
        assert max(shares) > 0.85


@pytest.mark.parametrize("size", [(60, 40), (2, 3)])
def test_crops_are_drawn_as_written(size: tuple[int, int]) -> None:
    """A share of 8 % to all of the area, a ratio of 3:4 to 4:3, both edges anywhere; the first that fits of ten."""
    (width, height), (draws, same) = size, (torch.Generator().manual_seed(7) for _ in range(2))
    for _ in range(40):
        found = crop_box(width, height, draws)
        while True:
            share, stretch, across, down = torch.rand(4, generator=same).tolist()
            area, ratio = width * height * (0.08 + 0.92 * share), 0.75 * (16 / 9) ** stretch
            wide, high = round((area * ratio) ** 0.5), round((area / ratio) ** 0.5)
            if 1 <= wide <= width and 1 <= high <= height:
                break
        left, upper = int(across * (width - wide + 1)), int(down * (height - high + 1))
        assert found == (left, upper, left + wide, upper + high)
    assert crop_box(1000, 10, draws) == (493, 0, 506, 10), "where none fits, the largest in the middle"
    assert crop_box(10, 1000, draws) == (0, 493, 10, 506)


def test_half_of_the_crops_are_mirrored() -> None:
    ramp = Image.fromarray(np.tile(np.linspace(0, 255, 64, dtype=np.uint8), (64, 1)))
    draws = torch.Generator().manual_seed(1)
    mirrored = 0
    for _ in range(200):
        pixels = np.asarray(crop_flip(ramp, (24, 32), draws)).astype(float)
        assert pixels.shape == (24, 32)
        mirrored += pixels[:, 0].mean() > pixels[:, -1].mean()
    assert 70 < mirrored < 130


def test_a_view_is_the_same_in_every_task(backbone: Backbone) -> None:
    split = open_source(DATA).train
    seen: dict[str, set[bytes]] = {}
    for task in range(20):
        views = Views(split, backbone, 3, f"task {task}")
        for index in range(len(split)):
            seen.setdefault(views.digest(index), set()).add(views.image(index).tobytes())
    assert all(len(images) == 1 for images in seen.values())
    assert len(seen) == 3 * len(split)
    assert len(set.union(*seen.values())) > 2.9 * len(split)


def test_the_cache_holds_each_view_once(backbone: Backbone, tmp_path: Path) -> None:
    source, cache = open_source(DATA), FeatureCache(tmp_path)
    data = ClientData(source, backbone, cache)
    for task in range(40):
        split = data.augmented(source.class_names, 2, f"task {task}")
        features, raw = split.features(), split.raw_features()
        assert features.shape == (len(source.train), backbone.d_e)
        assert torch.allclose(raw / raw.norm(dim=1, keepdim=True), features, atol=1e-6)
        assert not torch.allclose(raw, features, atol=1e-2)
    kept = [row for path in tmp_path.rglob("*.safetensors") for row in load_file(path).values()]
    assert sum(row.numel() * 4 for row in kept) == 4 * 2 * len(source.train) * (backbone.d_e + 1), "and a length"
    assert cache.images_computed == 2 * len(source.train)


def test_images_are_cropped_anew_in_every_batch(backbone: Backbone, tmp_path: Path) -> None:
    source = open_source(DATA)
    data = ClientData(source, backbone, FeatureCache(tmp_path), images=ImageCache(1 << 20))
    rows = torch.tensor([0, 3])
    split, again = (data.augmented(source.class_names, 2, "a task") for _ in range(2))
    first, second = split.images(rows), split.images(rows)
    assert first.shape == (2, 3, *backbone.image_size)
    assert not first.equal(second)
    assert first.equal(again.images(rows))
    assert not first.equal(data.augmented(source.class_names, 2, "another").images(rows))
    assert split.labels.equal(data.split("train", source.class_names).labels)


def test_nothing_of_it_stands_in_a_spec_without_it() -> None:
    """Clients of the version before read such a spec."""
    assert not {"augmentation", "views"} & set(TrainingSpec().model_dump())
    given = TrainingSpec(augmentation="crop_flip", views=4)
    assert TrainingSpec.model_validate(given.model_dump()) == given


@pytest.mark.extended
@pytest.mark.parametrize("method", [{"name": "promptfl", "m": 2}, {"name": "plan", "m": 1, "depth": 1}])
def test_federations_train_on_crops(method: dict[str, Any], tmp_path: Path) -> None:
    def run(**training: Any) -> str:
        spec: dict[str, Any] = {"name": "crops", "method": method, "rounds": 2, "evaluation": {"every": 2}}
        spec["training"] = {"batch_size": 8, **training}
        return simulate(spec, [Site("a", DATA)], features=tmp_path / "features").state_hash

    # PLAN keeps no features: each of its images is cropped anew.
    crops: dict[str, Any] = {"augmentation": "crop_flip"} | ({"views": 2} if method["name"] == "promptfl" else {})
    cropped = run(**crops)
    assert cropped == run(**crops)
    assert cropped != run()
