"""The reconstruction of DiPrompT: each of its steps written out, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.context import TextPromptClassifier
from promptfed.shared.methods.core.interface import ClientContext, ClientUpdate, Mixes
from promptfed.shared.methods.diprompt import DiPrompt
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit
from tests.support import literal
from tests.support.equality import assert_gradients

Make = Callable[..., ClientContext]
RATE = 0.1
PLAIN = {"epochs": 1, "batch_size": 20, "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0}


def method(**hyper: Any) -> DiPrompt:
    made = make_method({"name": "diprompt", "m": 2} | hyper)
    assert isinstance(made, DiPrompt)
    return made


def state_of(tried: DiPrompt, backbone: Backbone, seed: int = 1) -> Tensors:
    draws = torch.Generator().manual_seed(seed)
    shapes = {"global_prompt": (2,), "domain_prompts": (len(tried.hyper.candidates), 2), "query_prompt": (2,)}
    names = [spec.name for spec in tried.state_tensors()]
    return {name: torch.randn(*shapes[name], backbone.d_t, generator=draws) * 0.1 for name in names}


def literal_queries(backbone: Backbone, query: Tensor) -> list[Tensor]:
    return [
        literal.text_feature(backbone, query, words) for words in ("a photo of a", "a painting of a", "a sketch of a")
    ]


def test_every_step_of_a_task_is_as_written(make_context: Make) -> None:
    context = make_context(7, **PLAIN)
    tried, backbone = method(), context.backbone
    payload = state_of(tried, backbone)
    found = tried.train(context, payload, {})
    split, scale = context.train, backbone.logit_scale
    labels = split.labels.tolist()

    nearest = []  # (D1)
    for image, label in zip(split.features(), labels, strict=True):
        texts = [text.replace("{}", NAMES[label]) for text in tried.hyper.candidates]
        nearest.append(int((backbone.encode_text(texts) @ image).argmax()))
    assert tried.nearest(context).tolist() == nearest

    query = payload["query_prompt"].clone().requires_grad_()  # (D2)
    losses = [
        literal.cross_entropy(scale * torch.stack([torch.dot(image, q) for q in literal_queries(backbone, query)]), j)
        for image, j in zip(split.features(), nearest, strict=True)
    ]
    value = torch.stack(losses).mean()
    [slope] = torch.autograd.grad(value, [query])
    assert found.metrics["query_loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    assert_gradients((payload["query_prompt"] - found.update["query_prompt"]) / RATE, slope)

    asked = torch.stack(literal_queries(backbone, found.update["query_prompt"]))  # (D3), with the trained Q
    chosen = (split.features() @ asked.T).argmax(1).tolist()
    leaves = {name: payload[name].clone().requires_grad_() for name in ("global_prompt", "domain_prompts")}
    losses = []
    for image, label, j in zip(split.features(), labels, chosen, strict=True):
        for prompt in (leaves["global_prompt"], leaves["domain_prompts"][j]):
            texts = [literal.text_feature(backbone, prompt, name) for name in NAMES]
            losses.append(literal.cross_entropy(scale * torch.stack([torch.dot(image, t) for t in texts]), label))
    value = torch.stack(losses).sum() / len(labels)
    assert found.metrics["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    for (name, leaf), slope in zip(leaves.items(), torch.autograd.grad(value, list(leaves.values())), strict=True):
        assert_gradients((leaf.detach() - found.update[name]) / RATE, slope)
    shares = [found.metrics[f"domain_share_{j}"] for j in range(3)]
    assert shares == pytest.approx([chosen.count(j) / 7 for j in range(3)])


def test_who_never_chose_a_domain_sends_its_prompt_unchanged(make_context: Make) -> None:
    context = make_context(6, **(PLAIN | {"momentum": 0.9, "weight_decay": 0.1, "epochs": 3}))
    tried = method(query="fixed")
    direction = tried.queries(context.backbone, None)[1]
    noise = torch.randn(6, len(direction), generator=torch.Generator().manual_seed(4))
    near = F.normalize(direction + 0.01 * noise, dim=1)
    payload = state_of(tried, context.backbone)
    found = tried.train(replace(context, train=MadeUpSplit(near, context.train.labels)), payload, {})
    assert found.update["domain_prompts"][[0, 2]].equal(payload["domain_prompts"][[0, 2]])
    assert not found.update["domain_prompts"][1].equal(payload["domain_prompts"][1])
    assert set(found.update) == {"global_prompt", "domain_prompts"}, "there is no Q"
    assert "query_loss" not in found.metrics


@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_domain_prompts_move_slowly_at_the_coordinator(backbone: Backbone, beta: float) -> None:
    tried = method(beta=beta)
    state, sent = state_of(tried, backbone), [state_of(tried, backbone, seed) for seed in (2, 3)]
    [phase] = tried.phases(1, 1)
    updates = [ClientUpdate(name, weight, one) for name, weight, one in zip("ab", (0.25, 0.75), sent, strict=True)]
    after = tried.aggregate(state, phase, updates, weighted_mean, None)
    for name, one in after.items():
        mean = 0.25 * sent[0][name] + 0.75 * sent[1][name]
        wanted = beta * state[name] + (1 - beta) * mean if name == "domain_prompts" else mean
        assert torch.allclose(one, wanted, atol=1e-6)


def test_the_ensemble(make_context: Make) -> None:
    context = make_context(5)
    tried, backbone, scale = method(), context.backbone, context.backbone.logit_scale
    state = state_of(tried, backbone)
    classifier = tried.classifier(context, state, {})
    found = classifier.logits(context.train, torch.arange(5))
    assert torch.allclose(found.exp().sum(1), torch.ones(5), atol=1e-5)
    queries = torch.stack(literal_queries(backbone, state["query_prompt"]))
    for row, image in enumerate(context.train.features()):
        w = torch.softmax(scale * queries @ image, dim=0)
        texts = [
            torch.stack([literal.text_feature(backbone, prompt, name) for name in NAMES])
            for prompt in (state["global_prompt"], *state["domain_prompts"])
        ]
        each = [torch.softmax(scale * text @ image, dim=0) for text in texts]
        wanted = each[0] / 2 + sum(w[j] * each[j + 1] for j in range(3)) / 2
        assert torch.allclose(found[row].exp(), wanted, atol=1e-4)
    assert isinstance(classifier, Mixes)
    assert torch.allclose(classifier.shares(context.train, torch.arange(5)).sum(1), torch.ones(5), atol=1e-5)
    same = state | {"domain_prompts": state["global_prompt"].expand(3, -1, -1).clone()}
    plain = TextPromptClassifier(context, state["global_prompt"])
    wanted = plain.logits(context.train, torch.arange(5)).log_softmax(1)
    assert torch.allclose(tried.classifier(context, same, {}).logits(context.train, torch.arange(5)), wanted, atol=1e-3)


def test_its_count_is_the_tables() -> None:
    """FaST-PT counts 0.012 M up with ViT-L/14: G and three D."""
    sizes = {"M": 3, "m": 4, "d_t": 768}
    count = {
        query: sum(torch.Size(spec.resolve(sizes)).numel() for spec in method(m=4, query=query).state_tensors())
        for query in ("fixed", "learned")
    }
    assert count == {"fixed": 12_288, "learned": 15_360}
