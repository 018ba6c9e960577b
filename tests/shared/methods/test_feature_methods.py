"""FedCLIPAdapter, FedCLIP, FedTaskRes and FedLP against their equations written out."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.rules import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.interface import Fixed
from promptfed.shared.methods.fedlp import Problem
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, Make
from tests.support import literal, literal_fast_pt
from tests.support.equality import assert_moved_equally, assert_values

RATE, ALPHA, REDUCTION = 0.2, 0.4, 16


SETTINGS = {"name": "fedclipadapter", "alpha": ALPHA, "reduction": REDUCTION, "start": "random"}


def server(d_e: int) -> pf.ServerContext:
    return pf.ServerContext(TrainingSpec(), BackboneShape(d_t=8, d_e=d_e), NAMES, (), seed=3, rounds=4)


def start(backbone: Backbone) -> Tensors:
    return make_method(SETTINGS).initial_state(server(backbone.d_e), initial_draws(3))


def positive(value: Tensor) -> Tensor:
    return value if bool(value > 0) else torch.zeros_like(value)


def literally(adapter: Tensors, vector: Tensor) -> Tensor:
    """The normalised blend of one feature, one hidden unit after the other."""
    hidden = torch.stack([positive((row * vector).sum()) for row in adapter["image_w1"]])
    adapted = torch.stack([positive((row * hidden).sum()) for row in adapter["image_w2"]])
    mixed = ALPHA * adapted + (1 - ALPHA) * vector
    return mixed / mixed.square().sum().sqrt()


def logits_by_hand(context: pf.ClientContext, adapter: Tensors, rows: Tensor) -> Tensor:
    texts = torch.stack([literal_fast_pt.whole_text(context.backbone, context.template, name) for name in NAMES])
    images = [literally(adapter, context.train.features()[row]) for row in rows.tolist()]
    return context.backbone.logit_scale * torch.stack(images) @ texts.T


def test_training_equals_the_equations(backbone: Backbone, make_context: Make) -> None:
    steps = {"epochs": 1, "batch_size": 3, "learning_rate": RATE, "schedule": "constant"}
    context = make_context(5, round=2, momentum=0.9, weight_decay=1e-3, **steps)
    payload = start(backbone)
    found = make_method(SETTINGS).train(context, payload, {}).update
    draws = generator(3, 2, "train", "hospital-a", "batches")
    weights = {name: tensor.clone() for name, tensor in payload.items()}
    speed = {name: torch.zeros_like(tensor) for name, tensor in payload.items()}
    for rows in torch.split(torch.randperm(5, generator=draws), 3):
        live = {name: tensor.clone().requires_grad_() for name, tensor in weights.items()}
        logits = logits_by_hand(context, live, rows)
        labels = context.train.labels[rows].tolist()
        losses = [literal.cross_entropy(scores, label) for scores, label in zip(logits, labels, strict=True)]
        gradients = torch.autograd.grad(torch.stack(losses).mean(), list(live.values()))
        for name, gradient in zip(live, gradients, strict=True):
            speed[name] = 0.9 * speed[name] + gradient + 1e-3 * weights[name]
            inputs = backbone.d_e if name.endswith("w1") else backbone.d_e // REDUCTION
            weights[name] = weights[name] - RATE / inputs**0.5 * speed[name]
    for name, tensor in found.items():
        moved, wanted = tensor - payload[name], weights[name] - payload[name]
        size = float(wanted.abs().max())
        assert size > 1e-5
        assert_values(moved / size, wanted / size, 1e-3)


def test_the_classifier_scores_blended_features(backbone: Backbone, make_context: Make) -> None:
    context, rows = make_context(5), torch.tensor([4, 0, 3])
    adapter = {name: 5 * tensor for name, tensor in start(backbone).items()}  # far from zero-shot
    found = make_method(SETTINGS).classifier(context, adapter, {})
    wanted = logits_by_hand(context, adapter, rows)
    assert_values(found.logits(context.train, rows), wanted)
    plain = TemplateClassifier(context).logits(context.train, rows)
    assert float((wanted - plain).abs().max()) > 0.1
    assert not isinstance(found, Fixed)


def test_the_start() -> None:
    drawn, zero = (
        make_method({"name": "fedclipadapter", "start": start}).initial_state(server(512), initial_draws(3))
        for start in ("random", "zero_shot")
    )
    assert float(abs(drawn["image_w1"]).max()) <= 512**-0.5
    assert 0.9 * 128**-0.5 < float(abs(drawn["image_w2"]).max()) <= 128**-0.5
    assert zero["image_w1"].equal(drawn["image_w1"])
    assert not zero["image_w2"].any()


def test_a_second_layer_of_zeros_is_trained_towards_what_lowers_the_loss(
    backbone: Backbone, make_context: Make
) -> None:
    context = make_context(5, epochs=1, batch_size=5, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    payload = start(backbone) | {"image_w2": torch.zeros(backbone.d_e, backbone.d_e // REDUCTION)}
    found = make_method(SETTINGS).train(context, payload, {}).update["image_w2"]
    rows, nudge = torch.arange(5), 1e-3 * torch.sign(found)

    def loss(adapter: Tensors) -> float:
        return float(torch.nn.functional.cross_entropy(logits_by_hand(context, adapter, rows), context.train.labels))

    assert found.any(dim=1).float().mean() > 0.9
    assert loss(payload | {"image_w2": nudge}) < loss(payload)


# FedCLIP against its adapter written out, coordinate by coordinate.


def start_of_fedclip(backbone: Backbone) -> Tensors:
    return make_method({"name": "fedclip", "start": "random"}).initial_state(server(backbone.d_e), initial_draws(3))


def literally_of_fedclip(adapter: Tensors, feature: Tensor) -> Tensor:
    """a(I) ⊙ I, normalised, one coordinate at a time."""
    hidden = [
        torch.tanh((w * feature).sum() + b) for w, b in zip(adapter["adapter_w1"], adapter["adapter_b1"], strict=True)
    ]
    scores = [
        (w * torch.stack(hidden)).sum() + b for w, b in zip(adapter["adapter_w2"], adapter["adapter_b2"], strict=True)
    ]
    total = sum(torch.exp(score) for score in scores)
    weighed = torch.stack([torch.exp(score) / total * one for score, one in zip(scores, feature, strict=True)])
    return weighed / weighed.square().sum().sqrt()


def loss_by_hand(context: pf.ClientContext, adapter: Tensors, some: Tensor) -> Tensor:
    texts = [literal_fast_pt.whole_text(context.backbone, context.template, name) for name in NAMES]
    losses = []
    for index in some.tolist():
        adapted = literally_of_fedclip(adapter, context.train.raw_features()[index])
        logits = torch.stack([context.backbone.logit_scale * torch.dot(adapted, text) for text in texts])
        losses.append(literal.cross_entropy(logits, int(context.train.labels[index])))
    return torch.stack(losses).mean()


def test_training_equals_the_equations_of_fedclip(backbone: Backbone, make_context: Make) -> None:
    context = make_context(6, round=2, epochs=2, batch_size=4, learning_rate=0.05, momentum=0.9, weight_decay=1e-3)
    payload = start_of_fedclip(backbone)
    found = make_method({"name": "fedclip"}).train(context, payload, {}).update
    wanted = literal.training(context, payload, lambda adapter, rows: loss_by_hand(context, adapter, rows))
    assert_moved_equally(found, wanted, payload, least=1e-4)


def test_the_classifier_scores_adapted_features(backbone: Backbone, make_context: Make) -> None:
    context = make_context(5)
    adapter = {name: 20 * tensor for name, tensor in start_of_fedclip(backbone).items()}  # far from uniform
    found = make_method({"name": "fedclip"}).classifier(context, adapter, {})
    texts = torch.stack([literal_fast_pt.whole_text(backbone, context.template, name) for name in NAMES])
    rows = torch.tensor([4, 0, 3])
    wanted = torch.stack([literally_of_fedclip(adapter, context.train.raw_features()[row]) for row in rows]) @ texts.T
    assert_values(found.logits(context.train, rows), backbone.logit_scale * wanted)


def test_raw_features_are_adapted_unless_told_otherwise(backbone: Backbone, make_context: Make) -> None:
    """tanh of W₁I saturates or not by the length of I, so that the two train differently at any rate."""
    context, adapter = make_context(5, learning_rate=0.05), start_of_fedclip(backbone)
    rows = torch.arange(5)
    texts = torch.stack([literal_fast_pt.whole_text(backbone, context.template, name) for name in NAMES])
    normal = make_method({"name": "fedclip", "features": "normalized"})
    wanted = torch.stack([literally_of_fedclip(adapter, feature) for feature in context.train.features()]) @ texts.T
    assert_values(normal.classifier(context, adapter, {}).logits(context.train, rows), backbone.logit_scale * wanted)
    updates = [make_method({"name": "fedclip", **more}).train(context, adapter, {}).update["adapter_w1"]
               for more in ({}, {"features": "raw"}, {"features": "normalized"})]  # fmt: skip
    assert updates[0].equal(updates[1])
    assert not updates[0].equal(updates[2])


# FedTaskRes against its equations: class by class, with gradients of the softmax by hand.


RATE_FEDTASKRES, ALPHA_FEDTASKRES = 0.4, 0.7


def texts_of(context: pf.ClientContext) -> Tensor:
    names = context.class_names
    return torch.stack([literal_fast_pt.whole_text(context.backbone, context.template, name) for name in names])


def weights_of(classifier: pf.Classifier) -> Tensor:
    assert isinstance(classifier, Fixed)
    weights = classifier.weights()
    assert weights is not None
    return weights["class_weights"]


def some_residual(d_e: int) -> Tensor:
    return 0.1 * torch.randn(len(NAMES), d_e, generator=torch.Generator().manual_seed(9))


def slope(context: pf.ClientContext, residual: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy, written out: ∂/∂x_k = Σ_i (p_ik − y_ik)·τ⁻¹·α·(f − (f·w)w)/|v|."""
    texts, total = texts_of(context), torch.zeros_like(residual)
    sums = [text + ALPHA_FEDTASKRES * row for text, row in zip(texts, residual, strict=True)]
    lengths = [float(vector.square().sum().sqrt()) for vector in sums]
    weights = [vector / length for vector, length in zip(sums, lengths, strict=True)]
    for index in rows.tolist():
        feature, label = context.train.features()[index], int(context.train.labels[index])
        scores = torch.stack([context.backbone.logit_scale * torch.dot(feature, weight) for weight in weights])
        shares = torch.exp(scores - scores.max())
        shares = shares / shares.sum()
        for k, (weight, length) in enumerate(zip(weights, lengths, strict=True)):
            across = (feature - torch.dot(feature, weight) * weight) / length
            total[k] += (shares[k] - float(k == label)) * context.backbone.logit_scale * ALPHA_FEDTASKRES * across
    return total / len(rows)


