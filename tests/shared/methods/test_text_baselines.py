"""FedKgCoOp, PromptFL+FT and FedCoCoOp against their equations written out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import fedcocoop, make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.interface import Retargets
from promptfed.shared.methods.core.training import TaskCancelled, batches, learning_rate
from promptfed.shared.methods.promptfl import mixed
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.support import literal
from tests.support.equality import assert_moved_equally, assert_values

M = 4


METHODS_HERE = ("fedpgp", "fedtpg", "promptfl_ft", "fedkgcoop", "fedcocoop")


def start_context(backbone: Backbone) -> Tensor:
    return torch.randn(M, backbone.d_t, generator=torch.Generator().manual_seed(1)) * 0.02


def server_context(d_t: int | None = 112, d_e: int = 96) -> pf.ServerContext:
    return pf.ServerContext(TrainingSpec(), BackboneShape(d_t=d_t, d_e=d_e), NAMES, (), seed=3, rounds=4)


@pytest.mark.parametrize("w", [8.0, 0.5])
def test_fedkgcoop_training_equals_the_equations(w: float, backbone: Backbone, make_context: Make) -> None:
    context = make_context(8, round=2, epochs=2, batch_size=4, learning_rate=0.02, schedule="cosine")
    words, plain = backbone.embed_words("a photo of a"), literal.plain_loss(context)

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        value = plain(tensors, rows)
        cosines = [
            torch.dot(
                literal.text_feature(backbone, tensors["context"], name), literal.text_feature(backbone, words, name)
            )
            for name in NAMES
        ]
        return value + w * (1 - sum(cosines) / len(cosines))

    start = {"context": start_context(backbone)}
    found = make_method({"name": "fedkgcoop", "m": M, "w": w}).train(context, start, {})
    rate = learning_rate(context.training, 2, 4)
    assert_moved_equally(found.update, literal.training(context, start, loss, rate), start)
    assert found.private == {}


def fine_tuner(**hyper: Any) -> pf.Method:
    return make_method({"name": "promptfl_ft", "m": M} | hyper)


def test_promptfl_ft_trains_as_promptfl(backbone: Backbone, make_context: Make) -> None:
    context, payload = make_context(batch_size=4, epochs=2), {"context": start_context(backbone)}
    tuned = fine_tuner(finetune_epochs=7).train(context, payload, {})
    plain = make_method({"name": "promptfl", "m": M}).train(context, payload, {})
    assert torch.equal(tuned.update["context"], plain.update["context"])
    assert tuned.private == {}


def test_promptfl_ft_classifies_after_fine_tuning(backbone: Backbone, make_context: Make) -> None:
    """E_ft epochs of SGD by hand from the global context, at a rate that no schedule lowers."""
    context = make_context(8, round=3, epochs=1, batch_size=4, learning_rate=0.02, schedule="cosine")
    start = {"context": start_context(backbone)}
    longer = context.with_terms(training=context.training.model_copy(update={"epochs": 3}))
    tuned = literal.training(longer, start, literal.plain_loss(context), 0.02)["context"]
    with torch.no_grad():
        texts = torch.stack([literal.text_feature(backbone, tuned, name) for name in NAMES])
        wanted = backbone.logit_scale * context.train.features() @ texts.T
        found = fine_tuner(finetune_epochs=3).classifier(context, start, {}).logits(context.train, torch.arange(8))
        untuned = make_method({"name": "promptfl", "m": M}).classifier(context, start, {})
    assert not pf.train_context(context, start["context"])[0].requires_grad
    other = context.with_terms(training=context.training.model_copy(update={"learning_rate": 0.5}))
    with torch.no_grad():
        named = fine_tuner(finetune_epochs=3, finetune_learning_rate=0.02).classifier(other, start, {})
    assert_values(named.logits(context.train, torch.arange(8)), wanted, 1e-4)
    assert_values(found, wanted, 1e-4)  # cosines' rounding times the logits' scale, after six steps
    assert float((untuned.logits(context.train, torch.arange(8)) - wanted).abs().max()) > 0.1
    assert torch.equal(start["context"], start_context(backbone))


def test_promptfl_ft_tunes_on_its_own_label_space_once_for_all_test_sets(
    backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further test set has other candidates; what was learned for it comes from the client's own classes."""
    spaces: list[tuple[str, ...]] = []
    train_context = pf.train_context

    def counted(context: pf.ClientContext, start: Tensor, **how: Any) -> tuple[Tensor, float]:
        spaces.append(context.class_names)
        return train_context(context, start, **how)

    monkeypatch.setattr(pf, "train_context", counted)
    context, payload = replace(make_context(8), label_space=NAMES), {"context": start_context(backbone)}
    other = replace(context, class_names=("paintbrush", "anvil", "comet"))
    method = fine_tuner(finetune_epochs=1, finetune_learning_rate=0.5)
    with torch.no_grad():
        tuned = method.classifier(context, payload, {})
        assert isinstance(tuned, Retargets)
        first = tuned.among(other).logits(context.train, torch.arange(3))
        alone = fine_tuner(finetune_epochs=1, finetune_learning_rate=0.5).classifier(other, payload, {})
    assert torch.equal(first, alone.logits(context.train, torch.arange(3)))
    assert spaces == [NAMES, NAMES], "once by the first method, once by the second"
    with torch.no_grad():
        method.classifier(context, {"context": start_context(backbone)}, {})
    assert len(spaces) == 3, "another payload is tuned anew"


