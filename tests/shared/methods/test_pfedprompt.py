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
from promptfed.shared.methods.pfedprompt import Memory, MemoryLogits, PFedPrompt, PFedPromptHyper
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.shared.methods.test_patch_methods import Patched
from tests.shared.methods.test_text_baselines import start_context
from tests.support import literal
from tests.support.equality import assert_moved_equally

M = 4


def method(**hyper: Any) -> PFedPrompt:
    made = make_method({"name": "pfedprompt", "m": M} | hyper)
    assert isinstance(made, PFedPrompt)
    return made


def test_the_kernel_by_hand() -> None:
    memory = Memory(torch.eye(2), torch.tensor([0, 1]), torch.tensor([0, 1]))
    added = MemoryLogits(PFedPromptHyper(memory="labels"), memory, 100.0)
    split = MadeUpSplit(torch.tensor([[0.6, 0.8]]), torch.zeros(1, dtype=torch.long))
    found = added(split, torch.tensor([0]), torch.eye(2))
    assert found[0].tolist() == [pytest.approx(math.exp(-2.2)), pytest.approx(math.exp(-1.1))]
    assert found[0].tolist() == [pytest.approx(0.110803, abs=1e-6), pytest.approx(0.332871, abs=1e-6)]


def literal_added(
    images: list[Tensor], memory: list[tuple[Tensor, int]], texts: list[Tensor], hyper: PFedPromptHyper, scale: float
) -> Tensor:
    """(5.1) to (5.3): ``images`` are what asks, the image itself or its patches."""
    if hyper.memory == "labels":
        nearness = [(math.exp(-hyper.beta * (1 - float(images[0] @ one))), label) for one, label in memory]
        return hyper.weight * torch.tensor([sum(v for v, label in nearness if label == c) for c in range(len(texts))])
    kappa = hyper.kappa or scale
    recalled = []
    for image in images:
        shares = torch.softmax(torch.stack([kappa * image @ one for one, _ in memory]), 0)
        recalled.append(sum(share * one for share, (one, _) in zip(shares, memory, strict=True)))
    mean = torch.stack(recalled).mean(0)
    return hyper.weight * scale * torch.stack([(mean / mean.norm()) @ text for text in texts])


FEATURES = {"memory": "features"}
CASES = [{}, FEATURES, FEATURES | {"weight": 3.0, "kappa": 20.0}, FEATURES | {"query": "patches"}]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_classifies_with_the_memory(options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    context, tried, rows = make_context(), method(**options), torch.arange(4)
    draws = torch.Generator().manual_seed(7)
    every = F.normalize(torch.randn(10, 6, backbone.d_e, generator=draws), dim=-1)
    context = replace(context, train=Patched(context.train.features(), context.train.labels, every))
    test = Patched(F.normalize(torch.randn(4, backbone.d_e, generator=draws), dim=-1), torch.zeros(4).long(), every[:4])
    start = start_context(backbone)
    with torch.no_grad():
        texts = [literal.text_feature(backbone, start, name) for name in NAMES]
    memory = [(one, int(label)) for one, label in zip(context.train.features(), context.train.labels, strict=True)]
    found = tried.classifier(context, {"context": start}, {}).logits(test, rows)
    for row in range(4):
        image = test.values[row]
        asks = list(every[row]) if options.get("query") == "patches" else [image]
        plain = backbone.logit_scale * torch.stack([image @ text for text in texts])
        wanted = plain + literal_added(asks, memory, texts, tried.hyper, backbone.logit_scale)
        assert float((found[row] - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())


def test_without_weight_or_images_it_is_promptfl(backbone: Backbone, make_context: Make) -> None:
    context, rows = make_context(), torch.arange(4)
    payload = {"context": start_context(backbone)}
    plain = make_method({"name": "promptfl", "m": M}).classifier(context, payload, {}).logits(context.train, rows)
    found = method(weight=0.0).classifier(context, payload, {}).logits(context.train, rows)
    assert float((found - plain).abs().max()) <= 1e-5 * float(plain.abs().max())
    none = replace(context, train=MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long)))
    alone = method().classifier(none, payload, {})
    assert float((alone.logits(context.train, rows) - plain).abs().max()) <= 1e-5 * float(plain.abs().max())
    assert alone.weights() is not None
    assert method().classifier(context, payload, {}).weights() is None


def test_it_trains_and_sends_what_promptfl_does(backbone: Backbone, make_context: Make) -> None:
    context, payload = make_context(8, epochs=2, batch_size=3), {"context": start_context(backbone)}
    found = method().train(context, payload, {})
    plain = make_method({"name": "promptfl", "m": M}).train(context, payload, {})
    assert torch.equal(found.update["context"], plain.update["context"])
    assert found.private == {}, "the memory is made of what is kept anyway"
    assert set(found.update) == {"context"}


@pytest.mark.parametrize("memory", ["features", "labels"])
def test_an_image_is_left_out_of_its_own_memory(memory: str, backbone: Backbone, make_context: Make) -> None:
    context = make_context(6, epochs=1, batch_size=3, learning_rate=0.05)
    tried, start = method(memory=memory, train_with_memory=True, kappa=10.0), {"context": start_context(backbone)}
    features, labels = context.train.features(), context.train.labels

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        texts = [literal.text_feature(backbone, tensors["context"], name) for name in NAMES]
        losses = []
        for row in rows.tolist():
            others = [(features[k], int(labels[k])) for k in range(6) if k != row]
            plain = backbone.logit_scale * torch.stack([features[row] @ text for text in texts])
            added = literal_added([features[row]], others, texts, tried.hyper, backbone.logit_scale)
            losses.append(literal.cross_entropy(plain + added, int(labels[row])))
        return torch.stack(losses).mean()

    found = tried.train(context, start, {})
    assert_moved_equally(found.update, literal.training(context, start, loss, 0.05), start)


def test_a_memory_of_nothing_but_the_image_itself_adds_nothing(backbone: Backbone, make_context: Make) -> None:
    context = make_context(1, batch_size=1)
    found = method(train_with_memory=True).train(context, {"context": start_context(backbone)}, {})
    plain = method().train(context, {"context": start_context(backbone)}, {})
    assert_moved_equally(found.update, plain.update, {"context": start_context(backbone)})


def test_the_memory_has_so_many_of_a_class_and_goes_by_name(make_context: Make) -> None:
    context = make_context(60)
    memory = Memory.of(context, 3)
    assert memory is not None
    counts = torch.bincount(memory.labels, minlength=len(NAMES))
    assert int(counts.max()) == 3
    assert torch.equal(memory.labels, context.train.labels[memory.rows])
    again = Memory.of(context, 3)
    assert again is not None
    assert torch.equal(memory.rows, again.rows)
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
    found = method(memory="labels").classifier(novel, payload, {}).logits(context.train, rows)
    assert float((found - plain).abs().max()) <= 1e-5 * float(plain.abs().max())


def test_what_it_needs_and_says() -> None:
    assert not method().needs.patch_tokens
    assert method(query="patches").needs.patch_tokens
    assert "reconstruction" in PFedPrompt.summary
