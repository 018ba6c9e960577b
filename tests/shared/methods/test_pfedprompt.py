"""The reconstruction of pFedPrompt: what the memory holds, what it adds, and that nothing of it leaves the client."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.pfedprompt import Memory, PFedPrompt, PFedPromptHyper, density
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.shared.methods.test_text_baselines import start_context
from tests.support import literal

M = 4


def method(**hyper: Any) -> PFedPrompt:
    made = make_method({"name": "pfedprompt", "m": M} | hyper)
    assert isinstance(made, PFedPrompt)
    return made


def test_the_kernel_by_hand() -> None:
    found = density(torch.tensor([[0.6, 0.8]]), Memory(torch.eye(2), torch.tensor([0, 1])), 5.5, 2)
    assert found[0].tolist() == [pytest.approx(math.exp(-2.2)), pytest.approx(math.exp(-1.1))]
    assert found[0].tolist() == [pytest.approx(0.110803, abs=1e-6), pytest.approx(0.332871, abs=1e-6)]


def literal_added(image: Tensor, memory: list[tuple[Tensor, int]], classes: int, hyper: PFedPromptHyper) -> Tensor:
    """w·Σ_j exp(−β(1 − ⟨f, F_j⟩))·[y_j = c] of one image."""
    nearness = [(math.exp(-hyper.beta * (1 - float(image @ one))), label) for one, label in memory]
    return hyper.weight * torch.tensor([sum(v for v, label in nearness if label == c) for c in range(classes)])


@pytest.mark.parametrize("options", [{}, {"weight": 3.0, "beta": 2.0}], ids=str)
def test_classifies_with_the_memory(options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    context, tried, rows = make_context(), method(**options), torch.arange(4)
    draws = torch.Generator().manual_seed(7)
    test = MadeUpSplit(F.normalize(torch.randn(4, backbone.d_e, generator=draws), dim=-1), torch.zeros(4).long())
    start = start_context(backbone)
    with torch.no_grad():
        texts = [literal.text_feature(backbone, start, name) for name in NAMES]
    memory = [(one, int(label)) for one, label in zip(context.train.features(), context.train.labels, strict=True)]
    found = tried.classifier(context, {"context": start}, {}).logits(test, rows)
    for row in range(4):
        image = test.values[row]
        plain = backbone.logit_scale * torch.stack([image @ text for text in texts])
        wanted = plain + literal_added(image, memory, len(NAMES), tried.hyper)
        assert float((found[row] - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


def test_it_trains_and_sends_what_promptfl_does(backbone: Backbone, make_context: Make) -> None:
    context, payload = make_context(8, epochs=2, batch_size=3), {"context": start_context(backbone)}
    found = method().train(context, payload, {})
    plain = make_method({"name": "promptfl", "m": M}).train(context, payload, {})
    assert torch.equal(found.update["context"], plain.update["context"])
    assert found.private == {}, "the memory is made of what is kept anyway"
    assert set(found.update) == {"context"}


def test_the_memory_has_so_many_of_a_class_and_goes_by_name(make_context: Make) -> None:
    context = make_context(60)
    memory = Memory.of(context, 3)
    assert memory is not None
    counts = torch.bincount(memory.labels, minlength=len(NAMES))
    assert int(counts.max()) == 3
    again = Memory.of(context, 3)
    assert again is not None
    assert torch.equal(memory.features, again.features)
    assert torch.equal(memory.labels, again.labels)
    turned = replace(context, label_space=NAMES, class_names=("moon", *reversed(NAMES[1:])))
    other = Memory.of(turned, 3)
    assert other is not None
    named = [turned.class_names[label] if label >= 0 else "sun" for label in other.labels.tolist()]
    assert named == [NAMES[label] for label in memory.labels.tolist()]


def test_classes_that_nobody_trained_on_get_nothing_of_the_labels(backbone: Backbone, make_context: Make) -> None:
    context = make_context()
    novel = replace(context, label_space=NAMES, class_names=("moon", "pencil"))
    payload, rows = {"context": start_context(backbone)}, torch.arange(4)
    plain = make_method({"name": "promptfl", "m": M}).classifier(novel, payload, {}).logits(context.train, rows)
    found = method().classifier(novel, payload, {}).logits(context.train, rows)
    assert float((found - plain).abs().max()) <= 1e-5 * float(plain.abs().max())


def test_what_it_needs_and_says() -> None:
    assert not method().needs.patch_tokens
    assert "reconstruction" in PFedPrompt.summary
