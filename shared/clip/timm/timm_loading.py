"""Loading a plain vision transformer of timm as a backbone without text."""

from typing import Any

import torch
from torch import Tensor

from promptfed.shared.clip.building import check_runs, load_errors, seeded
from promptfed.shared.clip.errors import BackboneError, near
from promptfed.shared.clip.timm.timm_vit import VisualBackbone
from promptfed.shared.clip.weights.permissions import expect_permitted, expect_permitted_checkpoint

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
