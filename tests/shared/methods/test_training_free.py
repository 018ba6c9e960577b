"""Tip-Adapter and FedGDA: their equations written out, limits, and what they refuse."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.rules import Rule
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core import toolkit
from promptfed.shared.methods.core.interface.base import (
    ClientContext,
    ClientInfo,
    ClientUpdate,
    MethodError,
    ServerContext,
)
from promptfed.shared.methods.fedgda import ClassGaussians, FedGDA, discriminants, fused, statistics
from promptfed.shared.methods.tip_adapter import BLEND, KEYS, LABELS, TipAdapter, cropped, held_out
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from promptfed.shared.spec.spec_aggregation import AggregationSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit

Make = Callable[..., ClientContext]
Bad = list[tuple[dict[str, Any], str]]


def tip(**hyper: Any) -> TipAdapter:
    made = make_method({"name": "tip_adapter", "validation": 0.0} | hyper)
    assert isinstance(made, TipAdapter)
    return made


def gda(**hyper: Any) -> FedGDA:
    made = make_method({"name": "fedgda"} | hyper)
    assert isinstance(made, FedGDA)
    return made


def everywhere(context: ClientContext) -> Tensor:
    return torch.arange(len(context.train))


def softmax_of(context: ClientContext, text: bool = True) -> Tensor:
    return TemplateClassifier(context).logits(context.train, everywhere(context))


# Tip-Adapter


def test_the_cache_votes_as_written(make_context: Make) -> None:
    context = make_context(7)
    tried = tip(alpha=2.0, beta=3.0)
    result = tried.train(context, {}, {})
    assert result.update == {}
    found = tried.classifier(context, {}, result.private).logits(context.train, everywhere(context))
    plain, features, labels = softmax_of(context), context.train.features(), context.train.labels
    for i in range(7):
        for c in range(len(NAMES)):
            votes = sum(
                math.exp(-3.0 * (1 - float(features[i] @ features[j]))) for j in range(7) if int(labels[j]) == c
            )
            assert float(found[i, c]) == pytest.approx(float(plain[i, c]) + 2.0 * votes, rel=1e-4, abs=1e-4)


def test_without_sharpness_it_counts_classes(make_context: Make) -> None:
    context = make_context(9)
    context = replace(context, train=MadeUpSplit(context.train.features(), context.train.labels.clamp(max=3)))
    tried = tip(alpha=1.0, beta=0.0)
    found = tried.classifier(context, {}, tried.train(context, {}, {}).private)
    added = found.logits(context.train, everywhere(context)) - softmax_of(context)
    counts = torch.bincount(context.train.labels, minlength=len(NAMES)).float()
    assert torch.allclose(added, counts.expand(9, -1), atol=1e-4)
    empty = counts == 0
    assert empty.any(), "a class without images keeps the text's logit"
    assert added[:, empty].abs().max() < 1e-4


def test_one_image_a_class_and_all_weight_is_the_nearest_neighbour(
    make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = replace(make_context(5), train=MadeUpSplit(make_context(5).train.features(), torch.arange(5)))
    some = torch.randn(40, context.backbone.d_e, generator=torch.Generator().manual_seed(1))
    test = MadeUpSplit(F.normalize(some, dim=-1), torch.zeros(40, dtype=torch.int64))
    tried = tip(alpha=1000.0, beta=60.0)
    private = tried.train(context, {}, {}).private
    text = torch.zeros(5, context.backbone.d_e)
    monkeypatch.setattr(toolkit, "template_features", lambda *about: text)
    found = tried.classifier(context, {}, private).logits(test, torch.arange(40)).argmax(1)
    assert found.equal((test.values @ context.train.features().T).argmax(1))


def test_the_search_is_on_held_out_images_and_all_are_keys_afterwards(make_context: Make) -> None:
    base = make_context(40)
    noise = torch.randn(40, base.backbone.d_e, generator=torch.Generator().manual_seed(2))
    clear = base.train.features()[:5][base.train.labels] + 0.01 * noise
    context = replace(base, train=MadeUpSplit(F.normalize(clear, dim=-1), base.train.labels))
    held = held_out(context, 0.25)
    for label in range(5):
        own = int((context.train.labels == label).sum())
        assert int(held[context.train.labels == label].sum()) == own // 4
    assert held.equal(held_out(context, 0.25))
    result = tip(validation=0.25).train(context, {}, {})
    assert result.metrics["validation_accuracy"] == 1.0
    assert 0.1 <= result.metrics["alpha"] <= 13
    assert result.private[BLEND].tolist() == pytest.approx([result.metrics["alpha"], result.metrics["beta"]])
    assert len(result.private[KEYS]) == 40
    few = tip(validation=0.25).train(make_context(3), {}, {})
    assert (few.metrics["alpha"], few.metrics["beta"]) == (1.17, 1.0), "too few to hold any out"


def test_keys_can_be_means_or_of_crops(make_context: Make) -> None:
    context = make_context(12)
    means = tip(keys="means").train(context, {}, {}).private
    for key, label in zip(means[KEYS], means[LABELS], strict=True):
        own = context.train.features()[context.train.labels == label].mean(0)
        assert torch.allclose(key, own / own.norm(), atol=1e-6)
    size = context.backbone.image_size[0]
    images = torch.randn(12, 3, size, size, generator=torch.Generator().manual_seed(3))
    seen = replace(context, train=Pictured(context.train.features(), context.train.labels, images))
    one = tip(augment=3).train(seen, {}, {}).private[KEYS]
    assert one.equal(tip(augment=3).train(seen, {}, {}).private[KEYS])
    assert not torch.allclose(one, context.train.features(), atol=1e-2)
    assert torch.allclose(one.norm(dim=1), torch.ones(12), atol=1e-5)
    draws = generator(context.seed, "crops", context.client)
    raw = sum(context.backbone.encode_images(cropped(images, draws), normalize=False) for _ in range(3)) / 3
    assert torch.allclose(one, torch.stack([key / key.norm() for key in raw]), atol=1e-5), "a longer view counts more"
    whole = cropped(torch.full((4, 3, 8, 8), 2.5), torch.Generator().manual_seed(0))
    assert torch.allclose(whole, torch.full((4, 3, 8, 8), 2.5))


class Pictured(MadeUpSplit):
    def __init__(self, values: Tensor, labels: Tensor, pictures: Tensor):
        super().__init__(values, labels)
        self.pictures = pictures

    def images(self, indices: Tensor) -> Tensor:
        return self.pictures[indices]


def test_who_has_no_cache_classifies_zero_shot_and_others_by_name(make_context: Make) -> None:
    context = make_context(8)
    evaluator = replace(context, train=MadeUpSplit(torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64)))
    assert isinstance(tip().classifier(evaluator, {}, {}), TemplateClassifier)
    with pytest.raises(MethodError, match="no training images"):
        tip().train(evaluator, {}, {})
    private = tip().train(context, {}, {}).private
    turned = replace(context, class_names=(*NAMES[::-1], "moon"), label_space=NAMES)
    found = tip().classifier(turned, {}, private).logits(context.train, everywhere(context))
    plain = tip().classifier(context, {}, private).logits(context.train, everywhere(context))
    assert torch.allclose(found[:, :5].flip(1), plain, atol=1e-4)
    before = tip().classifier(context, {}, {}).logits(context.train, everywhere(context))
    assert torch.allclose(before, plain, atol=1e-4), "before its first task, with what is given"


# FedGDA


def test_two_classes_in_one_dimension_by_hand() -> None:
    features = torch.tensor([[0.0], [2], [10], [12]])
    found = ClassGaussians.of(features, torch.tensor([0, 0, 1, 1]), 2)
    precision = found.precision()
    assert precision is not None
    assert float(precision) == pytest.approx(0.1875)
    scores = discriminants(found, precision, torch.tensor([[6.0]]))[0]
    assert float(scores[0]) == pytest.approx(float(scores[1]))
    assert float(scores[0]) == pytest.approx(6 * 0.1875 * 1 - 0.1875 / 2 - math.log(2))


@pytest.mark.parametrize("parts", [2, 3, 7])
def test_any_partition_gives_the_pooled_result(parts: int) -> None:
    draws = torch.Generator().manual_seed(parts)
    features = F.normalize(torch.randn(60, 6, generator=draws, dtype=torch.float64), dim=1)
    labels = torch.randint(4, (60,), generator=draws)
    owner = torch.randint(parts, (60,), generator=draws)
    sums = [torch.zeros(4).double(), torch.zeros(4, 6).double(), torch.zeros(6, 6).double()]
    for client in range(parts):
        mine = owner == client
        weight = float(mine.sum()) / 60
        for total, part in zip(sums, statistics(features[mine], labels[mine], 4), strict=True):
            total += weight * part
    federated, pooled = ClassGaussians.of_sums(*sums, 60), ClassGaussians.of(features, labels, 4)
    assert float(sums[0].sum()) == pytest.approx(1.0)
    one, other = federated.precision(), pooled.precision()
    assert one is not None
    assert other is not None
    assert torch.allclose(one, other, rtol=1e-11, atol=1e-10)
    assert torch.allclose(federated.means, pooled.means, rtol=0, atol=1e-12)
    inner = pooled.means[labels] - features
    assert torch.allclose(pooled.scatter, inner.T @ inner, atol=1e-12)


def test_the_posterior_against_stacked_images_and_its_limits() -> None:
    draws = torch.Generator().manual_seed(4)
    own, others = (torch.randn(n, 3, generator=draws, dtype=torch.float64) for n in (11, 30))
    y, z = torch.arange(11) % 3, torch.arange(30) % 3
    mine, prior = ClassGaussians.of(own, y, 3), ClassGaussians.of(others, z, 3)
    twice = ClassGaussians.of(torch.cat([own, others, others]), torch.cat([y, z, z]), 3)
    found = mine.with_prior(prior, 2.0)
    assert torch.allclose(found.means, twice.means)
    assert torch.allclose(found.scatter * 3, twice.scatter)
    for limit, wanted in ((0.0, mine), (1e9, prior)):
        found = mine.with_prior(prior, limit)
        one, other = found.precision(), wanted.precision()
        assert one is not None
        assert other is not None
        assert torch.allclose(one, other, rtol=1e-6)
        assert torch.allclose(found.means, wanted.means, rtol=1e-6)


def test_classes_with_few_images_send_nothing_of_themselves(make_context: Make) -> None:
    context = make_context(6)
    split = MadeUpSplit(context.train.features(), torch.tensor([0, 0, 0, 1, 2, 2]))
    sent = gda().train(replace(context, train=split), {}, {}).update
    assert sent["class_share"].tolist() == pytest.approx([1 / 2, 0, 1 / 3, 0, 0])
    assert not sent["class_sum"][1].any()
    rows = split.values[[0, 1, 2, 4, 5]]
    assert torch.allclose(sent["moment"], rows.T @ rows / 6, atol=1e-6), "nor of their second moment"


def test_fusions(make_context: Make) -> None:
    text, image = torch.tensor([[2.0, 0.0, 1.0]]), torch.tensor([[0.0, 3.0, 0.0]])
    assert fused(text, image, gda(fusion="image").hyper).equal(image)
    assert fused(text, image, gda(fusion="fixed", fixed_weight=2.0).hyper).equal(text + 2 * image)
    p, q = image.softmax(1)[0].tolist(), text.softmax(1)[0].tolist()
    share = max(p) / (max(p) + max(q))
    wanted = [math.log(share * a + (1 - share) * b) for a, b in zip(p, q, strict=True)]
    assert fused(text, image, gda().hyper)[0].tolist() == pytest.approx(wanted, rel=1e-5)
    assert float(fused(text, image, gda().hyper).exp().sum()) == pytest.approx(1.0, rel=1e-5)


def played(make_context: Make, rule: dict[str, Any] | None = None, tampered: float = 1.0) -> tuple[Tensors, Any]:
    """One exchange of two clients by the rule; the state and the server's context."""
    tried, contexts = gda(), [make_context(20), make_context(31)]
    clients = tuple(ClientInfo(name, "trainer", len(c.train), NAMES) for name, c in zip("ab", contexts, strict=True))
    shape = BackboneShape(d_t=8, d_e=contexts[0].backbone.d_e)
    server = ServerContext(TrainingSpec(), shape, NAMES, clients, seed=0, rounds=1)
    start = tried.initial_state(server, initial_draws(0))
    updates = []
    for client, context in zip(clients, contexts, strict=True):
        sent = tried.train(context, {}, {}).update
        sent["moment"] = sent["moment"] * (tampered if client.name == "b" else 1)
        updates.append(ClientUpdate(client.name, client.num_samples / 51, sent))
    combine = Rule(AggregationSpec.model_validate(rule or {}), start)
    [phase] = tried.phases(1, 1)
    return tried.aggregate(start, phase, updates, combine, server), (tried, phase, start, server)


