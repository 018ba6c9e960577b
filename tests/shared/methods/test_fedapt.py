"""FedAPT against its equations written out, its keys, and who comes late."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.coordinator.aggregation.rules import weighted_mean
from promptfed.shared.clip import Backbone
from promptfed.shared.messages import Domain
from promptfed.shared.methods import fedapt, make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.context import TextPromptClassifier
from promptfed.shared.methods.core.interface import Mixes
from promptfed.shared.methods.diprompt import DiPrompt
from promptfed.shared.methods.fedapt import FedAPT, domains_of, mixture_of
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.support import literal
from tests.support.equality import assert_gradients

RATE = 0.1


def method(**hyper: Any) -> FedAPT:
    made = make_method({"name": "fedapt", "m": 2} | hyper)
    assert isinstance(made, FedAPT)
    return made


def clients(*names: str, words: dict[str, str] | None = None) -> tuple[pf.ClientInfo, ...]:
    told = words or {}
    return tuple(
        pf.ClientInfo(name, "trainer", 5, NAMES, Domain(name=name, description=told[name]) if name in told else None)
        for name in sorted(names)
    )


def server(backbone: Backbone, *names: str, words: dict[str, str] | None = None) -> pf.ServerContext:
    shape = BackboneShape(d_t=backbone.d_t, d_e=backbone.d_e, context_length=backbone.context_length)
    return pf.ServerContext(TrainingSpec(), shape, NAMES, clients(*names, words=words), seed=3, rounds=4)


def started(tried: FedAPT, context: pf.ServerContext) -> Tensors:
    return tried.initial_state(context, initial_draws(3))


def handed(tried: FedAPT, state: Tensors, context: pf.ServerContext, name: str) -> Tensors:
    [phase] = tried.phases(1, 4)
    client = next(one for one in context.clients if one.name == name)
    return tried.payload(state, phase, client, context)


def test_the_mixture_by_hand() -> None:
    found = mixture_of(torch.tensor([[1.0, 2.0, 4.0]]), 1.0)[0]
    assert found.tolist() == pytest.approx([0.0995, 0.1915, 0.7091], abs=1e-4)
    moved = mixture_of(torch.tensor([[8.0, 9.0, 11.0]]), 1.0)[0]
    assert torch.allclose(found, moved), "a constant changes nothing"
    assert mixture_of(torch.full((1, 4), 0.3), 0.01)[0].tolist() == [0.25] * 4
    sharp = mixture_of(torch.randn(2000, 2, generator=torch.Generator().manual_seed(0)), 0.01)
    assert bool((sharp.amax(1) > 1 - 1e-6).all()), "of two, always one"


@pytest.mark.parametrize("specific", [True, False])
def test_a_step_is_the_equations(make_context: Make, specific: bool) -> None:
    context = make_context(4, epochs=1, batch_size=4, learning_rate=RATE, momentum=0.0, weight_decay=0.0)
    tried, roster = method(class_specific=specific), server(context.backbone, "hospital-a", "hospital-b")
    state = started(tried, roster)
    payload = handed(tried, state, roster, "hospital-a")
    found = tried.train(context, payload, {})
    leaves = {name: payload[name].clone().requires_grad_() for name in ("meta_prompt", "query_weight")}
    row, losses = state["domains"].tolist().index(fedapt.domain_key("hospital-a")), []
    for image, label in zip(context.train.features(), context.train.labels.tolist(), strict=True):
        logits = []
        for c, name in enumerate(NAMES):
            own = leaves["meta_prompt"][c] if specific else leaves["meta_prompt"]
            rows = torch.stack([own[i] * (1 + payload["key"][i]) for i in range(2)])
            logits.append(
                context.backbone.logit_scale * torch.dot(image, literal.text_feature(context.backbone, rows, name))
            )
        scores = torch.stack([torch.dot(q, 10 * image) for q in leaves["query_weight"]])
        losses.append(literal.cross_entropy(torch.stack(logits), label) + literal.cross_entropy(scores, row))
    value = torch.stack(losses).mean()
    assert found.metrics["loss"] == pytest.approx(float(value.detach()), rel=1e-4)
    slopes = torch.autograd.grad(value, list(leaves.values()))
    for name, slope in zip(leaves, slopes, strict=True):
        assert_gradients((payload[name] - found.update[name]) / RATE, slope)
    assert set(found.update) == {"meta_prompt", "query_weight"}


def literal_logits(context: pf.ClientContext, state: Tensors, image: Tensor, t: float) -> Tensor:
    u = state["query_weight"] @ image
    sd = ((u - u.mean()).square().sum() / (len(u) - 1)).sqrt()
    w = torch.softmax((u - u.mean()) / sd / t, dim=0)
    key = sum(w[j] * state["keys"][j] for j in range(len(w)))
    texts = [
        literal.text_feature(context.backbone, state["meta_prompt"][c] * (1 + key), name)
        for c, name in enumerate(NAMES)
    ]
    return torch.stack([context.backbone.logit_scale * torch.dot(image, text) for text in texts])


@pytest.mark.parametrize("t", [0.5, 0.01])
def test_it_classifies_by_each_images_domains(make_context: Make, t: float) -> None:
    context = make_context(6)
    tried = method(t=t)
    state = started(tried, server(context.backbone, "a", "b", "c"))
    found = tried.classifier(context, state, {}).logits(context.train, torch.arange(6))
    for row in range(6):
        wanted = literal_logits(context, state, context.train.features()[row], t)
        assert torch.allclose(found[row], wanted, atol=2e-3)


@pytest.mark.parametrize(("images", "parts"), [(6.0, [6]), (5.9, [5, 1]), (0.9, [1] * 6)])
def test_as_many_keys_as_fit_are_mixed_at_once(
    images: float, parts: list[int], make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, tried, sizes = make_context(6), method(t=5.0), list[int]()
    classifier: Any = tried.classifier(context, started(tried, server(context.backbone, "a", "b", "c")), {})
    text = classifier._text
    monkeypatch.setattr(classifier, "_text", lambda keys: (sizes.append(len(keys)), text(keys))[1])
    monkeypatch.setattr(fedapt, "TEXTS", int(images * len(NAMES)))
    classifier.logits(context.train, torch.arange(6))
    assert sizes == parts


@pytest.mark.parametrize(("hospitals", "t"), [("abc", 0.5), ("abc", 0.01), ("a", 0.5)])
def test_a_graph_that_mixes_the_keys_of_every_image_classifies_alike(
    hospitals: str, t: float, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, tried, rows = make_context(6), method(t=t), torch.tensor([4, 0, 3, 3])
    classifier = tried.classifier(context, started(tried, server(context.backbone, *hospitals)), {})
    found = classifier.logits(context.train, rows)
    monkeypatch.setattr(fedapt, "into_graph", lambda: True)
    torch.testing.assert_close(classifier.logits(context.train, rows), found, rtol=1e-4, atol=2e-3)


def test_own_is_under_ones_own_key(make_context: Make) -> None:
    context, tried = make_context(4), method()
    state = started(tried, server(context.backbone, "hospital-a", "b", "c"))
    row = state["domains"].tolist().index(fedapt.domain_key("hospital-a"))
    only = state | {"keys": state["keys"][row].expand(3, -1, -1).clone()}
    own = tried.variants(context, state, {})["own"].logits(context.train, torch.arange(4))
    wanted = tried.classifier(context, only, {}).logits(context.train, torch.arange(4))
    assert torch.allclose(own, wanted, atol=1e-4)
    nobody = MadeUpSplit(torch.zeros(0, context.backbone.d_e), torch.zeros(0, dtype=torch.long))
    assert tried.variants(replace(context, train=nobody), state, {}) == {}


def test_keys_do_not_depend_on_who_joins_when(backbone: Backbone) -> None:
    tried = method()
    both = server(backbone, "a", "b", "c")
    at_once = started(tried, both)
    later = started(tried, server(backbone, "a", "c"))
    newcomer = next(one for one in both.clients if one.name == "b")
    joined = tried.join(later, newcomer, both)
    assert joined["domains"].tolist()[:2] == later["domains"].tolist()
    by_domain = dict(zip(at_once["domains"].tolist(), at_once["keys"], strict=True))
    for domain, key in zip(joined["domains"].tolist(), joined["keys"], strict=True):
        assert key.equal(by_domain[domain])
    assert not joined["query_weight"][2].any()
    assert joined["query_weight"][:2].equal(later["query_weight"])
    assert tried.join(joined, newcomer, both) is joined
    assert 0 <= float(at_once["keys"].min()) < float(at_once["keys"].max()) < 1
    shapes = {spec.name: spec.resolve(tried.dims(both)) for spec in tried.state_tensors()}
    assert {name: tuple(tensor.shape) for name, tensor in joined.items()} == shapes


def test_the_same_wording_is_one_domain(backbone: Backbone) -> None:
    words = {"a": "a sketch of a {}", "b": "A  sketch of a {}.", "c": "a photo of a {}"}
    assert len(domains_of(clients("a", "b", "c", words=words))) == 2
    assert len(domains_of(clients("a", "b", "d", words=words))) == 2, "who describes none is one"
    with pytest.raises(pf.MethodError, match="of one domain"):
        method().check_clients(server(backbone, "a", "b", words=words))
    method().check_clients(server(backbone, "a", "c", words=words))
    one, other = clients("a", "c", words=words)
    for former in (None, one):
        method().admit(one, former, server(backbone, "c"))
    with pytest.raises(pf.MethodError, match="another domain"):
        method().admit(replace(one, domain=other.domain), one, server(backbone, "c"))
    with pytest.raises(pf.MethodError, match="took part as trainer: enrol the evaluator under another name"):
        method().admit(replace(one, role="evaluator"), one, server(backbone, "c"))


def test_each_client_is_handed_its_own_key(make_context: Make, backbone: Backbone) -> None:
    tried, roster = method(), server(backbone, "a", "b")
    state = started(tried, roster)
    keys = [handed(tried, state, roster, name)["key"] for name in ("a", "b")]
    assert not keys[0].equal(keys[1])
    assert keys[0].equal(state["keys"][0])
    [stranger] = clients("unseen")
    judged = tried.payload(state, None, stranger, roster)
    assert all(judged[name].equal(state[name]) for name in ("meta_prompt", "query_weight", "keys"))
    assert started(tried, server(backbone))["keys"].shape == (0, 2, backbone.d_t)
    with pytest.raises(pf.MethodError, match="does not know the domain"):
        tried.train(make_context(3), handed(tried, state, roster, "a"), {})


def test_a_class_without_a_prompt_is_refused_by_name(make_context: Make) -> None:
    context = make_context(3)
    state = started(method(), server(context.backbone, "a", "b"))
    turned = replace(context, class_names=NAMES[::-1], label_space=NAMES)
    plain = method().classifier(context, state, {}).logits(context.train, torch.arange(3))
    other = method().classifier(turned, state, {}).logits(context.train, torch.arange(3))
    assert torch.allclose(plain, other.flip(1), atol=1e-4)
    new = replace(context, class_names=("sun", "moon"), label_space=NAMES)
    with pytest.raises(pf.MethodError, match="no prompt for 'moon'"):
        method().classifier(new, state, {})
    one = method(class_specific=False)
    found = one.classifier(new, started(one, server(context.backbone, "a", "b")), {})
    assert found.logits(context.train, torch.arange(3)).shape == (3, 2)


# The reconstruction of DiPrompT: each of its steps written out, and what it refuses.


PLAIN = {"epochs": 1, "batch_size": 20, "learning_rate": RATE, "momentum": 0.0, "weight_decay": 0.0}


def method_of_diprompt(**hyper: Any) -> DiPrompt:
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
    tried, backbone = method_of_diprompt(), context.backbone
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
    tried = method_of_diprompt(query="fixed")
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
    tried = method_of_diprompt(beta=beta)
    state, sent = state_of(tried, backbone), [state_of(tried, backbone, seed) for seed in (2, 3)]
    [phase] = tried.phases(1, 1)
    updates = [pf.ClientUpdate(name, weight, one) for name, weight, one in zip("ab", (0.25, 0.75), sent, strict=True)]
    after = tried.aggregate(state, phase, updates, weighted_mean, None)
    for name, one in after.items():
        mean = 0.25 * sent[0][name] + 0.75 * sent[1][name]
        wanted = beta * state[name] + (1 - beta) * mean if name == "domain_prompts" else mean
        assert torch.allclose(one, wanted, atol=1e-6)


def test_the_ensemble(make_context: Make) -> None:
    context = make_context(5)
    tried, backbone, scale = method_of_diprompt(), context.backbone, context.backbone.logit_scale
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
