"""The card of an export, as JSON and as Markdown: the learned model, its contributors, its accuracy and its use.

The snippet in the Markdown is plain open_clip code and does not need promptfed. A test runs it unchanged.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata

from promptfed.export.adapted_model import AdaptedModel
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.export_card import (
    BACKBONE_CONFIG,
    BACKBONE_FOLDER,
    BACKBONE_WEIGHTS,
    GIVEN_NAMES,
    JSON_FILE,
    STATE_FILE,
    WEIGHTS_FILE,
    Card,
    CardFile,
    Hashes,
    Made,
    TensorShape,
    Use,
    classes_of,
    facts_of,
    spec_hash,
)
from promptfed.shared.clip import Backbone, tiny
from promptfed.shared.methods import METHODS
from promptfed.shared.spec.spec import BackboneSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode, state_hash


def version() -> str:
    """The version of this promptfed."""
    return metadata.version("promptfed")


@dataclass(frozen=True)
class Contents:
    """The contents of an export besides its card: files by name, and the tensors of the safetensors files.

    ``given``: the class names are not those of the spec. ``weights`` are for plain open_clip code
    (`adapted_model.weights_of`); ``why_none`` gives the reason if there are none. ``alone``: whether
    `promptfed predict` can classify with the export.
    """

    class_names: tuple[str, ...] | None
    given: bool
    state: Tensors
    weights: Tensors | None
    why_none: str | None
    alone: bool
    files: dict[str, bytes]


def card_of(result: FederationResult, model: AdaptedModel, contents: Contents, anonymous: bool) -> Card:
    """The card of ``result``. With ``anonymous`` clients are numbered instead of named."""
    kind = METHODS[model.terms.method["name"]]
    tensors = {STATE_FILE: contents.state, WEIGHTS_FILE: contents.weights}
    hashes = Hashes(
        state=state_hash(model.state), backbone=model.terms.backbone.fingerprint, spec=spec_hash(result.status["spec"])
    )
    about = kind.summary, kind.paper
    facts = facts_of(result.federation, result.clients, result.tally, hashes, about, result.round, anonymous)
    return Card(
        **dict(facts),
        class_names=list(contents.class_names) if contents.class_names else None,
        class_names_from=GIVEN_NAMES if contents.given else classes_of(result.federation)[1],
        use=Use(
            open_clip=contents.weights is not None,
            promptfed=contents.alone and contents.class_names is not None,
            why_not_open_clip=contents.why_none,
        ),
        files={name: described(body, tensors.get(name)) for name, body in sorted(contents.files.items())},
        made=Made(at=datetime.now(UTC).isoformat(timespec="seconds"), promptfed=version()),
    )


def described(body: bytes, tensors: Tensors | None) -> CardFile:
    """A file's entry in the card, with the shapes of its ``tensors``."""
    shapes = None
    if tensors is not None:
        shapes = {
            name: TensorShape(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in sorted(tensors.items())
        }
    return CardFile(bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), tensors=shapes)


def carries_backbone(backbone: BackboneSpec) -> bool:
    """Whether open_clip could not load the backbone by its name alone."""
    named = backbone.pretrained not in (None, "random") or backbone.model.startswith("hf-hub:")  # contains its weights
    return backbone.model == tiny.MODEL or not named


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
    given = [json.dumps(model)] + ([f"pretrained={json.dumps(weights)}"] if weights is not None else [])
    if weights is not None and is_pretrained_cfg(model, weights):
        given += ["force_quick_gelu=True"] * bool(get_pretrained_cfg(model, weights).get("quick_gelu", False))
    return ", ".join(given)


def backbone_files(backbone: Backbone) -> dict[str, bytes]:
    """The backbone's configuration and weights in one folder, which open_clip reads as ``local-dir:``."""
    config = json.dumps(backbone.open_clip_config, indent=1) + "\n"
    if backbone.model_name == tiny.MODEL and backbone.pretrained == tiny.PRETRAINED:
        weights = tiny.weights_path().read_bytes()
    else:
        state = backbone.model.state_dict()
        weights = encode({name: value.detach().cpu() for name, value in state.items()})
    return {
        BACKBONE_CONFIG: config.encode(),
        BACKBONE_WEIGHTS: weights,
    }