def test_promptfl_ft_without_training_images_has_the_global_context(backbone: Backbone, make_context: Make) -> None:
    context, payload = make_context(8), {"context": start_context(backbone)}
    empty = MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long))
    found = fine_tuner().classifier(replace(context, train=empty), payload, {})
    plain = make_method({"name": "promptfl", "m": M}).classifier(context, payload, {})
    rows = torch.arange(8)
    assert torch.equal(found.logits(context.train, rows), plain.logits(context.train, rows))


def some_state(backbone: Backbone) -> Tensors:
    """The start with every number moved, so that the shift is not zero and no ReLU is on its edge."""
    method = make_method({"name": "fedcocoop", "m": M})
    start = method.initial_state(server_context(backbone.d_t, backbone.d_e), initial_draws(3))
    draws = torch.Generator().manual_seed(2)
    return {name: value + torch.randn(value.shape, generator=draws) * 0.05 for name, value in start.items()}


def literal_shifted(state: Tensors, feature: Tensor) -> Tensor:
    """v_i + h(x) for each i, of one image."""
    hidden = state["meta_net.narrow.weight"] @ feature + state["meta_net.narrow.bias"]
    hidden = torch.maximum(hidden, torch.zeros(()))
    shift = state["meta_net.widen.weight"] @ hidden + state["meta_net.widen.bias"]
    return torch.stack([row + shift for row in state["context"]])


def conditional_loss(context: pf.ClientContext) -> literal.Loss:
    def loss(state: Tensors, rows: Tensor) -> Tensor:
        losses = []
        for row in rows:
            feature, label = context.train.features()[row], context.train.labels[row : row + 1]
            shifted = literal_shifted(state, feature)
            names = list(context.class_names)
            losses.append(literal.context_loss(context.backbone, shifted, names, feature.unsqueeze(0), label))
        return torch.stack(losses).mean()

    return loss


