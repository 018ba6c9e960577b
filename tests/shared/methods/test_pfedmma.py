"""pFedMMA against open_clip's blocks and the equations written out, and what of it leaves a client."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext, ClientUpdate, MethodError
from promptfed.shared.methods.pfedmma import PFedMMA, adapted, with_gradient_times
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_draws import TorchDraws
from tests.support.equality import assert_gradients, assert_values
from tests.support.literal import cross_entropy
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone, split_of

RATE = 0.1


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def method(**hyper: Any) -> PFedMMA:
    made = make_method({"name": "pfedmma", "r": 4, "alpha": 0.5} | hyper)
    assert isinstance(made, PFedMMA)
    return made


def start_of(tried: PFedMMA, backbone: Backbone) -> Tensors:
    """All of the adapters, biases too."""
    start = tried.start(generator, 3, tried.dims(server_context(backbone, "a")))
    draws = torch.Generator().manual_seed(2)
    return {
        name: one + 0.1 * torch.randn(one.shape, generator=draws) if name.endswith("bias") else one
        for name, one in start.items()
    }


def literal_adapter(own: Tensors, tower: str, pair: int, alpha: float, activation: Any, row: Tensor) -> Tensor:
    """(M1) of one row behind ln_1."""
    hidden = own[f"{tower}_down_weight"][pair] @ row + own[f"{tower}_down_bias"][pair]
    hidden = own["shared_weight"][pair] @ activation(hidden) + own["shared_bias"][pair]
    return alpha * (own[f"{tower}_up_weight"][pair] @ activation(hidden) + own[f"{tower}_up_bias"][pair])


def through(blocks: Any, rows: Tensor, own: Tensors, tower: str, alpha: float, act: Any, mask: Any = None) -> Tensor:
    """Rows ``(S, d)`` through open_clip's own blocks; the adapters stand beside the last ones."""
    first = len(blocks) - len(own["shared_weight"])
    for number, block in enumerate(blocks):
        out = block(rows.unsqueeze(0), attn_mask=mask)[0]
        if number >= first and f"{tower}_down_weight" in own:
            normed = block.ln_1(rows)
            out = out + torch.stack([literal_adapter(own, tower, number - first, alpha, act, row) for row in normed])
        rows = out
    return rows


def literal_logits(context: ClientContext, own: Tensors, image: Tensor, alpha: float, act: Any = F.relu) -> Tensor:
    backbone, model = context.backbone, context.backbone.model
    visual = model.visual
    patches = visual.conv1(image.unsqueeze(0))[0].flatten(1).T
    rows = torch.cat([visual.class_embedding.unsqueeze(0), patches]) + visual.positional_embedding
    rows = through(visual.transformer.resblocks, visual.ln_pre(rows), own, "visual", alpha, act)
    feature = visual.ln_post(rows[0]) @ visual.proj
    logits = []
    for name in NAMES:
        ids = backbone.tokens([f"a photo of a {name.replace('_', ' ')}."])[0]
        rows = model.token_embedding(ids) + model.positional_embedding
        rows = through(model.transformer.resblocks, rows, own, "text", alpha, act, model.attn_mask)
        text = model.ln_final(rows)[int(ids.argmax())] @ model.text_projection
        logits.append(backbone.logit_scale * F.cosine_similarity(feature, text, dim=0))
    return torch.stack(logits)


@pytest.mark.parametrize(
    "options", [{}, {"towers": "visual"}, {"towers": "text"}, {"k": 1}, {"activation": "gelu"}], ids=str
)
def test_it_computes_open_clips_blocks_and_a_loop(backbone: Backbone, options: dict[str, Any]) -> None:
    tried, context = method(**options), client_context(backbone, 3)
    own = start_of(tried, backbone)
    payload = {spec.name: own.pop(spec.name) for spec in tried.state_tensors()}
    found = tried.classifier(context, payload, own).logits(context.train, torch.arange(3))
    act = F.gelu if options.get("activation") == "gelu" else F.relu
    for row, image in enumerate(split_of(backbone, 3).pixels):
        assert_values(found[row], literal_logits(context, own | payload, image, 0.5, act))


