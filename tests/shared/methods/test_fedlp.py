"""FedLP against its equations, with gradients by autograd and curvature by the whole Hessian."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, ClientUpdate
from promptfed.shared.methods.fedlp import Problem
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES
from tests.shared.methods.test_fedtaskres import server, some_residual, texts_of
from tests.support import literal
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]


def state_of(backbone: Backbone) -> Tensors:
    return {"prototypes": some_residual(backbone.d_e), "text_weight_change": torch.tensor([0.3, -0.2, 0.0, 0.5, 0.1])}


def loss_by_hand(context: ClientContext, prototypes: Tensor, change: Tensor) -> Tensor:
    texts, losses = texts_of(context), []
    for feature, label in zip(context.train.features(), context.train.labels.tolist(), strict=True):
        weights = [row + (1 + more) * text for row, more, text in zip(prototypes, change, texts, strict=True)]
        scores = [context.backbone.logit_scale * torch.dot(feature, weight) for weight in weights]
        losses.append(literal.cross_entropy(torch.stack(scores), label))
    return torch.stack(losses).mean()


def test_training_equals_the_equations(backbone: Backbone, make_context: Make) -> None:
    context, start = make_context(6, epochs=2), state_of(backbone)
    found = make_method({"name": "fedlp"}).train(context, start, {})
    features, texts, scale = context.train.features(), texts_of(context), context.backbone.logit_scale
    spread = float(torch.linalg.eigvalsh(sum(torch.outer(row, row) for row in features) / 6)[-1])
    prototypes, change = start["prototypes"], start["text_weight_change"]
    for _ in range(2):
        live = prototypes.clone().requires_grad_()
        [gradient] = torch.autograd.grad(loss_by_hand(context, live, change), [live])
        prototypes = prototypes - gradient / (scale**2 * spread / 2)
        live = change.clone().requires_grad_()
        [gradient] = torch.autograd.grad(loss_by_hand(context, prototypes, live), [live])
        for k, text in enumerate(texts):
            bound = scale**2 * sum(float(torch.dot(row, text)) ** 2 for row in features) / 6 / 2
            change = change.clone()
            change[k] -= gradient[k] / bound
    for name, wanted in (("prototypes", prototypes), ("text_weight_change", change)):
        size = float((wanted - start[name]).abs().max())
        assert size > 1e-4
        assert_values((found.update[name] - start[name]) / size, (wanted - start[name]) / size, 1e-3)
    assert found.metrics["loss"] == pytest.approx(float(loss_by_hand(context, prototypes, change)), rel=1e-4)


def test_the_bounds_are_above_the_curvature_and_no_step_increases_the_loss(
    backbone: Backbone, make_context: Make
) -> None:
    context, state = make_context(6, epochs=1), state_of(backbone)
    problem, prototypes = Problem(context), state["prototypes"]
    curvature = torch.autograd.functional.hessian(
        lambda change: torch.nn.functional.cross_entropy(problem.logits(prototypes, change), problem.labels),
        state["text_weight_change"],
    )
    assert float(torch.linalg.eigvalsh(torch.diag(problem.text_bounds) - curvature)[0]) >= -1e-5
    losses = [float(loss_by_hand(context, *state.values()))]
    for _ in range(8):
        result = make_method({"name": "fedlp"}).train(context, state, {})
        state = result.update
        losses.append(result.metrics["loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01


def test_the_classifier_adds_prototypes_and_weighted_texts(backbone: Backbone, make_context: Make) -> None:
    context, state, rows = make_context(5), state_of(backbone), torch.tensor([4, 0, 3])
    method = make_method({"name": "fedlp"})
    other = replace(context, class_names=(NAMES[3], "lighthouse", NAMES[0]), label_space=NAMES)
    texts = texts_of(other)
    weights = torch.stack([state["prototypes"][3] + 1.5 * texts[0], texts[1], state["prototypes"][0] + 1.3 * texts[2]])
    wanted = backbone.logit_scale * context.train.features()[rows] @ weights.T
    assert_values(method.classifier(other, state, {}).logits(context.train, rows), wanted)
    zero = method.initial_state(server(backbone.d_e), initial_draws(3))
    found = method.classifier(context, zero, {}).logits(context.train, rows)
    assert_values(found, TemplateClassifier(context).logits(context.train, rows))


def test_prototypes_start_at_the_class_means_of_all_images(backbone: Backbone, make_context: Make) -> None:
    method, context = make_method({"name": "fedlp", "image_weight": 2.0}), server(backbone.d_e)
    means, train = method.phases(1, 4)
    assert [spec.name for spec in means.up] == ["prototypes"]
    assert train.down == train.up == method.state_tensors()
    assert [phase.name for phase in method.phases(2, 4)] == ["train"]
    state = method.initial_state(context, initial_draws(3))
    clients = [replace(make_context(count), phase="means") for count in (9, 3)]
    updates = [
        ClientUpdate(str(place), len(client.train) / 12, method.train(client, {}, {}).update)
        for place, client in enumerate(clients)
    ]
    after = method.aggregate(state, means, iter(updates), weighted_mean, context)
    assert not after["text_weight_change"].any()
    for place in range(len(NAMES)):
        total = sum(client.train.features()[client.train.labels == place].sum(dim=0) for client in clients)
        assert isinstance(total, Tensor)
        wanted = 2 * total / total.norm() if total.any() else total
        assert_values(after["prototypes"][place], wanted)
