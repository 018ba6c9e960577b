"""Images with several labels: the losses against their formulas, the threshold, and every method that can train."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.client_service.training.evaluation import presences
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.methods.core.several_labels import BIAS, LabelBias, PresenceTemplates, absent_template
from promptfed.shared.methods.core.training import ClassificationLoss
from promptfed.shared.metrics.figures import mean_average_precision
from promptfed.shared.seeds import initial_draws
from promptfed.shared.tensors import Tensors
from tests import ROOT
from tests.support.literal_private import Silent
from tests.support.visual_clients import client_context, server_context, small_backbone

LABELS = torch.tensor(
    [[1, 0, 1], [0, 0, 1], [1, 1, 0], [-1, 1, 0], [0, -1, 1], [1, 0, -1]], dtype=torch.int8
)  # -1: unknown
ABLE = sorted(name for name, kind in METHODS.items() if kind.can_take_several_labels())
TRAINABLE = [name for name in ABLE if name != "zero_shot"]


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def context_of(backbone: Backbone, **training: Any) -> pf.ClientContext:
    context = client_context(backbone, len(LABELS), **training)
    context.train.labels = LABELS
    return context


def literal_loss(cosines: Tensor, scale: float, beta: Tensor) -> Tensor:
    """The mean over images of the sum over known classes, one by one."""
    total = torch.zeros((), dtype=cosines.dtype)
    for row, labels in zip(cosines, LABELS.tolist(), strict=True):
        for c, label in enumerate(labels):
            if label == -1:
                continue
            p = 1 / (1 + torch.exp(-scale * (row[c] + beta)))
            total = total - (torch.log(p) if label else torch.log(1 - p))
    return total / len(cosines)


def test_the_loss_and_its_gradients_equal_the_formula(backbone: Backbone) -> None:
    scale = backbone.logit_scale
    beta = torch.tensor([-0.02], dtype=torch.float64, requires_grad=True)
    bias = LabelBias(beta.detach(), backbone, 3)
    loss = ClassificationLoss(replace(context_of(backbone), label_loss=bias))
    draws = torch.Generator().manual_seed(2)
    cosines = (torch.randn(6, 3, generator=draws, dtype=torch.float64) / scale).requires_grad_()
    found = loss(scale * cosines, LABELS)
    wanted = literal_loss(cosines, scale, beta[0])
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
    slope, own = torch.autograd.grad(found, (cosines, bias.leaf))
    by_hand, of_beta = torch.autograd.grad(wanted, (cosines, beta))
    assert float((slope - by_hand).abs().max()) < 1e-6 * max(1.0, float(by_hand.abs().max()))
    assert own.item() == pytest.approx(of_beta.item() / (3 * scale), abs=1e-6)
    assert loss.each(scale * cosines, LABELS).mean().item() == pytest.approx(found.item(), abs=1e-12)


def test_the_threshold_comes_from_any_start_to_the_best_one(backbone: Backbone) -> None:
    """Of equal cosines the best bias is the logit of the share of present labels."""
    share = float((LABELS == 1).sum()) / float((LABELS >= 0).sum())
    for start in (-0.5, 0.0, 0.5):
        bias = LabelBias(torch.tensor([start]), backbone, 3)
        loss = ClassificationLoss(replace(context_of(backbone), label_loss=bias))
        logits, before = torch.zeros(6, 3), math.inf
        for _ in range(60):
            value = loss(logits, LABELS)
            value.backward()
            bias.step()
            assert value.item() <= before + 1e-6
            before = value.item()
        assert float(bias.value) * backbone.logit_scale == pytest.approx(math.log(share / (1 - share)), abs=1e-2)


def test_a_step_of_the_threshold_is_the_inverse_of_the_largest_curvature(backbone: Backbone) -> None:
    """C·b has the curvature 1/(4·C) at most, for a sum over C classes."""
    bias = LabelBias(torch.tensor([0.5]), backbone, 3)
    bias.leaf.grad = torch.tensor([0.2])
    for _ in range(2):  # the second time there is no gradient
        bias.step()
        assert float(bias.leaf.detach()) == pytest.approx(0.5 * 3 * backbone.logit_scale - 4 * 3 * 0.2, rel=1e-6)
        assert (bias.leaf.grad, bias.value.requires_grad) == (None, False)


def test_copies_have_thresholds_of_their_own(backbone: Backbone) -> None:
    bias = LabelBias(torch.zeros(1), backbone, 3)
    loss = ClassificationLoss(replace(context_of(backbone), label_loss=bias))
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    copies = torch.linspace(-2, 2, 6)[:, None].requires_grad_()

    def units(parameters: Any, indices: Tensor) -> Tensor:
        return loss.each(logits[indices], LABELS[indices])

    losses = bias.among(pf.Objective(units)).units([copies], torch.arange(6))
    [gradients] = torch.autograd.grad(losses.sum(), copies)
    for row in range(6):
        own = copies[row].detach().clone().requires_grad_()
        alone = LabelBias(own.detach() / (3 * backbone.logit_scale), backbone, 3)
        single = ClassificationLoss(replace(context_of(backbone), label_loss=alone))
        single(logits[row : row + 1], LABELS[row : row + 1]).backward()
        assert alone.leaf.grad is not None
        assert gradients[row].item() == pytest.approx(alone.leaf.grad.item(), abs=1e-6)


def trained(backbone: Backbone, name: str, protection: Protection | None = None) -> tuple[Any, ...]:
    """The method, its payload, the result of one task and the server's context."""
    settings = {"name": name, "task": "multi_label"}
    method = make_method(settings | ({"m": 2} if "m" in METHODS[name].Hyper.model_fields else {}))
    server = server_context(backbone, "a")
    context = replace(context_of(backbone, learning_rate=0.05), protection=protection)
    state = method.initial_state_with(backbone, server, initial_draws(3))
    phases = method.phases(1, 4)
    payload = method.payload(state, phases[0], server.clients[0], server) if phases else {}
    return method, state, payload, context, method.train(context, payload, {}), server


