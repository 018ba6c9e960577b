"""A merged checkpoint: open_clip's own loading code takes it, and its model answers as the federation's classifier."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F

from promptfed.export.adapted_model import AdaptedModel
from promptfed.sdk.client import CommandError
from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.clip.weights import load_into, weights_in
from promptfed.shared.methods import make_method
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import Tensors
from tests.support.equality import assert_values
from tests.support.textless import MODEL, textless_backbone
from tests.support.visual_clients import NAMES, client_context, server_context, small_backbone

TEXTS = [f"a photo of a {name.replace('_', ' ')}." for name in NAMES]
ROWS = torch.arange(6)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def adapted(backbone: Backbone, method: dict[str, Any], state: Tensors, model: str = "small-both") -> AdaptedModel:
    spec = BackboneSpec(model=model, pretrained=None, fingerprint=backbone.fingerprint, shape=shape_of(backbone))
    terms = TrainingTerms(
        method=method, training=TrainingSpec(), backbone=spec, class_names=None, template="a photo of a {}.", rounds=4,
        seed=3,
    )  # fmt: skip
    return AdaptedModel(terms, 4, (), state)


def moved(method: dict[str, Any], backbone: Backbone) -> Tensors:
    context = replace(server_context(backbone, "a"), class_names=tuple(NAMES))
    state = make_method(method).initial_state(context, initial_draws(3))
    draws = torch.Generator().manual_seed(8)
    return {name: tensor + torch.randn(tensor.shape, generator=draws) * 0.05 for name, tensor in state.items()}


@pytest.mark.parametrize(
    "method",
    [
        {"name": "fedavg"},
        {"name": "fedprox", "trainable": "last_k", "k": 2},
        {"name": "fedavg", "trainable": "biases"},
        {"name": "fedlora"},
        {"name": "fedlora", "matrices": "qkvo", "towers": "visual"},
        {"name": "fedlora", "towers": "text", "aggregation": "freeze_a", "blocks": "last_k"},
    ],
)
def test_the_checkpoint_s_model_has_the_federation_s_logits(
    backbone: Backbone, method: dict[str, Any], tmp_path: Path
) -> None:
    state = moved(method, backbone)
    checkpoint = adapted(backbone, method, state).merged(backbone, NAMES)
    save_file(checkpoint, tmp_path / "open_clip_model.safetensors")
    loaded = open_clip.create_model("small-both", pretrained=str(tmp_path / "open_clip_model.safetensors")).eval()
    context = client_context(backbone)
    wanted = make_method(method).classifier(context, state, {}).logits(context.train, ROWS)
    with torch.no_grad():
        images = F.normalize(loaded.encode_image(context.train.images(ROWS)), dim=-1)
        texts = F.normalize(loaded.encode_text(open_clip.get_tokenizer("small-both")(TEXTS)), dim=-1)
        found = loaded.logit_scale.exp() * images @ texts.T
    assert_values(found, wanted)
    plain = backbone.logit_scale * backbone.encode_images(context.train.images(ROWS)) @ backbone.encode_text(TEXTS).T
    assert float((plain - wanted).abs().max()) > 1e-3, "and not those of the frozen one"
    again = load_backbone("small-both", None)
    load_into(again.model, weights_in(tmp_path), "small-both")
    assert all(tensor.equal(checkpoint[name]) for name, tensor in again.model.state_dict().items())
    assert all(
        tensor.equal(backbone.model.state_dict()[name]) for name, tensor in checkpoint.items() if "token" in name
    )


def test_what_cannot_be_merged_is_refused(backbone: Backbone) -> None:
    with pytest.raises(CommandError, match="changes no weights of the towers"):
        adapted(backbone, {"name": "promptfl"}, {}).merged(backbone, NAMES)
    state = moved({"name": "fedavg"}, backbone)
    right = adapted(backbone, {"name": "fedavg"}, state)
    wrong = BackboneSpec(fingerprint="sha256:" + "0" * 64)
    other = replace(right, terms=right.terms.model_copy(update={"backbone": wrong}))
    with pytest.raises(CommandError, match="the backbone here is"):
        other.merged(backbone, NAMES)
    textless, linear = textless_backbone(), {"name": "fedavg", "head": "linear", "trainable": "biases"}
    with pytest.raises(CommandError, match="not an open_clip model"):
        adapted(textless, linear, moved(linear, textless), MODEL).merged(textless, NAMES)
