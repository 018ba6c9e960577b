"""Loading a backbone by name: which names are free, which need the data owner's consent, and clear refusals.

Models are open_clip's, or plain vision transformers of timm, with their blocks for visual prompts.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from promptfed.shared import get_extra
from promptfed.shared.clip.backbone import FILTERS, Backbone, Halves, Supports, finish
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.clip.errors import BackboneError, near, one_line
from promptfed.shared.clip.hub import expect_at_hand
from promptfed.shared.clip.permission import expect_permitted
from promptfed.shared.clip.towers import copies, plain, vision
from promptfed.shared.clip.weights import load_into, read_weights, unknown_weights, weights_in
from promptfed.shared.data.image_files import Cut

log = logging.getLogger("promptfed.clip")

RANDOM_SEED = 20_240_229
DRAWING = (
    Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_, init.kaiming_normal_,
    init.xavier_uniform_, init.xavier_normal_, init.trunc_normal_,
)  # fmt: skip

_global_generator = threading.Lock()

PREFIX = "timm:"
CLASSIFIER = ("head.", "head_dist.")
PRECISIONS = ("fp32", "fp16", "bf16")
HUB = "hf-hub:"
FOLDER_CONFIG = "open_clip_config.json"
PREPROCESSING = ("mean", "std", "interpolation", "resize_mode", "size", "mode", "fill_color")  # set by a tag


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the global generator, from which random weights are drawn, and restore it afterwards."""
    with _global_generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        yield


class Undrawn(TorchFunctionMode):
    """Leaves out the random numbers of weights all of which are read from a file next: ViT-B/16's take a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def load_errors(model: str, pretrained: str | None, precision: str) -> Iterator[None]:
    """Turn any error of the block, which builds a model, into a BackboneError with the model's name."""
    try:
        yield
    except BackboneError:
        raise
    except Exception as error:
        name = model if pretrained is None else f"{model} ({pretrained})"
        hint = "" if precision == "fp32" else f" (in {precision}; try precision fp32)"
        raise BackboneError(f"The backbone {name} cannot be loaded{hint}: {one_line(error)}") from error


@torch.no_grad()
def check_runs(backbone: Backbone) -> None:
    """Raise BackboneError if a model does not run in its precision.

    open_clip converts some towers only partly to half precision, which would otherwise fail during a round.
    """
    try:
        backbone.encode_images(torch.zeros(1, 3, *backbone.image_size))
        if backbone.has_text:
            backbone.model.encode_text(
                torch.zeros(1, backbone.context_length, dtype=torch.long, device=backbone.device)
            )
    except RuntimeError as error:
        raise BackboneError(
            f"The backbone {backbone.model_name} does not run in {backbone.precision}, use precision fp32: "
            f"{one_line(error)}"
        ) from error


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
    def _halves(self) -> Halves | None:
        given, (height, width) = self._preprocess, self.image_size
        if given["crop_mode"] != "center" or height != width or given["interpolation"] not in FILTERS:
            return None
        scale = math.floor(height / given["crop_pct"])
        return Halves(Cut(scale, (height, width), FILTERS[given["interpolation"]]), given["mean"], given["std"])

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


def load_timm(
    model: str,
    pretrained: str | None,
    *,
    precision: str,
    device: str,
    allow_unregistered: bool,
    own_weights: Path | None,
) -> VisualBackbone:
    """Load the backbone `timm:NAME` with the weights `pretrained` (a tag, None or "random"), or with a file's.

    timm is outside open_clip's registry, so the data owner must permit each model by name. BackboneError gives the
    reason if the backbone cannot be loaded.
    """
    import timm
    from timm.data.config import resolve_model_data_config

    name = model.removeprefix(PREFIX)
    _expect_known(name)
    expect_permitted(model, allow_unregistered)
    random = pretrained in (None, "random") and own_weights is None
    _tell_random(model, pretrained, random)
    tag = "" if random or own_weights is not None else f".{_tag(name, str(pretrained))}"
    with load_errors(model, pretrained, precision):
        with seeded():
            built = timm.create_model(name + tag, pretrained=bool(tag), num_classes=0)
        _expect_plain(name, built)
        if own_weights is not None:  # without a classifier, which the client's head replaces
            file_weights = read_weights(own_weights)
            built.load_state_dict({key: value for key, value in file_weights.items() if not key.startswith(CLASSIFIER)})
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


