"""FedCLAP against its equations: FedTaskRes' gradient, checked there, and that of the constraint by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.methods.core.interface.protection import Protection
from promptfed.shared.methods.fedclap import multipliers
from tests.shared.methods.conftest import NAMES
from tests.shared.methods.test_fedtaskres import some_residual, texts_of
from tests.shared.methods.test_private_training import Silent
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]
RATE, STRENGTH = 0.4, 3.0


def lambdas_by_hand(context: ClientContext) -> list[float]:
    """Of the images of each class, the mean zero-shot probability of it; 1 without images."""
    texts, own = texts_of(context), [list[float]() for _ in NAMES]
    for feature, label in zip(context.train.features(), context.train.labels.tolist(), strict=True):
        powers = [math.exp(context.backbone.logit_scale * float(torch.dot(feature, text))) for text in texts]
        own[label].append(powers[label] / sum(powers))
    return [sum(shares) / len(shares) if shares else 1.0 for shares in own]


def moved(context: ClientContext, start: Tensor, **options: Any) -> Tensor:
    return (
        make_method({"name": "fedclap", **options}).train(context, {"residual": start}, {}).update["residual"] - start
    )


def test_each_class_is_held_as_strongly_as_the_template_recognises_it(backbone: Backbone, make_context: Make) -> None:
    context = make_context(6)
    wanted = lambdas_by_hand(context)
    assert 1.0 in wanted
    assert len(set(wanted)) > 2
    found = multipliers(context, texts_of(context))
    assert found.tolist() == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("constraint", ["adaptive", "constant"])
def test_a_step_adds_the_gradient_of_the_constraint(backbone: Backbone, make_context: Make, constraint: str) -> None:
    context = make_context(6, batch_size=6, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    start = some_residual(backbone.d_e)
    plain = make_method({"name": "fedtaskres", "alpha": 1.0}).train(context, {"residual": start}, {}).update["residual"]
    weights = torch.tensor(lambdas_by_hand(context) if constraint == "adaptive" else [1.0] * len(NAMES))
    slope = 2 * STRENGTH * weights[:, None] * start
    wanted = plain - start - RATE / backbone.d_e**0.5 * slope
    assert float((wanted - (plain - start)).abs().max()) > 1e-3
    assert_values(moved(context, start, strength=STRENGTH, constraint=constraint), wanted, 1e-5)
    assert_values(moved(context, start, strength=0.0, constraint=constraint), plain - start)


def test_under_privacy_no_multiplier_reads_an_image(backbone: Backbone, make_context: Make) -> None:
    context = make_context(6, batch_size=6, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    start = some_residual(backbone.d_e)
    private = replace(context, protection=Protection(1e9, 1.0, 6, 6, 1, Silent()))
    assert_values(moved(private, start), moved(context, start, constraint="constant"), 1e-4)
