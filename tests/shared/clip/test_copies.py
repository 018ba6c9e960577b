"""Towers with other weights against open_clip's and timm's own modules: values, gradients, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.shared.clip import BackboneError, load_backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.clip.towers.text import LowRank
from tests.shared.clip.conftest import (
    CLASS_NAMES,
    assert_image_weights_equal,
    assert_text_weights_equal,
    noise,
)
from tests.shared.clip.test_timm import KINDS, entry
from tests.support.equality import assert_values

VISION = ["small-vit", "small-quick", "small-scale", "small-bidirectional", "small-one-block", "promptfed-tiny"]
TEXT = ["small-vit", "small-quick", "small-scale", "small-eos", "small-custom", "small-one-block", "promptfed-tiny"]
TIMM = ["small_plain", "small_average", "small_prenorm"]


def backbone_of(name: Any, small: Any) -> Any:
    return load_backbone("promptfed-tiny", "random") if name == "promptfed-tiny" else small(name)


@pytest.mark.parametrize("name", VISION)
def test_an_image_tower_of_other_weights_is_open_clip_s_with_them(small: Any, name: Any) -> None:
    backbone = backbone_of(name, small)
    tower, images = backbone.vision_tower(), noise(3, 3, *backbone.image_size)
    assert_values(tower.features(images), backbone.encode_images(images, normalize=False))
    assert_image_weights_equal(tower, images)


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
    assert_values(tower.features(images), backbone.encode_images(images, normalize=False))
    assert_image_weights_equal(tower, images)


@pytest.mark.parametrize("name", TEXT)
def test_a_text_tower_of_other_weights_is_open_clip_s_with_them(small: Any, name: Any) -> Any:
    backbone = backbone_of(name, small)
    tower, model = backbone.text_tower(), backbone.model
    texts = [f"a photo of a {one}." for one in CLASS_NAMES]
    ids = backbone.tokens(texts)
    given = tower.texts(ids)
    assert given.rows.shape[1] == int(given.ends.max()) + 1 < ids.shape[1]
    assert_values(tower.encode_texts(given), backbone.encode_text(texts, normalize=False))
    assert_text_weights_equal(tower, model, ids, model.encode_text)


def test_blocks_may_be_run_in_two_parts(small: Any) -> None:
    backbone = small("small-vit")
    tower, images = backbone.vision_tower(), noise(2, 3, 32, 32)
    rows = tower.rows(images)
    half = tower.run(rows, 0, 2)
    assert half.shape == rows.shape
    assert_values(tower.project(tower.pool(tower.run(half, 2))), tower.features(images))


@pytest.mark.parametrize("matrices", [3, 4])
@pytest.mark.parametrize("name", ["small-vit", "small-bidirectional"])
def test_a_low_rank_branch_is_the_merged_weight(small: Any, matrices: Any, name: Any) -> None:
    tower = small(name).vision_tower()
    d, rows = tower.width, noise(2, 5, tower.width)
    low = {2: LowRank(noise(matrices, 2, d, seed=1), noise(matrices, d, 2, seed=2), 0.3)}
    branch = tower.run(rows, low_rank=low)
    merged, change = tower.copy(), low[2].change()
    [(place, weight)], [(output, other)] = (
        merged.named(kind, 2).items() for kind in ("in_proj_weight", "out_proj_weight")
    )
    merged.put({place: weight + change[:3].reshape(3 * d, d)} | ({output: other + change[3]} if matrices == 4 else {}))
    assert branch.shape[1] == (1 if name == "small-vit" else 5)
    assert_values(branch, merged.run(rows))
    assert not torch.allclose(branch, tower.run(rows))


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


def test_a_copy_shares_the_frozen_weights_wherever_the_model_was_moved(small: Any) -> None:
    backbone = load_backbone("small-vit", None)
    copy, visual = backbone.vision_tower().copy(), backbone.model.visual
    backbone.model.to(torch.float64)
    again = backbone.vision_tower().copy()
    assert again.module is not visual
    for name, weight in visual.named_parameters():
        assert again.module.get_parameter(name) is weight
        assert copy.module.get_parameter(name) is weight
        assert not weight.requires_grad
    again.put({"proj": torch.zeros(64, 40)})
    assert again.module.proj.dtype == torch.float64, "as the tower computes"
    assert bool(visual.proj.any())


def test_sizes_inside_the_towers_are_told_with_the_model_and_without_it() -> None:
    real = shape_of(load_backbone("promptfed-tiny", "random"))
    assert (real.mlp_width, real.positions, real.heads_v, real.heads_t) == (512, 37, 4, 4)
    large = shape_by_name("ViT-L-14")
    assert large is not None
    assert (large.mlp_width, large.positions, large.heads_v, large.heads_t) == (4096, 257, 16, 12)
    coca = shape_by_name("coca_ViT-B-32")
    assert coca is not None
    assert coca.mlp_width is None
