"""Weights of an open_clip model from a local file.

A federation identifies a backbone by its fingerprint, regardless of the origin of the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from promptfed.shared.clip.errors import BackboneError, one_line
from promptfed.shared.clip.weights.permissions import CHECKPOINT_SUFFIXES

# File names in folders, the safer format first.
IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")
_TOLD = 8  # names of each kind that are listed; of further ones only the number


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
        BackboneError: the file cannot be read, or holds the weights of another model; the text lists what did not fit.
    """
    from open_clip.factory import load_checkpoint

    tensors = _read(path)
    try:
        load_checkpoint(model, str(path), weights_only=True)
    except Exception as error:  # open_clip and torch raise many kinds of errors for a file of another model
        told = _misfits(model, tensors) or one_line(error)
        raise BackboneError(f"The weights in {path} are not those of {name}: {told}.") from error


def _read(path: Path) -> Mapping[str, Any]:
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        advice = "save them as safetensors"
        raise BackboneError(f"{path} cannot be read as weights alone; {advice} ({one_line(error)}).") from error
    if isinstance(loaded, Mapping) and isinstance(loaded.get("state_dict"), Mapping):  # of a training script
        loaded = loaded["state_dict"]
    if not isinstance(loaded, Mapping):
        raise BackboneError(f"{path} holds no weights by name.")
    return {name.removeprefix("module."): tensor for name, tensor in loaded.items()}


def _misfits(model: Any, tensors: Mapping[str, Any]) -> str:
    """The names of tensors that do not fit a model; empty if all fit."""
    own = model.state_dict()
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    shapes = [
        f"{name} {list(given[name])} for {list(tensor.shape)}"
        for name, tensor in own.items()
        if name in given and given[name] != tuple(tensor.shape)
    ]
    kinds = {
        "missing": [name for name in own if name not in given],
        "not of this model": [name for name in given if name not in own],
        "of another shape": shapes,
    }
    return "; ".join(f"{kind}: {_listed(names)}" for kind, names in kinds.items() if names)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _TOLD} more" if len(names) > _TOLD else ""
    return ", ".join(names[:_TOLD]) + more
