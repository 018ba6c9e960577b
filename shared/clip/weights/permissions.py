"""Checks of backbones that a coordinator may name only with the data owner's permission."""

import os

from promptfed.shared.clip.errors import BackboneError, near
from promptfed.shared.spec.spec import AllowedBackbones, BackboneSpec

CHECKPOINT_SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


def permits(allowed: AllowedBackbones, spec: BackboneSpec) -> bool:
    """Whether all in the spec that lies outside open_clip's registry is permitted, by the very names in the spec."""
    if isinstance(allowed, bool):
        return allowed
    weights = spec.pretrained or ""
    if ":" not in spec.model:
        return weights in allowed
    return spec.model in allowed and (weights in allowed or not weights.endswith(CHECKPOINT_SUFFIXES))


def expect_permitted(model: str, allow_unregistered: bool) -> None:
    """Refuse a `model` outside open_clip's registry that the data owner has not permitted."""
    if not allow_unregistered:
        raise BackboneError(
            f"The backbone {model!r} is outside open_clip's registry: the data owner must permit it by "
            f"--allow-backbone {model}."
        )


def expect_permitted_checkpoint(model: str, pretrained: str, tags: list[str], allow_unregistered: bool) -> None:
    """Refuse a `pretrained` that is neither one of `tags` nor a checkpoint file that the data owner has permitted."""
    if not os.path.isfile(pretrained):
        hint = near(pretrained, tags) or "; it has none, use 'random' or a checkpoint (--allow-backbone)" * (not tags)
        raise BackboneError(f"The model {model} has no weights {pretrained!r}{hint}.")
    if not allow_unregistered:
        raise BackboneError(
            f"The checkpoint {pretrained!r} is a local file: the data owner must permit it by "
            f"--allow-backbone {pretrained}."
        )
    if not pretrained.endswith(CHECKPOINT_SUFFIXES):
        raise BackboneError(f"The checkpoint {pretrained!r} is of unknown type: use {', '.join(CHECKPOINT_SUFFIXES)}.")
