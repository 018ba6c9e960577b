"""Protected gradients of the methods that take one image at a time: visual prompts, patches, experts, own prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, Method, Protection
from promptfed.shared.methods.core.training import PrivateGradients
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.tensors import Tensors
from tests.shared.methods.test_private_training import Silent
from tests.support.visual_clients import ImageSplit, client_context, filled, server_context, small_backbone

COUNT, PATCHES, RATE = 4, 5, 0.05
CASES: list[dict[str, Any]] = [
    {"name": "fedvpt", "m": 2},
    {"name": "fedvpt", "m": 2, "head": "linear"},
    {"name": "fedvpt_deep", "m": 2},
    {"name": "fedmaple", "m": 2},
    {"name": "pfedpg", "m": 2},
    {"name": "fedotp", "m": 2},
    {"name": "pfedmoap", "m": 2, "gate_width": 8, "heads": 2},
    {"name": "promptfl_amp", "m": 2},
]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


@dataclass
class Patched(ImageSplit):
    """With features of patches that follow from an image's pixels alone."""

    def patches(self, indices: Tensor) -> Tensor:
        width = self.backbone.d_e
        flat = self.pixels[indices].flatten(1)[:, : PATCHES * width].reshape(-1, PATCHES, width)
        return torch.nn.functional.normalize(flat, dim=-1)


def task(backbone: Backbone, stream: NoiseStream | None = None, clip: float = 1e9, count: int = COUNT) -> ClientContext:
    """One step over all images; under protection where there is a ``stream``."""
    context = client_context(backbone, count, batch_size=count, learning_rate=RATE)
    split = context.train
    assert isinstance(split, ImageSplit)
    context = replace(context, train=Patched(split.pixels, split.labels, backbone))
    return context if stream is None else replace(context, protection=Protection(clip, 1.0, count, count, 1, stream))


def payload_of(method: Method, backbone: Backbone) -> Tensors:
    """Random tensors of the shapes that a client is given; two experts."""
    dims = method.dims(server_context(backbone, "a", "b")) | {"E": 2}
    shapes = {
        tensor.name: tuple(dims[size] if isinstance(size, str) else size for size in tensor.shape)
        for tensor in method.phases(2, 4)[0].down
    }
    return filled(shapes, 4, 0.3)


def named(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", CASES, ids=named)
def test_without_clip_and_noise_a_full_batch_is_the_plain_one(settings: dict[str, Any], backbone: Backbone) -> None:
    method = make_method(settings)
    assert type(method).can_protect()
    start = payload_of(method, backbone)
    plain = make_method(settings).train(task(backbone), start, {})
    quiet = make_method(settings).train(task(backbone, Silent()), start, {})
    moved = 0.0
    for name, value in quiet.update.items():
        before = start.get(name, torch.zeros(()))
        scale = max(float((plain.update[name] - before).abs().max()), 1e-5)
        moved = max(moved, float((plain.update[name] - before).abs().max()))
        assert float((value - plain.update[name]).abs().max()) <= 2e-4 * scale, name
    assert moved > 1e-4, "it is no training that moves nothing"
    assert quiet.private.keys() == plain.private.keys()
    for name, value in quiet.private.items():
        assert torch.allclose(value.float(), plain.private[name].float(), rtol=1e-3, atol=1e-6), name
    assert math.isnan(quiet.metrics["loss"])


def gradients_of(
    settings: dict[str, Any], context: ClientContext, start: Tensors, monkeypatch: pytest.MonkeyPatch
) -> Tensor:
    """``(count, d)``: each image's own gradient in the first step, over all that the loop changes."""
    seen: list[Tensor] = []

    def step(gradients: PrivateGradients) -> None:
        seen.append(torch.cat([gradients._gradients(torch.tensor([unit])) for unit in range(COUNT)]))

    with monkeypatch.context() as patched:
        patched.setattr(PrivateGradients, "step", step)
        make_method(settings).train(context, start, {})
    return seen[0]


@pytest.mark.parametrize("settings", CASES, ids=named)
def test_an_image_s_gradient_follows_from_that_image_alone(
    settings: dict[str, Any], backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = payload_of(make_method(settings), backbone)
    before = gradients_of(settings, task(backbone, Silent()), start, monkeypatch)
    changed = task(backbone, Silent())
    assert isinstance(changed.train, Patched)
    changed.train.pixels[2] = changed.train.pixels[2].flip(-1) * 1.7
    changed.train.labels[2] = (changed.train.labels[2] + 1) % 3
    after = gradients_of(settings, changed, start, monkeypatch)
    others = [0, 1, 3]
    assert torch.equal(before[others], after[others])
    assert float((before[2] - after[2]).norm()) > 1e-6
    assert float(before.norm(dim=1).min()) > 0


@pytest.mark.parametrize("settings", CASES, ids=named)
def test_no_image_moves_all_tensors_together_by_more_than_the_clip(
    settings: dict[str, Any], backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without noise, momentum and decay a step is RATE·Σ g̃_i/n: shared and private tensors in one norm."""
    start, clip = payload_of(make_method(settings), backbone), 1e-3
    own = gradients_of(settings, task(backbone, Silent()), start, monkeypatch)
    found = make_method(settings).train(task(backbone, Silent(), clip), start, {}).update
    still = make_method(settings).train(task(backbone, Silent(), 1e-30), start, {}).update
    factors = (clip / own.norm(dim=1)).clamp(max=1.0)
    longest = float((own * factors.unsqueeze(1)).mean(dim=0).norm())
    moved = math.sqrt(sum(float((value - still[name]).double().square().sum()) for name, value in found.items()))
    assert 0 < moved <= RATE * longest * (1 + 1e-3) + 1e-7
    assert longest <= clip
