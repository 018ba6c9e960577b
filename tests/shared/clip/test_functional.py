"""Towers as functions of weights against open_clip's and timm's own modules: values, gradients, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.func import functional_call

from promptfed.shared.clip import BackboneError, load_backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.clip.towers.functional import LowRank
from tests.shared.clip.conftest import CLASS_NAMES, noise
from tests.shared.clip.test_timm import KINDS, entry
from tests.support.equality import assert_gradients, assert_values

VISION = ["small-vit", "small-quick", "small-scale", "small-bidirectional", "small-one-block", "promptfed-tiny"]
TEXT = ["small-vit", "small-quick", "small-scale", "small-eos", "small-custom", "small-one-block", "promptfed-tiny"]
TIMM = ["small_plain", "small_average", "small_prenorm"]
NAMES = {  # ours of a tower's, for gradients
    "conv1_weight": "conv1.weight",
    "class_embedding": "class_embedding",
    "positional_embedding": "positional_embedding",
    "ln_post_weight": "ln_post.weight",
    "proj": "proj",
    "0.in_proj_weight": "transformer.resblocks.0.attn.in_proj_weight",
    "0.in_proj_bias": "transformer.resblocks.0.attn.in_proj_bias",
    "0.out_proj_weight": "transformer.resblocks.0.attn.out_proj.weight",
    "0.ln_1_weight": "transformer.resblocks.0.ln_1.weight",
    "0.c_fc_weight": "transformer.resblocks.0.mlp.c_fc.weight",
    "0.c_proj_bias": "transformer.resblocks.0.mlp.c_proj.bias",
}
TIMM_NAMES = {
    "conv1_weight": "patch_embed.proj.weight",
    "0.in_proj_weight": "blocks.0.attn.qkv.weight",
    "0.out_proj_bias": "blocks.0.attn.proj.bias",
    "0.ln_2_weight": "blocks.0.norm2.weight",
    "0.c_fc_weight": "blocks.0.mlp.fc1.weight",
    "0.c_proj_weight": "blocks.0.mlp.fc2.weight",
}
TEXT_NAMES = {
    "token_embedding": "token_embedding.weight",
    "positional_embedding": "positional_embedding",
    "ln_final_bias": "ln_final.bias",
    "0.in_proj_weight": "transformer.resblocks.0.attn.in_proj_weight",
    "0.c_fc_weight": "transformer.resblocks.0.mlp.c_fc.weight",
}


def backbone_of(name: Any, small: Any) -> Any:
    return load_backbone("promptfed-tiny", "random") if name == "promptfed-tiny" else small(name)


def shaken(weights: Any, names: Any, seed: Any = 3) -> Any:
    """Other weights than the frozen ones, of which those called ``names`` take gradients."""
    changed = {name: weight + 0.02 * noise(*weight.shape, seed=seed + n) for n, (name, weight) in enumerate(weights)}
    return {name: weight.requires_grad_() if name in names else weight for name, weight in changed.items()}


def compare(found: Any, wanted: Any, ours: Any, theirs: Any, names: Any) -> None:
    assert_values(found, wanted)
    weight = noise(*found.shape, seed=9)
    gradients = torch.autograd.grad((found * weight).sum(), [ours[name] for name in names])
    wanted_gradients = torch.autograd.grad((wanted * weight).sum(), [theirs[name] for name in names.values()])
    for own, other in zip(gradients, wanted_gradients, strict=True):
        assert_gradients(own, other.reshape(own.shape))


@pytest.mark.parametrize("name", VISION)
def test_an_image_tower_of_other_weights_is_open_clip_s_with_them(small: Any, name: Any) -> None:
    backbone = backbone_of(name, small)
    tower, visual = backbone.vision_tower(), backbone.model.visual
    images = noise(3, 3, *backbone.image_size)
    assert_values(tower.encode(tower.weights, images), backbone.encode_images(images, normalize=False))
    names = {own: other for own, other in NAMES.items() if own in tower.weights}
    ours = shaken(tower.weights.items(), names)
    theirs = {
        key: ours[next((own for own, other in NAMES.items() if other == key), "")].detach().clone().requires_grad_()
        for key in names.values()
    }
    others = {key: ours[own].detach() for own, key in full_names(visual).items()}
    wanted = functional_call(visual, others | theirs, (images,))
    compare(tower.encode(ours, images), wanted, ours, theirs, names)


def full_names(visual: Any) -> Any:
    """open_clip's name of every weight that ours have."""
    found = {}
    for key, _ in visual.named_parameters():
        own = key.removeprefix("transformer.resblocks.").replace("attn.", "").replace("mlp.", "")
        own = own.removesuffix(".gamma") if own.endswith("gamma") else own
        number, _, rest = own.partition(".")
        found[f"{number}.{rest.replace('.', '_')}" if number.isdecimal() else own.replace(".", "_")] = key
    return found


@pytest.fixture(scope="module")
def _timm_models() -> None:
    from timm.models.vision_transformer import VisionTransformer

    for kind in TIMM:
        entry(kind, VisionTransformer, KINDS[kind])


@pytest.mark.usefixtures("_timm_models")
@pytest.mark.parametrize("name", TIMM)
def test_an_image_tower_of_timm_with_other_weights_is_timm_s_own_with_them(name: Any) -> None:
    backbone = load_backbone(f"timm:{name}", None, allow_unregistered=True)
    tower, images = backbone.vision_tower(), noise(3, 3, 32, 32)
    assert_values(tower.encode(tower.weights, images), backbone.encode_images(images, normalize=False))
    ours = dict(tower.weights)
    ours |= shaken([(key, ours[key]) for key in TIMM_NAMES], TIMM_NAMES)
    theirs = {key: ours[own].detach().clone().requires_grad_() for own, key in TIMM_NAMES.items()}
    wanted = functional_call(backbone.model, theirs, (images,))
    compare(tower.encode(ours, images), wanted, ours, theirs, TIMM_NAMES)


