"""The card of an export: what was learned, by whom, how well, and how to use it; as JSON and as Markdown.

The snippet in the Markdown is plain open_clip code, which needs no promptfed; a test runs it as it stands there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from statistics import fmean
from typing import Any

from pydantic import BaseModel, Field

from promptfed.export.adapted_model import AdaptedModel
from promptfed.sdk.result import FederationResult, PrivacySummary, SumsSummary
from promptfed.shared.canonical import canonical_json
from promptfed.shared.clip import Backbone, tiny
from promptfed.shared.messages import Domain, Figure
from promptfed.shared.methods import METHODS
from promptfed.shared.spec import BackboneSpec, TrainingSpec
from promptfed.shared.tensors import Tensors, encode, state_hash

FORMAT = 1
STATE_FILE, WEIGHTS_FILE, JSON_FILE, MARKDOWN_FILE = (
    "prompts.safetensors",
    "class_weights.safetensors",
    "card.json",
    "card.md",
)
MERGED_FILE = "open_clip_model.safetensors"  # as open_clip and promptfed look for it in a folder
BACKBONE_FOLDER = "backbone"  # of weights that open_clip cannot load by name


@dataclass(frozen=True)
class Contents:
    """What an export holds besides its card: files by name, with the tensors of the safetensors ones.

    ``weights`` are those for plain open_clip code (`adapted_model.weights_of`), or ``why_none`` says why there are
    none; ``alone`` is whether `promptfed predict` can classify with it.
    """

    class_names: tuple[str, ...] | None
    names_from: str
    state: Tensors
    weights: Tensors | None
    why_none: str | None
    alone: bool
    files: dict[str, bytes]


class Participant(BaseModel):
    """A client, by its name or its number."""

    name: str
    role: str
    domain: str | None
    num_samples: int
    num_classes: int
    updates_counted: int


class MeasuredAccuracy(BaseModel):
    """What a client measured on one of its test sets, or on a variant of it (fractions)."""

    client: str
    role: str
    split: str
    adapted: float
    zero_shot: float | None
    num_samples: int
    ece: Figure = None
    macro_f1: Figure = None


class Accuracies(BaseModel):
    """What clients measured last; ``mean`` is by role, over the clients' own test images."""

    round: int
    clients: list[MeasuredAccuracy]
    mean: dict[str, dict[str, float]]


class Use(BaseModel):
    """What can classify with the export."""

    open_clip: bool
    promptfed: bool
    why_not_open_clip: str | None


class TensorShape(BaseModel):
    """A tensor of a safetensors file."""

    shape: list[int]
    dtype: str


class CardFile(BaseModel):
    """One file of the export."""

    bytes: int
    sha256: str
    tensors: dict[str, TensorShape] | None = Field(None, exclude_if=lambda tensors: tensors is None)


class Card(BaseModel):
    """The card as ``card.json`` holds it."""

    format: int = FORMAT
    federation: dict[str, str]
    method: dict[str, Any]
    summary: str
    paper: str
    backbone: BackboneSpec
    template: str
    class_names: list[str] | None
    class_names_from: str | None
    round: int
    rounds: int
    training: TrainingSpec
    seed: int
    domains: list[Domain]
    participants: list[Participant]
    accuracy: Accuracies | None
    privacy: PrivacySummary | None = None
    secure_aggregation: SumsSummary | None = Field(None, exclude_if=lambda given: given is None)
    bytes: dict[str, int]
    use: Use
    hashes: dict[str, str | None]
    signature: str | None = Field(None, exclude_if=lambda signature: signature is None)
    files: dict[str, CardFile]
    made: dict[str, str]


def card_of(result: FederationResult, model: AdaptedModel, contents: Contents, anonymous: bool) -> Card:
    """The card; with ``anonymous`` clients are numbered instead of named."""
    federation, kind = result.federation, METHODS[model.method["name"]]
    tensors = {STATE_FILE: contents.state, WEIGHTS_FILE: contents.weights or {}}
    names = sorted(client.name for client in result.clients)
    shown = {name: f"client {number}" if anonymous else name for number, name in enumerate(names, 1)}
    return Card(
        federation={"name": federation.name, "id": federation.id, "state": federation.state},
        method=model.method,
        summary=kind.summary,
        paper=kind.paper,
        backbone=model.backbone,
        template=model.template,
        class_names=list(contents.class_names) if contents.class_names else None,
        class_names_from=contents.names_from if contents.class_names else None,
        round=result.round,
        rounds=model.rounds,
        training=model.training,
        seed=model.seed,
        domains=list(model.domains),
        participants=_participants(result, shown),
        accuracy=_accuracies(result, shown),
        privacy=result.privacy(),
        secure_aggregation=result.sums(),
        bytes={"up": result.bytes_up, "down": result.bytes_down},
        use=Use(
            open_clip=contents.weights is not None,
            promptfed=contents.alone and contents.class_names is not None,
            why_not_open_clip=contents.why_none,
        ),
        hashes={
            "state": state_hash(model.state),
            "backbone": model.backbone.fingerprint,
            "spec": "sha256:" + hashlib.sha256(canonical_json(result.spec).encode()).hexdigest(),
        },
        signature=result.signature or None,
        files={name: _file(body, tensors.get(name)) for name, body in sorted(contents.files.items())},
        made={"at": datetime.now(UTC).isoformat(timespec="seconds"), "promptfed": metadata.version("promptfed")},
    )