def apart(one: Tensors, other: Tensors) -> float:
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize("name", TRAINABLE)
def test_every_able_method_trains_by_the_loss_and_learns_the_threshold(backbone: Backbone, name: str) -> None:
    method, state, payload, context, result, server = trained(backbone, name)
    sent = result.update if BIAS.name in result.update else result.private
    assert float(sent[BIAS.name]) != 0
    assert set(payload) == {spec.name for spec in method.payload_tensors(None)}
    for phase in method.phases(1, 4):
        expected = method.expected_update(phase, server.clients[0], server)
        assert {key: tuple(tensor.shape) for key, tensor in result.update.items()} == {
            key: shape for key, (shape, _) in expected.items()
        }
        arrays = {key: tensor.numpy() for key, tensor in result.update.items()}
        numbers = {key: np.asarray(value) for key, value in state.items()}
        updates = [pf.ClientUpdate("a", 0.25, arrays), pf.ClientUpdate("b", 0.75, arrays)]

        def mean(given: Any) -> Tensors:
            every = list(given)
            return {key: sum(update.weight * update.tensors[key] for update in every) for key in every[0].tensors}

        after = method.aggregate(numbers, phase, updates, mean, server)
        assert set(after) == set(state)
        assert not phase.up or after[BIAS.name].item() == pytest.approx(sent[BIAS.name].item(), rel=1e-6)
    scores = method.classifier(context, payload, result.private).logits(context.train, torch.arange(6))
    assert scores.shape == LABELS.shape


