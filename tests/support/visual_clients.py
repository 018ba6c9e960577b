"""A small backbone of both towers and clients with made-up images, for the methods with visual prompts."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, ServerContext
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import TrainingSpec
from tests.support.terms import training_terms

NAMES = ("sun", "chess_knight", "umbrella")
VISION = {"image_size": 16, "layers": 3, "width": 32, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 16, "vocab_size": 49408, "width": 24, "heads": 4, "layers": 2}


def small_backbone(folder: Path) -> Backbone:
    """Two blocks of text, three of vision, widths that differ; random weights, larger than open_clip draws them."""
    import open_clip

    torch.set_num_threads(1)
    (folder / "small-both.json").write_text(json.dumps({"embed_dim": 16, "vision_cfg": VISION, "text_cfg": TEXT}))
    open_clip.add_model_config(folder)
    backbone = load_backbone("small-both", None)
    draws = torch.Generator().manual_seed(11)
    for weight in backbone.model.parameters():
        if weight.ndim > 1:
            weight.data = torch.randn(weight.shape, generator=draws) * weight.shape[-1] ** -0.5
    backbone.model.token_embedding.weight.data *= 0.1
    return backbone


@dataclass
class ImageSplit:
    """Made-up images with labels; counts how often each is asked for."""

    pixels: Tensor
    labels: Tensor
    backbone: Backbone
    asked: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        return self.backbone.encode_images(self.pixels)

    def raw_features(self) -> Tensor:
        return self.backbone.encode_images(self.pixels, normalize=False)

    def images(self, indices: Tensor) -> Tensor:
        self.asked += indices.tolist()
        return self.pixels[indices]

    def patches(self, indices: Tensor) -> Tensor:
        return self.backbone.encode_patches(self.pixels[indices])


def split_of(backbone: Backbone, count: int, client: str = "a") -> ImageSplit:
    """Random images of the backbone's size."""
    draws = generator(1, "images", client)
    pixels = torch.randn(count, 3, *backbone.image_size, generator=draws)
    return ImageSplit(pixels, torch.randint(len(NAMES), (count,), generator=draws), backbone)


def client_context(
    backbone: Backbone, count: int = 6, *, client: str = "a", round: int = 1, phase: str = "train", **training: Any
) -> ClientContext:
    """One client's task."""
    plain = {
        "momentum": 0.0, "weight_decay": 0.0, "batch_size": count or 1, "learning_rate": 1.0, "schedule": "constant",
    }  # fmt: skip
    return ClientContext(
        backbone=backbone, class_names=NAMES, template="a photo of a {}.", terms=training_terms(plain | training),
        client=client, domain=None, peers=(), round=round, phase=phase, train=split_of(backbone, count, client),
    )  # fmt: skip


def server_context(backbone: Backbone, *clients: str) -> ServerContext:
    """The roster in order of name."""
    roster = tuple(ClientInfo(name, "trainer", 6, NAMES) for name in sorted(clients))
    return ServerContext(TrainingSpec(), shape_of(backbone), NAMES, roster, seed=3, rounds=4)


def filled(shapes: dict[str, tuple[int, ...]], seed: int, scale: float) -> dict[str, Tensor]:
    """Tensors of N(0, scale²) in order of name."""
    draws = torch.Generator().manual_seed(seed)
    return {name: torch.randn(*shape, generator=draws) * scale for name, shape in sorted(shapes.items())}