def test_one_exchange_pools_all_images_and_serves_by_role(make_context: Make, caplog: Any) -> None:
    state, (tried, phase, start, server) = played(make_context)
    assert int(state["total"]) == 51
    assert tried.measure(start, phase, state, server).phase == {"pooled_images": 51.0}
    context = make_context(20)
    both = torch.cat([context.train.features(), make_context(31).train.features()])
    labels = torch.cat([context.train.labels, make_context(31).train.labels])
    pooled = ClassGaussians.of(both, labels, 5)
    precision = pooled.precision()
    assert precision is not None
    none = replace(context, train=MadeUpSplit(torch.zeros(0, 16), torch.zeros(0, dtype=torch.int64)), label_space=NAMES)
    shown = gda(fusion="image").classifier(none, state, {}).logits(context.train, everywhere(context))
    wanted = discriminants(pooled, precision, context.train.features())
    assert torch.allclose(shown.double(), wanted, rtol=1e-3, atol=1e-2)
    mine = ClassGaussians.of(context.train.features(), context.train.labels, 5).with_prior(pooled, 1.0)
    own = mine.precision()
    assert own is not None
    shown = gda(fusion="image").classifier(context, state, {}).logits(context.train, everywhere(context))
    assert torch.allclose(shown.double(), discriminants(mine, own, context.train.features()), rtol=1e-3, atol=1e-2)
    assert set(gda().variants(context, state, {})) == {"global"}
    with caplog.at_level(logging.WARNING):
        new = gda().classifier(replace(context, class_names=("sun", "moon"), label_space=NAMES), state, {})
    assert isinstance(new, TemplateClassifier)
    assert "nobody has images of 'moon'" in caplog.text
    assert isinstance(gda().classifier(context, start, {}), TemplateClassifier) is False, "own images are there"
    assert isinstance(gda().classifier(none, start, {}), TemplateClassifier), "before the exchange"


