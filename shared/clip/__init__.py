"""The frozen backbone: an open_clip model, or a plain vision transformer of timm without text.

It encodes texts and images with prompts and caches image features. Importing this package imports neither torch nor
open_clip nor timm: its names are imported when they are first used, and `load_backbone` imports the model's library.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from promptfed.shared.clip.backbone import Backbone, Supports, shape_of
    from promptfed.shared.clip.caches import FeatureCache
    from promptfed.shared.clip.errors import BackboneError
    from promptfed.shared.clip.image_reading import ImageSplit
    from promptfed.shared.clip.loading import load_backbone
    from promptfed.shared.clip.towers.text import ClassPrompts

__all__ = [
    "Backbone",
    "BackboneError",
    "ClassPrompts",
    "FeatureCache",
    "ImageSplit",
    "Supports",
    "load_backbone",
    "shape_of",
]

_MODULES = {
    "Backbone": "backbone",
    "BackboneError": "errors",
    "ClassPrompts": "towers.text",
    "FeatureCache": "caches",
    "ImageSplit": "caches",
    "Supports": "backbone",
    "load_backbone": "loading",
    "shape_of": "backbone",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
