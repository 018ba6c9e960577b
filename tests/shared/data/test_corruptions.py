"""Corrupted test images, and images told among names of which none is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data.corruptions import CORRUPTIONS, STRENGTHS

DATA = "symbols:neon?topic=weather&per_class=4&test_per_class=2"


def pixels(uri: str, row: int = 0) -> np.ndarray:
    return np.asarray(open_source(uri).test.image(row), dtype=float) / 255


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_a_stronger_corruption_is_farther_from_the_picture(kind: str) -> None:
    clean = pixels(DATA)
    apart = [float(np.square(pixels(f"{DATA}&corrupt={kind}:{k}") - clean).mean()) for k in STRENGTHS]
    assert 0 < apart[0] < apart[1] < apart[2], apart


def test_noise_has_the_spread_of_its_strength_and_is_the_same_each_time() -> None:
    """On a grey picture nothing is cut off, so that the spread is that of the noise."""
    from PIL import Image

    grey = Image.new("RGB", (64, 64), (128, 128, 128))
    noisy = np.asarray(CORRUPTIONS["noise"](grey, 1, "a"), dtype=float) / 255
    assert abs(noisy.std() - 0.08) < 0.003
    assert abs(noisy.mean() - 128 / 255) < 0.004
    again, other = CORRUPTIONS["noise"](grey, 1, "a"), CORRUPTIONS["noise"](grey, 1, "b")
    assert np.array_equal(np.asarray(again, dtype=float) / 255, noisy)
    assert not np.array_equal(np.asarray(other, dtype=float) / 255, noisy), "another picture has other noise"


def test_contrast_keeps_the_mean_and_the_share_of_the_distance_from_it() -> None:
    from PIL import Image

    image = Image.fromarray(np.repeat(np.repeat([[[56], [200]]], 8, axis=0).astype(np.uint8), 3, axis=2))
    flat = np.asarray(CORRUPTIONS["contrast"](image, 1, ""), dtype=int)
    assert abs(int(flat[0, 0, 0]) - (128 - 29)) <= 1
    assert abs(int(flat[0, 1, 0]) - (128 + 29)) <= 1


def test_training_images_labels_and_order_stay() -> None:
    clean, worse = open_source(DATA), open_source(f"{DATA}&corrupt=jpeg:3")
    assert [clean.train.digest(k) for k in range(3)] == [worse.train.digest(k) for k in range(3)]
    assert torch.equal(clean.test.labels, worse.test.labels)
    part = worse.test.select(torch.tensor([3, 1]))
    assert part.digest(0) == worse.test.digest(3)
    assert worse.test.digest(3) != clean.test.digest(3)
    assert part.labels.tolist() == clean.test.labels[[3, 1]].tolist()


@pytest.mark.parametrize("text", ["noise", "noise:0", "noise:4", "fog:1", ""])
def test_an_unknown_corruption_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"corrupt=.* is not known; choose one of noise, blur, contrast, jpeg"):
        open_source(f"{DATA}&corrupt={text}")


def test_novel_images_among_base_names() -> None:
    base, novel = open_source(f"{DATA}&classes=base"), open_source(f"{DATA}&classes=novel")
    unseen = open_source(f"{DATA}&classes=novel&among=base")
    assert unseen.class_names == base.class_names
    assert [unseen.test.digest(k) for k in range(4)] == [novel.test.digest(k) for k in range(4)]
    assert set(unseen.test.labels.tolist()) == {-1}
    with pytest.raises(DataError, match="among=base is for classes=novel"):
        open_source(f"{DATA}&among=base")


def test_nobody_trains_on_images_without_a_class(tmp_path: Path) -> None:
    source = open_source(f"{DATA}&classes=novel&among=base")
    data = ClientData(source, load_backbone("promptfed-tiny", None), FeatureCache(tmp_path))
    assert set(data.split("test", source.class_names).labels.tolist()) == {-1}
    with pytest.raises(ClientError, match="without a class"):
        data.split(TRAIN, source.class_names)
