"""The options of the visual methods: bfloat16 and activation checkpointing change rounding and memory, nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core.visual import CHUNK, ImageClassifier, Towers, VisualHyper
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import filled, small_backbone, split_of


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


class Kept:
    """Bytes of distinct tensors that autograd holds for the backward pass."""

    def __init__(self) -> None:
        self.sizes: dict[int, int] = {}

    def __enter__(self) -> Kept:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    def without(self, *tensors: Tensor) -> int:
        mine = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        return sum(size for pointer, size in self.sizes.items() if pointer not in mine)


def run(backbone: Backbone, images: Tensor, **options: Any) -> tuple[Tensor, Tensor, int]:
    """Features of images, the gradient of a weighted sum of them, and what was held for it (without the weights)."""
    prompts = filled({"v": (3, 2, backbone.d_v)}, 1, 0.3)["v"].requires_grad_()
    towers = Towers(backbone, VisualHyper(**options))
    with Kept() as kept:
        features = towers.images(images, prompts)
    held = kept.without(prompts, images, *backbone.model.parameters())
    weight = filled({"w": tuple(features.shape)}, 2, 1.0)["w"]
    return features.detach(), torch.autograd.grad((features * weight).sum(), prompts)[0], held


def test_checkpointing_gives_the_same_gradient_and_holds_less(backbone: Backbone) -> None:
    images = split_of(backbone, 12).pixels
    features, gradient, held = run(backbone, images)
    for size in (1, 5, 12):
        again, recomputed, fewer = run(backbone, images, checkpoint=size)
        assert_values(again, features)
        assert_gradients(recomputed, gradient)
        assert fewer < held / 20, "only the images and the prompts are held until the backward pass"


def test_bfloat16_is_close(backbone: Backbone) -> None:
    images = split_of(backbone, 6).pixels
    (features, gradient, _), (rough, sloped, _) = run(backbone, images), run(backbone, images, autocast="bf16")
    assert rough.dtype == sloped.dtype == torch.float32
    assert not torch.equal(rough, features)
    assert float((rough - features).abs().max()) < 0.05
    cosine = torch.cosine_similarity(sloped.flatten(), gradient.flatten(), dim=0)
    assert float(cosine) > 0.99


def test_checkpointing_and_bfloat16_together(backbone: Backbone) -> None:
    images = split_of(backbone, 6).pixels
    once, again = run(backbone, images, autocast="bf16"), run(backbone, images, autocast="bf16", checkpoint=6)
    assert_values(once[0], again[0])
    assert_gradients(again[1], once[1])


def test_images_are_classified_in_chunks_without_a_gradient(backbone: Backbone) -> None:
    split, seen = split_of(backbone, CHUNK + 3), []

    def logits(images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        seen.append(len(images))
        return images[:, 0, 0, :2]

    rows = torch.arange(CHUNK + 3).flip(0)
    found = ImageClassifier(logits).logits(split, rows)
    assert found.equal(split.pixels[rows][:, 0, 0, :2])
    assert seen == [CHUNK, 3]
