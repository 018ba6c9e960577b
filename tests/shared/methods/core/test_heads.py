"""The private linear head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core.heads import BIAS, CLASSES, WEIGHT, LinearHead, TextHead, head_width
from promptfed.shared.methods.core.interface import ClientContext, MethodError
from promptfed.shared.methods.zero_shot import TemplateClassifier
from tests.shared.methods.conftest import NAMES, MadeUpSplit
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]


def test_logits_are_written_out(make_context: Make) -> None:
    head = LinearHead.start(make_context(), 7)
    features = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    trained = LinearHead(head.names, head.weight, torch.arange(5.0))
    wanted = [[float(torch.dot(w, f) + b) for w, b in zip(trained.weight, trained.bias, strict=True)] for f in features]
    assert trained.logits(features) == pytest.approx(torch.tensor(wanted), abs=1e-5)
    assert_values(trained.among(["umbrella", "sun"]).logits(features), trained.logits(features)[:, [2, 0]])


def test_the_start_is_seeded_and_the_same_for_all_clients(make_context: Make) -> None:
    context = make_context()
    first, again = LinearHead.start(context, 128), LinearHead.start(replace(context, client="other", round=3), 128)
    other = LinearHead.start(context.with_terms(seed=4), 128)
    assert first.weight.equal(again.weight)
    assert not first.weight.equal(other.weight)
    assert not first.bias.any()
    assert float(first.weight.abs().max()) <= 128**-0.5
    assert float(first.weight.std()) == pytest.approx(128**-0.5 / 3**0.5, rel=0.05)


def test_a_trained_head_comes_back(make_context: Make) -> None:
    context = make_context()
    head = LinearHead.of(context, {}, 6).trainable(torch.device("cpu"))
    assert all(tensor.requires_grad for tensor in head.parameters)
    head.logits(torch.ones(2, 6)).square().sum().backward()
    with torch.no_grad():
        for tensor in head.parameters:
            tensor -= 0.1 * tensor.grad
    kept = head.private()
    assert set(kept) == {WEIGHT, BIAS, CLASSES}
    assert not any(tensor.requires_grad for tensor in kept.values())
    again = LinearHead.of(context, kept, 6)
    assert again.weight.equal(head.weight)
    assert not again.weight.equal(LinearHead.start(context, 6).weight)


def test_rows_follow_the_training_label_space(make_context: Make) -> None:
    context = replace(make_context(), class_names=NAMES[:2], label_space=NAMES)
    head = LinearHead.of(context, {}, 4)
    assert head.names == NAMES
    assert head.among(context.class_names).weight.equal(head.weight[:2])


@pytest.mark.parametrize("names", [("sun", "moon", "umbrella", "star", "cloud"), NAMES[::-1]])
def test_rows_that_stand_for_other_classes_now_are_refused(make_context: Make, names: tuple[str, ...]) -> None:
    """As many classes in a client's changed data fit the tensors, and would be trained as if they were these."""
    kept = LinearHead.start(make_context(), 4).private()
    changed = replace(make_context(), class_names=names, label_space=names)
    assert len(names) == len(NAMES)
    with pytest.raises(MethodError, match="with other names or in another order"):
        LinearHead.of(changed, kept, 4)
    assert LinearHead.of(make_context(), {name: kept[name] for name in (WEIGHT, BIAS)}, 4).weight.equal(kept[WEIGHT])


def test_refusals(make_context: Make) -> None:
    context = make_context()
    with pytest.raises(MethodError, match="cannot score 'tree'"):
        LinearHead.start(context, 4).among(["sun", "tree"])
    nothing = replace(context, train=MadeUpSplit(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)))
    with pytest.raises(MethodError, match="trains nothing"):
        LinearHead.of(nothing, {}, 4)
    with pytest.raises(MethodError, match="is for 5 classes and features of 4; now it has 5 and 9"):
        LinearHead.of(context, LinearHead.start(context, 4).private(), 9)


def test_the_width_is_that_before_or_behind_the_projection(backbone: Backbone) -> None:
    assert head_width(backbone, projected=False) == backbone.model.visual.proj.shape[0]
    assert head_width(backbone, projected=True) == backbone.model.visual.proj.shape[1]


def test_the_text_head_is_the_template(backbone: Backbone, make_context: Make) -> None:
    context, head = make_context(), TextHead.of(make_context())
    wanted = TemplateClassifier(context).logits(context.train, torch.arange(10))
    assert head.logits(context.train.features()).equal(wanted)
    assert head.parameters == []
    assert head.private() == {}
