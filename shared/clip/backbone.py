"""The frozen backbone: an open_clip model with a fingerprint, prompted encoders and its preprocessing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.fingerprint import config_digest, content_key, weights_fingerprint
from promptfed.shared.clip.tokenizers import tokenizer_of
from promptfed.shared.clip.towers import copies, vision
from promptfed.shared.clip.towers.dense import DenseEncoder
from promptfed.shared.clip.towers.hub_text import text_tower_of
from promptfed.shared.clip.towers.prefix import PrefixEncoder
from promptfed.shared.clip.towers.text import (
    ClassPrompts,
    PromptTokenizer,
    TextTower,
    is_standard_block,
    make_class_prompts,
    prompts_of,
    tracing,
)
from promptfed.shared.clip.towers.text import Path as TextPath
from promptfed.shared.data.image_files import Cut, middle
from promptfed.shared.recent import Recent
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors.transfer import sent_to

FILTERS = {"bicubic": int(Image.Resampling.BICUBIC), "bilinear": int(Image.Resampling.BILINEAR)}
TEXT_CHUNK = 256  # texts per pass without gradients
PREFIX_TEXTS, DENSE_TEXTS = 512, 1 << 16  # texts per pass with gradients, on each of the paths
LABEL_SPACES = 64  # label spaces whose tokens are cached
PROMPTED = 8  # sets of prompts whose features are cached (without gradients)


@dataclass(frozen=True)
class Halves:
    """``cut`` makes uint8 of an image, and `numbers` of those what the whole preprocessing gives, bit for bit."""

    cut: Cut
    mean: Sequence[float]
    std: Sequence[float]
    _there: dict[torch.device, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of_config(cls, given: Mapping[str, Any]) -> Halves | None:
        """The halves of a preprocessing of open_clip, without torchvision; None of one with other steps than these."""
        height, width = (given["size"],) * 2 if isinstance(given["size"], int) else given["size"]
        scale = {"shortest": height if height == width else None, "squash": (height, width)}.get(given["resize_mode"])
        if scale is None or given["interpolation"] not in FILTERS:
            return None
        return cls(Cut(scale, (height, width), FILTERS[given["interpolation"]]), given["mean"], given["std"])

    def numbers(self, pixels: Tensor, device: torch.device) -> Tensor:
        """`(B, 3, H, W)` float32 on ``device`` of uint8 pixels, of which a quarter as many bytes are sent there."""
        if device not in self._there:
            # The divisor is a tensor of that device too: a GPU would multiply by the inverse of a number.
            numbers = ([255.0] * len(self.mean), self.mean, self.std)
            self._there[device] = [torch.tensor(values, device=device).view(-1, 1, 1) for values in numbers]
        full, mean, std = self._there[device]
        return sent_to(pixels, device).float().div_(full).sub_(mean).div_(std)


@dataclass(frozen=True)
class Supports:
    """The prompting capabilities of a backbone. Each text path implies the ones above it."""

    text_prompts: bool  # text prompts are possible, at least by the plain computation
    text_short: bool  # positions after the pooled one can be left out
    text_prefix: bool  # the prefix `[SOS] ctx` can be computed once for all classes
    visual_prompts: bool


class Backbone:
    """A frozen open_clip model, made by `load_backbone`. d_t, d_v and d_e are the text, vision and joint widths.

    Weights never receive gradients. Features are float32 for every precision (float64 for a float64 model), and
    L2-normalised unless `normalize=False`.
    """

    has_text = True
    """Whether there is a text tower at all: without one there is no zero-shot prediction."""

    text_path: TextPath = "auto"
    """How prompts pass the text tower (see `encode_prompts`); auto: `dense` on a GPU, `prefix` elsewhere."""

    held_images: int | None = None  # whose activations a step holds at once on a device without room for more
    tokenizer_folder: Path | None = None  # with the weights, where the tokenizer may be too

    def __init__(
        self,
        model: Any,
        *,
        model_name: str,
        pretrained: str | None,
        precision: str,
        config: Mapping[str, Any],
        source: str | None = None,
    ) -> None:
        """config: everything besides weights and preprocessing that determines features; open_clip's model config.

        source: open_clip's name of the model, where it is another.
        """
        self.model = model.eval().requires_grad_(False)
        self.model_name = model_name
        self.pretrained = pretrained
        self.precision = precision
        self._config = dict(config)
        self._source = source or model_name
        self._tokenised: Recent[ClassPrompts] = Recent(LABEL_SPACES)
        self._prompted: Recent[tuple[Tensor, int]] = Recent(PROMPTED)  # features with their tensor version at creation

    @property
    def device(self) -> torch.device:
        return next(iter(self.model.parameters())).device  # type: ignore[no-any-return]

    def to(self, device: str | torch.device) -> Self:
        """Moves the weights, in place."""
        self.model.to(device)
        return self

    @cached_property
    def fingerprint(self) -> str:
        """`sha256:<hex>` over weights, architecture, preprocessing and tokenizer; the device does not matter."""
        config = {"model": self._config, "preprocess": self._preprocess_config}
        return weights_fingerprint(self.model.state_dict(), config)

    @property
    def open_clip_config(self) -> dict[str, Any]:
        """Architecture and preprocessing as open_clip's `local-dir:` reads them from `open_clip_config.json`."""
        return {"model_cfg": self._config, "preprocess_cfg": self._preprocess_config}

    @cached_property
    def transform_id(self) -> str:
        """`sha256:<hex>` of the preprocessing's configuration."""
        return config_digest(self._preprocess_config)

    @cached_property
    def supports(self) -> Supports:
        flags = self._text.flags
        return Supports(flags.refusal is None, flags.short, flags.prefix, vision.refusal_of(self.model.visual) is None)

    @property
    def d_t(self) -> int:
        return self._text.width

    @property
    def d_v(self) -> int:
        return vision.vision_width(self.model.visual)

    @property
    def d_pooled(self) -> int:
        """Width of an image's pooled feature before the projection."""
        return vision.pooled_width(self.model.visual)

    @property
    def d_e(self) -> int:
        return int(self._config["embed_dim"])

    @property
    def text_layers(self) -> int:
        """Number of blocks of the text tower; 0 if it takes no prompts."""
        return len(self._text.blocks) if self.supports.text_prompts else 0

    @property
    def vision_layers(self) -> int:
        """Number of blocks of the image tower; 0 if it takes no prompts."""
        return self._prompted_tower.layers if self.supports.visual_prompts else 0

    @property
    def patch_size(self) -> int | None:
        """Side of a patch in pixels; None if the image tower takes no prompts or its patches are not square."""
        return self._prompted_tower.patch_size if self.supports.visual_prompts else None

    @cached_property
    def _prompted_tower(self) -> vision.PromptedTower:
        return vision.prompted_tower(self.model.visual)

    @property
    def context_length(self) -> int:
        """Number of positions of the text tower, including special tokens."""
        return self._text.context_length

    @cached_property
    def logit_scale(self) -> float:
        """exp of the model's logit scale: 1/τ."""
        return float(self.model.logit_scale.float().exp())

    # Images

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of a preprocessed image, in pixels."""
        size = self._preprocess_config["size"]
        return (int(size[0]), int(size[1])) if isinstance(size, (tuple, list)) else (int(size), int(size))

    def preprocess(self, image: Any) -> Tensor:
        """PIL image -> `(3, H, W)` on the CPU, with open_clip's preprocessing for evaluation."""
        if self._halves is not None:
            return self._halves.numbers(self.pixels(image).unsqueeze(0), torch.device("cpu"))[0]
        tensor: Tensor = self._transform(middle(image))
        return tensor

    @property
    def cut(self) -> Cut | None:
        """What makes pixels of an image; None where only `preprocess` as a whole is known."""
        return None if self._halves is None else self._halves.cut

    def pixels(self, image: Any) -> Tensor:
        """PIL image -> `(3, H, W)` on the CPU of which `images` makes numbers: uint8, or what `preprocess` gives."""
        return self.preprocess(image) if self.cut is None else torch.from_numpy(self.cut.pixels(image))

    def images(self, pixels: Tensor) -> Tensor:
        """`(B, 3, H, W)` as `preprocess` gives them, on the backbone's device, of such `pixels`."""
        if self._halves is None or pixels.dtype != torch.uint8:
            return sent_to(pixels, self.device)
        return self._halves.numbers(pixels, self.device)

    @torch.no_grad()
    def encode_images(self, images: Tensor, *, normalize: bool = True) -> Tensor:
        """Features `(B, d_e)` of images `(B, 3, H, W)`, for any image tower."""
        return finish(self.model.encode_image(self.image_input(images), normalize=False), normalize)

    @property
    def patch_tokens(self) -> int | None:
        """Number of patch features of an image; None if the image tower gives none."""
        return vision.patch_tokens(self.model.visual)

    @torch.no_grad()
    def encode_patches(self, images: Tensor, *, normalize: bool = True) -> Tensor:
        """Patch features `(B, M, d_e)` of images `(B, 3, H, W)`; BackboneError if the tower has none."""
        return finish(vision.encode_patches(self.model.visual, self.image_input(images)), normalize)

    def encode_images_prompted(
        self, images: Tensor, prompts: Tensor, *, pooled: bool = False, normalize: bool = True
    ) -> Tensor:
        """Features `(B, d_e)` of images `(B, 3, H, W)` with visual prompts `(depth, n, d_v)`, which receive gradients.

        prompts[0] enters beside [cls] and the patches; prompts[i] replaces it before block i. With `pooled` the result
        is the feature `(B, d_v)` before the projection. BackboneError if the tower takes no prompts.
        """
        images, prompts = self.image_input(images), prompts.to(self.device)
        return finish(self._prompted_tower.encode(images, prompts, pooled), normalize)

    # Towers of other weights

    def vision_tower(self) -> copies.PlainTower:
        """The image tower with names for its weights; BackboneError if they cannot be replaced."""
        return copies.vision_tower(self.model.visual)

    def text_tower(self) -> TextTower:
        """The text tower for whole texts and changed blocks; BackboneError if its blocks cannot be changed."""
        self._text.require()
        standard = all(map(is_standard_block, self._text.blocks))
        copies.expect("text", standard, "its blocks are not open_clip's standard ones")
        return self._text

    def tokens(self, texts: Sequence[str]) -> Tensor:
        """Token ids `(N, L)` of whole texts on the backbone's device. BackboneError if a text is too long."""
        return self._tokenizer.texts(texts).to(self.device)

    @cached_property
    def sizes(self) -> dict[str, int | None]:
        """`mlp_width`, `positions`, `heads_v` and `heads_t` of a `BackboneShape`; None if a tower lacks them."""
        sizes: dict[str, int | None] = dict.fromkeys(("mlp_width", "positions", "heads_v", "heads_t"))
        with suppress(BackboneError):
            tower = self.vision_tower()
            sizes |= {"mlp_width": tower.mlp_width, "heads_v": tower.heads, "positions": tower.positions}
        with suppress(BackboneError):
            sizes["heads_t"] = self.text_tower().blocks[0].attn.num_heads
        return sizes

    # Texts

    @cached_property
    def _text(self) -> TextTower:
        return text_tower_of(self.model, self._config.get("text_cfg", {}))

    @cached_property
    def _prefix(self) -> PrefixEncoder:
        return PrefixEncoder(self._text)

    @cached_property
    def _dense(self) -> DenseEncoder:
        return DenseEncoder(self._text)

    @property
    def texts_at_once(self) -> int:
        """How many prompted texts a step may pass through the text tower together: it bounds the memory."""
        dense = self.supports.text_prompts and self._choose_path("auto", False) == "dense"
        return DENSE_TEXTS if dense and self.held_images is None else PREFIX_TEXTS

    @torch.no_grad()
    def encode_text(self, texts: Sequence[str], *, normalize: bool = True) -> Tensor:
        """Features `(N, d_e)` of whole texts, computed by open_clip."""
        if isinstance(texts, str):
            raise BackboneError("encode_text takes a list of texts, not one text.")
        ids = self._tokenizer.texts(texts).to(self.device)
        parts = [self.model.encode_text(part, normalize=False) for part in torch.split(ids, TEXT_CHUNK) if len(part)]
        features = torch.cat(parts) if parts else torch.zeros(0, self.d_e, device=self.device)
        return finish(features, normalize)

    @torch.no_grad()
    def embed_words(self, words: str) -> Tensor:
        """Token embeddings `(k, d_t)` of words, without special tokens and positions."""
        return _wide(self._text.embed(self._tokenizer.words(words)))

    def class_prompts(self, class_names: Sequence[str], context_length: int) -> ClassPrompts:
        """Tokenised texts `[SOS] ctx×m name. [EOT]`. "_" in a name is a space.

        BackboneError names the class whose name is empty or too long.
        """
        self._text.require()

        def make() -> ClassPrompts:
            return make_class_prompts(self._tokenizer, class_names, context_length, self._text.pooled_position)

        named = class_names if isinstance(class_names, str) else tuple(class_names)
        return self._tokenised.made((named, context_length), make)

    def template_prompts(self, class_names: Sequence[str], texts: Sequence[str], words: str, most: int) -> ClassPrompts:
        """The whole ``texts`` of the classes, which begin with ``words``: the last of these stand where a context goes.

        They are at most ``most`` tokens, none where all texts begin otherwise; `words_of` has their embeddings. A
        context that is equal to those gives what `encode_text` does. BackboneError if a text is too long.
        """
        self._text.require()

        def make() -> ClassPrompts:
            ids, start, length = self._tokenizer.template_ids(texts, words, most)
            return prompts_of(class_names, ids, start, length, self._text.pooled_position(ids))

        return self._tokenised.made((tuple(texts), words, most), make)

    @torch.no_grad()
    def words_of(self, prompts: ClassPrompts) -> Tensor:
        """Token embeddings `(m, d_t)` of the words that stand in the context's place of `template_prompts`."""
        places = slice(prompts.start, prompts.start + prompts.context_length)
        return _wide(self._text.embed(prompts.ids[0, places]))

    def encode_prompts(
        self,
        context: Tensor,
        prompts: ClassPrompts,
        *,
        deep: Tensor | None = None,
        path: TextPath = "auto",
        per_class: bool = False,
        normalize: bool = True,
    ) -> Tensor:
        """Text features `(..., C, d_e)` of all classes under a context `(..., m, d_t)`; leading dims are a batch.

        deep `(..., depth, m, d_t)`: deep[i] replaces the context's rows at the input of block i + 1 (counted from 0),
        so depth is at most `text_layers` - 1. Its leading dims are those of the context or absent. With `per_class` the
        context is `(..., C, m, d_t)`, one per class, and the prefix is not shared. Context and deep receive gradients.

        path: `plain` computes every position of every class like open_clip; `short` stops at the end token; `prefix`
        computes `[SOS] ctx` once for all classes; `dense` takes the fewest operations. The results are equal; `auto` is
        `text_path`, or the fastest possible path of the device.
        BackboneError for a path that this backbone does not support. Without gradients, features of recently encoded
        prompts are cached and returned again: do not change them in place.
        """
        self._text.require()
        lead = self._check_context(context, prompts, per_class)
        kind = self._choose_path(path, per_class)
        if torch.is_grad_enabled() or tracing():
            return self._encode_prompts(context, prompts, deep, lead, kind, per_class, normalize)
        # The number of threads is part of the key, since the bits of a feature may depend on it.
        threads = torch.get_num_threads()
        key = (prompts, content_key(context), content_key(deep), kind, per_class, normalize, self.device, threads)

        def make() -> tuple[Tensor, int]:
            # No inference tensors, even if the caller is in inference mode: a later training step may use them.
            with torch.inference_mode(False), torch.no_grad():
                features = self._encode_prompts(context, prompts, deep, lead, kind, per_class, normalize)
            return features, features._version

        features, version = self._prompted.made(key, make)
        if features._version != version:
            raise RuntimeError("text features that others use too were changed in place: change a copy")
        return features

    def _encode_prompts(
        self,
        context: Tensor,
        prompts: ClassPrompts,
        deep: Tensor | None,
        lead: tuple[int, ...],
        kind: str,
        per_class: bool,
        normalize: bool,
    ) -> Tensor:
        dtype, device = self._text.dtype, self.device
        self._text.spare_memory = self.held_images is not None
        flat = context.to(device, dtype).flatten(0, len(lead) - 1) if lead else context.to(device, dtype).unsqueeze(0)
        if deep is not None:
            deep = self._flat_deep(deep, prompts, lead).to(device, dtype)
        if kind == "prefix":
            features = self._prefix.encode(flat, deep, prompts)
        else:
            ways = {"dense": self._dense.encode, "short": self._text.encode_short, "plain": self._text.encode_plain}
            features = ways[kind](flat if per_class else flat.unsqueeze(1), deep, prompts)
        return finish(torch.unflatten(features, 0, lead) if lead else features[0], normalize)

    def _choose_path(self, path: str, per_class: bool) -> str:
        traced = tracing()
        possible = {
            "dense": self._text.dense and not traced,
            "prefix": self.supports.text_prefix and not per_class and not traced,
            "short": self.supports.text_short,
            "plain": True,
        }
        if path == "auto":
            named = self.text_path
            if named == "auto":
                named = "dense" if self._text.device.type == "cuda" else "prefix"
            return named if possible[named] else next(kind for kind in ("prefix", "short", "plain") if possible[kind])
        if path not in possible:
            raise BackboneError(f"Unknown text path {path!r}: use auto, dense, prefix, short or plain.")
        if not possible[path]:
            reason = (
                "a context per class has no shared prefix" if per_class else f"not with the flags of {self.model_name}"
            )
            raise BackboneError(f"The text path {path!r} is not possible ({reason}): use path='auto'.")
        return path

    def _check_context(self, context: Tensor, prompts: ClassPrompts, per_class: bool) -> tuple[int, ...]:
        """The context's leading dims. BackboneError if the shape does not fit."""
        expected = ((len(prompts),) if per_class else ()) + (prompts.context_length, self.d_t)
        if context.ndim < len(expected) or tuple(context.shape[-len(expected) :]) != expected:
            raise BackboneError(
                f"A context of shape {tuple(context.shape)} does not fit: (..., *{expected}) is needed."
            )
        return tuple(context.shape[: context.ndim - len(expected)])

    def _flat_deep(self, deep: Tensor, prompts: ClassPrompts, lead: tuple[int, ...]) -> Tensor:
        """`(N, depth, m, d_t)`."""
        expected = (prompts.context_length, self.d_t)
        fits = deep.ndim >= 3 and tuple(deep.shape[-2:]) == expected and 1 <= deep.shape[-3] < self.text_layers
        if not fits or tuple(deep.shape[:-3]) not in ((), lead):
            raise BackboneError(
                f"Deep prompts of shape {tuple(deep.shape)} do not fit: (depth, {expected[0]}, {expected[1]}) with a "
                f"depth of 1 to {self.text_layers - 1} is needed, behind no leading dims or those of the context, "
                f"{lead}."
            )
        return deep.expand(*lead, *deep.shape[-3:]).reshape(-1, *deep.shape[-3:])

    def image_input(self, images: Tensor) -> Tensor:
        """Images or their `pixels` on the backbone's device and in the image tower's dtype."""
        if images.dtype == torch.uint8:
            return self.images(images).to(self._image_dtype)
        return sent_to(images, self.device, self._image_dtype)

    @cached_property
    def _image_dtype(self) -> torch.dtype:
        """The dtype of the image tower's first weights (mixed precision keeps norms in float32)."""
        weights: list[Tensor] = list(self._image_module.parameters())
        return next(weight.dtype for weight in weights if weight.ndim == 4)

    @property
    def _image_module(self) -> Any:
        return self.model.visual

    @cached_property
    def _preprocess_config(self) -> dict[str, Any]:
        return dict(self.model.visual.preprocess_cfg)

    @cached_property
    def _transform(self) -> Any:
        from open_clip.transform import PreprocessCfg, image_transform_v2

        return image_transform_v2(PreprocessCfg(**self._preprocess_config), is_train=False)

    @cached_property
    def _halves(self) -> Halves | None:
        return Halves.of_config(self._preprocess_config)

    @cached_property
    def _tokenizer(self) -> PromptTokenizer:
        tokenizer = tokenizer_of(self._source, self._config["text_cfg"], self.tokenizer_folder)
        return PromptTokenizer(tokenizer, self.context_length)


def _wide(features: Tensor) -> Tensor:
    return features.float() if features.dtype in (torch.float16, torch.bfloat16) else features


def finish(features: Tensor, normalize: bool) -> Tensor:
    """Features `(..., d)` in at least float32; L2-normalised with `normalize`."""
    features = _wide(features)
    return F.normalize(features, dim=-1) if normalize else features


def shape_of(backbone: Backbone) -> BackboneShape:
    """The sizes that a coordinator, which has no backbone, needs to create prompts.

    Sizes are None for a tower that is missing or does not take prompts.
    """
    supports = backbone.supports
    return BackboneShape(
        d_t=backbone.d_t if supports.text_prompts else None,
        d_v=backbone.d_v if supports.visual_prompts else None,
        d_e=backbone.d_e,
        text_layers=backbone.text_layers or None,
        vision_layers=backbone.vision_layers or None,
        context_length=backbone.context_length if backbone.has_text else None,
        patch_size=backbone.patch_size,
        patch_tokens=backbone.patch_tokens,
        **backbone.sizes,
    )
