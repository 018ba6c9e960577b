"""The loss under privacy: each image's gradient is clipped by itself, in every method that protects."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import Method, Protection
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import Tensors
from tests.support.literal_private import Silent
from tests.support.visual_clients import ImageSplit, client_context, server_context, small_backbone

IMAGES, RATE = 5, 1.0
LEAST = {"fedclipadapter": 0.002}  # a clip below the gradients of all images; other methods: 0.02
ONE, SEVERAL = torch.tensor([0, 2, 0, 1, 2]), torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [-1, 1, 0], [0, -1, 1]])


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method_of(name: str, several: bool) -> Method:
    few = {"m": 2} if "m" in METHODS[name].Hyper.model_fields else {}
    return make_method({"name": name, **few, **({"task": "multi_label"} if several else {})})


def step(backbone: Backbone, name: str, several: bool, rows: list[int], clip: float | None = None) -> Tensors:
    """What one step of plain SGD on the images at ``rows`` adds to the method's start; with ``clip``, privately."""
    method, server = method_of(name, several), server_context(backbone, "a")
    context = client_context(backbone, IMAGES, learning_rate=RATE, epochs=1, batch_size=len(rows), optimizer="sgd")
    assert isinstance(context.train, ImageSplit)
    labels = (SEVERAL.to(torch.int8) if several else ONE)[rows]
    train = ImageSplit(context.train.pixels[rows], labels, backbone)
    sizes = {"units": len(rows), "batch_size": len(rows), "epochs": 1}
    private = None if clip is None else Protection(clip, 1.0, stream=Silent(b"0" * 32), **sizes)
    context = replace(context, train=train, protection=private)
    state = method.initial_state_with(backbone, server, initial_draws(3))
    start = method.payload(state, method.phases(1, 4)[0], server.clients[0], server)
    update = method.train(context, start, {}).update
    return {key: update[key].double() - start[key].double() for key in update}


def minus(one: Tensors, other: Tensors) -> Tensors:
    return {key: one[key] - other[key] for key in one}


def close(one: Tensor, other: Tensor) -> bool:
    """Up to the rounding of parameters of a size about 1."""
    return float((one - other).abs().max()) <= 1e-3 * float(other.abs().max()) + 3e-7


def norm(tensors: Tensors) -> float:
    return math.sqrt(sum(float((tensor**2).sum()) for tensor in tensors.values()))


def cases() -> list[Any]:
    able = [name for name in sorted(METHODS) if METHODS[name].can_protect() and not METHODS[name].personal]
    several = [name for name in able if METHODS[name].can_take_several_labels()]
    return [*((name, False) for name in able), *((name, True) for name in several)]


@pytest.mark.parametrize(("name", "several"), cases())
def test_each_images_gradient_is_clipped_by_itself(backbone: Backbone, name: str, several: bool) -> None:
    """The private step is the mean of the steps of single images, of which longer gradients are cut to the clip.

    A clip below all gradients gives their lengths, whatever rates the step has; a clip of next to nothing leaves what
    does not depend on images, such as a penalty.
    """
    every, least = list(range(IMAGES)), LEAST.get(name, 0.02)
    common = step(backbone, name, several, every, clip=1e-12)
    plain, cut = (
        [minus(step(backbone, name, several, [row], clip), common) for row in every] for clip in (None, least)
    )
    norms = [least * norm(one) / norm(other) for one, other in zip(plain, cut, strict=True)]
    assert min(norms) > least
    for one, other, length in zip(plain, cut, norms, strict=True):
        for key in one:  # one clip for all tensors
            assert close(one[key] * least / length, other[key]), key
    clip = sorted(norms)[IMAGES // 2]
    assert min(norms) < clip < max(norms)
    private = minus(step(backbone, name, several, every, clip), common)
    for key, found in private.items():
        scaled = [own[key] * min(1.0, clip / length) for own, length in zip(plain, norms, strict=True)]
        wanted = torch.stack(scaled).sum(dim=0) / IMAGES
        assert close(found, wanted), key
