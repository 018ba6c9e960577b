"""CONCH's image tower: a vision transformer of timm whose rows are pooled by attention with one learned query.

Lu et al., "A visual-language foundation model for computational pathology", Nature Medicine 2024. Its text tower is
CoCa's in open_clip. The names of the weights are those of the published file. A second pooling there, for captions, is
not used.
"""

from typing import Any

import torch
from torch import Tensor, nn

HEADS = 8  # of the pooling


class ConchVision(nn.Module):
    """Features `(B, d_e)` of images `(B, 3, H, W)`: attention over the trunk's rows, a norm, a square projection."""

    def __init__(self, trunk: Any, d_e: int) -> None:
        from open_clip.transformer import AttentionalPooler

        super().__init__()
        self.trunk = trunk
        self.d_e = d_e
        self.attn_pool_contrast = AttentionalPooler(d_e, trunk.num_features, n_head=HEADS, n_queries=1)
        self.ln_contrast = nn.LayerNorm(d_e)
        self.proj_contrast = nn.Parameter(torch.randn(d_e, d_e) * d_e**-0.5)

    @classmethod
    def of(cls, visual: Any, d_e: int) -> "ConchVision":
        """The tower around the trunk that open_clip has built, with its preparation of images."""
        made = cls(visual.trunk, d_e).to(next(visual.parameters()))
        for name in ("image_size", "image_mean", "image_std", "preprocess_cfg"):
            if hasattr(visual, name):
                setattr(made, name, getattr(visual, name))
        return made

    def attend(self, rows: Tensor) -> Tensor:
        """The pooled feature `(B, d_e)` of the trunk's last rows `(B, S, d)`, behind their norm."""
        pooled: Tensor = self.ln_contrast(self.attn_pool_contrast(rows)[:, 0])
        return pooled

    def project(self, pooled: Tensor) -> Tensor:
        """Features `(B, d_e)` of pooled ones."""
        return pooled @ self.proj_contrast.to(pooled.dtype)

    def forward(self, images: Tensor) -> Tensor:
        """Features, not normalised."""
        return self.project(self.attend(self.trunk.forward_features(images)))
