"""`precision: bf16` for the frozen towers: half the memory, features near those of fp32, gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from promptfed.shared.clip import Backbone, load_backbone

pytestmark = pytest.mark.extended
NAMES = ("sun", "chess knight", "umbrella")


def weights_bytes(backbone: Backbone) -> int:
    """Of both towers but for the word table, which open_clip keeps in float32, and CoCa's decoder of captions."""
    table = backbone._text.embedding.data_ptr()
    return sum(
        weight.numel() * weight.element_size()
        for name, weight in backbone.model.named_parameters()
        if weight.data_ptr() != table and not name.startswith("text_decoder")
    )


@pytest.mark.parametrize("model", ["promptfed-tiny", "small-vit", "small-quick", "small-coca"])
def test_frozen_towers_in_half_precision(model: str) -> None:
    whole, half = (load_backbone(model, "random", precision=precision) for precision in ("fp32", "bf16"))
    assert weights_bytes(half) < 0.6 * weights_bytes(whole)
    images = torch.randn(2, 3, *whole.image_size, generator=torch.Generator().manual_seed(1))
    features = [backbone.encode_images(images) for backbone in (whole, half)]
    assert features[1].dtype == torch.float32
    assert float(F.cosine_similarity(*features).min()) > 0.99
    context = torch.randn(2, whole.d_t, generator=torch.Generator().manual_seed(2)) * 0.2
    slopes = []
    for backbone in (whole, half):
        leaf = context.clone().requires_grad_()
        texts = backbone.encode_prompts(leaf, backbone.class_prompts(NAMES, 2))
        (texts * texts.detach().roll(1, 0)).sum().backward()
        assert leaf.grad is not None
        slopes.append(leaf.grad)
        features.append(texts.detach())
    assert float(F.cosine_similarity(*features[2:]).min()) > 0.99
    assert float(F.cosine_similarity(slopes[0].flatten(), slopes[1].flatten(), dim=0)) > 0.9
    if not whole.supports.visual_prompts:
        return
    prompts = torch.randn(1, 2, whole.d_v, generator=torch.Generator().manual_seed(3)).requires_grad_()
    half.encode_images_prompted(images, prompts).sum().backward()
    assert prompts.grad is not None
    assert bool(torch.isfinite(prompts.grad).all())