def _tell_random(model: str, pretrained: str | None, random: bool) -> None:
    """Warn of random weights that nobody has asked for by their name."""
    if random and pretrained is None:
        log.warning("%s has random weights, since pretrained is null: name its weights, or write random", model)


def _expect_known(name: str) -> None:
    """Require a bare name of timm's registry; timm's prefixes would fetch arguments and weights from elsewhere."""
    import timm

    models = timm.list_models()
    if name in models:
        return
    base, _, tag = name.partition(".")
    if base in models:
        raise BackboneError(
            f"Name the weights of timm's {base} by `pretrained: {tag}`, the model by {PREFIX + base!r}."
        )
    raise BackboneError(f"timm has no model {name!r}{near(name, models)}.")


def _tag(name: str, pretrained: str) -> str:
    """`pretrained`, which must be a tag of timm's model."""
    import timm

    tags = [full.partition(".")[2] for full in timm.list_pretrained(f"{name}.*")]
    if pretrained not in tags:
        raise unknown_weights(PREFIX + name, pretrained, tags)
    return pretrained


def _expect_plain(name: str, built: Any) -> None:
    from timm.models.vision_transformer import VisionTransformer

    if type(built) is not VisionTransformer:
        raise BackboneError(
            f"timm's {name} is a {type(built).__name__}, which takes no visual prompts: choose a plain vision "
            "transformer, such as timm:vit_base_patch16_224."
        )