@pytest.mark.parametrize("scaled", [True, False])
def test_a_step_is_the_equations(backbone: Backbone, scaled: bool) -> None:
    """With M3, every parameter's gradient is M1's divided by α, and the one towards z is exact."""
    tried = method(scale_gradients=scaled)
    context = client_context(backbone, 3, epochs=1, learning_rate=RATE)
    own = start_of(tried, backbone)
    payload = {spec.name: own.pop(spec.name) for spec in tried.state_tensors()}
    found = tried.train(context, payload, own)
    leaves = {name: one.clone().requires_grad_() for name, one in (own | payload).items()}
    split = split_of(backbone, 3)
    losses = [
        cross_entropy(literal_logits(context, leaves, image, 0.5), int(label))
        for image, label in zip(split.pixels, split.labels, strict=True)
    ]
    value = torch.stack(losses).mean()
    assert found.metrics["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    slopes = torch.autograd.grad(value, list(leaves.values()))
    moved = found.update | found.private
    for (name, leaf), slope in zip(leaves.items(), slopes, strict=True):
        wanted = slope / 0.5 if scaled else slope
        assert_gradients((leaf.detach() - moved[name]) / RATE, wanted)
    assert float(slopes[list(leaves).index("visual_down_weight")].abs().max()) > 0


def test_scaled_gradients_leave_values_and_z_alone(backbone: Backbone) -> None:
    own = start_of(method(), backbone)
    z = torch.randn(2, 3, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    down = own["visual_down_weight"].requires_grad_()
    outs, slopes = [], []
    for scaled in (True, False):
        out = adapted(own, 0, "visual", method(scale_gradients=scaled).hyper)(z)
        outs.append(out)
        slopes.append(torch.autograd.grad(out.square().sum(), [z, down]))
    assert outs[0].equal(outs[1])
    assert_gradients(slopes[0][0], slopes[1][0])
    assert_gradients(slopes[0][1] * 0.5, slopes[1][1])
    assert with_gradient_times(z, 3.0).equal(z)


def test_switched_off_it_is_zero_shot(backbone: Backbone) -> None:
    tried, context = method(alpha=0.0), client_context(backbone, 3)
    own = start_of(tried, backbone)
    payload = {spec.name: own.pop(spec.name) for spec in tried.state_tensors()}
    plain = TemplateClassifier(context).logits(context.train, torch.arange(3))
    assert tried.classifier(context, payload, own).logits(context.train, torch.arange(3)).equal(plain)
    nearly = method(alpha=1e-7).classifier(context, payload, own).logits(context.train, torch.arange(3))
    assert_values(nearly, plain)


def test_another_s_moves_both_towers(backbone: Backbone) -> None:
    tried, context = method(), client_context(backbone, 3)
    own = start_of(tried, backbone)
    for one in ("visual", "text"):
        kept = {name: tensor for name, tensor in own.items() if one in name}
        single = method(towers=one)
        shown = []
        for factor in (1.0, 2.0):
            payload = {name: own[name] * factor for name in ("shared_weight", "shared_bias")}
            shown.append(single.classifier(context, payload, kept).logits(context.train, torch.arange(3)))
        assert float((shown[0] - shown[1]).abs().max()) > 1e-3


def test_texts_are_made_anew_for_every_state(backbone: Backbone) -> None:
    """Nothing that a text tower of other weights has made is kept: the released program's first texts stay for good."""
    tried, context = method(towers="text"), client_context(backbone, 3)
    own = start_of(tried, backbone)
    payload = {spec.name: own.pop(spec.name) for spec in tried.state_tensors()}
    first = tried.classifier(context, payload, own).logits(context.train, torch.arange(3))
    tried.classifier(context, {name: 2 * one for name, one in payload.items()}, own)
    again = tried.classifier(context, payload, own).logits(context.train, torch.arange(3))
    assert again.equal(first)
    plain = TemplateClassifier(context).logits(context.train, torch.arange(3))
    assert float((first - plain).abs().max()) > 1e-3


def test_only_the_middle_leaves(backbone: Backbone) -> None:
    tried, context = method(), client_context(backbone, 2)
    state = tried.initial_state(server_context(backbone, "a"), TorchDraws())
    found = tried.train(context, state, {})
    assert set(found.update) == {"shared_weight", "shared_bias"}
    assert len(found.private) == 8
    assert not set(found.private) & set(found.update)
    assert {spec.name for spec in tried.payload_tensors(None)} == set(found.update)
    [phase] = tried.phases(1, 2)
    updates = [
        ClientUpdate(name, weight, {key: one * factor for key, one in found.update.items()})
        for name, weight, factor in (("a", 0.25, 1.0), ("b", 0.75, 3.0))
    ]
    after = tried.aggregate(state, phase, updates, weighted_mean, server_context(backbone, "a", "b"))
    assert_values(after["shared_bias"], 2.5 * found.update["shared_bias"])
    alone = method(share="none").train(context, {}, {})
    assert alone.update == {}
    assert len(alone.private) == 10
    whole = method(share="all")
    start = whole.initial_state(server_context(backbone, "a"), TorchDraws())
    assert len(whole.train(context, start, {}).update) == 10


def test_the_start_is_one_for_all_and_every_part_gets_a_gradient(backbone: Backbone) -> None:
    tried = method(r=32)
    start = tried.start(generator, 3, tried.dims(server_context(backbone, "a")))
    assert all(
        one.equal(again)
        for one, again in zip(
            start.values(), tried.start(generator, 3, tried.dims(server_context(backbone, "b"))).values(), strict=True
        )
    )
    assert float(start["shared_weight"].std()) == pytest.approx((2 / 32) ** 0.5, rel=0.1)
    assert float(start["visual_up_weight"].std()) == pytest.approx((2 / 32) ** 0.5, rel=0.1)
    assert float(start["text_up_weight"].std()) == pytest.approx((2 / 24) ** 0.5, rel=0.1)
    assert not any(one.any() for name, one in start.items() if name.endswith("bias"))
    state = {spec.name: start[spec.name] for spec in tried.state_tensors()}
    found = tried.train(client_context(backbone, 3, epochs=1), state, {})
    for name, one in (found.update | found.private).items():
        assert not one.equal(start[name]), f"{name} learns from the first step on"


def test_who_has_trained_none_classifies_zero_shot(backbone: Backbone) -> None:
    context = client_context(backbone, 3)
    for tried in (method(), method(share="none")):
        state = tried.initial_state(server_context(backbone, "a"), TorchDraws())
        assert isinstance(tried.classifier(context, state, {}), TemplateClassifier), "a random adapter is never served"
        evaluator = replace(context, train=split_of(backbone, 0))
        assert isinstance(tried.classifier(evaluator, state, {}), TemplateClassifier)


def test_pairs_are_counted_from_the_top(backbone: Backbone) -> None:
    sizes = method().dims(server_context(backbone, "a"))
    assert sizes["k"] == 2, "the text tower has two blocks, the image tower three"
    assert method(towers="visual").dims(server_context(backbone, "a"))["k"] == 3
    with pytest.raises(MethodError, match="k = 3, but a tower has 2 blocks"):
        method(k=3).dims(server_context(backbone, "a"))
    with pytest.raises(SpecError, match="alpha: 0 switches"):
        resolve_spec({"name": "f", "method": {"name": "pfedmma", "alpha": 0.0}})


def test_its_size_is_the_papers() -> None:
    sizes = {"k": 8, "r": 32, "d_t": 512, "d_v": 768}
    tried = make_method({"name": "pfedmma"})
    assert isinstance(tried, PFedMMA)
    count = {spec.name: torch.Size(spec.resolve(sizes)).numel() for spec in tried.tensors()}
    assert sum(count[spec.name] for spec in tried.state_tensors()) == 8_448
    assert sum(count.values()) == 674_560