def _file(body: bytes, tensors: Tensors | None) -> CardFile:
    described = None
    if tensors is not None:
        described = {
            name: TensorShape(shape=list(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
            for name, tensor in sorted(tensors.items())
        }
    return CardFile(bytes=len(body), sha256=hashlib.sha256(body).hexdigest(), tensors=described)


def _participants(result: FederationResult, shown: Mapping[str, str]) -> list[Participant]:
    counted = [update.client for report in result.round_reports for phase in report.phases for update in phase.counted]
    return [
        Participant(
            name=shown[client.name],
            role=client.role,
            domain=client.domain.name if client.domain else None,
            num_samples=client.num_samples,
            num_classes=client.num_classes,
            updates_counted=counted.count(client.name),
        )
        for client in sorted(result.clients, key=lambda client: client.name)
    ]


def _accuracies(result: FederationResult, shown: Mapping[str, str]) -> Accuracies | None:
    if result.evaluated_round is None:
        return None
    rows = [
        MeasuredAccuracy(
            client=shown.get(accuracy.client, accuracy.client),
            role=accuracy.role,
            split=accuracy.split,
            adapted=accuracy.accuracy,
            zero_shot=accuracy.zero_shot,
            num_samples=accuracy.num_samples,
            ece=accuracy.ece,
            macro_f1=accuracy.macro_f1,
        )
        for accuracy in result.final()
    ]
    return Accuracies(round=result.evaluated_round, clients=rows, mean=_means(rows))


def _means(rows: list[MeasuredAccuracy]) -> dict[str, dict[str, float]]:
    """By role, over the clients' own test images."""
    means = {}
    for role in sorted({row.role for row in rows}):
        own = [row for row in rows if row.role == role and row.split == "test"]
        columns: dict[str, list[float]] = {
            "adapted": [row.adapted for row in own],
            "zero_shot": [row.zero_shot for row in own if row.zero_shot is not None],
            "ece": [row.ece for row in own if row.ece is not None],
            "macro_f1": [row.macro_f1 for row in own if row.macro_f1 is not None],
        }
        means[role] = {name: fmean(values) for name, values in columns.items() if values}
    return means


def carries_backbone(backbone: BackboneSpec) -> bool:
    """Whether open_clip could not load the backbone by its name alone."""
    named = backbone.pretrained not in (None, "random") or backbone.model.startswith("hf-hub:")  # brings its weights
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
    """How open_clip is asked for the very backbone; always in float32, in which the weights are."""
    if carries_backbone(backbone):
        return f'"local-dir:{BACKBONE_FOLDER}"'
    from open_clip import get_pretrained_cfg, is_pretrained_cfg

    model, weights = backbone.model, backbone.pretrained
    given = [json.dumps(model)] + ([f"pretrained={json.dumps(weights)}"] if weights is not None else [])
    if weights is not None and is_pretrained_cfg(model, weights):
        given += ["force_quick_gelu=True"] * bool(get_pretrained_cfg(model, weights).get("quick_gelu", False))
    return ", ".join(given)


def backbone_files(backbone: Backbone) -> dict[str, bytes]:
    """The backbone as open_clip's ``local-dir:`` reads it: configuration and weights in one folder."""
    config = json.dumps(backbone.open_clip_config, indent=1) + "\n"
    if backbone.model_name == tiny.MODEL and backbone.pretrained == tiny.PRETRAINED:
        weights = tiny.weights_path().read_bytes()
    else:
        state = backbone.model.state_dict()
        weights = encode({name: value.detach().cpu() for name, value in state.items()})
    return {
        f"{BACKBONE_FOLDER}/open_clip_config.json": config.encode(),
        f"{BACKBONE_FOLDER}/open_clip_model.safetensors": weights,
    }
