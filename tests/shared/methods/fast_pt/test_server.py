"""FaST-PT's server half: phases and payloads, rows of domains, averaging, warm starts, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.coordinator.aggregation.rules import weighted_mean
from promptfed.shared.clip import Backbone, BackboneError
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.interface import (
    AGGREGATE,
    ClientContext,
    ClientInfo,
    ClientUpdate,
    MethodError,
    NeedsBackbone,
)
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.methods.fast_pt import style_transfer as styles
from promptfed.shared.methods.fast_pt.domains import (
    OF_DOMAIN_PROMPTS,
    WORDS,
    described_domains,
    domain_key,
    domain_names,
    one_of,
    trainer_domains,
    wording,
)
from promptfed.shared.methods.fast_pt.method import FastPT
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import TEMPLATE, BackboneShape
from promptfed.shared.tensors.torch_tensors import decode, encode
from tests.shared.methods.conftest import NAMES
from tests.support import literal_fast_pt as literal
from tests.support import small_fast_pt as given
from tests.support.equality import assert_values


def test_domain_prompts_have_no_way_up_before_the_end() -> None:
    method = given.fast_pt()
    for round in range(1, 20):
        (phase,) = method.phases(round, 20)
        assert phase.name == "global"
        assert [spec.name for spec in phase.up] == ["global_prompt", "classifier_weight", "classifier_bias"]
    last = method.phases(20, 20)
    assert [phase.name for phase in last] == ["global", "domain_prompts"]
    assert [spec.name for spec in last[1].up] == ["domain_prompt"]
    assert last[1].ask == "all"


def test_the_start_has_a_zero_row_for_each_domain_in_order_of_name() -> None:
    method, context = given.fast_pt(), given.server(given.A, given.B, given.UNSEEN)
    state = method.initial_state(context, initial_draws(3))
    assert torch.equal(state["domains"], given.keys(given.NEON, given.SKETCH))
    assert state["classifier_weight"].shape == (2, 96)
    assert not state["classifier_weight"].any()
    assert torch.equal(state["classifier_bias"], torch.zeros(2))
    assert float(state["global_prompt"].std()) == pytest.approx(0.02, rel=0.2)
    assert state["domain_prompts"].shape == (0, 3, 112)
    assert state["listed_domains"].shape == (0,)
    assert decode(encode(state))[0].keys() == state.keys(), "empty tensors travel"
    assert set(state) == {spec.name for spec in method.state_tensors()}


def test_a_late_domain_appends_a_zero_row() -> None:
    method = given.fast_pt()
    state = method.initial_state(given.server(given.A, given.B), initial_draws(3))
    state |= {"classifier_weight": given.drawn(1, 2, 96), "classifier_bias": given.drawn(2, 2)}
    later = method.join(state, given.C, given.server(given.A, given.B, given.C))
    assert torch.equal(later["domains"], given.keys(given.NEON, given.SKETCH, given.CHALK)), (
        "though chalk comes first by name: no row moves"
    )
    assert torch.equal(later["classifier_weight"][:2], state["classifier_weight"])
    assert not later["classifier_weight"][2].any()
    assert later["classifier_bias"].tolist() == [*state["classifier_bias"].tolist(), 0.0]
    again = method.join(later, given.client("d", given.CHALK), given.server(given.A, given.B, given.C))
    assert torch.equal(again["domains"], later["domains"]), "a domain that is known needs no row"
    assert torch.equal(
        method.join(later, given.UNSEEN, given.server(given.A, given.B, given.UNSEEN))["domains"], later["domains"]
    )
    (phase,) = method.phases(1, 4)
    expected = method.expected_update(phase, given.A, given.server(given.A, given.B, given.C))
    assert expected["classifier_weight"] == ((3, 96), "float32")


def test_updates_are_averaged_and_the_list_is_made_of_those_who_answered(backbone: Backbone) -> None:
    method, context = given.fast_pt(), given.server(given.A, given.B, given.C)
    state = given.payload_of(backbone, rows=(given.CHALK, given.NEON, given.SKETCH))
    general, last = method.phases(4, 4)
    sent = [{spec.name: given.drawn(10 + i, *state[spec.name].shape) for spec in general.up} for i in range(2)]
    updates = [ClientUpdate("a", 0.25, sent[0]), ClientUpdate("b", 0.75, sent[1])]
    after = method.aggregate(state, general, iter(updates), weighted_mean, context)
    for spec in general.up:
        assert_values(after[spec.name], 0.25 * sent[0][spec.name] + 0.75 * sent[1][spec.name], 1e-6)
    assert torch.equal(after["domains"], state["domains"])
    prompts = {name: given.drawn(20 + i, 3, backbone.d_t) for i, name in enumerate("ac")}
    updates = [ClientUpdate(name, 0.5, {"domain_prompt": one}) for name, one in prompts.items()]
    ended = method.aggregate(after, last, iter(updates), weighted_mean, context)
    assert torch.equal(ended["listed_domains"], given.keys(given.CHALK, given.SKETCH)), (
        "in the order of the rows; b did not answer"
    )
    assert torch.equal(ended["domain_prompts"], torch.stack([prompts["c"], prompts["a"]]))
    alone = method.aggregate(after, last, iter(updates[1:]), weighted_mean, context)
    assert torch.equal(alone["domain_prompts"], prompts["c"][None]), "the weights of one domain's sum to one"


def test_merged_domains_are_one_row_and_one_prompt(backbone: Backbone) -> None:
    method = given.fast_pt(merge_domains=True)
    twin = given.client("d", Domain(name="drawing", description="A sketch of a {}."))
    method.admit(twin, None, given.server(given.A, given.B))
    context = given.server(given.A, given.B, twin)
    assert method.dims(context)["n"] == 2
    state = method.initial_state(context, initial_draws(3))
    (_, last) = method.phases(4, 4)
    prompts = [given.drawn(i, 3, backbone.d_t) for i in range(3)]
    updates = [
        ClientUpdate(name, weight, {"domain_prompt": one})
        for name, weight, one in zip("abd", (0.2, 0.5, 0.3), prompts, strict=True)
    ]
    ended = method.aggregate(state, last, iter(updates), weighted_mean, context)
    assert torch.equal(ended["listed_domains"], given.keys(given.NEON, given.SKETCH))
    assert_values(ended["domain_prompts"][1], 0.4 * prompts[0] + 0.6 * prompts[2])
    assert one_of(updates[:1], lambda updates: {}) == updates[0].tensors, "no rule changes what one has sent"


def test_words_can_start_the_global_prompt(backbone: Backbone) -> None:
    method = given.fast_pt(m=4, context_init="a photo of a")
    with pytest.raises(NeedsBackbone):
        method.initial_state(given.server(), initial_draws(3))
    made = method.initial_state_with(backbone, given.server(), initial_draws(3))
    assert torch.equal(made["global_prompt"], backbone.embed_words("a photo of a"))
    assert made["domains"].shape == (0,), "the command does not know the clients"
    started = method.adopt(made, given.server(given.A, given.B))
    assert torch.equal(started["domains"], given.keys(given.NEON, given.SKETCH))
    assert started["classifier_weight"].shape == (2, 96)


def test_a_warm_start_keeps_the_rows_of_domains_that_are_there(backbone: Backbone) -> None:
    method = given.fast_pt()
    before = given.payload_of(backbone, listed=(given.SKETCH, given.CHALK), rows=(given.SKETCH, given.CHALK))
    started = method.adopt(before, given.server(given.A, given.B))
    assert torch.equal(started["domains"], given.keys(given.NEON, given.SKETCH))
    assert torch.equal(started["classifier_weight"][1], before["classifier_weight"][0])
    assert not started["classifier_weight"][0].any()
    assert started["domain_prompts"].shape == (0, 3, backbone.d_t), "domain prompts are their federation's"
    others = [{"classifier_bias": torch.zeros(3)}, {"domains": torch.zeros(2)}, {"classifier_weight": torch.zeros(2)}]
    less = [{name: before[name] for name in names} for names in (before.keys() - {"domains"}, ["global_prompt"])]
    for broken in [*(before | one for one in others), *less]:
        assert method.adopt(broken, given.server(given.A, given.B)) is broken, (
            "left for the check that follows to refuse"
        )


def refused(method: FastPT, newcomer: ClientInfo, former: ClientInfo | None, *others: ClientInfo) -> str:
    with pytest.raises(MethodError) as caught:
        method.admit(newcomer, former, given.server(*others))
    return str(caught.value)


def test_a_description_that_another_trainer_has_is_refused() -> None:
    method, twin = given.fast_pt(), given.client("d", Domain(name="other", description="A sketch of a {}."))
    text = refused(method, twin, None, given.A, given.B)
    assert text == (
        "'a' describes its domain as 'A sketch of a {}.' too: say what sets this one apart, or set "
        "method.merge_domains to make them one domain"
    )
    method.admit(twin, None, given.server(given.B, given.client("unseen", given.SKETCH, "evaluator")))
    method.admit(given.client("unseen", given.SKETCH, "evaluator"), None, given.server(given.A, given.B))
    method.admit(given.client("unseen", None, "evaluator"), None, given.server(given.A, given.B))


@pytest.mark.parametrize("words", ["{}", "... {} -", ""])
def test_a_description_says_something(words: str) -> None:
    for domain in (Domain.model_construct(name="d", description=words), None):
        said = refused(given.fast_pt(), given.client("d", domain), None, given.B)
        assert "says nothing: use words, as in 'a sketch of a {}'" in said


def test_what_others_learn_depends_on_whether_there_are_domain_prompts() -> None:
    usual = (AGGREGATE, WORDS)
    assert given.fast_pt(prompts="global").disclosures == usual
    for prompts in ("domain", "both"):
        assert given.fast_pt(prompts=prompts).disclosures == (*usual, *OF_DOMAIN_PROMPTS)


def test_domains_have_their_names_as_far_as_they_are_known() -> None:
    known = [domain_key(one.description) for one in (given.SKETCH, given.CHALK)]
    own = given.CHALK.model_copy(update={"name": "mine"})
    for clients, domain, names in (
        ([given.A], own, ("domain 1", "sketch", "mine", "domain 4")),
        ([given.A], None, ("domain 1", "sketch", "domain 3", "domain 4")),
        ([given.A], given.SKETCH.model_copy(update={"name": "x"}), ("domain 1", "sketch", "domain 3", "domain 4")),
    ):
        assert domain_names([5, *known, 7], clients, domain) == names


def test_who_comes_back_has_the_same_domain_and_role() -> None:
    method = given.fast_pt()
    method.admit(given.A, given.A, given.server(given.B))
    assert refused(method, given.client("a", given.CHALK), given.A, given.B) == (
        "'a' took part with the domain 'a sketch of a {}': come back with it, or enrol 'a chalk drawing of a {}' "
        "under another name"
    )
    evaluator = given.client("a", given.SKETCH, "evaluator")
    assert "enrol the evaluator under another name" in refused(method, evaluator, given.A, given.B)
    assert "enrol the trainer under another name" in refused(method, given.A, evaluator, given.B)


def test_a_backbone_without_room_for_both_prompts_is_refused() -> None:
    context = given.server(given.A, given.B)
    small = replace(context, shape=BackboneShape(d_t=8, d_e=8, context_length=10))
    with pytest.raises(MethodError, match="no room for a class name"):
        given.fast_pt(m=4).dims(small)
    assert given.fast_pt(m=4, prompts="global").dims(small)["m"] == 4
    with pytest.raises(MethodError, match="text tower"):
        given.fast_pt().dims(given.server(given.A, given.B, d_t=None))


def test_a_trainer_without_a_description_is_told_so(make_context: given.Make, backbone: Backbone) -> None:
    with pytest.raises(MethodError, match="no domain description"):
        given.fast_pt().train(replace(make_context(), phase="global"), given.payload_of(backbone), {})


@pytest.mark.parametrize("words", ["very " * 39 + "{}", "x" * 198 + " {}"])
def test_a_description_that_no_text_tower_reads_is_refused_where_it_is_enrolled(words: str) -> None:
    context = given.server(given.B)
    context = replace(context, shape=context.shape.model_copy(update={"context_length": 32}))
    long = given.client("long", Domain(name="long", description=words))
    with pytest.raises(MethodError, match="say it in fewer"):
        given.fast_pt().admit(long, None, context)
    given.fast_pt().admit(given.A, None, context)


def test_one_peer_with_too_many_words_stops_nobody(make_context: given.Make, backbone: Backbone) -> None:
    """It got in, as 200 characters of rare signs are more tokens than words: nothing is transferred to it."""
    rare = Domain(name="rare", description="❄☃⚘♞ " * 12 + "{}")
    context = replace(
        make_context(), domain=given.SKETCH, peers=(given.A, given.B, given.client("rare", rare)), phase="global"
    )
    with pytest.raises(BackboneError):
        given.fast_pt().check_domain(backbone, context.class_names, rare)
    method = given.fast_pt()
    private = method.prepare(context, {})
    payload = {
        "global_prompt": given.drawn(1, 3, backbone.d_t), "classifier_weight": torch.zeros(3, backbone.d_e),
        "classifier_bias": torch.zeros(3), "domains": given.keys(given.NEON, rare, given.SKETCH),
    }  # fmt: skip
    result = method.train(context, payload, private)
    assert result.metrics["mst_too_long[rare]"] == 1.0
    assert "mst_too_long[neon]" not in result.metrics
    assert result.update["classifier_weight"].shape == (3, backbone.d_e)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.update.values())


# MST against its equations written out, and its life on a client: resumed, extended, reported once, stopped.


SKETCHED = Domain(name="sketch", description="a sketch of a {}")


NEON_LOOK = Domain(name="neon", description="a neon sign of a {}")


CHALKED = Domain(name="chalk", description="a chalk drawing of a {}")


def client_of_style_transfer(name: str, domain: Domain | None, role: Any = "trainer") -> ClientInfo:
    return ClientInfo(name, role, 10, (), domain)


def texts(backbone: Backbone, template: str) -> Tensor:
    return torch.stack([literal.whole_text(backbone, template, name) for name in NAMES])


@pytest.fixture
def sketcher(make_context: given.Make) -> ClientContext:
    return replace(make_context(10), domain=SKETCHED)


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 1.0), (0.2, 1.0), (0.2, 0.05)])
def test_the_loss_is_the_papers_with_its_gradients(
    weight: float, temperature: float, backbone: Backbone, sketcher: ClientContext
) -> None:
    hyper = styles.StyleTransferHyper(mst_weight=weight, mst_temperature=temperature)
    own, target, template = (texts(backbone, one) for one in (SKETCHED.description, NEON_LOOK.description, TEMPLATE))
    start = styles.new_transform(backbone.d_e, 7, torch.Generator().manual_seed(3))
    values, labels = sketcher.train.features(), sketcher.train.labels

    q = {name: one.clone().requires_grad_() for name, one in start.items()}
    found = styles.transfer_loss(styles.transform(q, values), values, labels, target - own, template, hyper)
    gradients = torch.autograd.grad(found, list(q.values()))

    p = {name: one.clone().requires_grad_() for name, one in start.items()}
    aligned, consistent = literal.transfer_terms(
        p, values, labels, list(own), list(target), list(template), temperature
    )
    wanted = weight * aligned + (1 - weight) * consistent
    literally = torch.autograd.grad(wanted, list(p.values()))

    assert_values(found, wanted)
    for one, other in zip(gradients, literally, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


def test_training_a_transform_equals_the_equations(backbone: Backbone, sketcher: ClientContext) -> None:
    hyper = styles.StyleTransferHyper(mst_hidden=5, mst_epochs=2, mst_batch_size=4, mst_learning_rate=0.01)
    values, labels = sketcher.train.features(), sketcher.train.labels
    trained = styles.StyleTransfer(sketcher, hyper).train(NEON_LOOK)
    assert not any(tensor.requires_grad for tensor in trained.values())
    draws = generator(3, "hospital-a", "style-transfer", "a neon sign of a {}")
    templates = (SKETCHED.description, NEON_LOOK.description, TEMPLATE)
    wanted = literal.trained_transform(
        backbone, values, labels, NAMES, templates, draws, hidden=5, epochs=2, batch_size=4, rate=0.01
    )
    found = {name.rsplit(".", 1)[1]: one for name, one in trained.items()}
    start = styles.new_transform(backbone.d_e, 5, generator(3, "hospital-a", "style-transfer", "a neon sign of a {}"))
    for name in styles.PARAMETERS:
        assert float((wanted[name] - start[name]).abs().max()) > 0.01
        assert_values(found[name], wanted[name], 1e-4)
    moved = styles.StyleTransfer(sketcher, hyper).apply(trained, NEON_LOOK)
    assert_values(moved, literal.transferred(wanted, values), 1e-4)
    assert_values(moved.norm(dim=1), torch.ones(10))


def test_the_hidden_width_is_half_of_d_e_by_default(backbone: Backbone, sketcher: ClientContext) -> None:
    trained = styles.StyleTransfer(sketcher, styles.StyleTransferHyper(mst_epochs=1)).train(NEON_LOOK)
    shapes = {name.rsplit(".", 1)[1]: tuple(one.shape) for name, one in trained.items()}
    d_e = backbone.d_e
    assert shapes == {"w1": (d_e // 2, d_e), "b1": (d_e // 2,), "w2": (d_e, d_e // 2), "b2": (d_e,), "report": (4,)}


def test_few_images_are_trained_on_in_as_many_steps(sketcher: ClientContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 epochs of batch 256 were 50 steps on 208 images, and 10 images had as many."""
    steps: list[int] = []
    transfer_loss = styles.transfer_loss

    def counted(moved: Tensor, *rest: Any) -> Tensor:
        steps.append(len(moved))
        return transfer_loss(moved, *rest)

    monkeypatch.setattr(styles, "transfer_loss", counted)
    styles.StyleTransfer(sketcher, styles.StyleTransferHyper()).train(NEON_LOOK)
    assert steps == [10] * 400
    steps.clear()
    styles.StyleTransfer(sketcher, styles.StyleTransferHyper(mst_steps=5, mst_batch_size=4)).train(NEON_LOOK)
    assert steps == [4, 4, 2, 4, 4]
    steps.clear()
    styles.StyleTransfer(sketcher, styles.StyleTransferHyper(mst_epochs=2, mst_batch_size=4)).train(NEON_LOOK)
    assert steps == [4, 4, 2, 4, 4, 2]


