"""One narrow backbone of each family that open_clip knows: of the family's own classes, two blocks deep."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import open_clip
import torch

from promptfed.shared.clip import Backbone, load_backbone, published
from promptfed.shared.clip.building import seeded
from promptfed.shared.clip.stand_in import stand_in

BIOMEDCLIP = "BiomedCLIP"
MODELS = [
    "ViT-B-16",
    "ViT-B-32-quickgelu",
    "RN50",
    "ViT-B-16-SigLIP",
    "ViT-SO400M-14-SigLIP-448",
    "ViT-B-16-SigLIP2",
    "EVA02-B-16",
    "coca_ViT-B-32",
    "MobileCLIP-B",
    "MobileCLIP-S1",
    "PE-Core-B-16",
    "convnext_base",
    "ViTamin-B",
    BIOMEDCLIP,
    "conch_ViT-B-16",
]
TEXT = {"width": 48, "heads": 4, "layers": 2, "vocab_size": 49408}
VISION = {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8}
PLAIN = {"depth": 2, "embed_dim": 48, "num_heads": 4, "img_size": 32, "patch_size": 8}
NARROWER = 16  # of a convolutional stem: 768 / 48
TRUNKS = {
    "vit_base_mci_224": {"depth": 2, "embed_dim": 48, "num_heads": 4, "img_size": 64},
    "vitamin_base_224": {"depth": 2, "img_size": 64},  # the width is that of the stem
    "convnext_base": {"depths": (1, 1, 1, 1), "dims": (8, 16, 24, 32)},
    "fastvit_mci1": {"layers": (1, 1, 1, 1)},
}
PREPARATION = {"mean": [0.48145466, 0.4578275, 0.40821073], "std": [0.26862954, 0.26130258, 0.27577711]}
BERT = {"hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 2}


@contextmanager
def narrow(model: str) -> Iterator[None]:
    """Within it a family's model is built with few and narrow blocks."""
    import timm
    from open_clip import factory
    from timm.models import vision_transformer_hybrid

    published.register()
    create, stem, configs = timm.create_model, vision_transformer_hybrid.ConvStem, dict(factory._MODEL_CONFIGS)
    if model in configs:
        configs[model] = _narrowed(configs[model])

    def narrow_stem(channels: tuple[int, ...], **options: Any) -> Any:
        return stem(channels=tuple(count // NARROWER for count in channels), **options)

    def small(name: str, **options: Any) -> Any:
        with patch.object(vision_transformer_hybrid, "ConvStem", narrow_stem):
            return create(name, **options, **TRUNKS.get(name, PLAIN))

    texts = {name: config | BERT for name, config in published.text_models().items()}
    with (
        patch("timm.create_model", small),
        patch.object(factory, "_MODEL_CONFIGS", configs),
        patch.object(published, "text_models", lambda: texts),
    ):
        yield


def _narrowed(config: dict[str, Any]) -> dict[str, Any]:
    vision, text = dict(config["vision_cfg"]), dict(config["text_cfg"]) | TEXT
    if "timm_model_name" in vision:
        hybrid = vision["timm_model_name"] in TRUNKS
        vision |= {"image_size": 64 if hybrid else 32}
    elif isinstance(vision["layers"], list):
        vision |= {"layers": [1, 1, 1, 1], "width": 8, "image_size": 64}
    else:
        vision |= VISION
    if "multimodal_cfg" in config:
        return config | {"embed_dim": 40, "vision_cfg": vision, "text_cfg": text} | {"multimodal_cfg": _decoder(config)}
    return config | {
        "embed_dim": 48 if vision.get("timm_pool") == "map" else 40,
        "vision_cfg": vision,
        "text_cfg": text,
    }


def _decoder(config: dict[str, Any]) -> dict[str, Any]:
    return dict(config["multimodal_cfg"]) | {"width": 48, "heads": 4, "layers": 1}


def biomedclip(folder: Path, pixels: int) -> str:
    """A folder with BiomedCLIP's configuration and random weights, for ``pixels``; open_clip's name for it."""
    bert = "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract"
    vision = {"timm_model_name": "vit_base_patch16_224", "timm_model_pretrained": False, "timm_pool": ""}
    text = {"hf_model_name": bert, "hf_tokenizer_name": bert, "hf_proj_type": "mlp"}
    text |= {"hf_pooler_type": "cls_last_hidden_state_pooler"}
    model = {
        "embed_dim": 512,
        "vision_cfg": vision | {"timm_proj": "linear", "image_size": pixels},
        "text_cfg": text | {"context_length": 256},
    }
    about = {"model_cfg": model, "preprocess_cfg": PREPARATION}
    (folder / "open_clip_config.json").write_text(json.dumps(about))
    with seeded(), published.known_text_models():
        made = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    torch.save(made.state_dict(), folder / "open_clip_pytorch_model.bin")
    return f"local-dir:{folder}"


def small_family(model: str, folder: Path, precision: str = "fp32") -> Backbone:
    """A narrow backbone of a family, by its model's name, with weights that differ from zero."""
    torch.set_num_threads(1)
    with narrow(model):
        name = biomedclip(folder, VISION["image_size"]) if model == BIOMEDCLIP else model
        backbone = load_backbone(name, None, precision=precision, allow_unregistered=True)
        stand_in(backbone)
    draws = torch.Generator().manual_seed(7)
    for weight in backbone.model.parameters():
        weight.data += 0.05 * torch.randn(weight.shape, generator=draws)
    return backbone
