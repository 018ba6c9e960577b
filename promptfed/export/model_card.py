"""The card of an export: what was learned, by whom, how well, and how to use it; as JSON and as Markdown.

The snippet in the Markdown is plain open_clip code, which needs no promptfed; a test runs it as it stands there.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from statistics import fmean
from typing import Any

from promptfed.export.adapted_model import Learned
from promptfed.sdk.snapshot import Taken
from promptfed.shared.clip import Backbone, tiny
from promptfed.shared.methods import METHODS
from promptfed.shared.tensors import Tensors, canonical_json, encode

FORMAT = 1
STATE_FILE, WEIGHTS_FILE, JSON_FILE, MARKDOWN_FILE = (
    "prompts.safetensors",
    "class_weights.safetensors",
    "card.json",
    "card.md",
)
BACKBONE_FOLDER = "backbone"  # of weights that open_clip cannot load by name
MOST_CLASSES = 12  # that the Markdown names one by one


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


def card_of(taken: Taken, learned: Learned, contents: Contents, anonymous: bool) -> dict[str, Any]:
    """The card; with ``anonymous`` clients are numbered instead of named."""
    found = taken.federation
    kind = METHODS[learned.method["name"]]
    tensors = {STATE_FILE: contents.state, WEIGHTS_FILE: contents.weights or {}}
    return {
        "format": FORMAT,
        "federation": {"name": found["name"], "id": found["id"], "state": found["state"]},
        "method": learned.method,
        "summary": kind.summary,
        "paper": kind.paper,
        "backbone": learned.backbone,
        "template": learned.template,
        "class_names": list(contents.class_names) if contents.class_names else None,
        "class_names_from": contents.names_from if contents.class_names else None,
        "round": taken.round,
        "rounds": learned.rounds,
        "training": learned.training,
        "seed": learned.seed,
        "domains": [domain.model_dump() for domain in learned.domains],
        "participants": _participants(taken, anonymous),
        "accuracy": _accuracy(taken, anonymous),
        "bytes": {key: sum(report[f"bytes_{key}"] for report in taken.reports) for key in ("up", "down")},
        "use": {
            "open_clip": contents.weights is not None,
            "promptfed": contents.alone and contents.class_names is not None,
            "why_not_open_clip": contents.why_none,
        },
        "hashes": {
            "state": taken.state_hash,
            "backbone": learned.backbone["fingerprint"],
            "spec": "sha256:" + hashlib.sha256(canonical_json(taken.spec).encode()).hexdigest(),
        },
        "files": {name: _file(body, tensors.get(name)) for name, body in sorted(contents.files.items())},
        "made": {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "promptfed": metadata.version("promptfed"),
        },
    }


def _file(body: bytes, tensors: Tensors | None) -> dict[str, Any]:
    about: dict[str, Any] = {"bytes": len(body), "sha256": hashlib.sha256(body).hexdigest()}
    if tensors is not None:
        about["tensors"] = {
            name: {"shape": list(tensor.shape), "dtype": str(tensor.dtype).removeprefix("torch.")}
            for name, tensor in sorted(tensors.items())
        }
    return about


def _shown(taken: Taken, anonymous: bool) -> dict[str, str]:
    names = sorted(client["name"] for client in taken.clients)
    return {name: f"client {number}" if anonymous else name for number, name in enumerate(names, 1)}


def _participants(taken: Taken, anonymous: bool) -> list[dict[str, Any]]:
    shown = _shown(taken, anonymous)
    counted = [one["client"] for report in taken.reports for phase in report["phases"] for one in phase["counted"]]
    return [
        {
            "name": shown[client["name"]],
            "role": client["role"],
            "domain": client["domain"]["name"] if client["domain"] else None,
            "num_samples": client["num_samples"],
            "num_classes": client["num_classes"],
            "updates_counted": counted.count(client["name"]),
        }
        for client in sorted(taken.clients, key=lambda client: client["name"])
    ]


def _accuracy(taken: Taken, anonymous: bool) -> dict[str, Any] | None:
    """What clients measured last; ``splits`` with their variants, fractions."""
    found = taken.evaluation()
    if found is None:
        return None
    round, clients = found
    shown = _shown(taken, anonymous)
    rows = [
        {
            "client": shown.get(name, name),
            "role": one["role"],
            "split": split,
            "adapted": result["accuracy"],
            "zero_shot": _zero_shot(one, split),
            "num_samples": result["num_samples"],
        }
        for name, one in sorted(clients.items())
        for split, result in sorted(one["splits"].items())
    ]
    return {"round": round, "clients": rows, "mean": _means(rows)}


def _zero_shot(one: dict[str, Any], split: str) -> float | None:
    found = one["zero_shot"].get(split.partition("@")[0])
    return found["accuracy"] if found else None


def _means(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """By role, over the clients' own test images."""
    found = {}
    for role in sorted({row["role"] for row in rows}):
        mine = [row for row in rows if row["role"] == role and row["split"] == "test"]
        values = {key: [row[key] for row in mine if row[key] is not None] for key in ("adapted", "zero_shot")}
        found[role] = {key: fmean(some) for key, some in values.items() if some}
    return found


def carries_backbone(backbone: dict[str, Any]) -> bool:
    """Whether open_clip could not load the backbone by its name alone."""
    model, weights = backbone["model"], backbone["pretrained"]
    named = weights not in (None, "random") or model.startswith("hf-hub:")  # whose name brings its weights
    return model == tiny.MODEL or not named


def snippet(learned: Learned, weights: Tensors) -> str:
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
        f"model, _, preprocess = open_clip.create_model_and_transforms({_arguments(learned.backbone)})",
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


def _arguments(backbone: dict[str, Any]) -> str:
    """How open_clip is asked for the very backbone; always in float32, in which the weights are."""
    if carries_backbone(backbone):
        return f'"local-dir:{BACKBONE_FOLDER}"'
    from open_clip import get_pretrained_cfg, is_pretrained_cfg

    model, weights = backbone["model"], backbone["pretrained"]
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
