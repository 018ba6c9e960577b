"""Files of weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from promptfed.shared.clip.errors import BackboneError, near, one_line
from promptfed.shared.tensors.lazy import Tensor, torch

SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")
WRAPPERS = ("state_dict", "model", "model_ema")  # keys under which training scripts keep the weights

# File names in folders, the safer format first.
IN_FOLDERS = ("open_clip_model.safetensors", "model.safetensors", "open_clip_pytorch_model.bin", "pytorch_model.bin")


def unknown_weights(model: str, pretrained: str, tags: list[str]) -> BackboneError:
    """The error of a `pretrained` that is none of the model's `tags`."""
    hint = near(pretrained, tags) or "; it has none, use 'random'"
    return BackboneError(f"The model {model} has no weights {pretrained!r}{hint}. A file of them is --backbone-file.")


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
    if not str(path).endswith(SUFFIXES):
        raise BackboneError(f"The file {path} of weights is of unknown type: use {', '.join(SUFFIXES)}.")
    return path


def load_into(model: Any, path: Path, name: str) -> None:
    """Load the weights in the file ``path`` into ``model``, which is open_clip's model ``name``.

    Code in a file is never executed: it is read as safetensors or with ``weights_only``.

    Raises:
        BackboneError: the file cannot be read, or holds the weights of another model.
    """
    from open_clip.factory import load_checkpoint

    try:
        load_checkpoint(model, str(path), weights_only=True)
    except Exception as error:  # open_clip and torch raise many kinds of errors for a file of another model
        read_weights(path)  # or it holds none
        raise BackboneError(f"The weights in {path} are not those of {name}: {one_line(error)}") from error


def read_weights(path: Path) -> dict[str, Tensor]:
    """The weights in a file by name; code in it is never executed. BackboneError if it holds something else."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        advice = "save them as safetensors"
        raise BackboneError(f"{path} cannot be read as weights alone; {advice} ({one_line(error)}).") from error
    for key in WRAPPERS:
        if isinstance(loaded, Mapping) and isinstance(loaded.get(key), Mapping):
            loaded = loaded[key]
    if not isinstance(loaded, Mapping):
        raise BackboneError(f"{path} holds no weights by name.")
    named = {str(name).removeprefix("module."): tensor for name, tensor in loaded.items()}
    return {name: tensor for name, tensor in named.items() if isinstance(tensor, torch.Tensor)}
