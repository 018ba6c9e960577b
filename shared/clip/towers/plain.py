"""The embedded backbones' towers: the computation of open_clip's CLIP with the same names, without importing open_clip.

open_clip imports torchvision, timm and transformers, which takes twice as long as torch itself. So promptfed-photo's
image tower is not timm's module either, but has its names and gives its bits.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# open_clip's constants for a model that says nothing else.
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def is_a(thing: Any, module: str, name: str) -> bool:
    """Whether ``thing`` is of the class ``name`` of open_clip's ``module``, or of this file's class of that name.

    open_clip is not imported for it: where it has made something, it is.
    """
    return type(thing) in (getattr(sys.modules.get(f"open_clip.{module}"), name, None), globals().get(name))


class LayerNorm(nn.LayerNorm):
    """A norm whose result has the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(x.dtype)


class ResidualAttentionBlock(nn.Module):
    """Attention and an MLP, each behind a norm and beside a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1 = LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ls_1 = nn.Identity()
        self.ln_2 = LayerNorm(width)
        self.mlp = nn.Sequential()
        self.mlp.add_module("c_fc", nn.Linear(width, 4 * width))
        self.mlp.add_module("gelu", nn.GELU())
        self.mlp.add_module("c_proj", nn.Linear(4 * width, width))
        self.ls_2 = nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        rows = self.ln_1(x)
        mask = None if attn_mask is None else attn_mask.to(rows.dtype)
        x = x + self.attn(rows, rows, rows, need_weights=False, attn_mask=mask)[0]
        result: Tensor = x + self.mlp(self.ln_2(x))
        return result


class Transformer(nn.Module):
    """Blocks."""

    batch_first = True

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.width = width
        self.resblocks = nn.ModuleList([ResidualAttentionBlock(width, heads) for _ in range(layers)])

    def get_cast_dtype(self) -> torch.dtype:
        """The dtype in which the blocks compute."""
        first: Any = self.resblocks[0]
        dtype: torch.dtype = first.mlp.c_fc.weight.dtype
        return dtype

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        for block in self.resblocks:
            x = block(x, attn_mask=attn_mask)
        return x


def _preparation(size: int) -> dict[str, Any]:
    """How open_clip prepares images for a configuration that says nothing else."""
    how = {"mode": "RGB", "mean": MEAN, "std": STD, "interpolation": "bicubic", "resize_mode": "shortest"}
    return {"size": (size, size), **how, "fill_color": 0}


class VisionTransformer(nn.Module):
    """The image tower, which pools its class token."""

    attn_pool = None
    pool_type = "tok"

    def __init__(self, image_size: int, patch_size: int, width: int, layers: int, head_width: int, d_e: int) -> None:
        super().__init__()
        self.patch_size = patch_size, patch_size
        self.output_dim = d_e
        self.preprocess_cfg = _preparation(image_size)
        self.class_embedding = nn.Parameter(torch.empty(width))
        self.positional_embedding = nn.Parameter(torch.empty((image_size // patch_size) ** 2 + 1, width))
        self.proj = nn.Parameter(torch.empty(width, d_e))
        self.conv1 = nn.Conv2d(3, width, patch_size, patch_size, bias=False)
        self.ln_pre = LayerNorm(width)
        self.transformer = Transformer(width, layers, width // head_width)
        self.ln_post = LayerNorm(width)

    def _embeds(self, images: Tensor) -> Tensor:
        x: Tensor = self.conv1(images)
        x = x.flatten(2).permute(0, 2, 1)
        first = self.class_embedding.view(1, 1, -1).expand(x.shape[0], -1, -1)
        x = torch.cat([first.to(x.dtype), x], dim=1) + self.positional_embedding.to(x.dtype)
        rows: Tensor = self.ln_pre(x)
        return rows

    def _pool(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.ln_post(x)
        return x[:, 0], x[:, 1:]

    def forward(self, images: Tensor) -> Tensor:
        return self._pool(self.transformer(self._embeds(images)))[0] @ self.proj


class Same(nn.Conv2d):
    """A convolution without bias, padded as TensorFlow does: a result has ⌈size / stride⌉ pixels a side."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__(
            inputs, outputs, kernel, stride, padding=kernel // 2 * (stride == 1), groups=groups, bias=False
        )

    def forward(self, x: Tensor) -> Tensor:
        step, kernel = self.stride[0], self.kernel_size[0]
        if step > 1:
            lacking = [max(0, (-(-size // step) - 1) * step + kernel - size) for size in (x.shape[-1], x.shape[-2])]
            x = F.pad(x, [part for total in lacking for part in (total // 2, total - total // 2)])
        return super().forward(x)


class Convolved(nn.Module):
    """Convolutions, each with a norm, and beside them the input where its shape is the result's."""

    def __init__(self, named: Mapping[str, Same], beside: bool) -> None:
        super().__init__()
        self._pairs, self._beside = [(name, f"bn{number}") for number, name in enumerate(named, 1)], beside
        for conv, norm in self._pairs:
            self.add_module(conv, named[conv])
            self.add_module(norm, nn.BatchNorm2d(named[conv].out_channels, eps=1e-3))

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        for number, (conv, norm) in enumerate(self._pairs, 1):
            x = self.get_submodule(norm)(self.get_submodule(conv)(x))
            if number < len(self._pairs):
                x = F.relu6(x, inplace=True)
        return x + residual if self._beside else x


class EfficientNetLite0(nn.Module):
    """The convolutions of Google's EfficientNet-Lite0 and the mean over their pixels, without the classifier."""

    STAGES = ((1, 16, 3, 1, 1), (2, 24, 3, 2, 6), (2, 40, 5, 2, 6), (3, 80, 3, 2, 6), (3, 112, 5, 1, 6),
              (4, 192, 5, 2, 6), (1, 320, 3, 1, 6))  # fmt: skip
    """Of each stage: blocks, channels, kernel, stride of the first block, how much wider a block is inside."""
    num_features = 1280

    def __init__(self) -> None:
        super().__init__()
        self.conv_stem, self.bn1 = Same(3, 32, 3, 2), nn.BatchNorm2d(32, eps=1e-3)
        self.blocks, inputs = nn.Sequential(), 32
        for blocks, outputs, kernel, stride, wider in self.STAGES:
            stage = nn.Sequential()
            for number in range(blocks):
                step, inside = stride if number == 0 else 1, inputs * wider
                named = {"conv_dw": Same(inside, inside, kernel, step, groups=inside)}
                last = {"conv_pw" if wider == 1 else "conv_pwl": Same(inside, outputs, 1)}
                first = {} if wider == 1 else {"conv_pw": Same(inputs, inside, 1)}
                stage.append(Convolved(first | named | last, step == 1 and inputs == outputs))
                inputs = outputs
            self.blocks.append(stage)
        self.conv_head, self.bn2 = Same(inputs, self.num_features, 1), nn.BatchNorm2d(self.num_features, eps=1e-3)

    def forward(self, images: Tensor) -> Tensor:
        x = F.relu6(self.bn1(self.conv_stem(images)), inplace=True)
        x = F.relu6(self.bn2(self.conv_head(self.blocks(x))), inplace=True)
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class TimmModel(nn.Module):
    """EfficientNet-Lite0 and a linear projection into the joint space."""

    def __init__(self, image_size: int, d_e: int, preparation: Mapping[str, Any]) -> None:
        super().__init__()
        self.output_dim = d_e
        self.preprocess_cfg = _preparation(image_size) | dict(preparation)
        self.trunk = EfficientNetLite0()
        self.head = nn.Sequential()
        self.head.add_module("proj", nn.Linear(self.trunk.num_features, d_e))

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.head(self.trunk(images))
        return features


class CLIP(nn.Module):
    """Both towers, made of open_clip's configuration; its weights have no values yet.

    ``preparation``: what differs from open_clip's of images.
    """

    text_pool_type = "argmax"
    text_eos_id = 2
    attn_mask: Tensor

    def __init__(
        self,
        embed_dim: int,
        vision_cfg: Mapping[str, Any],
        text_cfg: Mapping[str, int],
        preparation: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        width, self.context_length = text_cfg["width"], text_cfg["context_length"]
        self.positional_embedding = nn.Parameter(torch.empty(self.context_length, width))
        self.text_projection = nn.Parameter(torch.empty(width, embed_dim))
        self.logit_scale = nn.Parameter(torch.empty([]))
        self.visual: nn.Module
        if "timm_model_name" in vision_cfg:
            self.visual = TimmModel(vision_cfg["image_size"], embed_dim, preparation)
        else:
            self.visual = VisionTransformer(**vision_cfg, d_e=embed_dim)
        self.transformer = Transformer(width, text_cfg["layers"], text_cfg["heads"])
        self.token_embedding = nn.Embedding(text_cfg["vocab_size"], width)
        self.ln_final = LayerNorm(width)
        mask = torch.full((self.context_length, self.context_length), float("-inf")).triu_(1)
        self.register_buffer("attn_mask", mask, persistent=False)

    def encode_image(self, images: Tensor, normalize: bool = False) -> Tensor:
        """Features `(B, d_e)` of images `(B, 3, H, W)`."""
        features: Tensor = self.visual(images)
        return F.normalize(features, dim=-1) if normalize else features

    def encode_text(self, ids: Tensor, normalize: bool = False) -> Tensor:
        """Features `(N, d_e)` of token ids `(N, L)`."""
        dtype = self.transformer.get_cast_dtype()
        x = self.token_embedding(ids).to(dtype) + self.positional_embedding.to(dtype)
        x = self.ln_final(self.transformer(x, attn_mask=self.attn_mask))
        features: Tensor = x[torch.arange(x.shape[0], device=x.device), ids.argmax(dim=-1)] @ self.text_projection
        return F.normalize(features, dim=-1) if normalize else features
