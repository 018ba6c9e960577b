"""FedProLIP against its equations: the projection written out coordinate by coordinate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.base import ClientContext, ClientUpdate, MethodError, ServerContext
from promptfed.shared.methods.fedprolip import projection
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from tests.support import literal, literal_fast_pt
from tests.support.equality import assert_values
from tests.support.visual_clients import client_context, filled, server_context, small_backbone

RATE, COUNT = 5.0, 5


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def some_change(backbone: Backbone) -> Tensor:
    return filled({"change": (backbone.d_v, backbone.d_e)}, 8, 0.05)["change"]


def logits_by_hand(context: ClientContext, change: Tensor, row: int) -> Tensor:
    backbone = context.backbone
    tower = backbone.vision_tower()
    pooled = tower.encode(tower.weights, context.train.images(torch.tensor([row])), projected=False)[0].detach()
    columns = (tower.weights["proj"].detach() + change).T
    feature = torch.stack([torch.dot(pooled, column) for column in columns])
    feature = feature / feature.square().sum().sqrt()
    names = [name.replace("_", " ") for name in context.class_names]
    texts = [literal_fast_pt.whole_text(backbone, context.template, name) for name in names]
    return torch.stack([backbone.logit_scale * torch.dot(feature, text) for text in texts])


@pytest.mark.parametrize("weight", [None, 0.3])
def test_training_equals_the_equations(backbone: Backbone, weight: float | None) -> None:
    context = client_context(backbone, COUNT, round=2, batch_size=3, learning_rate=RATE, momentum=0.9)
    start = some_change(backbone)
    method = make_method({"name": "fedprolip", "weight": weight})
    found = method.train(context, {"projection_change": start}, {}).update["projection_change"]
    held = weight if weight is not None else len(context.class_names) / COUNT
    frozen, _ = projection(backbone)
    rate = RATE * float(frozen.square().mean().sqrt()) / backbone.d_v**0.5
    now, speed = start.clone(), torch.zeros_like(start)
    draws = generator(context.seed, 2, "train", context.client, "batches")
    for rows in torch.split(torch.randperm(COUNT, generator=draws), 3):
        live = now.clone().requires_grad_()
        labels = context.train.labels[rows].tolist()
        losses = [
            literal.cross_entropy(logits_by_hand(context, live, row), label)
            for row, label in zip(rows.tolist(), labels, strict=True)
        ]
        [gradient] = torch.autograd.grad(torch.stack(losses).mean(), [live])
        speed = 0.9 * speed + gradient + 2 * held * now
        now = now - rate * speed
    size = float((now - start).abs().max())
    assert size > 1e-3
    assert_values((found - start) / size, (now - start) / size, 1e-3)


def test_the_classifier_projects_anew(backbone: Backbone) -> None:
    context, rows = client_context(backbone, COUNT), torch.tensor([4, 0, 3])
    change, method = some_change(backbone), make_method({"name": "fedprolip"})
    found = method.classifier(context, {"projection_change": change}, {}).logits(context.train, rows)
    wanted = torch.stack([logits_by_hand(context, change, row) for row in rows.tolist()])
    assert_values(found, wanted, 1e-4)
    still = method.classifier(context, {"projection_change": 0 * change}, {}).logits(context.train, rows)
    assert_values(still, TemplateClassifier(context).logits(context.train, rows), 1e-4)
    assert float((found - still).abs().max()) > 0.01


def test_the_change_is_all_that_travels_and_is_averaged(backbone: Backbone) -> None:
    method, context = make_method({"name": "fedprolip"}), server_context(backbone, "a", "b")
    (phase,) = method.phases(1, 4)
    assert phase.down == phase.up == method.state_tensors()
    state = method.initial_state(context, initial_draws(3))
    assert state["projection_change"].shape == (backbone.d_v, backbone.d_e)
    assert not state["projection_change"].any()
    change = some_change(backbone)
    updates = [
        ClientUpdate("a", 0.25, {"projection_change": change}),
        ClientUpdate("b", 0.75, {"projection_change": 3 * change}),
    ]
    after = method.aggregate(state, phase, iter(updates), weighted_mean, context)
    assert_values(after["projection_change"], 2.5 * change, 1e-6)


def test_a_tower_without_a_projection_is_refused(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    method = make_method({"name": "fedprolip"})
    plain = ServerContext(TrainingSpec(), BackboneShape(d_t=8, d_e=8), ("a", "b"), (), seed=3, rounds=4)
    with pytest.raises(MethodError, match="vision transformer"):
        method.dims(plain)
    monkeypatch.setattr(Backbone, "vision_tower", lambda _: SimpleNamespace(weights={}))
    with pytest.raises(MethodError, match="this backbone's ends with none"):
        projection(backbone)