def test_a_transform_does_not_depend_on_when_or_beside_which_it_is_trained(sketcher: ClientContext) -> None:
    transfer = styles.StyleTransfer(sketcher, styles.StyleTransferHyper(mst_epochs=2))
    alone = transfer.train(NEON_LOOK)
    transfer.train(CHALKED)
    again = styles.StyleTransfer(
        replace(sketcher, round=4, phase="evaluation"), styles.StyleTransferHyper(mst_epochs=2)
    ).train(NEON_LOOK)
    assert all(torch.equal(alone[name], again[name]) for name in alone)
    with torch.no_grad():
        under_no_grad = transfer.train(NEON_LOOK)
    assert all(torch.equal(alone[name], under_no_grad[name]) for name in alone)


def test_a_stop_is_noticed_between_steps(sketcher: ClientContext) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(TaskCancelled):
        styles.StyleTransfer(replace(sketcher, cancelled=cancelled), styles.StyleTransferHyper()).train(NEON_LOOK)
    assert len(asked) == 4


def test_a_domain_is_its_wording() -> None:
    assert wording("A  Sketch of a {}.") == "a sketch of a {}"
    assert domain_key("A Sketch of a {}.") == domain_key("a sketch of a {}") != domain_key("a sketch of the {}")
    assert 0 <= domain_key("a {}") < 1 << 63


def test_domains_are_the_trainers_sorted_by_name_and_told_once() -> None:
    shout = Domain(name="a-sketch", description="A SKETCH OF A {}")
    clients = [
        client_of_style_transfer("a", SKETCHED),
        client_of_style_transfer("b", NEON_LOOK),
        client_of_style_transfer("c", shout),
        client_of_style_transfer("d", CHALKED, "evaluator"),
    ]
    clients.append(client_of_style_transfer("e", None, "evaluator"))
    assert [domain.name for domain in trainer_domains(clients).values()] == ["neon", "sketch"]
    assert [domain.name for domain in described_domains(clients).values()] == ["chalk", "neon", "sketch"]
    assert list(trainer_domains(clients)) == [domain_key(NEON_LOOK.description), domain_key(SKETCHED.description)]
