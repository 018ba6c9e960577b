"""What a protected federation is planned to cost, whether that fits, and what is paid and told of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from promptfed.client_service.exits import ClientError, Exit, Failure
from promptfed.client_service.privacy import protection
from promptfed.client_service.privacy.ledger import FILE as HEAD
from promptfed.client_service.privacy.ledger import BudgetExhausted, Ledger
from promptfed.client_service.privacy.noisy_counts import NoisyCounts, declared_images
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.privacy.protection import (
    FILE,
    PrivacyPlan,
    SiteProtection,
    expect_room,
    groups_of,
    own_ledger,
    plan,
    reported,
    site_plan,
    unexplained,
    units_of,
)
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.privacy.accounting import Event, PrivacyError, epsilon_of, replace_one_epsilon
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.tensors.torch_tensors import encode
from tests.support.fake_coordinator import made_up_source

SPEC = {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0, "delta": 1e-3}


def info_of(rounds: int = 2, method: str = "promptfl", **privacy: Any) -> EnrolmentInfo:
    return EnrolmentInfo(
        federation_id="fed-1", name="pets", method={"name": method}, seed=0, backbone=BackboneSpec(),
        class_names=None, template=None, state="running", rounds=rounds, evaluate_every=1,
        training=TrainingSpec(batch_size=8, epochs=3), privacy=PrivacySpec.model_validate(SPEC | privacy),
    )  # fmt: skip


def planned(ledger: Ledger | None = None, units: int = 24, most: float = 8.0, **given: Any) -> PrivacyPlan:
    delta, state = given.pop("own_delta", None), given.pop("state", None)
    info = info_of(**given)
    return plan(info, make_method(info.method), units, ledger or Ledger(None, "eyes"), state, most, delta)


def spent(ledger: Ledger, federation: str, split: Any, z: float = 2.0) -> None:
    """A release of this data set in a federation."""
    where = {"federation_id": federation, "coordinator": "http://x", "phase": "train", "noise": "secret"}
    about = where | {"round": 1, "task_id": "t"}
    ledger.spend(f"{federation} {split}", [Event("gaussian", 1.0, z, 1)], 99.0, about, split)


def refused(said: str, act: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(ClientError, match=said) as end:
        act(*given, **named)
    assert end.value.exit is Exit.LEDGER


def test_a_plan_is_of_all_steps_and_beside_what_was_spent_on_training_for_others() -> None:
    own = planned()
    events = [Event("gaussian", 8 / 24, 4.0, 2 * 9)]  # 2 rounds of 3 epochs of 3 batches
    assert (own.units, own.noise_multiplier, own.delta, own.steps, own.q) == (24, 4.0, 1e-3, 18, 8 / 24)
    assert own.epsilon == own.in_all == epsilon_of(events, 1e-3)
    assert (own.replaced, own.most, own.unit) == (replace_one_epsilon(events, 1e-3), 8.0, "record")
    ledger = Ledger(None, "eyes")
    ledger.open(1e-3)
    for federation, split in (("fed-1", "train"), ("other", "test")):
        spent(ledger, federation, split)
    assert planned(ledger).in_all == own.epsilon, "its own spends are those of the plan, and test images another budget"
    spent(ledger, "other", "train")
    beside = planned(ledger)
    assert beside.epsilon == own.epsilon
    assert beside.in_all == epsilon_of([Event("gaussian", 1.0, 2.0, 1), *events], 1e-3)


@pytest.mark.parametrize(
    ("kept", "own", "asked", "units", "delta"),
    [
        (1e-4, 1e-5, 1e-3, 24, 1e-4), (None, 1e-5, 1e-3, 24, 1e-5), (None, None, 1e-3, 24, 1e-3),
        (None, None, None, 24, 1e-3), (1e-3, None, 1e-3, 24, 1e-3), (None, None, None, 101, 1e-4),
        (2e-3, None, 1e-3, 24, "larger than the federation allows"), (None, 0.1, None, 24, "is not between"),
        (None, None, None, 0, "no units"),
    ],
)  # fmt: skip
def test_the_delta_is_the_ledger_s_else_the_owner_s_else_the_federation_s(
    kept: Any, own: Any, asked: Any, units: int, delta: Any
) -> None:
    ledger = Ledger(None, "eyes")
    if kept is not None:
        ledger.open(kept)
    given = {"own_delta": own, "delta": asked, "rounds": 1}
    if isinstance(delta, str):
        refused(f"cannot be protected here: .*{delta}", planned, ledger, units, **given)
    else:
        assert planned(ledger, units, **given).delta == delta


def test_what_cannot_be_protected_is_refused_by_its_reason() -> None:
    of_groups = Ledger(None, "eyes")
    of_groups.open(1e-3, "group")
    refused("'eyes' is of groups, and the federation protects records", planned, of_groups)
    unfit = next(
        name for name in ("perfedavg", "fedbabu", "pfedpg") if not type(make_method({"name": name})).can_protect()
    )
    refused(f"{unfit} cannot be trained under protection: ", planned, method=unfit)
    refused("sends nothing up", planned, rounds=0)


def test_a_budget_is_calibrated_once_for_a_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[tuple[Any, ...]]()
    monkeypatch.setattr(protection, "calibrate", lambda *given: asked.append(given) or 5.0 + len(asked))
    state = PrivateState(tmp_path)
    of_budget = {"noise_multiplier": None, "epsilon": 3.0, "state": state}
    first = planned(**of_budget)
    assert (asked, first.noise_multiplier) == ([(3.0, 1e-3, 8 / 24, 18)], 6.0)
    spec = info_of(noise_multiplier=None, epsilon=3.0).privacy
    own = SiteProtection(cast(Any, spec), first, Ledger(None), SeededNoise(1), "http://x", "fed-1", state=state)
    own.open()
    assert own.ledger.delta() == 1e-3
    assert state.read_note(FILE)
    assert planned(**of_budget).noise_multiplier == 6.0, "as it was planned"
    changes: list[dict[str, Any]] = [{"epsilon": 4.0}, {"rounds": 3}, {"units": 25}]
    assert [planned(**of_budget | change).noise_multiplier for change in changes] == [7.0, 8.0, 9.0]
    assert planned(state=state).noise_multiplier == 4.0, "the spec's own"


def test_the_whole_schedule_has_to_fit_unless_the_owner_lets_it_end_early() -> None:
    own = replace(planned(), in_all=2.0, most=2.0)
    expect_room(own, "eyes")
    over = replace(own, in_all=2.01)
    expect_room(over, "eyes", partial=True)
    refused("make ε = 2.01 of the 2 that the data set 'eyes' has", expect_room, over, "eyes")


def test_a_site_s_policy_says_budget_delta_and_ledger(settings: Settings, tmp_path: Path) -> None:
    train, info = made_up_source().train, info_of()
    method, ledger = make_method(info.method), Ledger(None, "eyes")
    own = settings.model_copy(update={"max_epsilon": 50.0})
    assert site_plan(info, method, train, own, None, ledger)[0].most == 50.0
    given = {"version": 1, "privacy": {"max_epsilon": 40.0, "delta": 1e-4}, "dataset": "hearts", "ledger": "~/l.jsonl"}
    policy = Policy.model_validate(given)
    made, groups = site_plan(info, method, train, own, policy, ledger)
    assert (made.most, made.delta, made.units, groups) == (40.0, 1e-4, len(train), None)
    short = policy.privacy.model_copy(update={"max_epsilon": 0.1})
    refused(
        "raise --max-epsilon", site_plan, info, method, train, own, policy.model_copy(update={"privacy": short}), ledger
    )
    early = policy.model_copy(update={"privacy": short.model_copy(update={"partial": True})})
    assert site_plan(info, method, train, own, early, ledger)[0].most == 0.1
    for rules, file, dataset in (
        (None, own.ledger_file, own.dataset), (Policy(version=1), own.ledger_file, own.dataset),
        (policy, Path("~/l.jsonl").expanduser(), "hearts"),
    ):  # fmt: skip
        found = own_ledger(own, rules)
        assert (found.path, found.dataset) == (file, dataset)
    at = own.model_copy(update={"ledger": tmp_path / "own.jsonl"})
    assert (own_ledger(at, policy).path, own_ledger(at, policy).dataset) == (tmp_path / "own.jsonl", "hearts")


def test_groups_are_counted_where_the_federation_protects_them() -> None:
    class Grouped:
        groups: Any = ("p2", "p1", "p2", "p2")

        def digest(self, row: int) -> int:
            return -row

    train = cast(Any, Grouped())
    group = {"unit": "group", "per_group": 2}
    assert groups_of(cast(Any, info_of(**group).privacy), train) == ((3, 2), (1,))
    assert groups_of(cast(Any, info_of().privacy), train) is None
    assert (units_of(info_of(**group), train), units_of(info_of(), train)) == (2, None)
    assert units_of(info_of().model_copy(update={"privacy": None}), train) is None
    train.groups = None
    assert units_of(info_of(**group), train) is None
    refused("the data name none", groups_of, info_of(**group).privacy, train)
    whole, level = info_of(), PrivacySpec(level="client", clip=1.0)
    assert declared_images(37, 10, whole) == 37, "accounted by its exact number"
    assert [declared_images(37, 10, whole.model_copy(update={"privacy": one})) for one in (None, level)] == [30, 30]


@pytest.mark.parametrize("kept", [True, False])
def test_a_release_is_paid_once_and_told_with_its_cost(tmp_path: Path, kept: bool) -> None:
    state, ledger = PrivateState(tmp_path / "state"), Ledger(tmp_path / "ledger.jsonl", "eyes")
    event = Event("gaussian", 1.0, 4.0, 1)
    most = epsilon_of([replace(event, count=2)], 1e-3)
    own = SiteProtection(
        cast(Any, info_of().privacy), replace(planned(), most=most), ledger, SeededNoise(1), "http://x", "fed-1",
        federation="pets", state=state if kept else None,
    )  # fmt: skip
    own.open()
    told = own.report(event)
    assert (told.epsilon, told.delta, told.noise) == (epsilon_of([event], 1e-3), 1e-3, "seeded")
    assert told.epsilon_replace_one == replace_one_epsilon([event], 1e-3)
    assert own.pay_for("one", told, 3, "train", "task-3")
    assert not own.pay_for("one", told, 3, "train", "task-3")
    [spend] = ledger.spends()
    assert (spend.round, spend.federation, spend.split, spend.coordinator) == (3, "pets", "train", "http://x")
    assert (state.read_note(HEAD) is not None) is kept
    assert own.report(event).epsilon == most
    pending = SimpleNamespace(update=SimpleNamespace(read=lambda: encode({}, {"privacy": told.model_dump()})))
    assert own.pay(cast(Any, SimpleNamespace(**vars(pending), round=4, phase="train", task_id="task-4")), "two")
    for act in (lambda: own.report(event), lambda: own.pay_for("three", told, 5, "train", None)):
        with pytest.raises(Failure) as failed:
            act()
        assert failed.value.kind == "privacy-budget-exhausted"
    with pytest.raises(Failure) as failed:
        own.pay_for("four", reported(encode({}, {})), 5, "train", None)
    assert failed.value.kind == "privacy-missing"


@pytest.mark.parametrize("error", [ValueError("odd"), TaskCancelled(), ClientError(Exit.LEDGER, "full"), None])
@pytest.mark.parametrize("hidden", [True, False])
def test_why_protected_work_failed_is_not_told(hidden: bool, error: Exception | None) -> None:
    def work() -> None:
        with unexplained(hidden, "evaluation"):
            if error is not None:
                raise error

    if error is None:
        work()
        return
    with pytest.raises(Failure if hidden and isinstance(error, ValueError) else type(error)) as raised:
        work()
    if isinstance(raised.value, Failure):
        assert (raised.value.kind, "odd" in str(raised.value)) == ("evaluation-failed", False)


@pytest.mark.parametrize(
    ("own", "asked", "images", "delta"),
    [(1e-5, 1e-4, 8, 1e-5), (None, 1e-4, 8, 1e-4), (None, None, 8, 1e-2), (None, None, 1, 1e-1)],
)
def test_a_ledger_of_test_images_begins_with_the_first_delta_that_is_named(
    own: Any, asked: Any, images: int, delta: float
) -> None:
    source = made_up_source()
    source = replace(source, test=source.test.select(list(range(images))))
    counts = NoisyCounts(info_of(delta=asked), Ledger(None), SeededNoise(1), cast(Any, None), 8.0, "a", "http://x")
    assert counts.begun(source, {}, own) is counts
    assert counts.ledger.delta() == delta
    assert counts.begun(source, {}, 1e-7) is counts
    assert counts.ledger.delta() == delta, "begun before"


def test_budgets_and_deltas_at_their_very_limits(tmp_path: Path) -> None:
    planned = PrivacyPlan(24, 2.0, 1e-3, 8, 0.25, 1.0, 8.0, 8.0)
    protection.expect_room(planned, "eyes")
    protection.expect_room(replace(planned, in_all=8.5), "eyes", partial=True)
    with pytest.raises(ClientError, match=r"all rounds would make ε = 8\.5 of the 8 that the data set 'eyes' has"):
        protection.expect_room(replace(planned, in_all=8.5), "eyes")
    for allowed, delta, fits in ((None, 1.0, True), (1e-3, 1e-3, True), (1e-3, 1.1e-3, False)):
        with nullcontext() if fits else pytest.raises(PrivacyError, match="is larger than the federation allows"):
            protection._check_allowed(PrivacySpec(level="sample", delta=allowed), delta)
    ledger, event = Ledger(tmp_path / "ledger.jsonl"), Event("laplace", 1.0, 0.5, 2)
    ledger.open(1e-3)
    cost = ledger.expect([event], 9.0, "test")
    assert ledger.expect([event], cost, "test") == cost
    with pytest.raises(BudgetExhausted, match="has spent ε = 0 of"):
        ledger.expect([event], cost - 1e-9, "test")
    about = {"federation_id": "f", "coordinator": "c", "round": 1, "phase": "p", "task_id": "t", "noise": "secret"}
    assert ledger.spend("a", [event], cost, about, "test")
    with pytest.raises(BudgetExhausted, match=f"has spent ε = {cost:.4g} of"):
        ledger.expect([event], cost, "test")
    assert ledger.expect([event], cost, "train") > 0, "training images have a budget of their own"
