"""A site's policy: every key has a federation that offends it, refused by name before anything but a token was sent."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import yaml

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.doctor import Examination
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.noisy_counts import (
    AnsweredStates,
    coded_accuracy,
    floor_of,
    floored,
    lowest,
    planned_rounds,
    states_of,
    what_leaves,
    without_shares,
)
from promptfed.client_service.privacy.policy import (
    EXAMPLE,
    FLOOR,
    RULES,
    STATES,
    Policy,
    SiteFacts,
    allows,
    facts_of,
    read_policy,
    refusals,
)
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training import trainer
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import Source
from promptfed.shared.messages import EnrolmentInfo, SplitResult
from promptfed.shared.methods import make_method
from promptfed.shared.privacy.accounting import Event, epsilon_of
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator

PEER = "ed25519:" + "0" * 64


FACTS = SiteFacts(
    coordinator="https://coordinator.example.org", federation="eyes", method="promptfl", backbone="ViT-B-16/openai",
    rounds=50, epochs=5, steps=35, images=200, role="trainer", level="sample", class_names=True, sums=3,
    today=date(2027, 6, 30),
)  # fmt: skip


OFFENCES: dict[str, dict[str, Any]] = {
    "coordinator": {"coordinator": "https://coordinator.example.com"}, "federation": {"federation": "ears"},
    "method": {"method": "plan"}, "backbone": {"backbone": "ViT-B-16/laion2b"}, "rounds": {"rounds": 51},
    "epochs": {"epochs": 6}, "steps": {"steps": 4}, "images": {"images": 199}, "expired": {"today": date(2027, 7, 1)},
    "privacy": {"level": "none"}, "unit": {"unit": "group"}, "secure-aggregation": {"sums": None},
}  # fmt: skip


def written(folder: Path, given: Any) -> Path:
    path = folder / "policy.yaml"
    path.write_text(given if isinstance(given, str) else yaml.safe_dump({"version": 1, **given}))
    return path


def test_the_example_is_a_policy_that_allows_what_it_says(tmp_path: Path) -> None:
    policy, digest = read_policy(written(tmp_path, EXAMPLE))
    assert len(digest) == 64
    assert refusals(policy, FACTS) == []


def test_a_site_that_asks_for_whole_clients_holds_the_federation_s_epsilon_against_its_own() -> None:
    policy = Policy.model_validate({"version": 1, "privacy": {"require": "client", "max_epsilon": 4.0}})
    said = {
        epsilon: [one.kind for one in refusals(policy, replace(FACTS, level="client", epsilon=epsilon))]
        for epsilon in (None, 4.0, 4.1)
    }
    assert said == {None: ["policy-epsilon"], 4.0: [], 4.1: ["policy-epsilon"]}
    assert [one.kind for one in refusals(policy, FACTS)] == ["policy-privacy"]


@pytest.mark.parametrize("rule", OFFENCES)
def test_each_key_is_offended_by_what_is_just_beyond_it(tmp_path: Path, rule: str) -> None:
    policy, _ = read_policy(written(tmp_path, EXAMPLE))
    facts = SiteFacts(**{**vars(FACTS), **OFFENCES[rule]})
    (found,) = refusals(policy, facts)
    assert found.kind == f"policy-{rule}"
    assert refusals(Policy(version=1), facts) == []


def test_the_other_rules() -> None:
    sums = Policy.model_validate({"version": 1, "secure_aggregation": {"require": True}})
    assert [one.kind for one in refusals(sums, replace(FACTS, sums=None))] == ["policy-secure-aggregation"]
    assert refusals(sums, replace(FACTS, sums=3)) == []
    five = Policy.model_validate({"version": 1, "secure_aggregation": {"require": True, "minimum": 5}})
    assert [one.kind for one in refusals(five, replace(FACTS, sums=3))] == ["policy-minimum"]
    assert refusals(five, replace(FACTS, sums=5)) == []
    names = Policy.model_validate({"version": 1, "allow": {"class_names": "federation"}})
    own, unnamed = Policy.model_validate({"version": 1}), SiteFacts(**{**vars(FACTS), "class_names": False})
    assert (own.allow.class_names, refusals(own, unnamed)) == ("own", [])
    assert [one.kind for one in refusals(names, unnamed)] == ["policy-classes"]
    floor = Policy.model_validate({"version": 1, "metrics": {"floor": 20}})
    found = [[one.kind for one in refusals(floor, replace(FACTS, images=count))] for count in (19, 20)]
    assert found == [["policy-floor"], []]


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"limits": {"min_steps": 99}}, {}), ({"privacy": {"require": "client"}}, {}),
        ({"privacy": {"unit": "group"}}, {}), ({"secure_aggregation": {"require": True}}, {"sums": None}),
        ({"privacy": {"require": "client", "max_epsilon": 1.0}}, {"level": "client", "epsilon": 2.0}),
    ],
)  # fmt: skip
def test_who_only_evaluates_is_held_to_nothing_of_training(given: dict[str, Any], facts: dict[str, Any]) -> None:
    policy = Policy.model_validate({"version": 1, **given})
    assert len(refusals(policy, replace(FACTS, **facts))) == 1
    assert refusals(policy, replace(FACTS, **facts, role="evaluator")) == []


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"unit": "group"}, {"level": "client"}), ({"unit": "record"}, {}), ({"max_epsilon": 1.0}, {"level": "client"}),
        ({"require": "sample", "max_epsilon": 1.0}, {"epsilon": 2.0}), ({"require": "none"}, {"level": "none"}),
    ],
)  # fmt: skip
def test_a_unit_is_of_records_and_an_epsilon_of_whole_clients_alone(given: Any, facts: dict[str, Any]) -> None:
    assert refusals(Policy.model_validate({"version": 1, "privacy": given}), replace(FACTS, **facts)) == []


def test_steps_are_those_of_the_units_that_are_trained_on() -> None:
    info = EnrolmentInfo(
        federation_id="f", name="pets", template=None, state="running", class_names=None, method={"name": "promptfl"},
        backbone=BackboneSpec(), rounds=3, training=TrainingSpec(epochs=2, batch_size=10), seed=0, evaluate_every=1,
    )  # fmt: skip
    found = [facts_of(info, "https://x", "trainer", *given) for given in ((0, 5), (41,), (41, 20))]
    assert [(facts.images, facts.steps) for facts in found] == [(0, 0), (41, 10), (41, 4)]
    assert (found[0].unit, found[0].epsilon, found[0].level, found[0].sums) == ("record", None, "none", None)
    whole = PrivacySpec(level="client", clip=1.0, epsilon=2.0, delta=1e-5)
    for privacy, epsilon in ((whole, 2.0), (whole.model_copy(update={"level": "sample"}), None)):
        assert facts_of(info.model_copy(update={"privacy": privacy}), "https://x", "trainer", 1).epsilon == epsilon


@pytest.mark.parametrize(("given", "said"), [
    ("version: 2", "version"),
    ("- a list", "the file"),
    ("version: [", "is not YAML"),
    ({"limit": {}}, "limit: this version does not know it"),
    ({"payload": {"signed": 2}}, "payload: this version does not know it"),
    ({"privacy": {"unit": "person"}}, "privacy.unit"),
    ({"secure_aggregation": {"witnesses": 1}}, "secure_aggregation.witnesses: this version does not know it"),
    ({"secure_aggregation": {"peers": ["ed25519:12"]}}, "secure_aggregation.peers.0"),
    ({"secure_aggregation": {"verified": 2}}, "verified is 2, and peers lists 0"),
    ({"secure_aggregation": {"unverified": 0}}, "peers lists nobody"),
    ({"secure_aggregation": {"peers": [PEER], "unverified": 1}}, "give verified"),
    ({"secure_aggregation": {"peers": [PEER, PEER], "verified": 2}}, "verified is 2, and peers lists 1"),
    ({"secure_aggregation": {"max_own_share": 0.6}}, "secure_aggregation.max_own_share"),
    ({"metrics": {"accuracy": "rounded"}}, "metrics.accuracy"),
    ({"limits": {"rounds": "50"}}, "limits.rounds"),
    ({"limits": {"rounds": 0}}, "limits.rounds"),
])  # fmt: skip
def test_a_policy_that_is_not_understood_ends_the_client_before_it_asks_anybody(
    tmp_path: Path, given: Any, said: str, make: Make, settings: Settings
) -> None:
    coordinator = make.coordinator()
    own = settings.model_copy(update={"policy": written(tmp_path, given)})
    with pytest.raises(ClientError, match=said) as end:
        asyncio.run(make.worker(coordinator, settings=own).run())
    assert end.value.exit is Exit.POLICY
    assert coordinator.client is None
    missing = settings.model_copy(update={"policy": tmp_path / "none.yaml"})
    with pytest.raises(ClientError, match="cannot read the policy"):
        asyncio.run(make.worker(make.coordinator(), settings=missing).run())


@pytest.mark.parametrize(("given", "kind", "changes"), [
    ({"allow": {"coordinators": ["https://other.example.org"]}}, "policy-coordinator", {}),
    ({"allow": {"federations": ["dogs"]}}, "policy-federation", {}),
    ({"allow": {"methods": ["fedpgp"]}}, "policy-method", {}),
    ({"allow": {"backbones": ["ViT-B-16/openai"]}}, "policy-backbone", {}),
    ({"limits": {"rounds": 1}}, "policy-rounds", {}),
    ({"limits": {"min_steps": 2}}, "policy-steps", {}),
    ({"limits": {"min_images": 25}}, "policy-images", {}),
    ({"limits": {"until": date(2020, 1, 1)}}, "policy-expired", {}),
    ({"privacy": {"require": "sample"}}, "policy-privacy", {}),
    ({"secure_aggregation": {"require": True}}, "policy-secure-aggregation", {}),
    ({"limits": {"epochs": 2}}, "policy-epochs", {"training": {"epochs": 3}}),
    ({"allow": {"class_names": "federation"}}, "policy-classes", {"class_names": None}),
])  # fmt: skip
def test_a_federation_that_offends_learns_nothing_of_this_site(
    tmp_path: Path, given: dict[str, Any], kind: str, changes: dict[str, Any], make: Make, settings: Settings
) -> None:
    coordinator = make.coordinator(**changes)
    own = settings.model_copy(update={"policy": written(tmp_path, given)})
    with pytest.raises(ClientError, match=kind) as end:
        asyncio.run(make.worker(coordinator, settings=own).run())
    assert end.value.exit is Exit.POLICY
    assert coordinator.client is None
    assert {(verb, path.rsplit("/", 1)[-1]) for verb, path, _ in coordinator.calls} == {("GET", "enrolment")}
    assert set(coordinator.received) == {b""}


def test_a_policy_that_expires_stops_the_tasks_before_their_payload_is_fetched(
    tmp_path: Path, make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = make.coordinator(rounds=1)
    own = settings.model_copy(update={"policy": written(tmp_path, {"limits": {"until": date(2999, 1, 1)}})})

    class Later(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime(2999, 1, 2, tzinfo=tz)

    monkeypatch.setattr(trainer, "datetime", Later)
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert {one["type"] for one in coordinator.failures} == {"policy-expired"}
    assert not any(path.endswith("/payload") for _, path, _ in coordinator.calls)


def test_metrics_stay_at_the_site_where_its_policy_says_so(tmp_path: Path, make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=1)
    given = {"metrics": {"accuracy": "withheld", "training": False}}
    own = settings.model_copy(update={"policy": written(tmp_path, given)})
    asyncio.run(make.worker(coordinator, settings=own).run())
    (update,) = (body for body in coordinator.received if b"payload_sha256" in body)
    assert b"loss" not in update
    assert b"seconds" not in update
    assert [(one["splits"], one["withheld"]) for one in coordinator.evaluations] == [({}, True)] * 2


@pytest.mark.parametrize(
    ("spec", "site", "told"), [("plain", "plain", True), ("plain", None, False), (None, "plain", False)]
)
def test_accuracies_of_a_protected_federation_take_the_spec_and_the_policy(
    tmp_path: Path, spec: Any, site: str | None, told: bool, make: Make, settings: Settings
) -> None:
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=8.0, delta=1e-3, evaluation=spec).model_dump()
    coordinator = make.coordinator(rounds=1, privacy=privacy, training=TrainingSpec(batch_size=24).model_dump())
    given = {"metrics": {"accuracy": site}, "ledger": str(tmp_path / "ledger.jsonl"), "privacy": {"delta": 1e-3}}
    asyncio.run(
        make.worker(coordinator, settings=settings.model_copy(update={"policy": written(tmp_path, given)})).run()
    )
    assert bool(coordinator.evaluations[-1]["splits"]) is told
    assert (tmp_path / "ledger.jsonl").exists()


def test_the_policys_budget_holds_whatever_the_settings_say(tmp_path: Path, make: Make, settings: Settings) -> None:
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=1.0, delta=1e-3).model_dump()
    limit = {"require": "sample", "max_epsilon": 1.0}
    for partial in (False, True):
        given = {"privacy": limit | {"partial": partial}, "ledger": str(tmp_path / "ledger.jsonl")}
        coordinator = make.coordinator(rounds=1, privacy=privacy)
        update = {"policy": written(tmp_path, given), "max_epsilon": 1000.0}
        worker = make.worker(coordinator, settings=settings.model_copy(update=update))
        if partial:
            asyncio.run(worker.run())
            assert [one["type"] for one in coordinator.failures] == ["privacy-budget-exhausted"]
        else:
            with pytest.raises(ClientError, match="of the 1 that") as end:
                asyncio.run(worker.run())
            assert (end.value.exit, coordinator.client) == (Exit.LEDGER, None), "before it enrols"


def test_the_doctor_tells_every_rule_and_what_the_budget_would_be(tmp_path: Path, make: Make, source: Source) -> None:
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=8.0, delta=1e-3)
    backbone = BackboneSpec(model="promptfed-tiny", pretrained=None)
    info = EnrolmentInfo(
        federation_id="fed-1", name="pets", method={"name": "promptfl"}, backbone=backbone, class_names=None,
        template=None, state="enrolling", rounds=2, training={}, seed=0, evaluate_every=1, privacy=privacy,
    )  # fmt: skip
    given = {"limits": {"rounds": 1}, "ledger": str(tmp_path / "ledger.jsonl"), "privacy": {"delta": 1e-3}}
    path = written(tmp_path, given)
    own, (policy, _) = make.settings.model_copy(update={"policy": path}), read_policy(path)
    examination = Examination(own, policy=policy)
    examination._policy(info, source)
    found = {check.name: check for check in examination.checks}
    assert {name.removeprefix("policy ") for name in found} == {*RULES, "privacy"}
    assert found["policy rounds"].verdict == "fail"
    assert found["policy method"].verdict == "pass"
    assert found["privacy"].verdict == "warn"  # a ledger that is new
    assert "planned, 0 spent of 8 at δ = 0.001; noise of 8 times the clip" in found["privacy"].text
    Ledger(tmp_path / "ledger.jsonl").open(1e-3)
    again = Examination(own, policy=policy)
    again._policy(info, source)
    assert {check.name: check for check in again.checks}["privacy"].verdict == "pass"


# A site's policy at work: what a task asks is held against it before anything of the data leaves.


def with_policy(settings: Settings, folder: Path, given: dict[str, Any]) -> Settings:
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"version": 1, **given}))
    return settings.model_copy(update={"policy": path})


def test_an_origin_is_compared_as_an_address(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text('version: 1\nallow: {coordinators: ["https://coordinator.example.org:443/"]}\n')
    policy, _ = read_policy(path)
    assert allows(policy, "https://coordinator.example.org")
    assert allows(None, "https://anything.example.org")
    for other in ("http://coordinator.example.org", "https://coordinator.example.org:444", "https://example.org"):
        assert not allows(policy, other)
    two = Policy.model_validate(
        {"version": 1, "allow": {"coordinators": ["http://a.example:80", "http://b.example/x/"]}}
    )
    addresses = {
        "http://a.example/": True,
        "http://a.example:81": False,
        "http://b.example/x": True,
        "http://b.example": False,
    }
    assert {address: allows(two, address) for address in addresses} == addresses
    together = {"http://a.example, http://b.example/x": 0, "http://a.example, http://c.example": 1}
    for coordinator, offended in together.items():
        assert len(refusals(two, replace(FACTS, coordinator=coordinator))) == offended


@pytest.mark.parametrize("given", [{"verified": 1}, {"verified": 1, "unverified": 1}, {"unverified": 0}])
def test_as_many_verified_members_as_peers_may_be_asked_for(given: dict[str, int]) -> None:
    Policy.model_validate({"version": 1, "secure_aggregation": {"peers": [PEER], **given}})


Change = Callable[[dict[str, Any]], dict[str, Any]]


def config(**values: Any) -> Change:
    return lambda task: task | {"config": task["config"] | values}


def training(**values: Any) -> Change:
    return lambda task: task | {"config": task["config"] | {"training": task["config"]["training"] | values}}


@pytest.mark.parametrize(("given", "change", "kind"), [
    ({"allow": {"methods": ["promptfl"]}}, config(method={"name": "fedpgp"}), "policy-method"),
    ({"allow": {"backbones": ["promptfed-tiny/random"]}},
     config(backbone={"model": "promptfed-tiny", "pretrained": "symbols", "precision": "fp32"}), "policy-backbone"),
    ({"allow": {"class_names": "federation"}}, config(class_names=None), "policy-classes"),
    ({"limits": {"rounds": 2}}, config(rounds=3), "policy-rounds"),
    ({"limits": {"epochs": 3}}, training(epochs=4), "policy-epochs"),
    ({"limits": {"min_steps": 3}}, training(epochs=1, batch_size=24), "policy-steps"),
    ({"privacy": {"require": "sample", "delta": 1e-3}}, config(privacy=None), "policy-privacy"),
])  # fmt: skip
def test_a_task_that_offends_is_refused_by_name_before_its_payload_is_fetched(
    given: dict[str, Any], change: Change, kind: str, tmp_path: Path, make: Make, settings: Settings
) -> None:
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 8.0, "delta": 1e-3}
    protected = {"privacy": privacy} if "privacy" in given else {}
    coordinator = make.coordinator(rounds=2, training={"epochs": 3, "batch_size": 24}, **protected)
    coordinator.garble = change
    own = with_policy(settings, tmp_path, given | {"ledger": str(tmp_path / "ledger.jsonl")})
    assert asyncio.run(make.worker(coordinator, settings=own).run()) == Exit.OK
    trained = [one for one in coordinator.failures if one["type"] == kind]
    assert len(trained) >= 2, coordinator.failures
    assert not any(path.endswith(("/payload", "/update", "/evaluation")) for _, path, _ in coordinator.calls)


def test_policy_that_has_expired_holds_back_update_that_waited(tmp_path: Path, make: Make, settings: Settings) -> None:
    """Trained in time, sent too late: the policy is asked again before the bytes leave."""
    coordinator = make.coordinator(rounds=1)
    own = with_policy(settings, tmp_path, {"limits": {"until": date(2999, 1, 1)}})
    worker = make.worker(coordinator, settings=own)
    asked: list[bool] = []

    def expire(event: str, facts: Any) -> None:
        if event == "trained":
            assert worker.work is not None
            rules = worker.work.rules
            assert rules.policy is not None
            asked.append(True)
            limits = rules.policy.limits.model_copy(update={"until": date(2020, 1, 1)})
            worker.work.rules = replace(rules, policy=rules.policy.model_copy(update={"limits": limits}))

    worker.monitor._hook = expire
    assert asyncio.run(worker.run()) == Exit.OK
    assert asked
    assert [one["type"] for one in coordinator.failures][:1] == ["policy-expired"]
    assert not any(b"payload_sha256" in body for body in coordinator.received)
    assert not (settings.state_dir / "pending").exists()


def test_a_new_state_folder_and_name_find_the_same_budget_spent(tmp_path: Path, make: Make, settings: Settings) -> None:
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0, "delta": 1e-3}
    limit = 1.2 * epsilon_of([Event("gaussian", 1.0, 4.0, 1)], 1e-3)
    for name in ("first", "second"):
        coordinator = make.coordinator(rounds=1, privacy=privacy, training={"batch_size": 24})
        own = with_policy(settings, tmp_path, {"ledger": str(tmp_path / "l.jsonl"), "privacy": {"max_epsilon": limit}})
        own = own.model_copy(update={"name": name, "state_dir": tmp_path / name})
        worker = make.worker(coordinator, settings=own)
        assert asyncio.run(worker.run()) == Exit.OK
        assert len(coordinator.accepted) == (name == "first")
        failed = [one["type"] for one in coordinator.failures]
        assert failed == ([] if name == "first" else ["privacy-budget-exhausted"])


# The disclosure floor against an attacker: by subtraction, from fractions, between rounds.


def test_accuracies_tell_nothing_in_any_number_of_rounds() -> None:
    """An attacker who knows the exact number of test images cannot narrow few right or wrong answers, in any round."""
    for count in range(251):
        right_by_answer: dict[object, set[int]] = defaultdict(set)
        for right in range(count + 1):
            right_by_answer[coded_accuracy(right, count, FLOOR)].add(right)
        for rights in right_by_answer.values():
            for few in ({right for right in rights if right < FLOOR}, {count - r for r in rights if count - r < FLOOR}):
                assert few in (set(), set(range(min(FLOOR, count + 1))))


@pytest.mark.parametrize(
    ("right", "count", "floor", "told"),
    [
        (33, 57, 10, 1 - 24.5 / 54.5),  # 24 are wrong: 20 ... 29 of 50 ... 59
        (24, 57, 10, 24.5 / 54.5),
        (29, 59, 10, 24.5 / 54.5),
        (30, 61, 10, 0.5),  # 34.5 of 64.5 would be more than half
        (30, 60, 10, 0.5),
        (31, 61, 10, 0.5),
        (0, 20, 10, 4.5 / 24.5),  # twice the floor is enough
        (20, 20, 10, 1 - 4.5 / 24.5),
        (0, 19, 10, None),
        (1, 4, 2, 0.5 / 4.5),
        (3, 7, 1, 3 / 7),
        (1, 1, 1, 1.0),  # without a floor one image is enough
        (0, 0, 1, None),
    ],
)
def test_an_accuracy_from_ranges_written_out(right: int, count: int, floor: int, told: float | None) -> None:
    assert coded_accuracy(right, count, floor) == (told if told is None else pytest.approx(told))


def test_under_a_floor_no_other_figure_and_no_fraction_of_images_leaves() -> None:
    result = SplitResult(accuracy=0.5, num_samples=45, macro_f1=0.4, ece=0.1)
    assert floored({"test": result}, 1, lambda name: None) == {"test": result}
    told = floored({"test": result, "small@x": result}, 2, {"test": None, "small": 3}.__getitem__)
    assert told == {"test": SplitResult(accuracy=0.5, num_samples=44)}, "of three patients nothing"
    method, measured = SimpleNamespace(shares=("share_*",)), {"share_0": 0.25, "loss": 1.0}
    assert without_shares(measured, cast(Any, method), 1) == measured
    assert without_shares(measured, cast(Any, method), 2) == {"loss": 1.0}


def test_three_of_seven_is_not_told() -> None:
    assert coded_accuracy(3, 7, FLOOR) is None
    assert coded_accuracy(9, 19, FLOOR) is None
    assert coded_accuracy(200, 300, FLOOR, patients=19) is None
    assert coded_accuracy(3, 7, 1) is not None
    assert (lowest(7, FLOOR), lowest(37, FLOOR), lowest(7, 1)) == (0, 30, 7)


class Attacker(FakeCoordinator):
    """Sends a state of its own choice at each round: ``chosen`` by round."""

    chosen: Mapping[int, Tensors]

    def current_task(self) -> dict[str, Any]:
        self.global_state = self.chosen[self.plan[0][1]]
        return super().current_task()


def test_a_site_answers_few_states_and_every_field_follows_from_ranges(
    tmp_path: Path, backbone: Backbone, make: Make, settings: Settings
) -> None:
    """The attacker has all fields of all answers; what it sends again is answered again, also after a restart."""
    draws = torch.Generator().manual_seed(3)
    first = Attacker(shape_of(backbone), rounds=9).global_state
    spread = {name: tensor.std() for name, tensor in first.items()}
    chosen = {
        round: {
            name: torch.randn(tensor.shape, generator=draws) * spread[name] * 3.0 ** (round - 2)
            for name, tensor in first.items()
        }
        for round in range(7)
    }
    chosen |= {7: chosen[2], 8: {name: -tensor for name, tensor in chosen[1].items()}}
    chosen |= {9: {name: 2 * tensor for name, tensor in chosen[2].items()}}
    (tmp_path / "policy.yaml").write_text("version: 1\nmetrics: {floor: 10, states: 5}\n")
    answers: dict[str, list[dict[str, Any]]] = {}
    for kind, policy in (("open", None), ("floor", tmp_path / "policy.yaml")):
        own = settings.model_copy(update={"policy": policy, "state_dir": tmp_path / kind})
        coordinator = Attacker(shape_of(backbone), rounds=9)
        coordinator.chosen = chosen
        for rounds in (range(7), range(7, 10)):
            coordinator.plan = [("evaluate", round) for round in rounds]
            assert asyncio.run(make.worker(coordinator, settings=own).run()) is Exit.OK
        answers[kind] = coordinator.evaluations
    assert len({answer["splits"]["test"]["accuracy"] for answer in answers["open"]}) > 1
    for round, (told, exact) in enumerate(zip(answers["floor"], answers["open"], strict=True)):
        if round in (1, 3, 5, 8):  # of ten evaluations 0, 2, 4, 6 and the last are answered
            assert told == {"splits": {}, "zero_shot": {}, "metrics": {}, "withheld": True}
            continue
        expected = {
            kind: {
                name: {
                    "accuracy": coded_accuracy(round_half(each), each["num_samples"], 10),
                    "num_samples": lowest(each["num_samples"], 10),
                }
                for name, each in exact[kind].items()
            }
            for kind in ("splits", "zero_shot")
        }
        assert expected["splits"]["test"]["num_samples"] == 20
        assert told == {**expected, "metrics": {}}
    assert answers["floor"][7] == answers["floor"][2]


def round_half(result: Mapping[str, Any]) -> int:
    """The number of right answers."""
    return round(result["accuracy"] * result["num_samples"])


def test_two_names_of_one_test_set_share_its_states(tmp_path: Path) -> None:
    answered = AnsweredStates(PrivateState(tmp_path / "state"), 2)
    images = {"test": "a", "again": "a", "other": "b"}
    assert answered.admitted({"test": "a"}, "1") == {"test"}
    assert answered.admitted(images, "2") == set(images)
    assert answered.admitted(images, "3") == {"other"}
    assert answered.admitted(images, "1") == {"test", "again"}
    assert answered.admitted(images, "4") == set()


def test_neither_other_images_of_a_name_nor_a_restart_are_more_states(tmp_path: Path) -> None:
    for images, state, told in (("a", "1", True), ("b", "2", True), ("c", "3", False), ("c", "1", True)):
        folder = PrivateState(tmp_path / "state")
        assert AnsweredStates(folder, 2).admitted({"test": images}, state) == ({"test"} if told else set())
        folder.close()


@pytest.mark.parametrize(("last", "every"), [(0, 1), (1, 1), (14, 1), (15, 1), (40, 1), (41, 3), (1000, 7), (100, 200)])
def test_the_states_of_a_floor_are_spread_and_the_last_is_among_them(tmp_path: Path, last: int, every: int) -> None:
    """Whoever asks for more is not told more: also where rounds are computed again from a backup."""
    asked = [*range(0, last, every), last]
    for most in (1, 2, STATES):
        planned = sorted(planned_rounds(last, every, most))
        assert planned[-1] == last
        assert len(planned) == min(most, len(asked))
        assert set(planned) <= set(asked)
        places = [asked.index(round) for round in planned]
        steps = [after - before for before, after in itertools.pairwise(places)]
        assert not steps or max(steps) - min(steps) <= 1
        answered = AnsweredStates(PrivateState(tmp_path / f"{most}", ephemeral=True), most, last, every)
        told = [round for round in range(last) if answered.admitted({"test": "a"}, f"{round}", round)]
        assert told == planned[:-1]
        again = [round for round in range(last) if answered.admitted({"test": "a"}, f"again {round}", round)]
        assert len(told) + len(again) == min(most - 1, 2 * len(told))
        assert answered.admitted({"test": "a"}, "the last", last) == {"test"}
        assert bool(answered.admitted({"test": "a"}, "another last", last)) is (len(told) + len(again) + 1 < most)


def test_of_several_labels_no_figure_leaves_under_a_floor() -> None:
    """A mean average precision under constant scores is the share of positives, to the unit."""
    method = make_method({"name": "promptfl", "task": "multi_label"})
    info = EnrolmentInfo(
        federation_id="f", name="pets", template=None, state="running", class_names=None,
        method={"name": "promptfl", "task": "multi_label"}, backbone=BackboneSpec(), rounds=3, training=TrainingSpec(),
        seed=0, evaluate_every=1,
    )  # fmt: skip
    assert [what_leaves(info, method, "trainer", None, floor=floor) for floor in (1, 2)] == ["plain", "withheld"]


def test_what_was_answered_on_the_same_images_is_answered_again_and_on_no_others(tmp_path: Path) -> None:
    """Round 1 is none of the two that are planned."""
    answered = AnsweredStates(PrivateState(tmp_path / "state"), 2, last=10)
    assert answered.admitted({"test": "a"}, "state", 0) == {"test"}
    assert answered.admitted({"again": "a"}, "state", 1) == {"again"}
    assert answered.admitted({"test": "b"}, "state", 1) == set()
    assert answered.admitted({"test": "a"}, "other", 1) == set()
    assert answered.admitted({"test": "a", "more": "c"}, "other", 10) == {"test", "more"}
    assert answered.admitted({"test": "a"}, "third", 10) == set(), "no room is left"
    assert (floor_of(None), states_of(None)) == (1, STATES)