def _dtype(precision: str) -> torch.dtype:
    return {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[precision]


def load_backbone(
    model: str,
    pretrained: str | None,
    *,
    precision: str = "fp32",
    device: str = "cpu",
    allow_unregistered: bool = False,
    weights_file: Path | None = None,
) -> Backbone:
    """Load the frozen backbone `model` of open_clip or timm, as safetensors or with `weights_only`.

    Args:
        model: a name of open_clip's registry; `promptfed-tiny` or `promptfed-emoji`. With `allow_unregistered` also
            `hf-hub:owner/name` or `local-dir:path`, which include their weights, and `timm:name`, a plain vision
            transformer without text.
        pretrained: a tag of that model; `embedded`; None or "random" for random weights, always the same; any word for
            those of a file.
        weights_file: a file of open_clip or timm, or a folder with one, that replaces a download. A tokenizer in the
            folder is used too. For `hf-hub:owner/name` a folder with that repository's files.
        precision: fp32, fp16 or bf16.

    Raises BackboneError if it cannot be loaded; the text gives the reason.
    """
    if precision not in PRECISIONS:
        raise BackboneError(f"Unknown precision {precision!r}: use one of {', '.join(PRECISIONS)}.")
    if device != "cpu":
        # cuBLAS reads it at its first use in a process, and deterministic tasks need it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    expect_device(device)
    own_weights = _own_weights(weights_file, model)  # before a model is built
    if model.startswith("timm:"):
        return load_timm(
            model,
            pretrained,
            precision=precision,
            device=device,
            allow_unregistered=allow_unregistered,
            own_weights=own_weights,
        )
    backbone = _load_clip(model, pretrained, precision, device, allow_unregistered, own_weights)
    if weights_file is not None and weights_file.expanduser().is_dir():
        backbone.tokenizer_folder = weights_file.expanduser()
    return backbone


def _load_clip(
    model: str, pretrained: str | None, precision: str, device: str, allow_unregistered: bool, own_weights: Path | None
) -> Backbone:
    """A model of open_clip."""
    embedded = EMBEDDED.get(model)
    drawn = (None, "random") if own_weights is None else ()
    if embedded is not None and pretrained not in (*drawn, embedded.PRETRAINED):
        raise BackboneError(f"Unknown weights {pretrained!r} of {model}: use {embedded.PRETRAINED!r}.")
    if embedded is not None and pretrained == embedded.PRETRAINED and precision == "fp32":
        config = embedded.config()
        with load_errors(model, pretrained, precision), Undrawn():
            built = plain.CLIP(**config, preparation=embedded.preparation)
            built.load_state_dict(embedded.weights(built.state_dict(), own_weights))
            built.to(device)
        return Backbone(built, model_name=model, pretrained=pretrained, precision=precision, config=config)
    import open_clip

    random = pretrained in drawn
    _tell_random(model, pretrained, random and not model.startswith((HUB, "local-dir:")))  # these bring their weights
    source: str | None = None
    if embedded is not None:
        embedded.register()
        weights, options = None, {"force_preprocess_cfg": embedded.preparation} if embedded.preparation else {}
    elif own_weights is not None and model.startswith(HUB):
        source, own_weights = _of_folder(model, own_weights, allow_unregistered), None
        weights, options = _resolve(source, None, random=True, allow_unregistered=True)
    elif own_weights is not None:
        model, weights, options = _with_file(model, pretrained)
    else:
        model, weights, options = _weights_of(model, pretrained, random, allow_unregistered)
    source = source or model
    config = _config(source)
    with load_errors(model, pretrained, precision):
        with Undrawn() if own_weights is not None or (embedded is not None and not random) else nullcontext():
            built = _create(open_clip, source, weights, random, precision, device, options)
        if embedded is not None and not random:
            built.load_state_dict(embedded.weights(built.state_dict(), own_weights))
        elif own_weights is not None:
            load_into(built, own_weights, model)
    if options.get("force_quick_gelu"):
        config["quick_gelu"] = True
    tag = None if random else pretrained
    backbone = Backbone(built, model_name=model, pretrained=tag, precision=precision, config=config, source=source)
    if precision != "fp32":
        check_runs(backbone)
    return backbone


def _own_weights(weights_file: Path | None, model: str) -> Path | None:
    """The file that replaces a download, if one is given. Raises BackboneError if it is absent or not for `model`."""
    if weights_file is None:
        return None
    if model.startswith(HUB) or (model in EMBEDDED and EMBEDDED[model].tower is not None):
        return weights_file.expanduser()
    if model in EMBEDDED or (":" in model and not model.startswith(PREFIX)):
        raise BackboneError(f"A file of weights is for models of open_clip or timm, not for {model!r}: leave it out.")
    return weights_in(weights_file)


def _of_folder(model: str, folder: Path, allow_unregistered: bool) -> str:
    """open_clip's name for a model of the hub in a folder that has its files. Raises BackboneError if it has not."""
    expect_permitted(model, allow_unregistered)
    if not (folder / FOLDER_CONFIG).is_file():
        text = f"give a folder with {FOLDER_CONFIG}, the weights and the tokenizer, as `hf download` writes it"
        raise BackboneError(f"{folder} does not hold {model!r}: {text}.")
    weights_in(folder)
    return f"local-dir:{folder}"


def _weights_of(
    model: str, pretrained: str | None, random: bool, allow_unregistered: bool
) -> tuple[str, str | None, dict[str, Any]]:
    """open_clip's name of the model, its weights if open_clip reads them, and the options to build it."""
    model = model if ":" in model else model.replace("/", "-")
    return model, *_resolve(model, pretrained, random, allow_unregistered)


def _with_file(model: str, pretrained: str | None) -> tuple[str, None, dict[str, Any]]:
    """As `_weights_of` for weights from a file; the tag determines the other influences on the features."""
    from open_clip import get_pretrained_cfg, list_models

    model = model.replace("/", "-")
    if model not in list_models():
        raise BackboneError(f"open_clip has no model {model!r}{near(model, list_models())}.")
    preparation = get_pretrained_cfg(model, pretrained or "") or _published_preparation(model)
    options: dict[str, Any] = {"force_quick_gelu": True} if preparation.get("quick_gelu", False) else {}
    return (
        model,
        None,
        options | {"force_preprocess_cfg": {key: preparation[key] for key in PREPROCESSING if key in preparation}},
    )


def _published_preparation(model: str) -> dict[str, Any]:
    """What all published weights of a model agree on: SigLIP's normalisation holds for weights of one's own too."""
    from open_clip import get_pretrained_cfg, list_pretrained_tags_by_model

    configs = [get_pretrained_cfg(model, tag) for tag in list_pretrained_tags_by_model(model)]
    keys = (*PREPROCESSING, "quick_gelu")
    return {
        key: configs[0][key]
        for key in (keys if configs else ())
        if key in configs[0] and all(other.get(key) == configs[0][key] for other in configs)
    }


def expect_device(device: str) -> None:
    """Raise BackboneError if torch cannot compute on ``device``."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        gpus = torch.cuda.device_count()
        if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
            reason = "it is none of cpu, cuda and cuda:N"
        elif not gpus:
            reason = "there is no GPU, or no driver or no CUDA in torch for it; `promptfed doctor` looks for them"
        elif int(device.partition(":")[2] or 0) >= gpus:
            reason = f"the GPUs here are {', '.join(f'cuda:{number}' for number in range(gpus))}"
        else:
            reason = one_line(error)
        raise BackboneError(f"The device {device!r} cannot be used: {reason}. Or give --device cpu.") from error


def _resolve(
    model: str, pretrained: str | None, random: bool, allow_unregistered: bool
) -> tuple[str | None, dict[str, Any]]:
    """The argument `pretrained` for open_clip, and further options."""
    from open_clip import get_pretrained_cfg, is_pretrained_cfg, list_models, list_pretrained_tags_by_model

    if model.startswith(("hf-hub:", "local-dir:")):
        expect_permitted(model, allow_unregistered)
        if not random:
            raise BackboneError(f"The backbone {model!r} brings its own weights: leave `pretrained` out.")
        return None, {"require_pretrained": True}
    if model not in list_models():
        hint = near(model, [*list_models(), *EMBEDDED])
        raise BackboneError(f"open_clip has no model {model!r}{hint}.")
    if random:
        return None, {}
    assert pretrained is not None
    if not is_pretrained_cfg(model, pretrained):
        raise unknown_weights(model, pretrained, list_pretrained_tags_by_model(model))
    expect_at_hand(model, pretrained)
    # Weights trained with QuickGELU give other features under GELU, and open_clip only warns.
    quick = bool(get_pretrained_cfg(model, pretrained).get("quick_gelu", False))
    return pretrained, {"force_quick_gelu": True} if quick else {}


def _create(
    open_clip: Any, model: str, weights: str | None, random: bool, precision: str, device: str, options: dict[str, Any]
) -> Any:
    with seeded(), _without_its_log():
        built = open_clip.create_model(
            model, pretrained=weights, precision=precision, device=device, pretrained_text=False, **options
        )
        if random and isinstance(built, open_clip.CoCa):
            # open_clip leaves the caption decoder's unused projection uninitialised: it would change the fingerprint.
            projection = built.text_decoder.text_projection
            torch.nn.init.normal_(projection, std=projection.shape[0] ** -0.5)
        if precision != "fp32":
            _cast_rest(open_clip, built)
    return built


def _cast_rest(open_clip: Any, built: Any) -> None:
    """Cast what open_clip leaves in float32 beside half precision: parts of CoCa, which would not run."""
    for part in built.modules():
        if isinstance(part, open_clip.transformer.AttentionalPooler):
            part.to(part.attn.out_proj.weight.dtype)
        elif getattr(part, "cls_emb", None) is not None:
            part.cls_emb.data = part.cls_emb.data.to(part.transformer.get_cast_dtype())


@contextmanager
def _without_its_log() -> Iterator[None]:
    """Silence open_clip, which logs on the root logger and installs a handler there; problems raise exceptions."""
    root, handler = logging.getLogger(), logging.NullHandler()

    def from_elsewhere(record: logging.LogRecord) -> bool:
        return "open_clip" not in record.pathname

    root.addHandler(handler)
    root.addFilter(from_elsewhere)
    try:
        yield
    finally:
        root.removeFilter(from_elsewhere)
        root.removeHandler(handler)


def _config(model: str) -> dict[str, Any]:
    """The model's configuration without the keys that only determine downloads."""
    from open_clip import get_model_config

    try:
        config = get_model_config(model)
    except Exception as error:
        raise BackboneError(f"The configuration of {model!r} cannot be read: {one_line(error)}") from error
    if config["text_cfg"].get("tokenizer_kwargs", {}).get("trust_remote_code"):
        raise BackboneError(f"The tokenizer of {model!r} asks to run code of its own, which is not permitted.")
    if config["text_cfg"].get("hf_model_name") and importlib.util.find_spec("transformers") is None:
        raise BackboneError(f"The text tower of {model!r} is one of transformers: {get_extra('transformers')}.")
    config["vision_cfg"].pop("timm_model_pretrained", None)
    config["text_cfg"].pop("hf_model_pretrained", None)
    return dict(config)
