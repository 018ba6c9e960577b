"""FedAPT against its equations written out, its keys, and who comes late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip import Backbone
from promptfed.shared.messages import Domain
from promptfed.shared.methods import fedapt, make_method
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, MethodError, ServerContext
from promptfed.shared.methods.fedapt import FedAPT, domains_of, mixture_of, scaled
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit
from tests.support import literal
from tests.support.equality import assert_gradients

Make = Callable[..., ClientContext]
RATE = 0.1


def method(**hyper: Any) -> FedAPT:
    made = make_method({"name": "fedapt", "m": 2} | hyper)
    assert isinstance(made, FedAPT)
    return made


def clients(*names: str, words: dict[str, str] | None = None) -> tuple[ClientInfo, ...]:
    told = words or {}
    return tuple(
        ClientInfo(name, "trainer", 5, NAMES, Domain(name=name, description=told[name]) if name in told else None)
        for name in sorted(names)
    )


def server(backbone: Backbone, *names: str, words: dict[str, str] | None = None) -> ServerContext:
    shape = BackboneShape(d_t=backbone.d_t, d_e=backbone.d_e, context_length=backbone.context_length)
    return ServerContext(TrainingSpec(), shape, NAMES, clients(*names, words=words), seed=3, rounds=4)


def started(tried: FedAPT, context: ServerContext) -> Tensors:
    return tried.initial_state(context, initial_draws(3))


def handed(tried: FedAPT, state: Tensors, context: ServerContext, name: str) -> Tensors:
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


def literal_logits(context: ClientContext, state: Tensors, image: Tensor, t: float, hard: bool) -> Tensor:
    u = state["query_weight"] @ image
    sd = ((u - u.mean()).square().sum() / (len(u) - 1)).sqrt()
    w = torch.softmax((u - u.mean()) / sd / t, dim=0)
    key = state["keys"][int(w.argmax())] if hard else sum(w[j] * state["keys"][j] for j in range(len(w)))
    texts = [
        literal.text_feature(context.backbone, state["meta_prompt"][c] * (1 + key), name)
        for c, name in enumerate(NAMES)
    ]
    return torch.stack([context.backbone.logit_scale * torch.dot(image, text) for text in texts])


@pytest.mark.parametrize(("mixture", "t"), [("soft", 0.5), ("soft", 0.01), ("hard", 0.5)])
def test_it_classifies_by_each_images_domains(make_context: Make, mixture: str, t: float) -> None:
    context = make_context(6)
    tried = method(mixture=mixture, t=t)
    state = started(tried, server(context.backbone, "a", "b", "c"))
    found = tried.classifier(context, state, {}).logits(context.train, torch.arange(6))
    for row in range(6):
        wanted = literal_logits(context, state, context.train.features()[row], t, mixture == "hard")
        assert torch.allclose(found[row], wanted, atol=2e-3)


def test_without_adaption_it_is_the_mean_key_and_own_is_ones_own(make_context: Make) -> None:
    context = make_context(4)
    tried = method(adaptive=False)
    state = started(tried, server(context.backbone, "hospital-a", "b", "c"))
    found = tried.classifier(context, state, {}).logits(context.train, torch.arange(4))
    same = state | {"keys": state["keys"].mean(0).expand(3, -1, -1).clone()}
    assert torch.allclose(
        found, method().classifier(context, same, {}).logits(context.train, torch.arange(4)), atol=1e-4
    )
    row = state["domains"].tolist().index(fedapt.domain_key("hospital-a"))
    only = state | {"keys": state["keys"][row].expand(3, -1, -1).clone()}
    own = tried.variants(context, state, {})["own"].logits(context.train, torch.arange(4))
    wanted = method().classifier(context, only, {}).logits(context.train, torch.arange(4))
    assert torch.allclose(own, wanted, atol=1e-4)


def test_without_keys_it_is_a_context_for_every_class() -> None:
    prompt = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
    assert scaled(prompt, torch.zeros(2, 4)).equal(prompt)


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
    with pytest.raises(MethodError, match="of one domain"):
        method().check_clients(server(backbone, "a", "b", words=words))
    one, other = clients("a", "c", words=words)
    with pytest.raises(MethodError, match="another domain"):
        method().admit(replace(one, domain=other.domain), one, server(backbone, "c"))


def test_each_client_is_handed_its_own_key(make_context: Make, backbone: Backbone) -> None:
    tried, roster = method(), server(backbone, "a", "b")
    state = started(tried, roster)
    keys = [handed(tried, state, roster, name)["key"] for name in ("a", "b")]
    assert not keys[0].equal(keys[1])
    assert keys[0].equal(state["keys"][0])
    with pytest.raises(MethodError, match="does not know the domain"):
        tried.train(make_context(3), handed(tried, state, roster, "a"), {})


def test_a_class_without_a_prompt_is_refused_by_name(make_context: Make) -> None:
    context = make_context(3)
    state = started(method(), server(context.backbone, "a", "b"))
    turned = replace(context, class_names=NAMES[::-1], label_space=NAMES)
    plain = method().classifier(context, state, {}).logits(context.train, torch.arange(3))
    other = method().classifier(turned, state, {}).logits(context.train, torch.arange(3))
    assert torch.allclose(plain, other.flip(1), atol=1e-4)
    new = replace(context, class_names=("sun", "moon"), label_space=NAMES)
    with pytest.raises(MethodError, match="no prompt for 'moon'"):
        method().classifier(new, state, {})
    one = method(class_specific=False)
    found = one.classifier(new, started(one, server(context.backbone, "a", "b")), {})
    assert found.logits(context.train, torch.arange(3)).shape == (3, 2)


def test_the_query_learns_to_tell_domains_apart(make_context: Make) -> None:
    """Two clients of features around opposite directions: after some rounds each image finds its own domain."""
    tried = method(class_specific=False)
    base = make_context(8, epochs=3, batch_size=8, learning_rate=0.1)
    roster = server(base.backbone, "a", "b")
    state = started(tried, roster)
    draws = torch.Generator().manual_seed(0)
    side = F.normalize(torch.randn(base.backbone.d_e, generator=draws), dim=0)
    splits = {}
    for name, sign in (("a", 1), ("b", -1)):
        near = F.normalize(sign * side + 0.3 * torch.randn(8, base.backbone.d_e, generator=draws) / 4, dim=1)
        splits[name] = MadeUpSplit(near, torch.arange(8) % 5)
    for _ in range(4):
        sent = [
            tried.train(replace(base, client=n, train=split), handed(tried, state, roster, n), {}).update
            for n, split in splits.items()
        ]
        state = state | {key: (sent[0][key] + sent[1][key]) / 2 for key in sent[0]}
    for row, name in enumerate(("a", "b")):
        shares = mixture_of(splits[name].values @ state["query_weight"].T, 0.01)
        assert bool((shares[:, row] > 0.99).all())


def test_its_size_is_the_papers() -> None:
    """PLAN's author counts 0.534 M on OfficeHome with three sources."""
    shape = BackboneShape(d_t=512, d_e=512, context_length=77)
    names = tuple(f"class {number}" for number in range(65))
    context = ServerContext(TrainingSpec(), shape, names, clients("a", "b", "c"), seed=0, rounds=1)
    tried = make_method({"name": "fedapt"})
    [phase] = tried.phases(1, 1)
    sizes = tried.dims(context)
    numbers = [torch.Size(spec.resolve(sizes)).numel() for spec in phase.up]
    assert sum(numbers) == 534_016
