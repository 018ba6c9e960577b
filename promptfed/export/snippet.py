"""The lines of plain open_clip code that a card shows, and the files of a backbone that they load."""

from __future__ import annotations

import json

import torch
from safetensors.torch import save
from torch import Tensor

from promptfed.shared.api.export_card import BACKBONE_CONFIG, BACKBONE_FOLDER, BACKBONE_WEIGHTS, JSON_FILE, WEIGHTS_FILE
from promptfed.shared.clip import Backbone
from promptfed.shared.clip.embedded import EMBEDDED
from promptfed.shared.spec.spec import BackboneSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode


def carries_backbone(backbone: BackboneSpec) -> bool:
    """Whether open_clip could not load the backbone by its name alone."""
    named = backbone.pretrained not in (None, "random") or backbone.model.startswith("hf-hub:")  # contains its weights
    return backbone.model in EMBEDDED or not named


def snippet(backbone: BackboneSpec, weights: Tensors) -> str:
    """Plain open_clip code that classifies one image with the exported weights."""
    if weights["class_weights"].ndim == 3:
        score = [
            'domains = features @ weights["domain_weight"].T + weights["domain_bias"]  # which domain it looks like',
            'classes = weights["class_weights"][domains.argmax(dim=-1)]  # (1, C, d_e)',
            'logits = model.logit_scale.exp() * torch.einsum("bd,bcd->bc", features, classes)',
        ]
    else:
        score = ['logits = model.logit_scale.exp() * features @ weights["class_weights"].T  # (1, C)']
    lines = [
        "import json",
        "",
        "import open_clip",
        "import torch",
        "from PIL import Image",
        "from safetensors.torch import load_file",
        "",
        f"model, _, preprocess = open_clip.create_model_and_transforms({_arguments(backbone)})",
        "model.eval()",
        f'weights = load_file("{WEIGHTS_FILE}")',
        f'class_names = json.load(open("{JSON_FILE}", encoding="utf-8"))["class_names"]',
        "",
        "with torch.no_grad():",
        '    image = preprocess(Image.open("image.png").convert("RGB")).unsqueeze(0)',
        "    features = model.encode_image(image, normalize=True)  # (1, d_e)",
        *(f"    {line}" for line in score),
        "    probabilities = logits.softmax(dim=-1)[0]",
        "for share, row in zip(*probabilities.topk(min(5, len(class_names)))):",
        '    print(f"{class_names[int(row)]}: {float(share):.1%}")',
    ]
    return "\n".join(lines) + "\n"


def _arguments(backbone: BackboneSpec) -> str:
    """The arguments with which open_clip loads the same backbone; always in float32, as the weights are."""
    if carries_backbone(backbone):
        return f'"local-dir:{BACKBONE_FOLDER}"'
    from open_clip import get_pretrained_cfg, is_pretrained_cfg

    model, weights = backbone.model, backbone.pretrained
    arguments = [json.dumps(model)] + ([f"pretrained={json.dumps(weights)}"] if weights is not None else [])
    if weights is not None and is_pretrained_cfg(model, weights):
        arguments += ["force_quick_gelu=True"] * bool(get_pretrained_cfg(model, weights).get("quick_gelu", False))
    return ", ".join(arguments)


def backbone_files(backbone: Backbone) -> dict[str, bytes]:
    """The backbone's configuration and weights in one folder, which open_clip reads as ``local-dir:``."""
    config = json.dumps(backbone.open_clip_config, indent=1) + "\n"
    state = {name: value.detach().cpu() for name, value in backbone.model.state_dict().items()}
    if backbone.model_name in EMBEDDED and backbone.pretrained == EMBEDDED[backbone.model_name].PRETRAINED:
        weights = save({name: _halved(value) for name, value in state.items()})
    else:
        weights = encode(state)
    return {BACKBONE_CONFIG: config.encode(), BACKBONE_WEIGHTS: weights}


def _halved(value: Tensor) -> Tensor:
    """The same numbers in half precision, if they have no more digits than that."""
    half = value.half()
    return half if value.is_floating_point() and torch.equal(half.float(), value) else value
