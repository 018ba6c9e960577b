"""The private linear head."""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods.core import heads
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.methods.fedotp import transport_plan
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.support.equality import assert_values


def test_logits_are_written_out(make_context: Make) -> None:
    head = heads.LinearHead.start(make_context(), 7)
    features = torch.randn(3, 7, generator=torch.Generator().manual_seed(0))
    trained = heads.LinearHead(head.names, head.weight, torch.arange(5.0))
    wanted = [[float(torch.dot(w, f) + b) for w, b in zip(trained.weight, trained.bias, strict=True)] for f in features]
    assert trained.logits(features) == pytest.approx(torch.tensor(wanted), abs=1e-5)
    assert_values(trained.among(["umbrella", "sun"]).logits(features), trained.logits(features)[:, [2, 0]])


def test_the_start_is_seeded_and_the_same_for_all_clients(make_context: Make) -> None:
    context = make_context()
    first, again = (
        heads.LinearHead.start(context, 128),
        heads.LinearHead.start(replace(context, client="other", round=3), 128),
    )
    other = heads.LinearHead.start(context.with_terms(seed=4), 128)
    assert first.weight.equal(again.weight)
    assert not first.weight.equal(other.weight)
    assert not first.bias.any()
    assert float(first.weight.abs().max()) <= 128**-0.5
    assert float(first.weight.std()) == pytest.approx(128**-0.5 / 3**0.5, rel=0.05)


def test_a_trained_head_comes_back(make_context: Make) -> None:
    context = make_context()
    head = heads.LinearHead.of(context, {}, 6).trainable(torch.device("cpu"))
    assert all(tensor.requires_grad for tensor in head.parameters)
    head.logits(torch.ones(2, 6)).square().sum().backward()
    with torch.no_grad():
        for tensor in head.parameters:
            tensor -= 0.1 * tensor.grad
    kept = head.private()
    assert set(kept) == {heads.WEIGHT, heads.BIAS, heads.CLASSES}
    assert not any(tensor.requires_grad for tensor in kept.values())
    again = heads.LinearHead.of(context, kept, 6)
    assert again.weight.equal(head.weight)
    assert not again.weight.equal(heads.LinearHead.start(context, 6).weight)


def test_rows_follow_the_training_label_space(make_context: Make) -> None:
    context = replace(make_context(), class_names=NAMES[:2], label_space=NAMES)
    head = heads.LinearHead.of(context, {}, 4)
    assert head.names == NAMES
    assert head.among(context.class_names).weight.equal(head.weight[:2])


@pytest.mark.parametrize("names", [("sun", "moon", "umbrella", "star", "cloud"), NAMES[::-1]])
def test_rows_that_stand_for_other_classes_now_are_refused(make_context: Make, names: tuple[str, ...]) -> None:
    """As many classes in a client's changed data fit the tensors, and would be trained as if they were these."""
    kept = heads.LinearHead.start(make_context(), 4).private()
    changed = replace(make_context(), class_names=names, label_space=names)
    assert len(names) == len(NAMES)
    with pytest.raises(MethodError, match="with other names or in another order"):
        heads.LinearHead.of(changed, kept, 4)
    assert heads.LinearHead.of(
        make_context(), {name: kept[name] for name in (heads.WEIGHT, heads.BIAS)}, 4
    ).weight.equal(kept[heads.WEIGHT])


def test_refusals(make_context: Make) -> None:
    context = make_context()
    with pytest.raises(MethodError, match="cannot score 'tree'"):
        heads.LinearHead.start(context, 4).among(["sun", "tree"])
    nothing = replace(context, train=MadeUpSplit(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64)))
    with pytest.raises(MethodError, match="trains nothing"):
        heads.LinearHead.of(nothing, {}, 4)
    with pytest.raises(MethodError, match="is for 5 classes and features of 4; now it has 5 and 9"):
        heads.LinearHead.of(context, heads.LinearHead.start(context, 4).private(), 9)


def test_the_width_is_that_before_or_behind_the_projection(backbone: Backbone) -> None:
    assert heads.head_width(backbone, projected=False) == backbone.model.visual.proj.shape[0]
    assert heads.head_width(backbone, projected=True) == backbone.model.visual.proj.shape[1]


def test_the_text_head_is_the_template(backbone: Backbone, make_context: Make) -> None:
    context, head = make_context(), heads.TextHead.of(make_context())
    wanted = TemplateClassifier(context).logits(context.train, torch.arange(10))
    assert head.logits(context.train.features()).equal(wanted)
    assert head.parameters == []
    assert head.private() == {}


# A linear head that all clients of a federation share: where it starts, and whose its rows are.


def test_its_start_is_the_one_of_private_heads_and_its_rows_follow_the_spec() -> None:
    start = heads.head_start(generator, 7, 3, 16)
    assert start[heads.WEIGHT].shape == (3, 16)
    assert float(start[heads.WEIGHT].abs().max()) <= 1 / math.sqrt(16)
    assert torch.equal(start[heads.BIAS], torch.zeros(3))
    head = heads.LinearHead.shared(("sun", "anchor", "tree"), start)
    some = head.among(("tree", "sun"))
    assert torch.equal(some.weight, start[heads.WEIGHT][[2, 0]])


