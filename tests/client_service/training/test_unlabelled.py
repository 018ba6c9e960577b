"""A client without labels trains on confident predictions of the received classifier, and on nothing else."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.joining.checks import check_data
from promptfed.client_service.training.data import ClientData, held_out
from promptfed.client_service.training.image_cache import ImageCache
from promptfed.client_service.training.unlabelled import with_predictions
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.text_features import template_features
from promptfed.shared.spec.loss import LossSpec
from tests.support.visual_clients import client_context

DATA = "symbols:neon?topic=weather&per_class=2&test_per_class=1"
NAMES = list(open_source(DATA).class_names)


def test_confident_predictions_take_the_place_of_labels(backbone: Backbone, tmp_path: Path) -> None:
    source = open_source(f"{DATA}&unlabelled=true")
    data = ClientData(source, backbone, FeatureCache(tmp_path), images=ImageCache(1 << 20))
    method = make_method({"name": "fedtaskres"})
    template = "a photo of a {}."
    text = template_features(backbone, template, tuple(NAMES))
    scores = torch.softmax(backbone.logit_scale * data.features("train") @ text.T, dim=1)
    values = scores.amax(1).unique()  # a threshold between two of them
    threshold = float(values[len(values) // 2 - 1 : len(values) // 2 + 1].mean())
    wanted = [int(row.argmax()) if row.max() >= threshold else -1 for row in scores]
    loss = LossSpec(unlabelled_threshold=threshold, unlabelled_weight=0.25)
    context = client_context(backbone, learning_rate=0.8).with_terms(loss=loss)
    context = replace(context, class_names=tuple(NAMES), train=data.split("train", tuple(NAMES)))
    payload = {"residual": torch.zeros(len(NAMES), backbone.d_e)}
    task = with_predictions(method, context, data, payload, {})
    assert task.train.labels.tolist() == wanted
    assert {-1} < set(wanted), "some images are confident and some are not"
    assert task.unlabelled
    assert task.training.learning_rate == pytest.approx(0.2)
    rows = torch.arange(2)
    assert not task.train.images(rows).equal(context.train.images(rows)), "the strong view is a crop"


def federation(method: dict[str, Any], second: str, **changes: Any) -> str:
    spec = {"name": "eyes", "method": method, "class_names": NAMES, "rounds": 2, "evaluation": {"every": 2}} | changes
    return simulate(spec, [Site("a", DATA), Site("b", second)]).state_hash


def test_labels_of_the_site_are_never_read(caplog: pytest.LogCaptureFixture) -> None:
    method = {"name": "fedtaskres"}
    caplog.set_level(logging.INFO, logger="promptfed.client")
    loss = {"unlabelled_threshold": 0.3}
    trained = federation(method, f"{DATA}&unlabelled=true", loss=loss)
    assert "images are classified with confidence and trained on" in caplog.text
    assert federation(method, f"{DATA}&flip=0.9&unlabelled=true", loss=loss) == trained
    assert federation(method, DATA, loss=loss) != trained
    assert federation(method, f"{DATA}&unlabelled=true", loss={"unlabelled_threshold": 0.9}) != trained


@pytest.mark.extended
def test_unlabelled_clients_train_with_privacy() -> None:
    privacy = {"level": "sample", "noise_multiplier": 1.0, "clip": 0.1, "delta": 1e-3}
    method = {"name": "fedtaskres"}
    private = federation(method, f"{DATA}&unlabelled=true", privacy=privacy)
    assert private != federation(method, f"{DATA}&unlabelled=true")


def test_methods_that_read_labels_otherwise_refuse_by_name() -> None:
    with pytest.raises(CommandError, match=r"fedcocoop does not train without labels: .* one of fedclip, "):
        federation({"name": "fedcocoop"}, f"{DATA}&unlabelled=true")


def test_the_owner_is_told() -> None:
    source = open_source(f"{DATA}&unlabelled=true")
    assert "no training label is read" in check_data(source, "trainer")[0].text
    with pytest.raises(ClientError, match="labels are not read"):
        held_out(source, 0.25, 0)
