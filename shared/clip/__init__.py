"""The frozen backbone: an open_clip model, or a plain vision transformer of timm without text.

It encodes texts and images with prompts and caches image features. Importing this package imports neither open_clip nor
timm; `load_backbone` does so on its first call.
"""

from promptfed.shared.clip.backbone import Backbone, Supports, shape_of
from promptfed.shared.clip.caches.features import FeatureCache
from promptfed.shared.clip.caches.slots import ImageSplit
from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.loading import load_backbone
from promptfed.shared.clip.towers.tokens import ClassPrompts

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