def test_training_equals_the_equations_of_fedtaskres(backbone: Backbone, make_context: Make) -> None:
    steps = {"epochs": 2, "batch_size": 4, "learning_rate": RATE_FEDTASKRES, "schedule": "constant"}
    context = make_context(6, round=2, momentum=0.9, weight_decay=1e-3, **steps)
    start = some_residual(backbone.d_e)
    method = make_method({"name": "fedtaskres", "alpha": ALPHA_FEDTASKRES})
    found = method.train(context, {"residual": start}, {}).update["residual"]
    draws = generator(3, 2, "train", "hospital-a", "batches")
    now, speed = start.clone(), torch.zeros_like(start)
    for _ in range(2):
        for rows in torch.split(torch.randperm(6, generator=draws), 4):
            speed = 0.9 * speed + slope(context, now, rows) + 1e-3 * now
            now = now - RATE_FEDTASKRES / backbone.d_e**0.5 * speed
    size = float((now - start).abs().max())
    assert size > 1e-3
    assert_values((found - start) / size, (now - start) / size, 1e-4)


def test_the_classifier_scores_the_sum(backbone: Backbone, make_context: Make) -> None:
    context, residual = make_context(5), some_residual(backbone.d_e)
    method = make_method({"name": "fedtaskres", "alpha": ALPHA_FEDTASKRES})
    classifier = method.classifier(context, {"residual": residual}, {})
    rows = torch.tensor([4, 0, 3])
    sums = texts_of(context) + ALPHA_FEDTASKRES * residual
    weights = torch.stack([vector / vector.square().sum().sqrt() for vector in sums])
    wanted = backbone.logit_scale * context.train.features()[rows] @ weights.T
    assert_values(classifier.logits(context.train, rows), wanted)
    assert_values(weights_of(classifier), weights)


