"""FedTaskRes against its equations: class by class, with gradients of the softmax by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import Classifier, ClientContext, Fixed, MethodError, ServerContext
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from tests.shared.methods.conftest import NAMES
from tests.support import literal_fast_pt
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]
RATE, ALPHA = 0.4, 0.7


def server(d_e: int) -> ServerContext:
    return ServerContext(TrainingSpec(), BackboneShape(d_t=8, d_e=d_e), NAMES, (), seed=3, rounds=4)


def texts_of(context: ClientContext) -> Tensor:
    names = context.class_names
    return torch.stack([literal_fast_pt.whole_text(context.backbone, context.template, name) for name in names])


def weights_of(classifier: Classifier) -> Tensor:
    assert isinstance(classifier, Fixed)
    weights = classifier.weights()
    assert weights is not None
    return weights["class_weights"]


def some_residual(d_e: int) -> Tensor:
    return 0.1 * torch.randn(len(NAMES), d_e, generator=torch.Generator().manual_seed(9))


def slope(context: ClientContext, residual: Tensor, rows: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy, written out: ∂/∂x_k = Σ_i (p_ik − y_ik)·τ⁻¹·α·(f − (f·w)w)/|v|."""
    texts, total = texts_of(context), torch.zeros_like(residual)
    sums = [text + ALPHA * row for text, row in zip(texts, residual, strict=True)]
    lengths = [float(vector.square().sum().sqrt()) for vector in sums]
    weights = [vector / length for vector, length in zip(sums, lengths, strict=True)]
    for index in rows.tolist():
        feature, label = context.train.features()[index], int(context.train.labels[index])
        scores = torch.stack([context.backbone.logit_scale * torch.dot(feature, weight) for weight in weights])
        shares = torch.exp(scores - scores.max())
        shares = shares / shares.sum()
        for k, (weight, length) in enumerate(zip(weights, lengths, strict=True)):
            across = (feature - torch.dot(feature, weight) * weight) / length
            total[k] += (shares[k] - float(k == label)) * context.backbone.logit_scale * ALPHA * across
    return total / len(rows)


def test_training_equals_the_equations(backbone: Backbone, make_context: Make) -> None:
    context = make_context(6, round=2, epochs=2, batch_size=4, learning_rate=RATE, momentum=0.9, weight_decay=1e-3)
    start = some_residual(backbone.d_e)
    method = make_method({"name": "fedtaskres", "alpha": ALPHA})
    found = method.train(context, {"residual": start}, {}).update["residual"]
    draws = generator(3, 2, "train", "hospital-a", "batches")
    now, speed = start.clone(), torch.zeros_like(start)
    for _ in range(2):
        for rows in torch.split(torch.randperm(6, generator=draws), 4):
            speed = 0.9 * speed + slope(context, now, rows) + 1e-3 * now
            now = now - RATE / backbone.d_e**0.5 * speed
    size = float((now - start).abs().max())
    assert size > 1e-3
    assert_values((found - start) / size, (now - start) / size, 1e-4)


def test_the_classifier_scores_the_sum(backbone: Backbone, make_context: Make) -> None:
    context, residual = make_context(5), some_residual(backbone.d_e)
    method = make_method({"name": "fedtaskres", "alpha": ALPHA})
    classifier = method.classifier(context, {"residual": residual}, {})
    rows = torch.tensor([4, 0, 3])
    sums = texts_of(context) + ALPHA * residual
    weights = torch.stack([vector / vector.square().sum().sqrt() for vector in sums])
    wanted = backbone.logit_scale * context.train.features()[rows] @ weights.T
    assert_values(classifier.logits(context.train, rows), wanted)
    assert_values(weights_of(classifier), weights)


@pytest.mark.parametrize(("alpha", "size"), [(0.5, 0.0), (0.0, 1.0)])
def test_without_a_residual_or_its_weight_it_is_zero_shot(
    backbone: Backbone, make_context: Make, alpha: float, size: float
) -> None:
    context, rows = make_context(5), torch.arange(5)
    payload = {"residual": size * some_residual(backbone.d_e)}
    found = make_method({"name": "fedtaskres", "alpha": alpha}).classifier(context, payload, {})
    assert_values(found.logits(context.train, rows), TemplateClassifier(context).logits(context.train, rows))


def test_rows_follow_the_names_of_classes_and_a_new_class_is_zero_shot(backbone: Backbone, make_context: Make) -> None:
    context, residual = make_context(5), some_residual(backbone.d_e)
    method = make_method({"name": "fedtaskres"})
    other = replace(context, class_names=(NAMES[3], "lighthouse", NAMES[0]), label_space=NAMES)
    found = weights_of(method.classifier(other, {"residual": residual}, {}))
    known = weights_of(method.classifier(context, {"residual": residual}, {}))
    assert_values(found[[0, 2]], known[[3, 0]])
    assert_values(found[1], texts_of(other)[1])
    with pytest.raises(MethodError, match="4 rows for 5 classes"):
        method.classifier(context, {"residual": residual[:4]}, {})


def test_adam_moves_every_width_by_the_same_share_of_a_feature(backbone: Backbone, make_context: Make) -> None:
    """Its first step is η/√d_e in each coordinate, so the residual of a class has the length η whatever d_e is."""
    context = make_context(5, batch_size=5, optimizer="adam", learning_rate=RATE, weight_decay=0.0)
    start = torch.zeros(len(NAMES), backbone.d_e)
    moved = make_method({"name": "fedtaskres"}).train(context, {"residual": start}, {}).update["residual"]
    assert_values(moved.norm(dim=1), torch.full((len(NAMES),), RATE), 1e-3)