@pytest.mark.parametrize("name", TEXT)
def test_a_text_tower_of_other_weights_is_open_clip_s_with_them(small: Any, name: Any) -> Any:
    backbone = backbone_of(name, small)
    tower, model = backbone.text_tower(), backbone.model
    texts = [f"a photo of a {one}." for one in CLASS_NAMES]
    ids = backbone.tokens(texts)
    assert tower.rows(tower.weights, ids).shape[1] == int(tower.ends(ids).max()) + 1 < ids.shape[1]
    assert_values(tower.encode(tower.weights, ids), backbone.encode_text(texts, normalize=False))
    ours = dict(tower.weights)
    ours |= shaken([(key, ours[key]) for key in TEXT_NAMES], TEXT_NAMES)
    prefix = "text." if hasattr(model, "text") else ""
    theirs = {prefix + key: ours[own].detach().clone().requires_grad_() for own, key in TEXT_NAMES.items()}

    class Texts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: Any) -> Any:
            return self.model.encode_text(given)

    wanted = functional_call(Texts(), {f"model.{key}": weight for key, weight in theirs.items()}, (ids,))
    compare(tower.encode(ours, ids), wanted, ours, theirs, {own: prefix + key for own, key in TEXT_NAMES.items()})


def test_blocks_may_be_run_in_two_parts(small: Any) -> None:
    backbone = small("small-vit")
    tower, images = backbone.vision_tower(), noise(2, 3, 32, 32)
    rows = tower.rows(tower.weights, images)
    half = tower.blocks(tower.weights, rows, 0, 2)
    assert half.shape == rows.shape
    whole = tower.pool(tower.weights, tower.blocks(tower.weights, half, 2))
    assert_values(tower.project(tower.weights, whole), tower.encode(tower.weights, images))


@pytest.mark.parametrize("matrices", [3, 4])
@pytest.mark.parametrize("first_only", [True, False])
def test_a_low_rank_branch_is_the_merged_weight(small: Any, matrices: Any, first_only: Any) -> None:
    tower = replace(small("small-vit").vision_tower(), pooling="tok" if first_only else "avg")
    d, rows = tower.blocks_shape.width, noise(2, 5, tower.blocks_shape.width)
    low = {1: LowRank(noise(matrices, 2, d, seed=1), noise(matrices, d, 2, seed=2), 0.3)}
    branch = tower.blocks(tower.weights, rows, low_rank=low)
    merged, change = dict(tower.weights), low[1].change()
    merged["1.in_proj_weight"] = merged["1.in_proj_weight"] + change[:3].reshape(3 * d, d)
    if matrices == 4:
        merged["1.out_proj_weight"] = merged["1.out_proj_weight"] + change[3]
    assert_values(branch, tower.blocks(merged, rows))
    assert not torch.allclose(branch, tower.blocks(tower.weights, rows))


def test_dropout_of_a_low_rank_branch_keeps_the_mean_and_repeats_with_its_seed() -> Any:
    rows = torch.ones(4000, 3)
    a, b = torch.ones(1, 1, 3), torch.ones(1, 3, 1)

    def drawn(seed: Any) -> Any:
        return LowRank(a, b, 1.0, 0.25, torch.Generator().manual_seed(seed)).branch(0, rows)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert float(drawn(1).mean()) == pytest.approx(3.0, abs=0.1)
    assert drawn(1).unique().tolist() == pytest.approx([0.0, 4 / 3, 8 / 3, 4.0])


@pytest.mark.parametrize(
    ("name", "why"),
    [("small-resnet", "it is a ModifiedResNet"), ("small-timm", "it is a TimmModel")],
)
def test_other_image_towers_are_refused_by_name(small: Any, name: Any, why: Any) -> None:
    backbone = small(name)
    with pytest.raises(BackboneError, match=f"image tower cannot be computed with other weights.*{why}"):
        backbone.vision_tower()
    assert backbone.sizes == dict.fromkeys(("mlp_width", "positions", "heads_v")) | {"heads_t": 4}


@pytest.mark.parametrize("name", ["small-qknorm"])
def test_other_text_towers_are_refused(small: Any, name: Any) -> None:
    with pytest.raises(BackboneError, match="text tower cannot be computed with other weights"):
        small(name).text_tower()


def test_the_frozen_weights_are_those_of_the_model_wherever_it_was_moved(small: Any) -> None:
    backbone = load_backbone("small-vit", None)
    before = backbone.vision_tower()
    backbone.model.to(torch.float64)
    after = backbone.vision_tower()
    assert before.weights["proj"].dtype == torch.float32
    assert after.weights["proj"].dtype == torch.float64
    assert after.weights["proj"].data_ptr() == backbone.model.visual.proj.data_ptr()
    assert not any(weight.requires_grad for weight in after.weights.values())


def test_sizes_inside_the_towers_are_told_with_the_model_and_without_it() -> None:
    real = shape_of(load_backbone("promptfed-tiny", "random"))
    assert (real.mlp_width, real.positions, real.heads_v, real.heads_t) == (512, 37, 4, 4)
    large = shape_by_name("ViT-L-14")
    assert large is not None
    assert (large.mlp_width, large.positions, large.heads_v, large.heads_t) == (4096, 257, 16, 12)
    coca = shape_by_name("coca_ViT-B-32")
    assert coca is not None
    assert coca.mlp_width is None