def test_rows_follow_the_names_of_classes_and_a_new_class_is_zero_shot(backbone: Backbone, make_context: Make) -> None:
    context, residual = make_context(5), some_residual(backbone.d_e)
    method = make_method({"name": "fedtaskres"})
    other = replace(context, class_names=(NAMES[3], "lighthouse", NAMES[0]), label_space=NAMES)
    found = weights_of(method.classifier(other, {"residual": residual}, {}))
    known = weights_of(method.classifier(context, {"residual": residual}, {}))
    assert_values(found[[0, 2]], known[[3, 0]])
    assert_values(found[1], texts_of(other)[1])
    with pytest.raises(pf.MethodError, match="4 rows for 5 classes"):
        method.classifier(context, {"residual": residual[:4]}, {})


def test_adam_moves_every_width_by_the_same_share_of_a_feature(backbone: Backbone, make_context: Make) -> None:
    """Its first step is η/√d_e in each coordinate, so the residual of a class has the length η whatever d_e is."""
    context = make_context(5, batch_size=5, optimizer="adam", learning_rate=RATE_FEDTASKRES, weight_decay=0.0)
    start = torch.zeros(len(NAMES), backbone.d_e)
    moved = make_method({"name": "fedtaskres"}).train(context, {"residual": start}, {}).update["residual"]
    assert_values(moved.norm(dim=1), torch.full((len(NAMES),), RATE_FEDTASKRES), 1e-3)


