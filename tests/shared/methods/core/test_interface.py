"""What every method has in common: lengths of prompts, ends of loops, who can do without whom."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.client_service.training.evaluation import answers, presences, probabilities
from promptfed.shared.clip import Backbone, BackboneError, shape_of
from promptfed.shared.clip.towers.text import ClassPrompts
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, make_method, pfedmoap, resolve_spec
from promptfed.shared.methods.core import costs, interface, training
from promptfed.shared.methods.core.interface import ClientInfo, MethodError, ServerContext, TensorSpec
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.methods.core.spec_backbone import described
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.methods.fast_pt import domains
from promptfed.shared.methods.fast_pt.domains import MixtureClassifier
from promptfed.shared.methods.fast_pt.style_transfer import EmbeddedSplit
from promptfed.shared.methods.plan import Reference
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, SpecError, TrainingSpec
from tests.shared.methods.conftest import NAMES, Make

LENGTHS = dict.fromkeys(("coop", "diprompt", "fedapt", "fedcocoop", "fedmaple", "fedotp", "fedpgp", "fedtpg"), 3)
LENGTHS |= dict.fromkeys(("pfedmoap", "pfedprompt", "plan", "promptfl", "promptfl_amp", "promptfl_ft"), 3)
LENGTHS |= dict.fromkeys(("fedkgcoop", "promptfl_per", "promptfl_prox", "promptfolio"), 3) | {"fast_pt": 6}


def test_so_many_vectors_stand_before_a_class_name() -> None:
    """General and domain prompts stand together in FaST-PT."""
    kinds = {name: {"m": 3} if "m" in METHODS[name].Hyper.model_fields else {} for name in METHODS.own()}
    found = {name: make_method({"name": name, **given}).prompt_length for name, given in kinds.items()}
    assert {name: length for name, length in found.items() if length} == LENGTHS


class Counted:
    """True once it was asked so often."""

    def __init__(self, most: int):
        self.asked, self.most = 0, most

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked > self.most


@pytest.mark.parametrize(("name", "protected"), [("promptfl", False), ("promptfl", True), ("fedlp", False)])
def test_every_loop_ends_where_it_is_told(name: str, protected: bool, make_context: Make, backbone: Backbone) -> None:
    method = make_method({"name": name, **({"m": 2} if name == "promptfl" else {})})
    phase = method.phases(2, 4)[0].name
    server = ServerContext(TrainingSpec(), shape_of(backbone), NAMES, (), 1, 4)
    state = method.initial_state(server, initial_draws(1))

    def train(stop: Counted) -> None:
        own = Protection(0.3, 1.0, 10, 5, 2, SeededNoise(1).stream()) if protected else None
        context = replace(make_context(10, batch_size=5, epochs=2), protection=own, phase=phase, round=2)
        trained = method.train(replace(context, cancelled=stop), state, {})
        assert not any(one.requires_grad for part in (trained.update, trained.private) for one in part.values())

    for most in (0, 1):
        stop = Counted(most)
        with pytest.raises(TaskCancelled):
            train(stop)
        assert stop.asked == most + 1
    train(Counted(99))


def test_answers_come_in_batches_that_can_be_broken_off() -> None:
    values = torch.linspace(-3, 3, 257 * 3).reshape(257, 3)
    classifier = cast(Any, SimpleNamespace(logits=lambda split, rows: values[rows]))
    for rows, batches in ((256, 1), (257, 2)):
        split, stop = cast(Any, [None] * rows), Counted(batches)
        predicted, confidence, shares = answers(classifier, split, stop)
        assert (stop.asked, predicted.tolist()) == (batches, [2] * rows)
        torch.testing.assert_close(shares, values[:rows].double().softmax(-1).float())
        torch.testing.assert_close(confidence, values[:rows].double().softmax(-1).amax(-1))
        assert probabilities(classifier, split).equal(values[:rows].double().softmax(-1))
        assert presences(classifier, split).equal(values[:rows].double().sigmoid())
        with pytest.raises(TaskCancelled):
            answers(classifier, split, Counted(batches - 1))


@pytest.mark.parametrize("kept", [True, False])
def test_the_reference_is_kept_or_made_anew_for_each_image(kept: bool) -> None:
    asked: list[int] = []

    def logits(indices: Tensor, images: Tensor) -> Tensor:
        asked.extend(indices.tolist())
        return torch.stack([images[:, 0], 2 * images[:, 0]], dim=1).requires_grad_()

    reference, rows = Reference(4, 2, logits, kept=kept), torch.tensor([3, 1])
    for _ in range(2):
        found = reference.of(rows, rows[:, None].float())
        torch.testing.assert_close(found, torch.log_softmax(torch.tensor([[3.0, 6.0], [1.0, 2.0]]), dim=-1))
        assert not found.requires_grad
    assert asked == ([3, 1] if kept else [3, 1, 3, 1])


def test_transferred_embeddings_are_features_alone() -> None:
    parts = [(torch.ones(2, 3), torch.tensor([0, 1])), (torch.zeros(1, 3), torch.tensor([2]))]
    split = EmbeddedSplit.of(parts)
    assert (len(split), split.labels.tolist(), split.features()[:, 0].tolist()) == (3, [0, 1, 2], [1, 1, 0])
    reads: list[tuple[str, Callable[[], Any]]] = [
        ("lengths", split.raw_features), ("images", lambda: split.images(torch.tensor([0]))),
        ("patches", lambda: split.patches(torch.tensor([0]))),
    ]  # fmt: skip
    for what, read in reads:
        with pytest.raises(MethodError, match=f"transferred embeddings have no {what}"):
            read()


def test_who_can_do_without_its_clients(backbone: Backbone) -> None:
    server = ServerContext(TrainingSpec(), shape_of(backbone), NAMES, (), 1, 4)

    def said(name: str) -> str | None:
        return interface.why_not_alone(make_method({"name": name}), lambda: server)

    assert (said("promptfl"), said("zero_shot")) == (None, None)
    assert said("coop") == "coop shares nothing: each client keeps what it has learned"
    assert said("fedrep") == "fedrep classifies with what each client keeps to itself, which the federation never sees"


def test_defaults_that_no_method_changes() -> None:
    method, state = make_method({"name": "promptfl"}), {"context": torch.zeros(1)}
    context = cast(Any, None)
    client = ClientInfo("a", "trainer", 1, ())
    assert all(same is state for same in (method.join(state, client, context), method.forget(state, client, context)))
    assert method.prepare(context, state) is state
    assert (method.variants(context, state, {}), method.measure(state, context, state, context)) == (
        {},
        interface.Measured(),
    )
    assert not interface.has_own(method, "join", "forget", "measure", "prepare")
    assert interface.has_own(make_method({"name": "fast_pt"}), "forget", "join")
    assert interface.layer("a", "o", "i") == (TensorSpec("a.weight", ("o", "i")), TensorSpec("a.bias", ("o",)))
    assert interface.layer("a", "d", join="_") == (TensorSpec("a_weight", ("d",)), TensorSpec("a_bias", ("d",)))
    given = interface.defaults(0, {"aggregation": {"weighting": "uniform"}, "none": {}})
    assert given == {"aggregation": {"weighting": "uniform"}}
    assert interface.defaults(3, epochs=2) == {"rounds": 3, "training": {"epochs": 2}}


SIZES = BackboneShape(
    d_t=8, d_v=12, d_e=8, text_layers=2, vision_layers=2, context_length=32, patch_size=4, patch_tokens=4, mlp_width=16,
    positions=5, heads_t=2, heads_v=2,
)  # fmt: skip
STARTS: dict[str, dict[str, float]] = {
    "diprompt": {"global_prompt": 0.0201, "domain_prompts": 0.0198, "query_prompt": 0.0227},
    "fast_pt": {"global_prompt": 0.0201, "domains": 6.006e18},
    "fedapt": {"meta_prompt": 0.019, "query_weight": 0.1945, "keys": 0.585, "domains": 6.006e18},
    "fedavg head": {"head_weight": 0.182}, "fedprox head": {"head_weight": 0.182}, "fedrod": {"head_weight": 0.182},
    "perfedavg head": {"head_weight": 0.182}, "fedclip": {"adapter_w1": 0.2068, "adapter_b1": 0.2584},
    "fedclipadapter": {"image_w1": 0.2328}, "fedlora": {"visual_a": 0.1717, "text_a": 0.2055},
    "fedcocoop": {"context": 0.0199, "meta_net.narrow.weight": 0.1971, "meta_net.narrow.bias": 0.1996},
    "fedmaple": {"text_prompts": 0.0198, "coupling_weight": 0.2074, "coupling_bias": 0.1943},
    "fedotp": {"global_context": 0.0199}, "fedpr": {"visual_prompts": 0.1855}, "fedvpt": {"visual_prompts": 0.1856},
    "fedtpg": {
        "queries": 0.0201, "norm_queries.weight": 1, "norm_classes.weight": 1, "to_query.weight": 0.3599,
        "to_key.weight": 0.3215, "to_value.weight": 0.3697, "to_output.weight": 0.0199, "norm_hidden.weight": 1,
        "widen.weight": 0.3425, "narrow.weight": 0.0188,
    },
    "fedvpt_deep": {"visual_prompts": 0.1988},
    "pfedpg": {
        "prompt_basis": 0.1856, "w_query": 0.2845, "w_key": 0.2777, "w_value": 0.3098, "w_output": 0.2998,
        "descriptors": 0.5151,
    },
    "plan": {
        "text_prompts": 0.0199, "visual_prompts": 0.0188, "text_aggregator.query": 0.0185,
        "text_aggregator.fq.w1": 0.2231, "text_aggregator.fa.w1": 0.2307, "visual_aggregator.query": 0.0194,
        "visual_aggregator.fq.w1": 0.166, "visual_aggregator.fa.w1": 0.1608,
    },
}  # fmt: skip
STARTS["fedtpg normal"] = STARTS["fedtpg"] | {
    "to_query.weight": 0.02, "to_key.weight": 0.0211, "to_value.weight": 0.015, "to_output.weight": 0.0189,
    "widen.weight": 0.0197, "narrow.weight": 0.0178,
}  # fmt: skip
STARTS["fedtpg xavier"] = STARTS["fedtpg"] | {"to_output.weight": 0.3516, "narrow.weight": 0.3332}
STARTS["plan alone"] = STARTS["plan"] | {  # without what is added to, both layers are drawn
    "text_aggregator.fq.w2": 0.6524, "text_aggregator.fa.w1": 0.216, "text_aggregator.fa.w2": 0.6058,
    "visual_aggregator.query": 0.0198, "visual_aggregator.fq.w1": 0.1594, "visual_aggregator.fq.w2": 0.5457,
    "visual_aggregator.fa.w1": 0.1678, "visual_aggregator.fa.w2": 0.5009,
}  # fmt: skip
"""Root mean squares of what is not zero before any training: uniform in ±1/√fan-in (their third of the square), or of
deviation 0.02; by whichever paper. The draws follow from the seed alone."""


OF_TEXTS = ("coop", "diprompt", "fast_pt", "fedapt", "fedcocoop", "fedkgcoop", "fedpgp", "fedtpg", "pfedmoap")
OF_TEXTS += ("pfedprompt", "promptfl", "promptfl_amp", "promptfl_ft", "promptfl_per", "promptfl_prox", "promptfolio")
OF_TOWERS = ("fedavg", "fedbabu", "fedprox", "fedrep", "fedrod", "perfedavg", "singleset_full")
NEEDED = dict.fromkeys(OF_TEXTS, "d_t") | dict.fromkeys(("fedmaple", "plan"), "d_t d_v text_layers vision_layers") | {
    **dict.fromkeys(OF_TOWERS, "d_v vision_layers patch_size mlp_width positions"), "fedotp": "d_t patch_tokens",
    **dict.fromkeys(("fedpr", "fedvpt", "fedvpt_deep", "pfedpg", "singleset_vpt"), "d_v vision_layers patch_size"),
    "fedlora": "d_t d_v text_layers vision_layers heads_v heads_t",
}  # fmt: skip
CLIENTS = tuple(ClientInfo(a, "trainer", 5, NAMES[:3], Domain(name=a, description=f"a {a} of a {{}}")) for a in "ab")


@pytest.mark.parametrize("name", METHODS.own())
def test_what_a_shape_does_not_say_is_refused_where_it_is_needed(name: str) -> None:
    needed, method = list[str](), make_method({"name": name})
    for field in set(SIZES.model_dump()) - {"d_e"}:
        shape = SIZES.model_copy(update={field: None})
        context = ServerContext(TrainingSpec(), shape, NAMES[:3], CLIENTS, 1, 4)
        for check in (lambda: method.dims(context), lambda: method.check_backbone(shape)):  # noqa: B023
            try:
                check()
            except MethodError:
                needed.append(field)
    assert set(needed) == set(NEEDED.get(name, "").split())


@pytest.mark.parametrize("name", STARTS)
def test_starts_are_drawn_as_wide_as_the_papers_say(name: str) -> None:
    kind, _, head = name.partition(" ")
    method = make_method(
        {"name": kind}
        | {"head": {"head": "linear"}, "alone": {"residual": False}}.get(head, {"start": head} if head else {})
    )
    clients = tuple(
        ClientInfo(a, "trainer", 5, NAMES[:3], Domain(name=a, description=f"a {a} of a {{}}")) for a in "ab"
    )
    state = method.initial_state(ServerContext(TrainingSpec(), SIZES, NAMES[:3], clients, 1, 4), initial_draws(3))
    drawn = {name: np.asarray(one, dtype=float) for name, one in state.items() if 0 not in one.shape}
    wide = {name: float(np.square(one).mean() ** 0.5) for name, one in drawn.items()}
    assert {name: value for name, value in wide.items() if value} == pytest.approx(STARTS[name], rel=0.01)
    for one in (one for name, one in drawn.items() if name not in ("domains", "keys")):
        assert one.size < 30 or one.std() == 0 or abs(one.mean()) < 0.3 * one.std(), "around zero"


@pytest.mark.parametrize(("held", "begins"), [(None, 4), (2, 2), (9, 4)])
def test_a_step_begins_with_as_many_images_as_have_fitted(
    held: int | None, begins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, leaf = list[Any](), SimpleNamespace(grad=1)
    monkeypatch.setattr(training, "in_parts", lambda *given: found.extend(given))
    backbone, cleared = SimpleNamespace(held_images=held), list[bool]()
    context = SimpleNamespace(backbone=backbone, label_loss=SimpleNamespace(leaf=leaf))
    optimizer = SimpleNamespace(zero_grad=lambda set_to_none: cleared.append(set_to_none))
    training._in_memory(cast(Any, context), cast(Any, optimizer), lambda: torch.ones(1), 4)
    compute, at_once, hold, refusal = found
    assert (float(compute(4)), at_once, type(refusal)) == (1.0, begins, MethodError)
    hold(3)
    assert (backbone.held_images, leaf.grad, cleared) == (3, None, [True])


def test_a_loaded_backbone_is_the_one_that_the_spec_names(backbone: Backbone) -> None:
    given = {"name": "x", "method": {"name": "promptfl", "m": 2}, "class_names": list(NAMES), "template": "a {}."}
    spec = resolve_spec(given | {"backbone": {"model": "promptfed-tiny"}})
    found, state = described(spec, backbone)
    assert (found.backbone.fingerprint, found.backbone.shape, state) == (backbone.fingerprint, shape_of(backbone), None)
    assert described(found, backbone)[0] == found
    for changes, said in (
        ({"fingerprint": "sha256:" + "0" * 64}, "backbone.fingerprint is sha256:0000"),
        (
            {"shape": shape_of(backbone).model_copy(update={"d_e": 9})},
            "backbone.shape is not that of the backbone here",
        ),
    ):
        named = spec.model_copy(update={"backbone": spec.backbone.model_copy(update=changes)})
        with pytest.raises(BackboneError, match=said):
            described(named, backbone)
    long = spec.model_copy(update={"template": "a " * 80 + "{}"})
    with pytest.raises(BackboneError):
        described(long, backbone)
    described(long.model_copy(update={"class_names": None}), backbone)


def test_what_noise_for_clients_costs_by_each_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Amplification counts for whoever does not know the participants alone."""
    monkeypatch.setattr(costs.accounting, "epsilon_of", lambda events, delta: [(e.q, e.z, e.count) for e in events])
    monkeypatch.setattr(costs.accounting, "replace_one_epsilon", lambda events, delta: ["one", events[0].count])
    raw = {"name": "x", "method": {"name": "promptfl"}, "aggregation": {"weighting": "uniform"}}
    raw["privacy"] = {"level": "client", "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-3, "accept_noise": True}
    for part, secret, nothing in (
        ({"min_clients": 9}, None, None),
        ({"min_clients": 9, "sampling": "poisson", "fraction": 0.5, "draw": "secret"}, [(0.5, 2.0, 3)], 0.0),
    ):
        spec = resolve_spec(raw | {"participation": part})
        measured = {"epsilon": [(1.0, 2.0, 3)], "epsilon_if_secret": secret, "epsilon_replace_one": ["one", 3]}
        assert costs.costs(spec, 3) == measured
        assert costs.costs(spec, 0) == {"epsilon": 0.0, "epsilon_if_secret": nothing, "epsilon_replace_one": 0.0}
    spec = spec.model_copy(update={"privacy": spec.privacy.model_copy(update={"epsilon": 3.0})})
    method = make_method({"name": "promptfl"})
    for allowed, found in ((7, 7), (spec.rounds, None)):
        monkeypatch.setattr(costs, "budget_rounds", lambda *given, allowed=allowed: allowed)
        assert costs.allowed_rounds(method, spec) == found

    def refuse(*given: Any) -> int:
        raise costs.accounting.PrivacyError("one round costs more")

    monkeypatch.setattr(costs, "budget_rounds", refuse)
    with pytest.raises(MethodError, match="one round costs more"):
        costs.allowed_rounds(method, spec)


def test_methods_that_cannot_or_need_not(backbone: Backbone, make_context: Make) -> None:
    context, rows = make_context(6), torch.arange(6)
    with pytest.raises(MethodError, match="zero_shot has nothing to train"):
        make_method({"name": "zero_shot"}).train(context, {}, {})
    with pytest.raises(SpecError, match="only multi_label is written here"):
        make_method({"name": "promptfl", "task": "detection"})
    for given, said in (({"m": 4, "context_init": " "}, "context_init is empty"), ({"context_init": "a b"}, "takes m")):
        with pytest.raises(SpecError, match=said):
            resolve_spec({"name": "x", "method": {"name": "promptfl", **given}})
    moap = make_method({"name": "pfedmoap", "m": 2})
    start = torch.full((2, backbone.d_t), 0.01)
    alone = moap.train(
        context, {"context": start, "experts": torch.zeros(0, 2, backbone.d_t)}, {"gate.x": torch.ones(1)}
    )
    plain = make_method({"name": "promptfl", "m": 2}).train(context, {"context": start}, {})
    assert alone.update["context"].equal(plain.update["context"]), "without experts it is PromptFL"
    assert set(alone.private) == {"gate.x", "own_context"}
    prompt = make_method({"name": "pfedprompt", "m": 2})
    nobody = replace(context, train=type(context.train)(torch.zeros(0, backbone.d_e), torch.zeros(0, dtype=torch.long)))
    for own, weights in ((nobody, True), (context, False)):
        classifier = cast(Any, prompt.classifier(own, {"context": start}, {}))
        assert (classifier.weights() is not None) is weights
        assert classifier.logits(context.train, rows).shape == (6, len(NAMES))
    dip = make_method({"name": "diprompt", "m": 2})
    dip.check_texts(backbone, NAMES, "a {}.")
    with pytest.raises(BackboneError):
        dip.check_texts(backbone, ("a " * 75,), "a {}.")


@pytest.mark.parametrize(("m", "words", "name", "fits"), [
    (4, 20, 10, True), (20, 3, 12, False), (12, 20, 5, False), (2, 20, 20, False), (2, 20, 3, True), (12, 4, 5, True),
])  # fmt: skip
def test_names_and_descriptions_fit_into_a_text(m: int, words: int, name: int, fits: bool, backbone: Backbone) -> None:
    """DiPrompT's texts are m vectors and a name, m vectors and a description, a description of a name."""
    candidates = ["a " * words + "{}", "a {}"]
    tried = make_method({"name": "diprompt", "m": m, "candidates": candidates})
    with contextlib.nullcontext() if fits else pytest.raises(BackboneError):
        tried.check_texts(backbone, ("a " * name,), "{}.")


@pytest.mark.parametrize("mixture", ["hard", "soft"])
def test_domains_are_mixed_by_their_shares(mixture: str, backbone: Backbone, make_context: Make) -> None:
    context, draws, rows = make_context(6), torch.Generator().manual_seed(2), torch.tensor([4, 0, 2])
    own, weight, bias = (
        torch.randn(*shape, generator=draws) * 0.1 for shape in ((2, 3, backbone.d_t), (2, backbone.d_e), (2,))
    )
    classifier = MixtureClassifier(context, None, own, weight * 30, bias, cast(Any, mixture), ("neon", "sketch"))
    features = context.train.features()[rows]
    scores = features @ (weight * 30).T + bias
    torch.testing.assert_close(classifier.shares(context.train, rows), scores.softmax(-1))
    wanted = []
    for feature, score in zip(features, scores, strict=True):
        mixed = own[score.argmax()] if mixture == "hard" else torch.einsum("k,kmd->md", score.softmax(-1), own)
        text = backbone.encode_prompts(mixed, backbone.class_prompts(NAMES, 3))
        wanted.append(backbone.logit_scale * text @ feature)
    torch.testing.assert_close(classifier.logits(context.train, rows), torch.stack(wanted), rtol=1e-4, atol=1e-4)
    told = classifier.weights()
    assert (told is None) is (mixture == "soft")
    assert told is None or set(told) == {"class_weights", "domain_weight", "domain_bias"}
    assert len(classifier.logits(context.train, rows[:0])) == 0


@pytest.mark.parametrize(("images", "parts"), [(3.0, [3]), (2.9, [2, 1]), (0.9, [1, 1, 1])])
def test_as_many_texts_as_fit_are_made_at_once(
    images: float, parts: list[int], backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, own, sizes = make_context(6), torch.zeros(2, 3, backbone.d_t), list[int]()
    given = (own, torch.zeros(2, backbone.d_e), torch.zeros(2))
    classifier = MixtureClassifier(context, None, *given, "soft")
    encode = classifier._encode
    monkeypatch.setattr(classifier, "_encode", lambda prompts: (sizes.append(len(prompts)), encode(prompts))[1])
    rows = domains.text_rows(backbone.class_prompts(NAMES, 3), backbone.supports.text_prefix)
    monkeypatch.setattr(domains, "CPU_ROWS", int(images * rows))
    classifier.logits(context.train, torch.arange(3))
    assert sizes == parts


def test_a_context_takes_its_rows_and_those_of_each_name_behind_it() -> None:
    """Three texts of 32 positions, whose contexts stand at 1 to 4 and whose ends at 7, 9 and 6."""
    prompts = ClassPrompts(("a", "b", "c"), 4, 1, torch.zeros(3, 32), torch.tensor([7, 9, 6]), ())
    assert (domains.text_rows(prompts, True), domains.text_rows(prompts, False)) == (4 + 3 + 5 + 2, 3 * 32)


@pytest.mark.parametrize(("words", "letters", "room", "said"), [
    (6, 0, 10, None), (7, 0, 10, " and 6 words: say it"), (7, 0, None, None), (1, domains.DESCRIPTION, None, None),
    (1, domains.DESCRIPTION + 1, None, "characters: say it in fewer"),
    (1, domains.DESCRIPTION + 1, 10, " and 6 words: say"),
])  # fmt: skip
def test_a_description_fits_into_every_tower(words: int, letters: int, room: int | None, said: str | None) -> None:
    text = "w" * letters or " ".join(["{}"] * words)
    shape = SIZES.model_copy(update={"context_length": room and room + domains.SPECIAL - 4})
    if said is None:
        domains._check_length(text, shape)
        return
    with pytest.raises(
        MethodError, match=f"the domain description has {words} words and {len(text)} characters"
    ) as end:
        domains._check_length(text, shape)
    assert said in str(end.value)


def test_some_methods_need_several_clients(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    def server(*clients: ClientInfo) -> ServerContext:
        return ServerContext(TrainingSpec(), SIZES, NAMES[:3], clients, 1, 4)

    by_domain, experts = make_method({"name": "fast_pt"}), make_method({"name": "pfedmoap", "m": 4})
    by_domain.check_clients(server(*CLIENTS))
    for alone in (CLIENTS[:1], (CLIENTS[0], replace(CLIENTS[1], role="evaluator"))):
        with pytest.raises(MethodError, match=r"all trainers are of one domain, 'a a of a \{\}': fast_pt needs"):
            by_domain.check_clients(server(*alone))
    monkeypatch.setattr(pfedmoap, "MANY_CLIENTS", 2)
    experts.check_clients(server(*CLIENTS))
    assert caplog.messages == []
    experts.check_clients(server(CLIENTS[0], replace(CLIENTS[1], role="evaluator")))
    experts.check_clients(server(*CLIENTS, replace(CLIENTS[0], name="c")))
    assert caplog.messages == [
        "pfedmoap with 1 trainer has no experts: it is promptfl",
        "pfedmoap keeps the contexts of 3 clients in its state: 0 MB each round",
    ]
