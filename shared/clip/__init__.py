"""The frozen backbone: any open_clip model with prompted text and image encoding and cached image features.

Importing this package does not import open_clip; `load_backbone` does, on its first call.
"""

from shared.clip.backbone import Backbone, Supports
from shared.clip.errors import BackboneError
from shared.clip.features import FeatureCache, ImageSplit
from shared.clip.loading import load_backbone
from shared.clip.tokens import ClassPrompts

__all__ = [
    "Backbone",
    "BackboneError",
    "ClassPrompts",
    "FeatureCache",
    "ImageSplit",
    "Supports",
    "load_backbone",
]