# FedLP against its equations, with gradients by autograd and curvature by the whole Hessian.


def state_of(backbone: Backbone) -> Tensors:
    return {"prototypes": some_residual(backbone.d_e), "text_weight_change": torch.tensor([0.3, -0.2, 0.0, 0.5, 0.1])}


def loss_by_hand_of_fedlp(context: pf.ClientContext, prototypes: Tensor, change: Tensor) -> Tensor:
    texts, losses = texts_of(context), []
    for feature, label in zip(context.train.features(), context.train.labels.tolist(), strict=True):
        weights = [row + (1 + more) * text for row, more, text in zip(prototypes, change, texts, strict=True)]
        scores = [context.backbone.logit_scale * torch.dot(feature, weight) for weight in weights]
        losses.append(literal.cross_entropy(torch.stack(scores), label))
    return torch.stack(losses).mean()


def test_training_equals_the_equations_of_fedlp(backbone: Backbone, make_context: Make) -> None:
    context, start = make_context(6, epochs=2), state_of(backbone)
    found = make_method({"name": "fedlp"}).train(context, start, {})
    features, texts, scale = context.train.features(), texts_of(context), context.backbone.logit_scale
    spread = float(torch.linalg.eigvalsh(sum(torch.outer(row, row) for row in features) / 6)[-1])
    prototypes, change = start["prototypes"], start["text_weight_change"]
    for _ in range(2):
        live = prototypes.clone().requires_grad_()
        [gradient] = torch.autograd.grad(loss_by_hand_of_fedlp(context, live, change), [live])
        prototypes = prototypes - gradient / (scale**2 * spread / 2)
        live = change.clone().requires_grad_()
        [gradient] = torch.autograd.grad(loss_by_hand_of_fedlp(context, prototypes, live), [live])
        for k, text in enumerate(texts):
            bound = scale**2 * sum(float(torch.dot(row, text)) ** 2 for row in features) / 6 / 2
            change = change.clone()
            change[k] -= gradient[k] / bound
    for name, wanted in (("prototypes", prototypes), ("text_weight_change", change)):
        size = float((wanted - start[name]).abs().max())
        assert size > 1e-4
        assert_values((found.update[name] - start[name]) / size, (wanted - start[name]) / size, 1e-3)
    assert found.metrics["loss"] == pytest.approx(float(loss_by_hand_of_fedlp(context, prototypes, change)), rel=1e-4)


def test_the_bounds_are_above_the_curvature_and_no_step_raises_the_loss(backbone: Backbone, make_context: Make) -> None:
    context, state = make_context(6, epochs=1), state_of(backbone)
    problem, prototypes = Problem(context), state["prototypes"]
    curvature = torch.autograd.functional.hessian(
        lambda change: torch.nn.functional.cross_entropy(problem.logits(prototypes, change), problem.labels),
        state["text_weight_change"],
    )
    assert float(torch.linalg.eigvalsh(torch.diag(problem.text_bounds) - curvature)[0]) >= -1e-5
    losses, counted = [float(loss_by_hand_of_fedlp(context, *state.values()))], list[int]()
    for _ in range(8):
        result = make_method({"name": "fedlp"}).train(replace(context, count_trained=counted.append), state, {})
        state = result.update
        losses.append(result.metrics["loss"])
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.01
    assert counted == [len(NAMES) * (backbone.d_e + 1)] * 8


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
        pf.ClientUpdate(str(place), len(client.train) / 12, method.train(client, {}, {}).update)
        for place, client in enumerate(clients)
    ]
    after = method.aggregate(state, means, iter(updates), weighted_mean, context)
    assert not after["text_weight_change"].any()
    for place in range(len(NAMES)):
        total = sum(client.train.features()[client.train.labels == place].sum(dim=0) for client in clients)
        assert isinstance(total, Tensor)
        wanted = 2 * total / total.norm() if total.any() else total
        assert_values(after["prototypes"][place], wanted)
