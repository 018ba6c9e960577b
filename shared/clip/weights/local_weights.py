"""Weights from a local file of open_clip, or of a CLIP or SigLIP model of the transformers library.

A federation identifies a backbone by its fingerprint, regardless of the origin of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from promptfed.shared.clip.errors import BackboneError, one_line
from promptfed.shared.clip.weights.of_transformers import converted
from promptfed.shared.clip.weights.permissions import CHECKPOINT_SUFFIXES

# File names in folders of open_clip and transformers, the safer format first.
IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
_OF_TRANSFORMERS = "text_model.embeddings.token_embedding.weight"
_OF_CONCH = "visual.attn_pool_contrast.query"
_TOLD = 3  # unfitting tensors that are listed; of further ones only the number


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
        if _OF_CONCH in tensors:
            text = "its pooling and its tokenizer are code of its own, which open_clip does not have"
            raise BackboneError(f"{path} has the weights of CONCH, which cannot be loaded: {text}.")
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
