"""Names of weights in the transformers library (CLIPModel, SiglipModel) and in open_clip.

CLIPModel is the layout of OpenAI's models and of PLIP; SiglipModel that of SigLIP, SigLIP 2 of a fixed resolution and
MedSigLIP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_PROBE = "vision_model.head.probe"
_PARTS = ("q_proj", "k_proj", "v_proj")  # open_clip stores these in one tensor, in this order
_BLOCK = re.compile(r"(text|vision)_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")


@dataclass(frozen=True)
class _Tower:
    """Where the blocks of a tower lie in open_clip, their inner names, and the tensor of queries, keys and values."""

    blocks: str
    inner: Mapping[str, str]
    joined: str


@dataclass(frozen=True)
class _Layout:
    """One model class of transformers. ``places``: patterns of the names outside blocks, and their names there.

    ``transposed``: linear maps without a bias, which open_clip stores the other way round.
    """

    places: Mapping[str, str]
    towers: Mapping[str, _Tower]
    transposed: Mapping[str, str]


_OWN_BLOCKS = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_TIMM_BLOCKS = {
    "layer_norm1": "norm1",
    "layer_norm2": "norm2",
    "self_attn.out_proj": "attn.proj",
    "mlp.fc1": "mlp.fc1",
    "mlp.fc2": "mlp.fc2",
}
_CLIP = _Layout(
    places={
        r"text_model\.embeddings\.token_embedding\.weight": "token_embedding.weight",
        r"text_model\.embeddings\.position_embedding\.weight": "positional_embedding",
        r"text_model\.final_layer_norm\.(\w+)": r"ln_final.\1",
        r"vision_model\.embeddings\.class_embedding": "visual.class_embedding",
        r"vision_model\.embeddings\.patch_embedding\.weight": "visual.conv1.weight",
        r"vision_model\.embeddings\.position_embedding\.weight": "visual.positional_embedding",
        r"vision_model\.pre_layrnorm\.(\w+)": r"visual.ln_pre.\1",
        r"vision_model\.post_layernorm\.(\w+)": r"visual.ln_post.\1",
        r"logit_scale": "logit_scale",
    },
    towers={
        "text": _Tower("transformer.resblocks", _OWN_BLOCKS, "attn.in_proj_{}"),
        "vision": _Tower("visual.transformer.resblocks", _OWN_BLOCKS, "attn.in_proj_{}"),
    },
    transposed={"text_projection.weight": "text_projection", "visual_projection.weight": "visual.proj"},
)
_SIGLIP = _Layout(
    places={
        r"text_model\.embeddings\.token_embedding\.weight": "text.token_embedding.weight",
        r"text_model\.embeddings\.position_embedding\.weight": "text.positional_embedding",
        r"text_model\.final_layer_norm\.(\w+)": r"text.ln_final.\1",
        r"text_model\.head\.(\w+)": r"text.text_projection.\1",
        r"vision_model\.embeddings\.patch_embedding\.(\w+)": r"visual.trunk.patch_embed.proj.\1",
        r"vision_model\.embeddings\.position_embedding\.weight": "visual.trunk.pos_embed",
        r"vision_model\.post_layernorm\.(\w+)": r"visual.trunk.norm.\1",
        r"vision_model\.head\.probe": "visual.trunk.attn_pool.latent",
        r"vision_model\.head\.attention\.out_proj\.(\w+)": r"visual.trunk.attn_pool.proj.\1",
        r"vision_model\.head\.layernorm\.(\w+)": r"visual.trunk.attn_pool.norm.\1",
        r"vision_model\.head\.mlp\.(fc[12]\.\w+)": r"visual.trunk.attn_pool.mlp.\1",
        r"(logit_scale|logit_bias)": r"\1",
    },
    towers={
        "text": _Tower("text.transformer.resblocks", _OWN_BLOCKS, "attn.in_proj_{}"),
        "vision": _Tower("visual.trunk.blocks", _TIMM_BLOCKS, "attn.qkv.{}"),
    },
    transposed={},
)
_POOL = re.compile(r"vision_model\.head\.attention\.in_proj_(weight|bias)")


def converted(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The weights of a CLIP or SigLIP model of transformers under open_clip's names, and names that have no place."""
    foreign: list[str] = []
    layout = _SIGLIP if _PROBE in tensors else _CLIP
    renamed: dict[str, Tensor] = {}
    split: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        block, pool = _BLOCK.fullmatch(name), _POOL.fullmatch(name)
        if name.endswith("position_ids"):
            continue
        if block is not None:
            tower, inner, kind = layout.towers[block[1]], block[3], block[4]
            place = f"{tower.blocks}.{block[2]}"
            if inner.removeprefix("self_attn.") in _PARTS:
                joined = f"{place}.{tower.joined.format(kind)}"
                split.setdefault(joined, {})[inner.removeprefix("self_attn.")] = tensor
                continue
            if inner in tower.inner:
                renamed[f"{place}.{tower.inner[inner]}.{kind}"] = tensor
                continue
        if pool is not None and layout is _SIGLIP:
            width = len(tensor) // 3
            renamed[f"visual.trunk.attn_pool.q.{pool[1]}"] = tensor[:width].clone()
            renamed[f"visual.trunk.attn_pool.kv.{pool[1]}"] = tensor[width:].clone()
            continue
        there = _place(layout, name)
        if there is None:
            foreign.append(name)
        else:
            renamed[there] = tensor.T.contiguous() if name in layout.transposed else tensor
    for joined, parts in split.items():
        if len(parts) == len(_PARTS):
            renamed[joined] = torch.cat([parts[part] for part in _PARTS])
    if layout is _SIGLIP:
        # open_clip has one more dimension in front of the positions, and none of the scale and the bias.
        renamed |= {name: renamed[name][None] for name in ("visual.trunk.pos_embed",) if name in renamed}
        renamed |= {name: renamed[name].reshape(()) for name in ("logit_scale", "logit_bias") if name in renamed}
    return renamed, foreign


def _place(layout: _Layout, name: str) -> str | None:
    if name in layout.transposed:
        return layout.transposed[name]
    matches = ((re.fullmatch(pattern, name), there) for pattern, there in layout.places.items())
    return next((match.expand(there) for match, there in matches if match is not None), None)
