"""The emoji backbone: it is loaded from its file, and knows things that it was not trained on."""

from __future__ import annotations

from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from benchmarks.backbone import fresh_model, save_weights
from promptfed.shared.clip import load_backbone
from promptfed.shared.clip.embedded import TABLE, emoji, tiny
from promptfed.shared.data import open_source


def test_it_is_loaded_from_its_file_and_the_tiny_backbone_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = load_backbone(emoji.MODEL, emoji.PRETRAINED)
    monkeypatch.setattr(emoji, "file", tmp_path / "weights.safetensors")
    model = fresh_model(emoji.MODEL, 3, "test")
    shared = load_file(tiny.weights_path())
    model.load_state_dict({TABLE: shared[TABLE].float()}, strict=False)
    save_weights(model, tmp_path / "weights.safetensors", [TABLE])
    loaded = load_backbone(emoji.MODEL, emoji.PRETRAINED)
    assert loaded.image_size == (64, 64)
    assert torch.equal(loaded.model.token_embedding.weight, model.token_embedding.weight)
    half = model.visual.proj.detach().half().float()
    assert torch.equal(loaded.model.visual.proj, half)
    assert load_backbone(emoji.MODEL, "random").fingerprint != loaded.fingerprint
    assert shipped.fingerprint != loaded.fingerprint


def test_the_shipped_weights_name_what_no_designer_of_theirs_drew() -> None:
    """FxEmoji's designer was not read: eight things in a style of their own, far above the chance of one in eight."""
    names = ("cat", "banana", "grapes", "key", "mushroom", "spider", "tulip", "wine glass")
    source = open_source(f"emoji:fxemoji?level=names&only={','.join(names)}")
    emoji.register()
    backbone = load_backbone(emoji.MODEL, emoji.PRETRAINED)
    image = torch.stack([backbone.preprocess(source.test.image(k)) for k in range(len(source.test))])
    with torch.no_grad():
        features = F.normalize(backbone.model.encode_image(image), dim=1)
        names_read = open_clip.get_tokenizer(emoji.MODEL)([f"a photo of a {name}." for name in source.class_names])
        text = F.normalize(backbone.model.encode_text(names_read), dim=1)
    right = (features @ text.T).argmax(1) == source.test.labels
    assert int(right.sum()) >= len(names) // 2
