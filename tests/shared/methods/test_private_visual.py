"""Protected gradients of the methods that take one image at a time: visual prompts, patches, experts, own prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface import ClientContext, Method
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.methods.core.training import PrivateGradients
from promptfed.shared.methods.core.visual import CHUNK, ImageClassifier, Towers, VisualHyper
from promptfed.shared.methods.fedvpt import PROMPTS, FedPR, projection
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import TorchDraws
from tests.support import literal_visual as literal
from tests.support import visual_clients as visual
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal import cross_entropy
from tests.support.literal_private import Silent

COUNT, PATCHES, RATE = 4, 5, 0.05


CASES: list[dict[str, Any]] = [
    {"name": "fedvpt", "m": 2}, {"name": "fedvpt", "m": 2, "head": "linear"}, {"name": "fedvpt_deep", "m": 2},
    {"name": "fedmaple", "m": 2}, {"name": "pfedpg", "m": 2}, {"name": "fedotp", "m": 2},
    {"name": "pfedmoap", "m": 2, "gate_width": 8, "heads": 2}, {"name": "promptfl_amp", "m": 2},
]  # fmt: skip


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return visual.small_backbone(tmp_path_factory.mktemp("configs"))


@dataclass
class Patched(visual.ImageSplit):
    """With features of patches that follow from an image's pixels alone."""

    def patches(self, indices: Tensor) -> Tensor:
        width = self.backbone.d_e
        flat = self.pixels[indices].flatten(1)[:, : PATCHES * width].reshape(-1, PATCHES, width)
        return torch.nn.functional.normalize(flat, dim=-1)


def task(backbone: Backbone, stream: NoiseStream | None = None, clip: float = 1e9, count: int = COUNT) -> ClientContext:
    """One step over all images; under protection where there is a ``stream``."""
    context = visual.client_context(backbone, count, batch_size=count, learning_rate=RATE)
    split = context.train
    assert isinstance(split, visual.ImageSplit)
    context = replace(context, train=Patched(split.pixels, split.labels, backbone))
    return context if stream is None else replace(context, protection=Protection(clip, 1.0, count, count, 1, stream))


def payload_of(method: Method, backbone: Backbone) -> Tensors:
    """Random tensors of the shapes that a client is given; two experts."""
    dims = method.dims(visual.server_context(backbone, "a", "b")) | {"E": 2}
    shapes = {
        tensor.name: tuple(dims[size] if isinstance(size, str) else size for size in tensor.shape)
        for tensor in method.phases(2, 4)[0].down
    }
    return visual.filled(shapes, 4, 0.3)


