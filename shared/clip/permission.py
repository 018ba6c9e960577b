"""Which models outside open_clip's registry the data owner permits."""

from __future__ import annotations

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.spec.spec import AllowedBackbones, BackboneSpec


def permits(allowed: AllowedBackbones, spec: BackboneSpec) -> bool:
    """Whether the spec's model, if it lies outside open_clip's registry, is permitted by its very name."""
    if isinstance(allowed, str):
        raise BackboneError(f"allow_backbone {allowed!r} is a text: give a list of names, as [{allowed!r}].")
    return allowed if isinstance(allowed, bool) else spec.model in allowed


def expect_permitted(model: str, allow_unregistered: bool) -> None:
    """Refuse a `model` outside open_clip's registry that the data owner has not permitted."""
    if not allow_unregistered:
        raise BackboneError(
            f"The backbone {model!r} is outside open_clip's registry: the data owner must permit it by "
            f"--allow-backbone {model}."
        )
