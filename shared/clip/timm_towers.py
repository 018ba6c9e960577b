"""Vision transformers of timm: their loading, and their blocks for visual prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor

from promptfed.shared.clip.backbone import Backbone, Supports, finish
from promptfed.shared.clip.building import check_runs, load_errors, seeded
from promptfed.shared.clip.errors import BackboneError, near
from promptfed.shared.clip.towers import copies, vision
from promptfed.shared.clip.weights import expect_permitted, expect_permitted_checkpoint


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


PREFIX = "timm:"
WRAPPERS = ("state_dict", "model", "model_ema")  # keys under which training scripts keep the weights
CLASSIFIER = ("head.", "head_dist.")


def load_timm(
    model: str, pretrained: str | None, *, precision: str, device: str, allow_unregistered: bool
) -> VisualBackbone:
    """Load the backbone `timm:NAME` with the weights `pretrained`: a tag, a checkpoint file, None or "random".

    timm is outside open_clip's registry, so the data owner must permit each model by name. BackboneError gives the
    reason if the backbone cannot be loaded.
    """
    import timm
    from timm.data.config import resolve_model_data_config

    name = model.removeprefix(PREFIX)
    _expect_known(name)
    expect_permitted(model, allow_unregistered)
    random = pretrained in (None, "random")
    tag, checkpoint = _weights(name, None if random else pretrained, allow_unregistered)
    with load_errors(model, pretrained, precision):
        with seeded():
            built = timm.create_model(f"{name}.{tag}" if tag else name, pretrained=tag is not None, num_classes=0)
        _expect_plain(name, built)
        if checkpoint is not None:
            built.load_state_dict(_read(checkpoint))
        built = built.to(device=device, dtype=_dtype(precision))
    backbone = VisualBackbone(
        built,
        model_name=model,
        pretrained=None if random else pretrained,
        precision=precision,
        config={"timm": name, "pool": str(built.global_pool), "prefix_tokens": built.num_prefix_tokens},
        preprocess=resolve_model_data_config(built),  # type: ignore[no-untyped-call]
    )
    if precision != "fp32":
        check_runs(backbone)
    return backbone


def _expect_known(name: str) -> None:
    """Require a bare name of timm's registry; timm's prefixes would fetch arguments and weights from elsewhere."""
    import timm

    known = timm.list_models()
    if name in known:
        return
    base, _, tag = name.partition(".")
    if base in known:
        raise BackboneError(
            f"Name the weights of timm's {base} by `pretrained: {tag}`, the model by {PREFIX + base!r}."
        )
    raise BackboneError(f"timm has no model {name!r}{near(name, known)}.")


def _weights(name: str, pretrained: str | None, allow_unregistered: bool) -> tuple[str | None, str | None]:
    """The tag, or the checkpoint file, that `pretrained` names."""
    import timm

    if pretrained is None:
        return None, None
    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]
    if pretrained in tags:
        return pretrained, None
    expect_permitted_checkpoint(f"{PREFIX}{name}", pretrained, tags, allow_unregistered)
    return None, pretrained


def _expect_plain(name: str, built: Any) -> None:
    from timm.models.vision_transformer import VisionTransformer

    if type(built) is not VisionTransformer:
        raise BackboneError(
            f"timm's {name} is a {type(built).__name__}, which takes no visual prompts: choose a plain vision "
            "transformer, such as timm:vit_base_patch16_224."
        )


def _read(path: str) -> dict[str, Tensor]:
    """The weights of a checkpoint without its classifier, which the client's head replaces."""
    from safetensors.torch import load_file

    if path.endswith(".safetensors"):
        weights: Any = load_file(path)
    else:
        weights = torch.load(path, map_location="cpu", weights_only=True)
    for key in WRAPPERS:
        if isinstance(weights, dict) and isinstance(weights.get(key), dict):
            weights = weights[key]
    if not isinstance(weights, dict) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise BackboneError(f"The checkpoint {path!r} holds no weights by name: save the model's state_dict().")
    return {key: value for key, value in weights.items() if not key.startswith(CLASSIFIER)}


def _dtype(precision: str) -> torch.dtype:
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]
