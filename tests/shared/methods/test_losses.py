"""The spec's losses against their formulas, and in every method that takes them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.methods.core.interface.protection import Protection
from promptfed.shared.methods.core.losses import ClassificationLoss
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.loss import LossSpec
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from tests import ROOT
from tests.support.visual_clients import ImageSplit, client_context, server_context, small_backbone

Change = Callable[[ClientContext], ClientContext]

COUNTS = (3, 1, 2)
LABELS = torch.tensor([0, 2, 0, 1, 2, 0])
TAKING = sorted(name for name, kind in METHODS.items() if kind.can_take_losses())
UNLABELLED = sorted(name for name, kind in METHODS.items() if kind.can_take_unlabelled())
TRAIN_PHASE = {"plan": "prompts"}


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


def context_of(backbone: Backbone, loss: LossSpec, labels: Tensor = LABELS, **training: Any) -> ClientContext:
    context = client_context(backbone, len(labels), **training).with_terms(loss=loss)
    assert isinstance(context.train, ImageSplit)
    context.train.labels = labels
    return context


def literal_loss(logits: Tensor, labels: Tensor, spec: LossSpec) -> Tensor:
    """The mean over images, image by image and class by class."""
    total = torch.zeros((), dtype=logits.dtype)
    shares = [count / sum(COUNTS) for count in COUNTS]
    weights = [(1 - spec.beta) / (1 - spec.beta**count) for count in COUNTS]
    for row, label in zip(logits, labels.tolist(), strict=True):
        if spec.balance == "logit_adjusted":
            powers = [share**spec.adjustment for share in shares]
        else:
            powers = [1.0] * len(shares)
        masses = [torch.exp(value) * power for value, power in zip(row, powers, strict=True)]
        p = masses[label] / torch.stack(masses).sum()
        value = {"cross_entropy": -torch.log(p), "gce": (1 - p**spec.q) / spec.q, "mae": 1 - p}[spec.kind]
        if spec.balance == "class_balanced":
            value = value * weights[label] / (sum(weights) / len(weights))
        total = total + value
    return total / len(labels)


@pytest.mark.parametrize("balance", ["none", "logit_adjusted", "class_balanced"])
@pytest.mark.parametrize("kind", ["cross_entropy", "gce", "mae"])
def test_each_loss_and_its_gradient_equal_the_formula(backbone: Backbone, kind: Any, balance: Any) -> None:
    spec = LossSpec(kind=kind, q=0.6, balance=balance, adjustment=1.3, beta=0.9)
    loss = ClassificationLoss(context_of(backbone, spec))
    draws = torch.Generator().manual_seed(2)
    logits = (3 * torch.randn(6, 3, generator=draws, dtype=torch.float64)).requires_grad_()
    found, wanted = loss(logits, LABELS), literal_loss(logits, LABELS, spec)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
    [slope], [by_hand] = torch.autograd.grad(found, logits), torch.autograd.grad(wanted, logits)
    assert float((slope - by_hand).abs().max()) < 1e-6
    assert loss.each(logits, LABELS).mean().item() == pytest.approx(found.item(), abs=1e-12)


def test_a_class_without_images_is_no_alternative(backbone: Backbone) -> None:
    two = torch.tensor([0, 2, 0, 0, 2, 0])
    loss = ClassificationLoss(context_of(backbone, LossSpec(balance="logit_adjusted"), two))
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(2)).requires_grad_()
    value = loss(logits, two)
    among_two = logits[:, [0, 2]] + torch.tensor([4 / 6, 2 / 6]).log()
    assert float(value) == pytest.approx(float(torch.nn.functional.cross_entropy(among_two, two // 2)), abs=1e-6)
    [slope] = torch.autograd.grad(value, logits)
    assert slope[:, 1].abs().max() == 0


def trained(
    backbone: Backbone, name: str, loss: LossSpec, labels: Tensor = LABELS, change: Change = lambda context: context
) -> Tensors:
    method = make_method({"name": name} | ({"m": 2} if "m" in METHODS[name].Hyper.model_fields else {}))
    server = server_context(backbone, "a")
    context = context_of(backbone, loss, labels, learning_rate=0.05, phase=TRAIN_PHASE.get(name, "train"))
    phases = {phase.name: phase for phase in method.phases(1, 4)}
    state = method.initial_state_with(backbone, server, initial_draws(3))
    payload = method.payload(state, phases[context.phase], server.clients[0], server)
    result = method.train(change(context), payload, {})
    return {**result.update, **{f"own {key}": value for key, value in result.private.items()}}


def apart(one: Tensors, other: Tensors) -> float:
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)


@pytest.mark.parametrize("name", TAKING)
def test_every_method_that_takes_losses_trains_by_them(backbone: Backbone, name: str) -> None:
    """Where two losses are the same function the training is the same; another loss trains something else."""
    plain = trained(backbone, name, LossSpec())
    moved = apart(plain, trained(backbone, name, LossSpec(kind="gce", q=0.7)))
    assert moved > 0
    near = trained(backbone, name, LossSpec(kind="gce", q=1e-4))
    assert apart(plain, near) < max(0.02 * moved, 1e-5)
    assert apart(plain, trained(backbone, name, LossSpec(balance="class_balanced", beta=0.9))) > 0
    even = torch.tensor([0, 1, 2, 2, 1, 0])
    adjusted = trained(backbone, name, LossSpec(balance="logit_adjusted"), even)
    assert apart(trained(backbone, name, LossSpec(), even), adjusted) < max(1e-3 * moved, 1e-5)


@pytest.mark.parametrize("name", UNLABELLED)
def test_images_without_a_prediction_train_nothing(backbone: Backbone, name: str) -> None:
    """Predicted labels train like others; what an image without one shows makes no difference."""

    def unlabelled(context: ClientContext) -> ClientContext:
        return replace(context, unlabelled=True)

    def changed(context: ClientContext) -> ClientContext:
        assert isinstance(context.train, ImageSplit)
        context.train.pixels[[1, 4]] = 0.5 - context.train.pixels[[1, 4]]
        return unlabelled(context)

    plain = LossSpec()
    assert apart(trained(backbone, name, plain), trained(backbone, name, plain, change=unlabelled)) < 1e-6
    some = LABELS.clone()
    some[[1, 4]] = -1
    guessed = trained(backbone, name, plain, some, unlabelled)
    assert apart(guessed, trained(backbone, name, plain)) > 1e-4
    assert apart(guessed, trained(backbone, name, plain, some, changed)) == 0
    assert apart(guessed, trained(backbone, name, LossSpec(balance="class_balanced"), some, unlabelled)) > 0


@pytest.mark.parametrize("balance", ["logit_adjusted", "class_balanced"])
def test_predictions_are_balanced_by_their_own_numbers(backbone: Backbone, balance: Any) -> None:
    """As those of a client with these labels alone; under privacy, and without any prediction, not at all."""
    some = LABELS.clone()
    some[[1, 4]] = -1
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(4), requires_grad=True)
    spec = LossSpec(balance=balance, beta=0.9)
    guessing = replace(context_of(backbone, spec, some), unlabelled=True)
    found = ClassificationLoss(guessing).each(logits, some)
    known = some >= 0
    wanted = ClassificationLoss(context_of(backbone, spec, some[known])).each(logits[known], some[known])
    assert torch.equal(found[known], wanted)
    assert not found[~known].any()
    plain = ClassificationLoss(replace(context_of(backbone, LossSpec(), some), unlabelled=True)).each(logits, some)
    assert float((found - plain).abs().max()) > 0.01
    protection = Protection(1.0, 1.0, units=6, batch_size=6, epochs=1, stream=SeededNoise(1).stream(1, "train", "a"))
    assert torch.equal(ClassificationLoss(replace(guessing, protection=protection)).each(logits, some), plain)
    nothing = torch.full_like(some, -1)
    none = ClassificationLoss(replace(context_of(backbone, spec, nothing), unlabelled=True)).each(logits, nothing)
    [slope] = torch.autograd.grad(none.sum(), logits)
    assert not none.any()
    assert not slope.any()


def test_methods_that_train_without_labels_take_losses_and_the_page_names_them() -> None:
    assert set(UNLABELLED) < set(TAKING)
    assert not any(METHODS[name].personal for name in UNLABELLED)
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    [sentence] = re.findall(r"Sites without labels[^.]*\.md#options\)([^.]*)\.", page)
    assert re.findall(r"`(\w+)`", sentence) == UNLABELLED


def test_at_least_fifteen_methods_take_losses_and_the_page_names_them() -> None:
    assert len(TAKING) >= 15
    page = (ROOT / "docs" / "reference" / "methods.md").read_text()
    [sentence] = re.findall(r"A spec's \[`loss`\][^.]*\.md#loss\)([^.]*)\.", page)
    assert re.findall(r"`(\w+)`", sentence) == TAKING


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"method": {"name": "fedapt"}, "loss": {"kind": "gce"}}, "fedapt trains with a loss of its own"),
        ({"method": {"name": "fedrod"}, "loss": {"balance": "class_balanced"}}, "a loss of its own"),
        ({"method": {"name": "fedavg", "fedsr": True}, "loss": {"kind": "mae"}}, "fedsr trains with a loss of its own"),
        ({"loss": {"kind": "gce", "q": 0}}, "greater than 0"),
        (
            {"loss": {"balance": "logit_adjusted"}, "privacy": {"level": "sample", "noise_multiplier": 1.0}},
            "which privacy.level sample hides",
        ),
    ],
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError, match=text):
        resolve_spec({"name": "eyes", "method": {"name": "promptfl"}} | changes)


def test_the_plain_loss_is_left_out_of_the_spec() -> None:
    """Older specs, and their signatures, read the same."""
    spec = resolve_spec({"name": "eyes", "method": {"name": "promptfl"}})
    assert "loss" not in spec.model_dump(mode="json")
    assert resolve_spec({"name": "eyes", "method": {"name": "promptfl"}, "loss": {"kind": "mae"}}).loss.kind == "mae"


def test_a_subclass_says_itself_whether_it_takes_losses() -> None:
    class Changed(PromptFL):
        pass

    assert not Changed.can_take_losses()
