"""FaST-PT's server half: phases and payloads, rows of domains, averaging, warm starts, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from promptfed.coordinator.aggregation.weights import weighted_mean
from promptfed.shared.clip import Backbone, BackboneError
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.interface import ClientInfo, ClientUpdate, MethodError, NeedsBackbone
from promptfed.shared.methods.fast_pt.method import FastPT
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors.torch_tensors import decode, encode
from tests.support.equality import assert_values
from tests.support.small_fast_pt import (
    CHALK,
    NEON,
    ROWS,
    SKETCH,
    UNSEEN,
    A,
    B,
    C,
    Make,
    client,
    drawn,
    fast_pt,
    keys,
    payload_of,
    server,
)


def test_domain_prompts_have_no_way_up_before_the_end() -> None:
    method = fast_pt()
    for round in range(1, 20):
        (phase,) = method.phases(round, 20)
        assert phase.name == "global"
        assert [spec.name for spec in phase.up] == ["global_prompt", "classifier_weight", "classifier_bias"]
    last = method.phases(20, 20)
    assert [phase.name for phase in last] == ["global", "domain_prompts"]
    assert [spec.name for spec in last[1].up] == ["domain_prompt"]
    assert last[1].ask == "all"


def test_the_papers_count_of_numbers() -> None:
    """Table 4: 0.005 M at d = 768, three domains and prompts of four; the domain prompts come once, apart."""
    method = fast_pt(m=4)
    context = server(A, B, C, d_t=768, d_e=768)
    general, domain = method.phases(20, 20)
    count = {
        phase.name: sum(torch.Size(shape).numel() for shape, _ in method.expected_update(phase, A, context).values())
        for phase in (general, domain)
    }
    assert count == {"global": 5379, "domain_prompts": 3072}


def test_the_start_has_a_zero_row_for_each_domain_in_order_of_name() -> None:
    method, context = fast_pt(), server(A, B, UNSEEN)
    state = method.initial_state(context, initial_draws(3))
    assert torch.equal(state["domains"], keys(NEON, SKETCH))
    assert state["classifier_weight"].shape == (2, 96)
    assert not state["classifier_weight"].any()
    assert torch.equal(state["classifier_bias"], torch.zeros(2))
    assert float(state["global_prompt"].std()) == pytest.approx(0.02, rel=0.2)
    assert state["domain_prompts"].shape == (0, 3, 112)
    assert state["listed_domains"].shape == (0,)
    assert decode(encode(state))[0].keys() == state.keys(), "empty tensors travel"
    assert set(state) == {spec.name for spec in method.state_tensors()}


def test_a_late_domain_appends_a_zero_row() -> None:
    method = fast_pt()
    state = method.initial_state(server(A, B), initial_draws(3))
    state |= {"classifier_weight": drawn(1, 2, 96), "classifier_bias": drawn(2, 2)}
    later = method.join(state, C, server(A, B, C))
    assert torch.equal(later["domains"], keys(NEON, SKETCH, CHALK)), "though chalk comes first by name: no row moves"
    assert torch.equal(later["classifier_weight"][:2], state["classifier_weight"])
    assert not later["classifier_weight"][2].any()
    assert later["classifier_bias"].tolist() == [*state["classifier_bias"].tolist(), 0.0]
    again = method.join(later, client("d", CHALK), server(A, B, C))
    assert torch.equal(again["domains"], later["domains"]), "a domain that is known needs no row"
    assert torch.equal(method.join(later, UNSEEN, server(A, B, UNSEEN))["domains"], later["domains"])
    (phase,) = method.phases(1, 4)
    expected = method.expected_update(phase, A, server(A, B, C))
    assert expected["classifier_weight"] == ((3, 96), "float32")


def test_updates_are_averaged_and_the_list_is_made_of_those_who_answered(backbone: Backbone) -> None:
    method, context = fast_pt(), server(A, B, C)
    state = payload_of(backbone, rows=(CHALK, NEON, SKETCH))
    general, last = method.phases(4, 4)
    sent = [{spec.name: drawn(10 + i, *state[spec.name].shape) for spec in general.up} for i in range(2)]
    updates = [ClientUpdate("a", 0.25, sent[0]), ClientUpdate("b", 0.75, sent[1])]
    after = method.aggregate(state, general, iter(updates), weighted_mean, context)
    for spec in general.up:
        assert_values(after[spec.name], 0.25 * sent[0][spec.name] + 0.75 * sent[1][spec.name], 1e-6)
    assert torch.equal(after["domains"], state["domains"])
    prompts = {name: drawn(20 + i, 3, backbone.d_t) for i, name in enumerate("ac")}
    updates = [ClientUpdate(name, 0.5, {"domain_prompt": one}) for name, one in prompts.items()]
    ended = method.aggregate(after, last, iter(updates), weighted_mean, context)
    assert torch.equal(ended["listed_domains"], keys(CHALK, SKETCH)), "in the order of the rows; b did not answer"
    assert torch.equal(ended["domain_prompts"], torch.stack([prompts["c"], prompts["a"]]))


def test_merged_domains_are_one_row_and_one_prompt(backbone: Backbone) -> None:
    method = fast_pt(merge_domains=True)
    twin = client("d", Domain(name="drawing", description="A sketch of a {}."))
    method.admit(twin, None, server(A, B))
    context = server(A, B, twin)
    assert method.dims(context)["n"] == 2
    state = method.initial_state(context, initial_draws(3))
    (_, last) = method.phases(4, 4)
    prompts = [drawn(i, 3, backbone.d_t) for i in range(3)]
    updates = [
        ClientUpdate(name, weight, {"domain_prompt": one})
        for name, weight, one in zip("abd", (0.2, 0.5, 0.3), prompts, strict=True)
    ]
    ended = method.aggregate(state, last, iter(updates), weighted_mean, context)
    assert torch.equal(ended["listed_domains"], keys(NEON, SKETCH))
    assert_values(ended["domain_prompts"][1], 0.4 * prompts[0] + 0.6 * prompts[2])


def test_payloads_hold_what_the_phase_needs(backbone: Backbone) -> None:
    method, context, state = fast_pt(), server(A, B), payload_of(backbone, listed=ROWS)
    general, last = method.phases(4, 4)
    found = {phase.name: set(method.payload(state, phase, A, context)) for phase in (general, last)}
    assert found == {
        "global": {"global_prompt", "classifier_weight", "classifier_bias", "domains"},
        "domain_prompts": {"global_prompt"},
    }
    assert set(method.payload(state, None, UNSEEN, context)) == set(state)


def test_words_can_start_the_global_prompt(backbone: Backbone) -> None:
    method = fast_pt(m=4, context_init="a photo of a")
    with pytest.raises(NeedsBackbone):
        method.initial_state(server(), initial_draws(3))
    made = method.initial_state_with(backbone, server(), initial_draws(3))
    assert torch.equal(made["global_prompt"], backbone.embed_words("a photo of a"))
    assert made["domains"].shape == (0,), "the command does not know the clients"
    started = method.adopt(made, server(A, B))
    assert torch.equal(started["domains"], keys(NEON, SKETCH))
    assert started["classifier_weight"].shape == (2, 96)


def test_a_warm_start_keeps_the_rows_of_domains_that_are_there(backbone: Backbone) -> None:
    method = fast_pt()
    before = payload_of(backbone, listed=(SKETCH, CHALK), rows=(SKETCH, CHALK))
    started = method.adopt(before, server(A, B))
    assert torch.equal(started["domains"], keys(NEON, SKETCH))
    assert torch.equal(started["classifier_weight"][1], before["classifier_weight"][0])
    assert not started["classifier_weight"][0].any()
    assert started["domain_prompts"].shape == (0, 3, backbone.d_t), "domain prompts are their federation's"
    broken = before | {"classifier_bias": torch.zeros(3)}
    assert method.adopt(broken, server(A, B)) is broken, "left for the check that follows to refuse"
    less = {"global_prompt": before["global_prompt"]}
    assert method.adopt(less, server(A, B)) is less


# Refusals


def refused(method: FastPT, newcomer: ClientInfo, former: ClientInfo | None, *others: ClientInfo) -> str:
    with pytest.raises(MethodError) as caught:
        method.admit(newcomer, former, server(*others))
    return str(caught.value)


def test_a_description_that_another_trainer_has_is_refused() -> None:
    method, twin = fast_pt(), client("d", Domain(name="other", description="A sketch of a {}."))
    text = refused(method, twin, None, A, B)
    assert text == (
        "'a' describes its domain as 'A sketch of a {}.' too: say what sets this one apart, or set "
        "method.merge_domains to make them one domain"
    )
    method.admit(twin, None, server(B, client("unseen", SKETCH, "evaluator")))
    method.admit(client("unseen", SKETCH, "evaluator"), None, server(A, B))
    method.admit(client("unseen", None, "evaluator"), None, server(A, B))


def test_a_description_must_say_something() -> None:
    text = refused(fast_pt(), client("d", Domain(name="d", description=" {}. ")), None)
    assert text == "the domain description ' {}. ' says nothing: use words, as in 'a sketch of a {}'"


def test_who_comes_back_has_the_same_domain_and_role() -> None:
    method = fast_pt()
    method.admit(A, A, server(B))
    assert refused(method, client("a", CHALK), A, B) == (
        "'a' took part with the domain 'a sketch of a {}': come back with it, or enrol 'a chalk drawing of a {}' "
        "under another name"
    )
    evaluator = client("a", SKETCH, "evaluator")
    assert "enrol the evaluator under another name" in refused(method, evaluator, A, B)
    assert "enrol the trainer under another name" in refused(method, A, evaluator, B)


def test_one_domain_is_no_federation() -> None:
    method = fast_pt(merge_domains=True)
    with pytest.raises(MethodError, match=r"all trainers are of one domain, 'a sketch of a \{\}'"):
        method.check_clients(server(A, client("d", SKETCH), UNSEEN))
    method.check_clients(server(A, B))


def test_a_backbone_without_room_for_both_prompts_is_refused() -> None:
    context = server(A, B)
    small = replace(context, shape=BackboneShape(d_t=8, d_e=8, context_length=10))
    with pytest.raises(MethodError, match="no room for a class name"):
        fast_pt(m=4).dims(small)
    assert fast_pt(m=4, prompts="global").dims(small)["m"] == 4
    with pytest.raises(MethodError, match="text tower"):
        fast_pt().dims(server(A, B, d_t=None))


def test_a_trainer_without_a_description_is_told_so(make_context: Make, backbone: Backbone) -> None:
    with pytest.raises(MethodError, match="no domain description"):
        fast_pt().train(replace(make_context(), phase="global"), payload_of(backbone), {})


@pytest.mark.parametrize("words", ["very " * 39 + "{}", "x" * 198 + " {}"])
def test_a_description_that_no_text_tower_reads_is_refused_where_it_is_enrolled(words: str) -> None:
    context = server(B)
    context = replace(context, shape=context.shape.model_copy(update={"context_length": 32}))
    long = client("long", Domain(name="long", description=words))
    with pytest.raises(MethodError, match="say it in fewer"):
        fast_pt().admit(long, None, context)
    fast_pt().admit(A, None, context)


def test_one_peer_with_too_many_words_stops_nobody(make_context: Make, backbone: Backbone) -> None:
    """It got in, as 200 characters of rare signs are more tokens than words: nothing is transferred to it."""
    rare = Domain(name="rare", description="❄☃⚘♞ " * 12 + "{}")
    context = replace(make_context(), domain=SKETCH, peers=(A, B, client("rare", rare)), phase="global")
    with pytest.raises(BackboneError):
        fast_pt().check_domain(backbone, context.class_names, rare)
    method = fast_pt()
    private = method.prepare(context, {})
    payload = {
        "global_prompt": drawn(1, 3, backbone.d_t),
        "classifier_weight": torch.zeros(3, backbone.d_e),
        "classifier_bias": torch.zeros(3),
        "domains": keys(NEON, rare, SKETCH),
    }
    result = method.train(context, payload, private)
    assert result.metrics["mst_too_long[rare]"] == 1.0
    assert "mst_too_long[neon]" not in result.metrics
    assert result.update["classifier_weight"].shape == (3, backbone.d_e)
    assert all(bool(torch.isfinite(tensor).all()) for tensor in result.update.values())