@pytest.mark.parametrize("texts_at_once", [512, 10, 1])
def test_fedcocoop_training_equals_the_equations(
    texts_at_once: int, backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever number of images passes the tower at once."""
    monkeypatch.setattr("promptfed.shared.clip.backbone.PREFIX_TEXTS", texts_at_once)
    context = make_context(7, round=2, epochs=1, batch_size=5, learning_rate=0.05, schedule="cosine")
    start = some_state(backbone)
    found = make_method({"name": "fedcocoop", "m": M}).train(context, start, {})
    wanted = literal.training(context, start, conditional_loss(context), learning_rate(context.training, 2, 4))
    assert_moved_equally(found.update, wanted, start)
    assert found.private == {}


@pytest.mark.parametrize("m", [1, 2])
def test_fedtpg_tells_how_alike_several_vectors_are(m: int, backbone: Backbone, make_context: Make) -> None:
    method = make_method({"name": "fedtpg", "m": m})
    state = method.initial_state(server_context(backbone.d_t, backbone.d_e), initial_draws(3))
    assert ("context_cosine" in method.train(make_context(4, epochs=1), state, {}).metrics) is (m > 1)


def test_fedcocoop_scores_each_image_under_its_own_context(backbone: Backbone, make_context: Make) -> None:
    context, state = make_context(6), some_state(backbone)
    found = make_method({"name": "fedcocoop", "m": M}).classifier(context, state, {})
    rows = torch.tensor([5, 0, 3])
    wanted = []
    with torch.no_grad():
        for row in rows:
            feature = context.train.features()[row]
            shifted = literal_shifted(state, feature)
            texts = torch.stack([literal.text_feature(backbone, shifted, name) for name in NAMES])
            wanted.append(backbone.logit_scale * texts @ feature)
    logits = found.logits(context.train, rows)
    assert logits.shape == (3, len(NAMES))
    assert float((logits - torch.stack(wanted)).abs().max()) <= 1e-5 * float(torch.stack(wanted).abs().max())


def test_fedcocoop_starts_where_promptfl_starts(backbone: Backbone, make_context: Make) -> None:
    server = server_context(backbone.d_t, backbone.d_e)
    method, plain = (make_method({"name": name, "m": M}) for name in ("fedcocoop", "promptfl"))
    state, shared = (one.initial_state(server, initial_draws(3)) for one in (method, plain))
    assert torch.equal(state["context"], shared["context"])
    assert {name: tuple(value.shape) for name, value in state.items()} == {
        "context": (M, backbone.d_t), "meta_net.narrow.weight": (6, 96), "meta_net.narrow.bias": (6,),
        "meta_net.widen.weight": (112, 6), "meta_net.widen.bias": (112,),
    }  # fmt: skip
    context, rows = make_context(6), torch.arange(6)
    one, other = (
        tried.classifier(context, tensors, {}).logits(context.train, rows)
        for tried, tensors in ((method, state), (plain, shared))
    )
    assert float((one - other).abs().max()) <= 1e-5 * float(other.abs().max())
    result = method.train(make_context(6, learning_rate=0.1, batch_size=2), state, {})
    assert all(float((value - state[name]).abs().max()) > 0 for name, value in result.update.items())


def test_fedcocoop_memory_is_bounded_by_chunks(backbone: Backbone) -> None:
    rows = torch.arange(100)
    assert [len(part) for part in fedcocoop.chunks(backbone, rows, 10)] == [51, 49]
    assert [len(part) for part in fedcocoop.chunks(backbone, rows[:3], 10_000)] == [1, 1, 1]


@pytest.mark.parametrize("name", METHODS_HERE)
def test_training_is_reproducible_and_of_client_and_round(name: str, backbone: Backbone, make_context: Make) -> None:
    method = make_method({"name": name, "m": M})
    payload = method.initial_state(server_context(backbone.d_t, backbone.d_e), initial_draws(3))
    before = {key: value.clone() for key, value in payload.items()}
    context = make_context(7, batch_size=3, learning_rate=0.05)
    results = [
        method.train(other, payload, {})
        for other in (context, context, replace(context, round=2), replace(context, client="hospital-b"))
    ]
    first, again, *others = ({**result.update, **result.private} for result in results)
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    for other in others:
        assert any(not torch.equal(value, other[key]) for key, value in first.items())
    assert all(torch.equal(value, before[key]) for key, value in payload.items()), "the payload is left alone"


# PromptFL, PromptFL+Prox, CoOp and zero-shot against their equations written out.


def proximal_loss(context: pf.ClientContext, start: Tensors, mu: float) -> literal.Loss:
    plain = literal.plain_loss(context)

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        moved = zip(tensors["context"], start["context"], strict=True)
        return plain(tensors, rows) + sum(mu / 2 * torch.dot(row - base, row - base) for row, base in moved)

    return loss


def test_texts_of_both_contexts_are_mixed_by_their_shares() -> None:
    assert mixed(torch.tensor([[[1.0, 0.0]], [[0.0, 2.0]]]), 0.25).tolist() == [[0.75, 0.5]]


@pytest.mark.parametrize(("name", "mu"), [("promptfl", 0.0), ("promptfl_prox", 0.7)])
def test_training_equals_the_equations(name: str, mu: float, backbone: Backbone, make_context: Make) -> None:
    settings = {"name": name, "m": 4} | ({"mu": mu} if mu else {})
    context = make_context(
        10, round=2, epochs=2, batch_size=4, learning_rate=0.01, momentum=0.9, weight_decay=5e-4, schedule="cosine"
    )
    start = {"context": start_context(backbone)}
    result = make_method(settings).train(context, start, {})
    wanted = literal.training(context, start, proximal_loss(context, start, mu))
    assert_moved_equally(result.update, wanted, start, least=1e-4)
    assert result.private == {}


def test_coop_keeps_its_context_and_sends_nothing(backbone: Backbone, make_context: Make) -> None:
    method = make_method({"name": "coop", "m": 4})
    context = make_context(batch_size=5, learning_rate=0.05)
    first = method.train(context, {}, {})
    assert first.update == {}
    start = {"context": torch.randn(4, backbone.d_t, generator=initial_draws(context.seed)) * 0.02}
    wanted = literal.training(context, start, literal.plain_loss(context))
    assert_values(first.private["context"], wanted["context"])
    second = method.train(make_context(batch_size=5, learning_rate=0.05, round=2), {}, first.private)
    assert not torch.equal(second.private["context"], first.private["context"])
    indices = torch.arange(10)
    trained = method.classifier(context, {}, second.private).logits(context.train, indices)
    untrained = method.classifier(context, {}, {}).logits(context.train, indices)
    assert not torch.equal(trained, untrained)


def test_classifier_scores_are_scaled_cosines(backbone: Backbone, make_context: Make) -> None:
    context, prompt = make_context(), start_context(backbone)
    found = make_method({"name": "promptfl", "m": 4}).classifier(context, {"context": prompt}, {})
    with torch.no_grad():
        texts = torch.stack([literal.text_feature(backbone, prompt, name) for name in NAMES])
    wanted = backbone.logit_scale * context.train.features()[2:5] @ texts.T
    assert_values(found.logits(context.train, torch.tensor([2, 3, 4])), wanted)


def test_zero_shot_scores_the_template(backbone: Backbone, make_context: Make) -> None:
    context = make_context()
    method = make_method({"name": "zero_shot"})
    with torch.no_grad():
        words = backbone.embed_words("a photo of a")
        texts = torch.stack([literal.text_feature(backbone, words, name) for name in NAMES])
    wanted = backbone.logit_scale * context.train.features() @ texts.T
    assert_values(method.classifier(context, {}, {}).logits(context.train, torch.arange(10)), wanted)
    assert method.phases(1, 1) == ()
    assert method.initial_state(server_context(), initial_draws(0)) == {}


def test_context_of_words_comes_last(backbone: Backbone) -> None:
    method = make_method({"name": "promptfl", "m": 6, "context_init": "a photo of a"})
    with pytest.raises(pf.NeedsBackbone, match="initial-state"):
        method.initial_state(server_context(), initial_draws(3))
    made = method.initial_state_with(backbone, server_context(), initial_draws(3))["context"]
    words = backbone.embed_words("a photo of a")
    assert made.shape == (6, backbone.d_t)
    assert torch.equal(made[2:], words.float())
    assert float(made[:2].abs().max()) > 0
    too_long = make_method({"name": "promptfl", "m": 2, "context_init": "a photo of a"})
    with pytest.raises(pf.MethodError, match="raise m"):
        too_long.initial_state_with(backbone, server_context(), initial_draws(3))


def test_initial_context_has_the_stated_spread() -> None:
    method = make_method({"name": "promptfl", "m": 64})
    values = method.initial_state(server_context(512), initial_draws(0))["context"]
    assert values.shape == (64, 512)
    assert float(values.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(values.mean())) < 0.001
    with pytest.raises(pf.MethodError, match="text tower"):
        method.initial_state(server_context(None), initial_draws(0))


def test_cosine_schedule_runs_over_the_rounds() -> None:
    cosine = TrainingSpec(schedule="cosine", learning_rate=0.4)
    assert [learning_rate(cosine, r, 4) for r in (1, 2, 3, 4)] == pytest.approx(
        [0.2 * (1 + math.cos(math.pi * k / 4)) for k in range(4)]
    )
    assert learning_rate(TrainingSpec(learning_rate=0.4), 3, 4) == learning_rate(cosine, 3, 4), "the default"
    assert learning_rate(TrainingSpec(schedule="constant", learning_rate=0.4), 3, 4) == 0.4


def test_batches_cover_every_epoch_once() -> None:
    found = list(batches(10, 4, 3, torch.Generator().manual_seed(0)))
    assert [len(batch) for batch in found] == [4, 4, 2] * 3
    epochs = [torch.cat(found[3 * k : 3 * k + 3]).tolist() for k in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1]


def test_training_stops_when_cancelled_or_broken(backbone: Backbone, make_context: Make) -> None:
    from dataclasses import replace

    method, payload = make_method({"name": "promptfl", "m": 4}), {"context": start_context(backbone)}
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 2

    with pytest.raises(TaskCancelled):
        method.train(replace(make_context(batch_size=2), cancelled=cancelled), payload, {})
    assert len(asked) == 3
    told: list[float] = []
    method.train(replace(make_context(5, batch_size=2, epochs=2), progress=told.append), payload, {})
    assert told == [step / 6 for step in range(6)], "the share of the steps that are done"
    with pytest.raises(pf.MethodError, match="learning_rate"):
        method.train(make_context(batch_size=2), {"context": torch.full_like(payload["context"], math.nan)}, {})
    empty = replace(make_context(), train=MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long)))
    with pytest.raises(pf.MethodError, match="no training images"):
        method.train(empty, payload, {})
