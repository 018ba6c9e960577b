"""Weights from a local file of open_clip or of a CLIP model of the transformers library.

A federation identifies a backbone by its fingerprint, regardless of the origin of the weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from promptfed.shared.clip.errors import BackboneError, near, one_line
from promptfed.shared.clip.weights.permissions import CHECKPOINT_SUFFIXES

# File names in folders of open_clip and transformers, the safer format first.
IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
_OF_TRANSFORMERS = "text_model.embeddings.token_embedding.weight"
_TOLD = 3  # unfitting tensors that are listed; of further ones only the number

# Names of transformers' CLIP -> open_clip's; suffixes (weight, bias) stay. Linear maps without a bias are stored
# transposed there.
_PLACES = {
    r"text_model\.embeddings\.token_embedding\.weight": "token_embedding.weight",
    r"text_model\.embeddings\.position_embedding\.weight": "positional_embedding",
    r"text_model\.final_layer_norm\.(\w+)": r"ln_final.\1",
    r"vision_model\.embeddings\.class_embedding": "visual.class_embedding",
    r"vision_model\.embeddings\.patch_embedding\.weight": "visual.conv1.weight",
    r"vision_model\.embeddings\.position_embedding\.weight": "visual.positional_embedding",
    r"vision_model\.pre_layrnorm\.(\w+)": r"visual.ln_pre.\1",
    r"vision_model\.post_layernorm\.(\w+)": r"visual.ln_post.\1",
    r"logit_scale": "logit_scale",
}
_TRANSPOSED = {"text_projection.weight": "text_projection", "visual_projection.weight": "visual.proj"}
_BLOCK = re.compile(r"(text|vision)_model\.encoder\.layers\.(\d+)\.(.+)\.(weight|bias)")
_TOWERS = {"text": "transformer.resblocks", "vision": "visual.transformer.resblocks"}
_IN_BLOCKS = {
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "self_attn.out_proj": "attn.out_proj",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
}
_PARTS = ("q_proj", "k_proj", "v_proj")  # open_clip stores these in one tensor, in this order


def weights_in(path: Path) -> Path:
    """The weights file ``path``, or the weights file in the folder ``path``.

    Raises:
        BackboneError: there is none.
    """
    path = path.expanduser()
    if path.is_dir():
        file = next((path / name for name in IN_FOLDERS if (path / name).is_file()), None)
        if file is None:
            raise BackboneError(f"The folder {path} holds no weights: give a file, or a folder with {IN_FOLDERS[1]}.")
        return file
    if not path.is_file():
        raise BackboneError(f"There is no file {path} of weights.")
    if not str(path).endswith(CHECKPOINT_SUFFIXES):
        raise BackboneError(f"The checkpoint {str(path)!r} is of unknown type: use {', '.join(CHECKPOINT_SUFFIXES)}.")
    return path


def load_into(model: Any, path: Path, name: str) -> None:
    """Load the weights in the file ``path`` into ``model``, which is open_clip's model ``name``.

    Code in a file is never executed: it is read as safetensors or with ``weights_only``.

    Raises:
        BackboneError: the file cannot be read, or holds the weights of another model.
    """
    from open_clip.factory import load_checkpoint

    try:
        tensors = load_file(path) if path.suffix == ".safetensors" else _torch_load(path)
        if _OF_TRANSFORMERS in tensors:
            model.load_state_dict(converted(tensors))
        else:
            load_checkpoint(model, str(path), weights_only=True)
    except BackboneError:
        raise
    except Exception as error:  # open_clip and torch raise many kinds of errors for a file of another model
        raise BackboneError(f"The weights in {path} are not those of {name}: {_misfits(error)}.") from error


def _torch_load(path: Path) -> Mapping[str, Any]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        advice = "save them as safetensors"
        raise BackboneError(f"{path} cannot be read as weights alone; {advice} ({one_line(error)}).") from error
    if not isinstance(loaded, Mapping):
        raise BackboneError(f"{path} holds no weights by name.")
    return loaded


def _misfits(error: Exception) -> str:
    """The first few tensors of torch's error text, which lists all of them."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return one_line(Exception("; ".join(lines[1 : 1 + _TOLD]) if len(lines) > 1 else str(error)))


def converted(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a CLIP model of transformers under open_clip's names.

    Raises:
        BackboneError: a tensor does not belong to a CLIP model.
    """
    renamed: dict[str, Tensor] = {}
    split: dict[tuple[str, str], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        block = _BLOCK.fullmatch(name)
        if name.endswith("position_ids"):
            continue
        if block is not None:
            place, inner, kind = f"{_TOWERS[block[1]]}.{block[2]}", block[3], block[4]
            if inner.removeprefix("self_attn.") in _PARTS:
                split.setdefault((place, kind), {})[inner.removeprefix("self_attn.")] = tensor
                continue
            if inner in _IN_BLOCKS:
                renamed[f"{place}.{_IN_BLOCKS[inner]}.{kind}"] = tensor
                continue
        renamed[_place(name)] = tensor.T.contiguous() if name in _TRANSPOSED else tensor
    for (place, kind), parts in split.items():
        renamed[f"{place}.attn.in_proj_{kind}"] = torch.cat([parts[part] for part in _PARTS])
    return renamed


def _place(name: str) -> str:
    if name in _TRANSPOSED:
        return _TRANSPOSED[name]
    for pattern, there in _PLACES.items():
        match = re.fullmatch(pattern, name)
        if match is not None:
            return match.expand(there)
    raise BackboneError(f"A CLIP model of transformers has no tensor {name!r}{near(name, _TRANSPOSED)}.")