def named(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


@pytest.mark.parametrize("settings", CASES, ids=named)
def test_without_clip_and_noise_a_full_batch_is_the_plain_one(settings: dict[str, Any], backbone: Backbone) -> None:
    method = make_method(settings)
    assert type(method).can_protect()
    start = payload_of(method, backbone)
    plain = make_method(settings).train(task(backbone), start, {})
    quiet = make_method(settings).train(task(backbone, Silent(bytes(32))), start, {})
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
    before = gradients_of(settings, task(backbone, Silent(bytes(32))), start, monkeypatch)
    changed = task(backbone, Silent(bytes(32)))
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
    own = gradients_of(settings, task(backbone, Silent(bytes(32))), start, monkeypatch)
    found = make_method(settings).train(task(backbone, Silent(bytes(32)), clip), start, {}).update
    still = make_method(settings).train(task(backbone, Silent(bytes(32)), 1e-30), start, {}).update
    factors = (clip / own.norm(dim=1)).clamp(max=1.0)
    longest = float((own * factors.unsqueeze(1)).mean(dim=0).norm())
    moved = math.sqrt(sum(float((value - still[name]).double().square().sum()) for name, value in found.items()))
    assert 0 < moved <= RATE * longest * (1 + 1e-3) + 1e-7
    assert longest <= clip


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


def run(backbone: Backbone, images: Tensor, at_once: int | None = None, **options: Any) -> tuple[Tensor, Tensor, int]:
    """Features of images, the gradient of a weighted sum of them, and what was held for it (without the weights)."""
    prompts = visual.filled({"v": (3, 2, backbone.d_v)}, 1, 0.3)["v"].requires_grad_()
    towers = Towers(backbone, VisualHyper(**options))
    backbone.held_images = at_once
    with Kept() as kept:
        features = towers.images(images, prompts)
    held = kept.without(prompts, images, *backbone.model.parameters())
    weight = visual.filled({"w": tuple(features.shape)}, 2, 1.0)["w"]
    slope = torch.autograd.grad((features * weight).sum(), prompts)[0]
    backbone.held_images = None
    return features.detach(), slope, held


def test_checkpointing_gives_the_same_gradient_and_holds_less(backbone: Backbone) -> None:
    images = visual.split_of(backbone, 12).pixels
    features, gradient, held = run(backbone, images)
    for size in (1, 5, 12):
        again, recomputed, fewer = run(backbone, images, size)
        assert_values(again, features)
        assert_gradients(recomputed, gradient)
        assert fewer < held / 20, "only the images and the prompts are held until the backward pass"


def test_bfloat16_is_close(backbone: Backbone) -> None:
    images = visual.split_of(backbone, 6).pixels
    (features, gradient, _), (rough, sloped, _) = run(backbone, images), run(backbone, images, autocast="bf16")
    assert rough.dtype == sloped.dtype == torch.float32
    assert not torch.equal(rough, features)
    assert float((rough - features).abs().max()) < 0.05
    cosine = torch.cosine_similarity(sloped.flatten(), gradient.flatten(), dim=0)
    assert float(cosine) > 0.99


def test_checkpointing_and_bfloat16_together(backbone: Backbone) -> None:
    images = visual.split_of(backbone, 6).pixels
    once, again = run(backbone, images, autocast="bf16"), run(backbone, images, 6, autocast="bf16")
    assert_values(once[0], again[0])
    assert_gradients(again[1], once[1])


def test_images_are_classified_in_chunks_without_a_gradient(backbone: Backbone) -> None:
    split, seen = visual.split_of(backbone, CHUNK + 3), []

    def logits(images: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        seen.append(len(images))
        return images[:, 0, 0, :2]

    rows = torch.arange(CHUNK + 3).flip(0)
    found = ImageClassifier(logits).logits(split, rows)
    assert found.equal(split.pixels[rows][:, 0, 0, :2])
    assert seen == [CHUNK, 3]


# FedPR: the projection by hand, steps against Adam's own, and what stays as it was.


ADAM = {"optimizer": "adam", "learning_rate": 0.05, "weight_decay": 0.0, "epochs": 3, "batch_size": 2}


def method(**hyper: Any) -> FedPR:
    made = make_method({"name": "fedpr", "m": 2} | hyper)
    assert isinstance(made, FedPR)
    return made


def payload_of_fedpr(m: int = 2) -> Tensors:
    return visual.filled({PROMPTS.name: (3, m, 32)}, 5, 0.3)


def test_the_projection_by_hand() -> None:
    away = projection(torch.tensor([[1.0, 0.0]]), 0.5)
    assert away(torch.tensor([[3.0, 4.0]])).tolist() == [[0.0, 4.0]]
    assert projection(torch.tensor([[1.0, 0.0]]), 1.0)(torch.tensor([[3.0, 4.0]])).tolist() == [[3.0, 4.0]]
    draws = torch.Generator().manual_seed(0)
    few, many = torch.randn(8, 64, generator=draws), torch.randn(50, 64, generator=draws)
    assert float((projection(few, 0.8)(few)).norm() / few.norm()) < 1e-6, "all of what eight hold"
    left = float((projection(many, 0.8)(many)).norm() / many.norm())
    values = torch.linalg.svdvals(many.double()).square()
    assert left == pytest.approx(float((values[12:].sum() / values.sum()).sqrt()), rel=1e-4), "the twelve largest go"


@pytest.mark.parametrize("m", [2, 6])
def test_what_the_global_prompts_hold_stays(backbone: Backbone, m: int) -> None:
    tried, payload = method(m=m), payload_of_fedpr(m)
    context = visual.client_context(backbone, 4, round=2, **ADAM)
    after, before = tried.train(context, payload, {}).update[PROMPTS.name], payload[PROMPTS.name]
    assert float((after - before).abs().max()) > 1e-3
    for new, old in zip(after, before, strict=True):
        assert torch.allclose(new @ old.T, old @ old.T, atol=1e-5)
    first = tried.train(visual.client_context(backbone, 4, round=1, **ADAM), payload, {}).update[PROMPTS.name]
    assert not torch.allclose(first[0] @ before[0].T, before[0] @ before[0].T, atol=1e-3), "not so in round 1"


def literal_steps(backbone: Backbone, prompts: Tensor, steps: int, normalise: bool) -> Tensor:
    """Adam by hand over all images, its step through (I − QQᵀ)/√(ρ·d)."""
    split = visual.split_of(backbone, 3)
    text = torch.stack([backbone.encode_text([f"a photo of a {name.replace('_', ' ')}."])[0] for name in visual.NAMES])
    start, first, second = prompts.clone(), torch.zeros_like(prompts), torch.zeros_like(prompts)
    for number in range(1, steps + 1):
        leaf = prompts.clone().requires_grad_()
        losses = [
            cross_entropy(backbone.logit_scale * text @ literal.image_feature(backbone, leaf, image), int(label))
            for image, label in zip(split.pixels, split.labels, strict=True)
        ]
        [slope] = torch.autograd.grad(torch.stack(losses).mean(), [leaf])
        first = 0.9 * first + 0.1 * slope
        second = 0.999 * second + 0.001 * slope.square()
        step = -0.05 * (first / (1 - 0.9**number)) / ((second / (1 - 0.999**number)).sqrt() + 1e-8)
        moved = []
        for block, own in enumerate(start):
            inverse = torch.linalg.inv(own @ own.T)
            part = step[block] - step[block] @ own.T @ inverse @ own
            moved.append(part / (0.8 * 32) ** 0.5 if normalise else part)
        prompts = prompts + torch.stack(moved)
    return prompts


@pytest.mark.parametrize("normalise", [True, False])
def test_adams_step_is_projected_and_not_the_gradient(backbone: Backbone, normalise: bool) -> None:
    training = ADAM | {"batch_size": 3}
    context = visual.client_context(backbone, 3, round=2, **training)
    found = method(normalise=normalise).train(context, payload_of_fedpr(), {}).update[PROMPTS.name]
    wanted = literal_steps(backbone, payload_of_fedpr()[PROMPTS.name], 3, normalise)
    assert float((found - wanted).abs().max()) < 2e-3 * float((wanted - payload_of_fedpr()[PROMPTS.name]).abs().max())


def test_it_starts_and_serves_as_fedvpt_deep(backbone: Backbone) -> None:
    server, tried = visual.server_context(backbone, "a"), method()
    start = tried.initial_state(server, TorchDraws().manual_seed(1))
    plain = make_method({"name": "fedvpt_deep", "m": 2})
    assert start[PROMPTS.name].equal(plain.initial_state(server, TorchDraws().manual_seed(1))[PROMPTS.name])
    context = visual.client_context(backbone, 3)
    shown = [one.classifier(context, start, {}).logits(context.train, torch.arange(3)) for one in (tried, plain)]
    assert shown[0].equal(shown[1])
    linear = method(head="linear").train(visual.client_context(backbone, 4, round=2, **ADAM), payload_of_fedpr(), {})
    assert "head_weight" in linear.private
    resolved = resolve_spec({"name": "f", "method": {"name": "fedpr"}})
    assert (resolved.training.optimizer, resolved.training.weight_decay) == ("adam", 0.0)