def test_a_classifier_is_its_cosines_and_the_threshold(backbone: Backbone) -> None:
    method, _, payload, context, _, _ = trained(backbone, "promptfl")
    plain = make_method({"name": "promptfl", "m": 2})
    given = {name: tensor for name, tensor in payload.items() if name != BIAS.name}
    wanted = plain.classifier(context, given, {}).logits(context.train, torch.arange(6)) + backbone.logit_scale * -0.3
    found = method.classifier(context, payload | {BIAS.name: torch.tensor([-0.3])}, {})
    assert torch.allclose(found.logits(context.train, torch.arange(6)), wanted)
    assert torch.allclose(presences(found, context.train), torch.sigmoid(wanted.double()))


@pytest.mark.parametrize("name", [name for name in TRAINABLE if METHODS[name].can_protect()])
def test_private_training_includes_the_threshold(backbone: Backbone, name: str) -> None:
    """Without noise and clipping the private step of one full batch is the plain step."""
    huge = Protection(clip=1e6, noise_multiplier=1.0, units=6, batch_size=6, epochs=1, stream=Silent(b"0" * 32))
    options = {"optimizer": "sgd", "momentum": 0.0, "weight_decay": 0.0, "batch_size": 6, "epochs": 1}
    results = []
    for protection in (None, huge):
        settings = {"name": name, "task": "multi_label"}
        method = make_method(settings | ({"m": 2} if "m" in METHODS[name].Hyper.model_fields else {}))
        server = server_context(backbone, "a")
        context = replace(context_of(backbone, learning_rate=0.05, **options), protection=protection)
        state = method.initial_state_with(backbone, server, initial_draws(3))
        payload = method.payload(state, method.phases(1, 4)[0], server.clients[0], server)
        results.append(method.train(context, payload, {}).update)
    assert float(results[0][BIAS.name]) == pytest.approx(float(results[1][BIAS.name]), rel=1e-3)
    assert apart(*results) < 1e-4


def test_zero_shot_compares_present_with_absent(backbone: Backbone) -> None:
    context = replace(context_of(backbone), template="a photo of a {}.")
    found = PresenceTemplates(context).logits(context.train, torch.arange(6))
    present = pf.template_features(backbone, "a photo of a {}.", context.class_names)
    absent = pf.template_features(backbone, "a photo without a {}.", context.class_names)
    wanted = backbone.logit_scale * (context.train.features() @ present.T - context.train.features() @ absent.T)
    assert torch.allclose(found, wanted, atol=1e-4)
    assert absent_template("{}, on a plate") == "a photo without a {}."


def test_mean_average_precision_equals_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score

    draws = np.random.default_rng(0)
    for _ in range(20):
        labels = draws.choice([1, 0, -1], size=(40, 5), p=[0.3, 0.5, 0.2])
        labels[:, 4] = draws.choice([0, -1], size=40)  # present nowhere: it does not count
        scores = draws.integers(0, 12, size=(40, 5)) / 12  # with ties
        columns = [(labels[:, c], scores[:, c]) for c in range(4)]
        wanted = np.mean([average_precision_score(k[k >= 0] == 1, said[k >= 0]) for k, said in columns])
        assert mean_average_precision(labels, scores) == pytest.approx(wanted, abs=1e-9)
    assert mean_average_precision(np.zeros((3, 2)), np.zeros((3, 2))) is None


def test_at_least_fifteen_methods_can_and_the_page_names_them() -> None:
    assert len(TRAINABLE) >= 15
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    [sentence] = re.findall(r"\[`task: multi_label`\]\(spec\.md\)([^.]*)\.", page)
    assert re.findall(r"`(\w+)`", sentence) == ABLE


CLASSES = {"class_names": ["drusen", "bleeding"]}


def test_the_task_is_part_of_the_resolved_method() -> None:
    spec = resolve_spec({"name": "eyes", "method": {"name": "promptfl"}})
    assert "task" not in spec.model_dump(mode="json")
    assert "task" not in spec.method
    several = resolve_spec({"name": "eyes", "task": "multi_label", "method": {"name": "promptfl"}} | CLASSES)
    again = resolve_spec(several.model_dump(mode="json"))
    assert again == several
    assert several.method["task"] == "multi_label"
