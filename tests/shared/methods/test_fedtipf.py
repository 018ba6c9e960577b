"""FedTipF against its votes written out, key by key."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext, ClientUpdate, ServerContext
from promptfed.shared.methods.zero_shot import TemplateClassifier
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from tests.shared.methods.conftest import NAMES
from tests.support import literal, literal_fast_pt
from tests.support.equality import assert_values

Make = Callable[..., ClientContext]
RATE, A, B = 0.5, 2.0, 3.0
HOME = {"name": "fedtipf", "alpha": A, "beta": B}
SHARED = HOME | {"keys": "shared"}


def server(d_e: int) -> ServerContext:
    return ServerContext(TrainingSpec(), BackboneShape(d_t=8, d_e=d_e), NAMES, (), seed=3, rounds=4)


def literally(context: ClientContext, keys: Tensor, labels: list[int], feature: Tensor) -> Tensor:
    """(T1) of one image, over the candidates."""
    scores = []
    for place, name in enumerate(context.class_names):
        text = literal_fast_pt.whole_text(context.backbone, context.template, name)
        score = context.backbone.logit_scale * torch.dot(feature, text)
        for key, label in zip(keys, labels, strict=True):
            if label == place:
                score = score + A * torch.exp(-B * (1 - torch.dot(feature, key)))
        scores.append(score)
    return torch.stack(scores)


def trained_by_hand(context: ClientContext, start: Tensor, labels: list[int], batch: int) -> Tensor:
    draws = generator(3, 2, "train", "hospital-a", "batches")
    now, speed = start.clone(), torch.zeros_like(start)
    for rows in torch.split(torch.randperm(len(context.train), generator=draws), batch):
        live = now.clone().requires_grad_()
        losses = [
            literal.cross_entropy(
                literally(context, live, labels, context.train.features()[row]), int(context.train.labels[row])
            )
            for row in rows.tolist()
        ]
        [gradient] = torch.autograd.grad(torch.stack(losses).mean(), [live])
        speed = 0.9 * speed + gradient + 1e-3 * now
        now = now - RATE / context.backbone.d_e**0.5 * speed
    return now


def assert_moved(found: Tensor, wanted: Tensor, start: Tensor) -> None:
    size = float((wanted - start).abs().max())
    assert size > 1e-4
    assert_values((found - start) / size, (wanted - start) / size, 1e-3)


def sgd_context(make_context: Make) -> ClientContext:
    return make_context(6, round=2, batch_size=4, learning_rate=RATE, momentum=0.9, weight_decay=1e-3)


def test_keys_at_home_are_trained_and_stay(make_context: Make) -> None:
    context, method = sgd_context(make_context), make_method(HOME)
    start, labels = context.train.features(), context.train.labels.tolist()
    first = method.train(context, {}, {})
    assert first.update == {}
    assert first.private["key_labels"].tolist() == labels
    wanted = trained_by_hand(context, start, labels, 4)
    assert_moved(first.private["keys"], wanted, start)
    again = method.train(context, {}, first.private).private["keys"]
    assert_moved(again, trained_by_hand(context, first.private["keys"], labels, 4), first.private["keys"])
    assert method.personal
    assert method.state_tensors() == ()
    assert method.disclosures == ()


def test_shared_keys_are_trained_but_for_classes_that_nobody_has(backbone: Backbone, make_context: Make) -> None:
    context, method = sgd_context(make_context), make_method(SHARED)
    keys = torch.randn(len(NAMES), backbone.d_e, generator=torch.Generator().manual_seed(2))
    keys = keys / keys.norm(dim=1, keepdim=True)
    keys[2] = 0
    result = method.train(context, {"keys": keys}, {})
    assert result.private == {}
    assert not result.update["keys"][2].any()
    known = [0, 1, 3, 4]
    assert_moved(result.update["keys"][known], trained_by_hand(context, keys[known], known, 4), keys[known])


def test_shared_keys_start_at_the_mean_feature_of_all_images(backbone: Backbone, make_context: Make) -> None:
    method, context = make_method(SHARED), server(backbone.d_e)
    means, train = method.phases(1, 4)
    assert (means.down, means.up, train.up) == ((), method.state_tensors(), method.state_tensors())
    assert [phase.name for phase in method.phases(2, 4)] == ["train"]
    state = method.initial_state(context, initial_draws(3))
    assert not state["keys"].any()
    clients = [replace(make_context(count), phase="means") for count in (9, 3)]
    updates = [
        ClientUpdate(str(place), len(client.train) / 12, method.train(client, {}, {}).update)
        for place, client in enumerate(clients)
    ]
    after = method.aggregate(state, means, iter(updates), weighted_mean, context)["keys"]
    for place in range(len(NAMES)):
        own = [
            feature
            for client in clients
            for feature, label in zip(client.train.features(), client.train.labels.tolist(), strict=True)
            if label == place
        ]
        mean = torch.stack(own).sum(dim=0) if own else torch.zeros(backbone.d_e)
        assert_values(after[place], mean / mean.norm() if own else mean)
    trained = method.aggregate({"keys": after}, train, iter(updates), weighted_mean, context)["keys"]
    assert_values(trained, sum(update.weight * update.tensors["keys"] for update in updates))


@pytest.mark.parametrize("settings", [HOME, SHARED], ids=["home", "shared"])
def test_the_classifier_adds_votes_for_the_names_that_keys_have(
    settings: dict[str, Any], backbone: Backbone, make_context: Make
) -> None:
    context = replace(make_context(6), class_names=(NAMES[3], "lighthouse", NAMES[0]), label_space=NAMES)
    labels, rows = context.train.labels.tolist(), torch.tensor([4, 0, 3])
    keys = torch.randn(len(NAMES), backbone.d_e, generator=torch.Generator().manual_seed(2)) / backbone.d_e**0.5
    shared = settings is SHARED
    found = make_method(settings).classifier(context, {"keys": keys} if shared else {}, {})
    place = {0: 2, 3: 0}
    own = [place.get(label, -1) for label in (range(len(NAMES)) if shared else labels)]
    used = keys if shared else context.train.features()
    wanted = [literally(context, used, own, context.train.features()[row]) for row in rows]
    assert_values(found.logits(context.train, rows), torch.stack(wanted))
    silent = make_method(settings | {"alpha": 0.0}).classifier(context, {"keys": keys} if shared else {}, {})
    assert_values(silent.logits(context.train, rows), TemplateClassifier(context).logits(context.train, rows))


def test_who_has_no_keys_is_zero_shot(backbone: Backbone, make_context: Make) -> None:
    context, evaluator = make_context(6), make_context(0)
    start = make_method(SHARED).initial_state(server(backbone.d_e), initial_draws(3))
    assert isinstance(make_method(SHARED).classifier(context, start, {}), TemplateClassifier)
    assert isinstance(make_method(HOME).classifier(evaluator, {}, {}), TemplateClassifier)


def test_shared_keys_need_the_federation_s_classes() -> None:
    with pytest.raises(SpecError, match="list the federation's class_names"):
        resolve_spec({"name": "x", "method": {"name": "fedtipf", "keys": "shared"}})
    assert resolve_spec({"name": "x", "method": {"name": "fedtipf"}}).training.optimizer == "adam"
