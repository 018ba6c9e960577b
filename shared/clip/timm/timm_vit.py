"""A backbone without text: a plain vision transformer of timm, such as `timm:vit_base_patch16_224`.

It has the interface of a CLIP model but refuses operations that need a text tower. Neither open_clip nor a tokenizer is
loaded. Importing this module does not import timm.
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from promptfed.shared.clip.backbone import Backbone, Supports, finish
from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers import copies, vision


class VisualBackbone(Backbone):
    """A frozen `timm.models.vision_transformer.VisionTransformer`, made by `load_backbone`.

    The feature of an image is the input of timm's classifier (pooled and normed), so d_e = d_v. There is no text tower,
    hence no d_t, no temperature and no zero-shot prediction: `supports.text_prompts` and `has_text` are false, and
    operations on texts raise BackboneError.
    """

    has_text = False

    def __init__(
        self,
        model: Any,
        *,
        model_name: str,
        pretrained: str | None,
        precision: str,
        config: Mapping[str, Any],
        preprocess: Mapping[str, Any],
    ) -> None:
        """config: everything besides weights that determines the features; preprocess: timm's data configuration."""
        super().__init__(model, model_name=model_name, pretrained=pretrained, precision=precision, config=config)
        self._preprocess = dict(preprocess)

    @property
    def _preprocess_config(self) -> dict[str, Any]:
        return self._preprocess

    @cached_property
    def supports(self) -> Supports:
        return Supports(text_prompts=False, text_short=False, text_prefix=False, visual_prompts=True)

    @property
    def d_v(self) -> int:
        return int(self.model.embed_dim)

    @property
    def d_pooled(self) -> int:
        return self.d_v

    @property
    def d_e(self) -> int:
        return int(self.model.num_features)

    @cached_property
    def _prompted_tower(self) -> vision.PromptedTower:
        return vision.timm_tower(self.model)

    @property
    def patch_tokens(self) -> None:
        """None: without a text tower, patch features are not used."""

    def encode_patches(self, images: Tensor, *, normalize: bool = True) -> NoReturn:
        raise BackboneError(f"{self.model_name} gives no patch features: choose a CLIP model.")

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of a preprocessed image, in pixels."""
        _, height, width = self._preprocess["input_size"]
        return int(height), int(width)

    @torch.no_grad()
    def encode_images(self, images: Tensor, *, normalize: bool = True) -> Tensor:
        """Features `(B, d_v)` of images `(B, 3, H, W)`: timm's features before the classifier."""
        rows = self.model.forward_features(self.image_input(images))
        return finish(self.model.forward_head(rows, pre_logits=True), normalize)

    def vision_tower(self) -> copies.PlainTower:
        """The image tower with names for its weights; BackboneError if they cannot be replaced."""
        return copies.timm_tower(self.model)

    @property
    def _image_module(self) -> Any:
        return self.model

    @cached_property
    def _transform(self) -> Any:
        from timm.data.transforms_factory import create_transform

        return create_transform(**self._preprocess, is_training=False)

    @property
    def context_length(self) -> int:
        return self._no_text()

    @property
    def logit_scale(self) -> float:
        return self._no_text()

    def _no_text(self) -> NoReturn:
        raise BackboneError(
            f"The backbone {self.model_name!r} has no text tower: choose a CLIP model, or a method that needs none."
        )

    _text = property(_no_text)
    _tokenizer = property(_no_text)