@pytest.mark.parametrize("names", [None, ("sun",), ("a", "b", "c", "d")])
def test_other_classes_than_it_has_rows_are_refused(names: tuple[str, ...] | None) -> None:
    with pytest.raises(MethodError, match="has 3 rows"):
        heads.LinearHead.shared(names, heads.head_start(generator, 7, 3, 16))


def test_without_class_names_in_the_spec_there_is_none() -> None:
    with pytest.raises(MethodError, match="list the federation's class_names in the spec"):
        heads.shared_classes("fedavg", None)
    assert heads.shared_classes("fedavg", ["a", "b"]) == 2


# Transport plans against numbers that were worked out apart from this code, and against plain loops.


S = torch.tensor([[0.3, 0.1], [0.2, 0.2], [0.0, 0.4]], dtype=torch.float64)


def score(plan: Tensor, similarities: Tensor = S) -> float:
    return float((plan * similarities).sum())


def literal_plan(similarities: Tensor, mass: float, epsilon: float, pairs: int) -> list[list[float]]:
    """K = exp(−C/ε) and scaling vectors, number by number, from v = 1 with u first."""
    patches, prompts = similarities.shape
    kernel = [[math.exp(-(1 - float(similarities[p, n])) / epsilon) for n in range(prompts)] for p in range(patches)]
    u, v = [1.0] * patches, [1.0] * prompts
    for _ in range(pairs):
        for p in range(patches):
            u[p] = min(1 / patches / sum(kernel[p][n] * v[n] for n in range(prompts)), 1.0)
        for n in range(prompts):
            v[n] = mass / prompts / sum(kernel[p][n] * u[p] for p in range(patches))
    return [[u[p] * kernel[p][n] * v[n] for n in range(prompts)] for p in range(patches)]


def test_the_plan_and_its_score() -> None:
    plan = transport_plan(S, 0.8, 0.1, iterations=10_000, threshold=1e-12)
    wanted = torch.tensor([[0.284456, 0.020860], [0.104646, 0.056705], [0.010898, 0.322435]], dtype=torch.float64)
    assert torch.allclose(plan, wanted, atol=1e-6)
    assert score(plan) == pytest.approx(0.248667, abs=1e-6)
    less, whole = (transport_plan(S, mass, 0.1, iterations=10_000, threshold=1e-12) for mass in (0.5, 1.0))
    assert score(less) == pytest.approx(0.157018, abs=1e-6)
    assert score(whole) == pytest.approx(0.290656, abs=1e-6)
    assert torch.allclose(whole.sum(1), torch.full((3,), 1 / 3, dtype=torch.float64), atol=1e-9)


def test_the_default_stop() -> None:
    assert score(transport_plan(S, 0.8, 0.1)) == pytest.approx(0.248715, abs=1e-6)
    stops = [transport_plan(S, 0.8, 0.1, iterations=count) for count in (17, 18, 19)]
    assert stops[1].equal(stops[2])
    assert not stops[0].equal(stops[1])


def test_it_is_the_literal_plan() -> None:
    draws = torch.Generator().manual_seed(2)
    given = torch.rand(7, 2, generator=draws, dtype=torch.float64) * 0.3
    for mass, epsilon in ((0.8, 0.1), (0.4, 0.05), (1.0, 0.2)):
        found = transport_plan(given, mass, epsilon, iterations=400, threshold=0.0)
        wanted = torch.tensor(literal_plan(given, mass, epsilon, 400), dtype=torch.float64)
        assert float((found - wanted).abs().max()) <= 1e-12


def test_a_problem_does_not_depend_on_its_neighbours() -> None:
    draws = torch.Generator().manual_seed(4)
    given = torch.rand(7, 3, 20, 2, generator=draws) * torch.tensor([0.05, 1, 0.3, 2, 0.1, 0.7, 0.2]).view(7, 1, 1, 1)
    together = transport_plan(given, 0.8, 0.05)
    for image in range(7):
        alone = transport_plan(given[image : image + 1], 0.8, 0.05)[0]
        assert float((alone - together[image]).abs().max()) <= 1e-6


def test_small_entropy_stays_finite_in_float32() -> None:
    draws = torch.Generator().manual_seed(5)
    for spread in (0.3, 2.0):
        given = (torch.rand(3, 196, 2, generator=draws) - 0.5) * spread
        plan = transport_plan(given, 0.8, 0.01)
        assert bool(torch.isfinite(plan).all())
        assert torch.allclose(plan.sum((-2, -1)), torch.full((3,), 0.8), atol=1e-4)


def test_a_kept_head_is_of_a_digest_of_names_in_order() -> None:
    """It lies on clients' disks: another one would begin their heads anew."""
    wanted = struct.unpack("<4q", hashlib.sha256('["sun","é"]'.encode()).digest())
    assert tuple(heads._digest(("sun", "é")).tolist()) == wanted
