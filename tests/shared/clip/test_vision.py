"""Prompted image encoding against a token-by-token reading of its definition."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from promptfed.shared.clip import BackboneError
from tests.shared.clip.conftest import VISION_TRANSFORMERS, noise
from tests.support.equality import assert_gradients, assert_values


def literal(backbone: Any, images: Any, prompts: Any, pooled: Any = False) -> Any:
    """Prompts between [cls] and the patches, as the papers draw them, and open_clip's modules one by one."""
    visual, n = backbone.model.visual, prompts.shape[1]
    patches = visual.conv1(images).flatten(2).transpose(1, 2)  # (B, patches, d)
    rows = torch.cat([visual.class_embedding.expand(len(images), 1, -1), patches], dim=1) + visual.positional_embedding
    rows = visual.ln_pre(torch.cat([rows[:, :1], prompts[0].expand(len(images), -1, -1), rows[:, 1:]], dim=1))
    for number, block in enumerate(visual.transformer.resblocks):
        if 1 <= number < len(prompts):
            fresh = prompts[number].expand(len(images), -1, -1)
            rows = torch.cat([rows[:, :1], fresh, rows[:, 1 + n :]], dim=1)
        rows = block(rows)
    own = torch.cat([rows[:, :1], rows[:, 1 + n :]], dim=1)
    if visual.attn_pool is not None:
        feature = visual.ln_post(visual.attn_pool(own))[:, 0]
    elif visual.final_ln_after_pool:
        feature = visual.ln_post(own[:, 1:].mean(dim=1) if visual.pool_type == "avg" else own[:, 0])
    else:
        own = visual.ln_post(own)
        feature = own[:, 1:].mean(dim=1) if visual.pool_type == "avg" else own[:, 0]
    return F.normalize(feature if pooled else feature @ visual.proj, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_prompted_images_equal_the_definition(small: Any, name: Any, pooled: Any, depth: Any, dtype: Any) -> None:
    backbone = small(name, dtype)
    images = noise(2, 3, 32, 32, dtype=dtype)
    leaves = [noise(depth, 5, backbone.d_v, seed=1, scale=0.5, dtype=dtype).requires_grad_() for _ in range(2)]
    found = backbone.encode_images_prompted(images, leaves[0], pooled=pooled)
    wanted = literal(backbone, images, leaves[1], pooled=pooled)
    assert_values(found, wanted)
    weight = noise(*found.shape, seed=2, dtype=dtype)
    (gradient,) = torch.autograd.grad((found * weight).sum(), leaves[0])
    (wanted_gradient,) = torch.autograd.grad((wanted * weight).sum(), leaves[1])
    assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_without_prompt_tokens_it_is_the_ordinary_encoding(small: Any, name: Any) -> None:
    backbone = small(name)
    images = noise(3, 3, 32, 32)
    found = backbone.encode_images_prompted(images, torch.zeros(2, 0, backbone.d_v))
    assert_values(found, backbone.encode_images(images))
    assert_values(
        backbone.encode_images(images), F.normalize(backbone.model.encode_image(images, normalize=False), dim=-1)
    )


def test_pooled_features_lead_to_the_projected_ones(small: Any) -> None:
    backbone = small("small-vit")
    images, prompts = noise(2, 3, 32, 32), noise(1, 4, backbone.d_v)
    pooled = backbone.encode_images_prompted(images, prompts, pooled=True, normalize=False)
    assert pooled.shape == (2, backbone.d_v)
    assert_values(
        pooled @ backbone.model.visual.proj, backbone.encode_images_prompted(images, prompts, normalize=False)
    )


@pytest.mark.parametrize("name", ["small-resnet", "small-timm"])
def test_other_image_towers_encode_but_take_no_prompts(small: Any, name: Any) -> None:
    backbone = small(name)
    assert not backbone.supports.visual_prompts
    assert backbone.vision_layers == 0
    features = backbone.encode_images(noise(2, 3, 64, 64))
    assert features.shape == (2, backbone.d_e)
    with pytest.raises(BackboneError, match="takes no visual prompts"):
        backbone.encode_images_prompted(noise(2, 3, 64, 64), noise(1, 4, backbone.d_v))


@pytest.mark.parametrize("shape", [(4, 64), (1, 4, 48), (4, 2, 64), (0, 2, 64)])
def test_prompts_that_do_not_fit(small: Any, shape: Any) -> None:
    with pytest.raises(BackboneError, match="depth of 1 to 3"):
        small("small-vit").encode_images_prompted(noise(2, 3, 32, 32), noise(*shape))


def test_no_gradient_reaches_a_weight_or_the_ordinary_encoding(small: Any) -> None:
    backbone = small("small-vit")
    images = noise(2, 3, 32, 32)
    assert not backbone.encode_images(images).requires_grad
    prompts = noise(3, 2, backbone.d_v).requires_grad_()
    backbone.encode_images_prompted(images, prompts).sum().backward()
    assert prompts.grad is not None
    assert bool((prompts.grad.abs().amax(dim=(1, 2)) > 0).all())
    assert all(weight.grad is None for weight in backbone.model.parameters())