def test_what_is_no_scatter_is_not_taken(make_context: Make) -> None:
    state, (tried, phase, start, server) = played(make_context, tampered=-50.0)
    assert all(state[name].equal(start[name]) for name in start)
    assert tried.measure(start, phase, state, server).phase == {"pooled_images": 0.0}


GDA_BAD: Bad = [
    ({"class_names": None}, "list the federation's class_names"),
    ({"rounds": 2}, "set rounds: 1"),
    ({"aggregation": {"weighting": "uniform"}}, "weighting: samples"),
    ({"aggregation": {"max_weight_share": 0.5}}, "max_weight_share: 1"),
    ({"method": {"name": "fedgda", "label_space": "client"}}, "leave label_space out"),
]


@pytest.mark.parametrize(("change", "says"), GDA_BAD)
def test_fedgda_says_what_it_cannot_do(change: dict[str, Any], says: str) -> None:
    raw = {"name": "f", "method": {"name": "fedgda"}, "class_names": ["a", "b"]}
    assert resolve_spec(raw).rounds == 1
    with pytest.raises(SpecError, match=says):
        resolve_spec(raw | change)


def test_its_owner_is_told_that_means_leave() -> None:
    assert any("each class's mean feature" in one.what for one in gda().disclosures)
    assert tip().disclosures == ()
