"""A site's policy: every key has a federation that offends it, refused by name before anything but a token was sent."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from fastapi import Request, Response

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.doctor import Examination
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.policy import EXAMPLE, RULES, Policy, SiteFacts, read_policy, refusals
from promptfed.client_service.settings import Settings
from promptfed.client_service.training import trainer
from promptfed.shared.data import Source
from promptfed.shared.messages import EnrolmentInfo
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from tests.client_service.conftest import Make

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
    assert [one.kind for one in refusals(names, SiteFacts(**{**vars(FACTS), "class_names": False}))] == [
        "policy-classes"
    ]
    same = Policy.model_validate({"version": 1, "allow": {"coordinators": ["https://coordinator.example.org:443/"]}})
    assert refusals(same, FACTS) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
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
        ({"secure_aggregation": {"max_own_share": 0.6}}, "secure_aggregation.max_own_share"),
        ({"metrics": {"accuracy": "rounded"}}, "metrics.accuracy"),
        ({"limits": {"rounds": "50"}}, "limits.rounds"),
        ({"limits": {"rounds": 0}}, "limits.rounds"),
    ],
)
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


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"allow": {"coordinators": ["https://other.example.org"]}}, "policy-coordinator"),
        ({"allow": {"federations": ["dogs"]}}, "policy-federation"),
        ({"allow": {"methods": ["fedpgp"]}}, "policy-method"),
        ({"allow": {"backbones": ["ViT-B-16/openai"]}}, "policy-backbone"),
        ({"limits": {"rounds": 1}}, "policy-rounds"),
        ({"limits": {"min_steps": 2}}, "policy-steps"),
        ({"limits": {"min_images": 25}}, "policy-images"),
        ({"limits": {"until": date(2020, 1, 1)}}, "policy-expired"),
        ({"privacy": {"require": "sample"}}, "policy-privacy"),
        ({"secure_aggregation": {"require": True}}, "policy-secure-aggregation"),
    ],
)
def test_a_federation_that_offends_learns_nothing_of_this_site(
    tmp_path: Path, given: dict[str, Any], kind: str, make: Make, settings: Settings
) -> None:
    coordinator = make.coordinator()
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
            assert end.value.exit is Exit.LEDGER


def test_no_request_of_a_refused_task_says_what_depends_on_data(tmp_path: Path, make: Make, settings: Settings) -> None:
    """Terms are pinned: less noise than agreed is refused before the payload is asked for."""
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=8.0, delta=1e-3).model_dump()
    coordinator = make.coordinator(rounds=1, privacy=privacy)
    seen: list[str] = []

    def note(request: Request) -> Response | None:
        seen.append(request.url.path.rsplit("/", 1)[-1])
        return None

    coordinator.alter = note
    coordinator.garble = lambda task: task | {"config": task["config"] | {"privacy": privacy | {"clip": 0.6}}}
    given = {"privacy": {"require": "sample"}, "ledger": str(tmp_path / "ledger.jsonl")}
    asyncio.run(
        make.worker(coordinator, settings=settings.model_copy(update={"policy": written(tmp_path, given)})).run()
    )
    assert "payload" not in seen
    assert "update" not in seen
    assert len(coordinator.failures) == 3


def test_the_doctor_tells_every_rule_and_what_the_budget_would_be(
    tmp_path: Path, make: Make, settings: Settings, source: Source
) -> None:
    privacy = PrivacySpec(level="sample", clip=0.3, noise_multiplier=8.0, delta=1e-3)
    backbone = BackboneSpec(model="promptfed-tiny", pretrained=None)
    info = EnrolmentInfo(
        federation_id="fed-1", name="pets", method={"name": "promptfl"}, backbone=backbone, class_names=None,
        template=None, state="enrolling", rounds=2, training={}, seed=0, evaluate_every=1, privacy=privacy,
    )  # fmt: skip
    given = {"limits": {"rounds": 1}, "ledger": str(tmp_path / "ledger.jsonl"), "privacy": {"delta": 1e-3}}
    path = written(tmp_path, given)
    own, (policy, _) = settings.model_copy(update={"policy": path}), read_policy(path)
    examination = Examination(own, tmp_path, policy=policy)
    examination._policy(info, source)
    found = {check.name: check for check in examination.checks}
    assert {name.removeprefix("policy ") for name in found} == {*RULES, "privacy"}
    assert found["policy rounds"].verdict == "fail"
    assert found["policy method"].verdict == "pass"
    assert found["privacy"].verdict == "warn"  # a ledger that is new
    assert "planned, 0 spent of 8 at δ = 0.001; noise of 8 times the clip" in found["privacy"].text
    Ledger(tmp_path / "ledger.jsonl").open(1e-3)
    again = Examination(own, tmp_path, policy=policy)
    again._policy(info, source)
    assert {check.name: check for check in again.checks}["privacy"].verdict == "pass"
