"""Patch features in the joint space, from the frozen towers of open_clip that support them.

Notation: `B` images, `M` patches, `d` width of the tower, `d_e` of the joint embedding.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from promptfed.shared.clip.errors import BackboneError


def refusal_of(visual: Any) -> str | None:
    """The reason why an image tower gives no patch features; None if it does."""
    from open_clip.modified_resnet import ModifiedResNet
    from open_clip.transformer import VisionTransformer

    if isinstance(visual, ModifiedResNet):
        return None
    if not isinstance(visual, VisionTransformer):
        return f"it is a {type(visual).__name__}, neither a vision transformer nor a CLIP ResNet of open_clip"
    if visual.attn_pool is not None:
        return "it pools its patches by attention, before they reach the joint space"
    if visual.pool_type not in ("tok", "avg"):
        return f"it pools by {visual.pool_type!r}"
    return None


def patch_tokens(visual: Any) -> int | None:
    """M; None if the tower gives no patch features."""
    if refusal_of(visual) is not None:
        return None
    pool = getattr(visual, "attnpool", None)  # of a ResNet
    positions = visual.positional_embedding if pool is None else pool.positional_embedding
    return int(positions.shape[0]) - 1


def encode_patches(visual: Any, images: Tensor) -> Tensor:
    """Patch features `(B, M, d_e)` of images `(B, 3, H, W)`, not normalised. BackboneError if the tower has none."""
    from open_clip.transformer import VisionTransformer

    refusal = refusal_of(visual)
    if refusal is not None:
        raise BackboneError(f"This backbone's image tower gives no patch features: {refusal}.")
    if not isinstance(visual, VisionTransformer):
        return _resnet_patches(visual, images)
    rows = visual.transformer(visual._embeds(images))[:, 1:]
    # Also if the tower norms after pooling: patches are not pooled, and the norm processes each row separately.
    rows = visual.ln_post(rows)
    features: Tensor = rows if visual.proj is None else rows @ visual.proj
    return features


def _resnet_patches(visual: Any, images: Tensor) -> Tensor:
    rows = visual.stem(images)
    for layer in (visual.layer1, visual.layer2, visual.layer3, visual.layer4):
        rows = layer(rows)
    return attend_from_everywhere(visual.attnpool, rows)[:, 1:]


def attend_from_everywhere(pool: Any, feature_map: Tensor) -> Tensor:
    """`(B, 1 + H·W, d_e)`: open_clip's `AttentionPool2d` with queries from all positions instead of position 0 only.

    feature_map: `(B, d, H, W)`; position 0 is their mean.
    """
    rows = feature_map.flatten(2).transpose(1, 2)
    rows = torch.cat([rows.mean(dim=1, keepdim=True), rows], dim=1) + pool.positional_embedding.to(rows.dtype)
    batch, positions, width = rows.shape

    def heads(projected: Tensor) -> Tensor:
        return projected.view(batch, positions, pool.num_heads, width // pool.num_heads).transpose(1, 2)

    attended = F.scaled_dot_product_attention(
        heads(pool.q_proj(rows)), heads(pool.k_proj(rows)), heads(pool.v_proj(rows))
    )
    result: Tensor = pool.c_proj(attended.transpose(1, 2).flatten(2))
    return result
