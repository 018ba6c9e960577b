"""What a federation knows of its clients: whose names, classes and descriptions count, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from promptfed.coordinator.domain.federation import Client, Federation, differing, kept_method, new_federation, rules_of
from promptfed.coordinator.domain.round_machine import TRAIN, step_answers_needed, steps_of
from promptfed.coordinator.domain.run_state import Member, PhasePlan
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core import costs
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.spec import BackboneShape, merged

ABC = ("ant", "bee", "cat")


def client(name: str, classes: tuple[str, ...] = ABC) -> Client:
    return Client(name, "trainer", 10, classes, id=f"cli-{name}", secret_digest=f"secret-{name}")


def federation(members: dict[str, Member], clients: list[Client], **changes: Any) -> Federation:
    made = new_federation("fed-1", resolve_spec({"name": "eyes", "method": {"name": "promptfl"}} | changes))
    made = replace(made, shape=BackboneShape(d_t=8, d_e=8)).with_clients(*clients)
    return replace(made, run=replace(made.run, members=members))


IN = Member("trainer", joined=True)
NAMES = ("d", "c", "b", "a")
MEMBERS = {
    "d": IN, "c": Member("trainer", active=False, joined=True), "b": Member("evaluator", joined=True),
    "a": Member("trainer"),
}  # fmt: skip


def test_whom_the_state_includes_is_described_to_others_while_active() -> None:
    known = federation(MEMBERS, [client(name) for name in NAMES])
    assert [peer.name for peer in known.peers()] == ["b", "d"], "neither who was withdrawn nor who is new"
    assert [(info.name, info.active) for info in known.context().clients] == [("b", True), ("c", False), ("d", True)]
    assert known.context() is known.context(), "made once, while it would come out the same"
    later = replace(known, run=replace(known.run, members={**MEMBERS, "a": IN}))
    assert [info.name for info in later.context().clients] == ["a", "b", "c", "d"]
    assert [info.name for info in known.context(["d", "a"]).clients] == ["a", "d"]
    coming = known.with_clients(client("e")).context(["e", "c"]).clients
    assert [(info.name, info.active) for info in coming] == [("c", False), ("e", True)], "one is just enrolling"


def test_class_names_are_those_of_all_trainers_that_joined_in_the_first_one_s_order() -> None:
    turned = ABC[::-1]
    given = [client("d"), client("c", turned), client("b", ("x", "y")), client("a", ("x", "y"))]
    assert federation(MEMBERS, given).class_names == turned, "of c, before d; b evaluates, and a is new"
    assert federation({**MEMBERS, "a": IN}, given).class_names is None, "they differ"
    assert federation({}, []).class_names is None
    assert federation({"d": IN}, given).class_names == ABC, "those of one alone"
    listed = federation(MEMBERS, given, class_names=["p", "q"])
    assert listed.class_names == ("p", "q")
    assert (listed.may_differ, federation(MEMBERS, given).may_differ) == (True, False)


def test_a_federation_names_what_differs_most_common_first() -> None:
    assert differing({"a": ABC, "b": ABC[::-1]}) is None
    assert differing({"a": ABC, "b": ("x",)}) == "the trainers' class names differ (a: 'ant', 'bee', 'cat' | b: 'x')"
    many = tuple("abcdefghi")
    assert str(differing({"a": ABC, "b": many})).endswith("b: 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', and 1 more)")
    given = {"z": ("bee", "ant", "dog"), "m": ABC, "k": ABC[::-1], "c": ("ant", "bee", "emu")}
    sides = "k, m: 'cat' | c: 'emu' | z: 'dog'"
    assert differing(given) == f"the trainers' class names differ beside 2 that all have ({sides})"


def test_classes_that_were_named_are_counted_once_and_go_with_their_clients() -> None:
    known = federation(dict.fromkeys("ab", IN), [client("a"), client("b", ("ant", "owls"))])
    both = known.recounted()
    assert (both.named, both.named_bytes) == ({*ABC, "owls"}, 13)
    assert both.with_named(ABC) is both
    gone = replace(both, run=replace(both.run, members={"a": IN, "b": replace(IN, active=False)})).recounted()
    assert (gone.named, gone.named_bytes) == (set(ABC), 9)


def test_a_client_is_found_by_its_newest_secret_alone() -> None:
    known = federation({"a": IN}, [client("a")])
    changed = known.with_clients(replace(client("a"), secret_digest="other"))
    assert (set(known.by_secret), set(changed.by_secret)) == ({"secret-a"}, {"other"})
    void = changed.with_clients(replace(client("a"), secret_digest=None))
    assert (void.by_secret, set(void.with_clients(client("a")).by_secret)) == ({}, {"secret-a"})


def test_an_update_may_have_what_the_spec_says_or_the_method_needs_once_the_shape_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "exchanged", lambda method, context: (0, 100 << 20))
    known, own = federation({}, []), federation({}, [], admission={"max_bytes": 5_000_000})
    assert replace(known, shape=None).update_limit == 64 << 20, "the default"
    assert known.update_limit == int(1.1 * (100 << 20)) + costs.HEADER
    assert own.update_limit == 5_000_000


@pytest.mark.parametrize("cohort", [3, 10])
def test_each_step_of_a_secure_sum_needs_so_many(cohort: int) -> None:
    spec = SecureAggregationSpec(threshold=0.6, minimum=5)
    steps = {plan.kind: plan.secure for plan in steps_of([PhasePlan("train")], spec)[:5]}
    shares = {3: 2, 10: 6}[cohort]  # ⌈0.6·K⌉
    wanted = {"train": 5, "share": max(shares, 5), "mask": max(shares, 5), "confirm": shares, "unmask": shares}
    assert {kind: step_answers_needed(spec, step, cohort) for kind, step in steps.items()} == wanted
    assert step_answers_needed(spec, steps["confirm"], 2) == 2, "two at least"


def test_an_attempt_s_first_step_alone_asks_whom_it_likes() -> None:
    plans = steps_of([PhasePlan("train"), PhasePlan("second", "all")], SecureAggregationSpec())
    assert len(plans) == 20
    free = [(plan.name, plan.ask) for plan in plans if not plan.is_fixed]
    assert free == [("train", "answered"), ("second", "all")]
    assert [plan.secure.index for plan in plans if not plan.is_fixed] == [TRAIN, TRAIN]
    assert [(plan.secure.first, plan.secure.following, plan.secure.after) for plan in plans[::5]] == [
        (0, 5, 10), (5, None, 10), (10, 15, 20), (15, None, 20),
    ]  # fmt: skip
    assert not PhasePlan("train").is_fixed


SUMS = {"secure_aggregation": {"minimum": 4}, "participation": {"min_clients": 4}}
PRIVATE = {
    "privacy": {"level": "client", "clip": 0.3, "noise_multiplier": 9.0, "accept_noise": True},
    "aggregation": {"weighting": "uniform", "max_weight_share": 1.0}, "participation": {"min_clients": 4},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "joins", "fixed", "selects", "least", "steps"),
    [
        ({}, True, False, False, 1, 1), (SUMS, False, False, False, 1, 10), (PRIVATE, True, True, False, 1, 1),
        ({"selection": {"share": 0.25}}, True, False, True, 1, 1),
        (merged(PRIVATE, {"participation": {"sampling": "poisson", "fraction": 0.5}}), False, True, False, 1, 1),
        ({"method": {"name": "plan"}}, True, False, False, 1, 2),
        ({"method": {"name": "fast_pt"}}, False, False, False, 1, 1),
    ],
)  # fmt: skip
def test_the_rules_of_a_run_follow_from_its_spec(
    changes: dict[str, Any], joins: bool, fixed: bool, selects: bool, least: int, steps: int
) -> None:
    known = federation({}, [], **changes)
    rules, spec = rules_of(known.spec, known.method), known.spec
    assert (rules.join_when_extended, rules.fixed_divisor, rules.selects) == (joins, fixed, selects)
    assert (rules.least_answers, len(rules.phases(1)), known.rules.phases(1)) == (least, steps, rules.phases(1))
    assert (rules.draw, rules.rounds, rules.secure) == (spec.seed, spec.rounds, spec.secure_aggregation)
    secret = known.drawing_with("ab").sampling_with("cd", 3)
    assert (secret.rules.draw, secret.draw_secret, secret.rules.poisson_key, secret.sampling_key) == (
        "ab",
        "ab",
        "cd",
        "cd",
    )
    assert (secret.rules.budget_rounds, secret.drawing_with(None).rules.draw) == (3, known.spec.seed)


def test_a_step_is_of_its_method_s_phase() -> None:
    plain = federation({}, [], method={"name": "plan"})
    assert [plain.method_phase(1, step).name for step in (0, 1)] == ["prompts", "aggregators"]
    sums = federation({}, [], **SUMS)
    assert {sums.method_phase(1, step).name for step in range(10)} == {sums.method.phases(1, 2)[0].name}


def test_a_method_that_is_not_here_leaves_its_federation_standing() -> None:
    known = federation({"a": IN}, [client("a")])
    assert (known.absent, kept_method(known.spec).name) == (None, "promptfl")
    gone = kept_method(known.spec.model_copy(update={"method": {"name": "no_such_method"}}))
    standing = replace(known, method=gone)
    assert "no_such_method" in str(standing.absent)
    for act in (lambda: gone.phases(1, 2), lambda: gone.payload({}, None, None, None)):
        with pytest.raises(MethodError, match="no_such_method"):
            act()


def test_the_terms_tell_the_weights_and_protection_that_are_known() -> None:
    known = replace(federation({}, [], **PRIVATE), fingerprint="sha256:" + "1" * 64)
    terms = known.training_terms()
    assert (terms.backbone.fingerprint, terms.backbone.shape) == (known.fingerprint, known.shape)
    assert (known.privacy, federation({}, []).privacy) == (known.spec.privacy, None)
    assert known.phase is None
    differing_pair = federation(dict.fromkeys("ab", Member("trainer")), [client("a"), client("b", ("x",))])
    assert str(differing_pair.class_differences).startswith("the trainers' class names differ")
    free = [{"method": {"name": "promptfl", "label_space": "client"}}, {"class_names": ["p", "q"]}, {"rounds": 0}]
    for changes in free:
        own = replace(differing_pair, spec=differing_pair.spec.model_copy(update=changes))
        assert (own.may_differ, own.class_differences) == (True, None)
