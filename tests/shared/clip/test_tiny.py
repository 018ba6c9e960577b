"""The embedded backbone: an ordinary open_clip model, made reproducibly, that behaves as the others need it to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor

from benchmarks import backbone
from benchmarks.backbone import normalise, pretrain, save_weights
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.data.classes import SYMBOLS
from promptfed.shared.data.symbols import symbols_split
from tests import ROOT

NAMES = tuple(symbol.name for symbol in SYMBOLS)
CONTEXT_LENGTH, CONTEXT_STD = 16, 0.02


@torch.no_grad()
def image_features(model: open_clip.CLIP, images: Tensor) -> Tensor:
    """Unit features (N, d_e) of uint8 RGB images (N, 3, 48, 48)."""
    parts = [model.encode_image(normalise(part)) for part in torch.split(images, 128)]
    return F.normalize(torch.cat(parts), dim=-1)


@torch.no_grad()
def text_features(model: open_clip.CLIP, names: Sequence[str], template: str) -> Tensor:
    """Unit features (C, d_e) of the template filled with each name."""
    tokenizer = open_clip.get_tokenizer(tiny.MODEL)
    return F.normalize(model.encode_text(tokenizer([template.format(n) for n in names])), dim=-1)


def accuracy(image: Tensor, text: Tensor, labels: Tensor) -> float:
    """Percent of images whose nearest text is their label's."""
    return 100.0 * (image @ text.T).argmax(1).eq(labels).float().mean().item()


@pytest.fixture(scope="module")
def model() -> open_clip.CLIP:
    tiny.register()
    return open_clip.create_model(tiny.MODEL, pretrained=str(tiny.weights_path())).eval().requires_grad_(False)


def test_weights_are_small_and_in_half_precision() -> None:
    assert tiny.weights_path().stat().st_size < 16e6
    with safe_open(tiny.weights_path(), "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118


@pytest.mark.extended
def test_the_documented_table_is_the_measured_one(model: open_clip.CLIP) -> None:
    """One style's row of docs/explanation/backbone.md, to what rounding on another machine may change."""
    text = (ROOT / "docs" / "explanation" / "backbone.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| painting, sketch"))
    styles, _, templates, _ = ([part.strip() for part in cell.split(",")] for cell in row.split("|")[1:-1])
    documented = float(templates[styles.index("sketch")])
    split = symbols_split(list(SYMBOLS), "sketch", 10, "test")
    pixels = torch.stack([torch.from_numpy(np.array(split.image(i))) for i in range(len(split))])
    template = text_features(model, NAMES, "a photo of a {}.")
    found = accuracy(image_features(model, pixels.permute(0, 3, 1, 2)), template, split.labels)
    assert abs(found - documented) < 0.5


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"seed": 0, "steps": 2, "batch": 6, "lr": 1e-3} | changes))


@pytest.mark.extended
def test_pretraining_is_reproducible(tmp_path: Path) -> None:
    recipe = backbone.Recipe()
    for name in ("a", "b"):
        save_weights(pretrain(arguments(), recipe), tmp_path / name)
    save_weights(pretrain(arguments(seed=1), recipe), tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()
