"""Prompted image encoding in an open_clip `VisionTransformer` (VPT, Jia et al., 2022; as used by PLAN and pFedPG).

Notation: `B` images, `n` prompt tokens, `d` = d_v the tower's width, `S` = 1 + patches.
"""

from typing import Any

import torch
from torch import Tensor

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers.blocks import first_row, is_standard_block


def refusal_of(visual: Any) -> str | None:
    """The reason why an image tower takes no visual prompts; None if it does."""
    from open_clip.transformer import VisionTransformer

    if not isinstance(visual, VisionTransformer):
        return f"it is a {type(visual).__name__}, not a vision transformer of open_clip"
    if not visual.transformer.batch_first:
        return "it is not batch-first"
    return None


def vision_width(visual: Any) -> int:
    """d_v: width of the tower's features before the projection."""
    if refusal_of(visual) is None:
        return int(visual.transformer.width)
    trunk = getattr(visual, "trunk", None)  # timm
    if trunk is not None:
        return int(trunk.num_features)
    return int(visual.attnpool.c_proj.in_features)


def patch_size(visual: Any) -> int | None:
    """Side of a vision transformer's patches in pixels; None if they are not square."""
    height, width = visual.patch_size
    return int(height) if height == width else None


def encode_prompted(visual: Any, images: Tensor, prompts: Tensor, *, pooled: bool) -> Tensor:
    """Features `(B, d_e)` of images `(B, 3, H, W)` with prompts `(depth, n, d)`; `pooled`: before the projection.

    The first prompts are added to [cls] and the patches after the positional embedding and before `ln_pre`.
    """
    refusal = refusal_of(visual)
    if refusal is not None:
        raise BackboneError(f"This backbone's image tower takes no visual prompts: {refusal}.")
    blocks = visual.transformer.resblocks
    check_prompts(prompts, len(blocks), visual.transformer.width)
    with torch.no_grad():
        rows = visual._embeds(images)  # (B, S, d)
    only_first = visual.attn_pool is None and visual.pool_type == "tok" and is_standard_block(blocks[-1])
    rows = run_prompted(blocks, visual.ln_pre, rows, prompts, only_first=only_first)
    feature: Tensor = visual._pool(rows)[0]
    if pooled or visual.proj is None:
        return feature
    projected: Tensor = feature @ visual.proj
    return projected


def check_prompts(prompts: Tensor, layers: int, width: int) -> None:
    """Raise BackboneError unless visual prompts are `(depth, n, width)` with a depth of 1 to ``layers``."""
    if prompts.ndim != 3 or prompts.shape[2] != width or not 1 <= prompts.shape[0] <= layers:
        raise BackboneError(
            f"Visual prompts of shape {tuple(prompts.shape)} do not fit: the backbone takes (depth, n, {width}) "
            f"with a depth of 1 to {layers}."
        )


def run_prompted(blocks: Any, norm: Any, rows: Tensor, prompts: Tensor, *, only_first: bool = False) -> Tensor:
    """Rows `(B, S, d)` of [cls] and patches after all blocks, with prompts `(depth, n, d)` beside them.

    ``rows`` are already normed by ``norm``, which is applied to the first prompts as well. Before each further block
    the next prompts replace the previous ones. Prompts are placed after the image's tokens, since attention ignores the
    order and pooling must cover only the image's tokens. With ``only_first`` the last block returns row 0, `(B, 1, d)`.
    """
    batch, tokens = rows.shape[:2]
    prompts = prompts.to(rows.dtype)
    for number, block in enumerate(blocks):
        if number < prompts.shape[0]:
            fresh = norm(prompts[0]) if number == 0 else prompts[number]
            rows = torch.cat([rows[:, :tokens], fresh.expand(batch, -1, -1)], dim=1)
        rows = first_row(block, rows) if only_first and number == len(blocks) - 1 else block(rows)
    return rows[:, :tokens]
