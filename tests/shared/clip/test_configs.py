"""What the flags of every configuration that open_clip ships allow."""

import json
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import open_clip
import pytest
import torch
from open_clip.model import CLIP, _build_text_tower

from promptfed.shared.clip import Backbone, BackboneError
from promptfed.shared.clip.towers.text import TextTower
from tests.shared.clip.conftest import CLASS_NAMES, noise

ONE_BLOCK = {"image_size": 32, "layers": 1, "width": 64, "patch_size": 32}


def shipped() -> list[str]:
    folder = Path(open_clip.__file__).parent / "model_configs"
    return sorted(path.stem for path in folder.glob("*.json"))


def tower_kind(config: Any) -> str:
    """prefix, short, plain or hub, read off the real text tower."""
    if config["text_cfg"].get("hf_model_name"):  # cannot be built without transformers; see test_every_text_tower.py
        return "hub"
    wanted = {key: config.get(key, False) for key in ("embed_dim", "text_cfg", "quick_gelu", "custom_text")}
    return built_kind(json.dumps(wanted, sort_keys=True))


@cache  # many configurations share one text tower, and building a large one takes a while even without memory
def built_kind(wanted: str) -> str:
    config = json.loads(wanted)
    with torch.device("meta"):
        if config["custom_text"]:
            text = _build_text_tower(config["embed_dim"], config["text_cfg"], config["quick_gelu"])
            model = SimpleNamespace(text=text)
        else:
            model = CLIP(config["embed_dim"], ONE_BLOCK, config["text_cfg"], config["quick_gelu"])
    flags = TextTower(model).flags
    return "refused" if flags.refusal else "prefix" if flags.prefix else "short" if flags.short else "plain"


def test_every_shipped_configuration_is_fast_plain_or_of_the_hub() -> None:
    kinds = {name: tower_kind(open_clip.get_model_config(name)) for name in shipped()}
    count = Counter(kinds.values())
    assert len(kinds) == 144
    # 52 differ from the causal mask with end-token pooling: 10 towers of transformers, 3 CoCa, 39 without a mask.
    assert count == {"prefix": 92, "plain": 42, "hub": 10}
    for name, kind in {
        "ViT-B-16": "prefix",
        "RN50": "prefix",
        "ViT-L-14-worldwide": "prefix",
        "ViT-B-16-SigLIP": "plain",
        "MobileCLIP-S1": "plain",
        "ViT-L-14-CLIPA": "plain",
        "coca_ViT-B-32": "plain",
        "coca_roberta-ViT-B-32": "hub",
        "xlm-roberta-base-ViT-B-32": "hub",
    }.items():
        assert kinds[name] == kind, name


def test_another_kind_of_text_tower_is_refused_but_images_work(small: Any) -> None:
    model = deepcopy(small("small-custom").model)
    model.text = torch.nn.Linear(3, 3)  # stands for a tower of transformers: no TextTransformer
    backbone = Backbone(model, model_name="small-custom", pretrained=None, precision="fp32", config={"embed_dim": 40})
    assert not backbone.supports.text_prompts
    assert backbone.text_layers == 0
    with pytest.raises(BackboneError, match="takes no prompts: it is a Linear"):
        backbone.class_prompts(CLASS_NAMES, 4)
    prompts = small("small-custom").class_prompts(CLASS_NAMES, 4)
    with pytest.raises(BackboneError, match="takes no prompts"):
        backbone.encode_prompts(noise(4, 48), prompts)
    images = noise(2, 3, 32, 32)
    assert torch.equal(backbone.encode_images(images), small("small-custom").encode_images(images))
