"""Batched rendering of glyphs in the styles, at thousands of images per second on one core."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from promptfed.shared.data.drawing import SIZE, Draws, hash_keys, place
from promptfed.shared.data.styles import STYLES

_CHUNK = 256


def render(glyphs: Tensor, styles: Sequence[str], keys: np.ndarray, pose: float = 1.0) -> Tensor:
    """Images (B, 3, SIZE, SIZE) uint8 of glyph masks (B, ATLAS, ATLAS) in their styles, with random keys (B,).

    ``pose`` in [0, 1] scales rotation, shift and bending.
    """
    images = torch.empty(len(glyphs), 3, SIZE, SIZE, dtype=torch.uint8)
    names = np.asarray(styles)
    for style in sorted(set(styles)):
        rows = np.flatnonzero(names == style)
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            images[part] = _render_style(glyphs[part], style, keys[part], pose)
    return images


def _render_style(glyphs: Tensor, style: str, keys: np.ndarray, pose: float) -> Tensor:
    info = STYLES[style]
    # Pose and style have separate streams, so that the same pose can be drawn in two styles.
    mask = place(glyphs, Draws(hash_keys("pose", keys)), info.wobble, pose)
    image = info.draw(mask, Draws(hash_keys("style", style, keys)))
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)
