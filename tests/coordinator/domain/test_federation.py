"""What a federation knows of its clients: whose names, classes and descriptions count, and for how long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from promptfed.coordinator.domain.federation import Client, Federation, differing, new_federation
from promptfed.coordinator.domain.round_machine import TRAIN, step_answers_needed, steps_of
from promptfed.coordinator.domain.run_state import Member, PhasePlan
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core import costs
from promptfed.shared.spec.sections import SecureAggregationSpec
from promptfed.shared.spec.spec import BackboneShape

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


def test_class_names_are_those_of_all_trainers_that_joined_in_the_first_one_s_order() -> None:
    turned = ABC[::-1]
    given = [client("d"), client("c", turned), client("b", ("x", "y")), client("a", ("x", "y"))]
    assert federation(MEMBERS, given).class_names == turned, "of c, before d; b evaluates, and a is new"
    assert federation({**MEMBERS, "a": IN}, given).class_names is None, "they differ"
    assert federation({}, []).class_names is None
    listed = federation(MEMBERS, given, class_names=["p", "q"])
    assert listed.class_names == ("p", "q")
    assert (listed.may_differ, federation(MEMBERS, given).may_differ) == (True, False)


def test_a_federation_names_what_differs_most_common_first() -> None:
    assert differing({"a": ABC, "b": ABC[::-1]}) is None
    assert differing({"a": ABC, "b": ("x",)}) == "the trainers' class names differ (a: 'ant', 'bee', 'cat' | b: 'x')"
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
    assert changed.with_clients(replace(client("a"), secret_digest=None)).by_secret == {}


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
