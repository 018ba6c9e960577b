"""A site's policy at work: what a task or a redirect asks is held against it before anything of the data leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.policy import expect_origin, read_policy
from promptfed.client_service.settings import Settings
from promptfed.shared.privacy.accounting import Event, epsilon_of
from promptfed.shared.spec.section import PROTOCOL, VERSION
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator

LISTED, ELSEWHERE = "http://127.0.0.1:1", "http://127.0.0.1:2"


def with_policy(settings: Settings, folder: Path, given: dict[str, Any]) -> Settings:
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"version": 1, **given}))
    return settings.model_copy(update={"policy": path})


class TwoOrigins(httpx.AsyncBaseTransport):
    """The first sends requests whose path ends in ``moved`` on to the second; both are the same coordinator."""

    def __init__(self, coordinator: FakeCoordinator, moved: str):
        self._inner, self._moved = httpx.ASGITransport(coordinator.app), moved
        self.second: list[tuple[str, bytes]] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.url.port == 2:
            self.second.append((str(request.url.path), await request.aread()))
        elif request.url.path.endswith(self._moved):
            headers = {"Location": str(request.url.copy_with(port=2)), PROTOCOL: str(VERSION)}
            return httpx.Response(307, headers=headers)
        return await self._inner.handle_async_request(request)


@pytest.mark.parametrize("moved", ["enrolment", "clients", "task", "payload", "update", "evaluation"])
def test_a_307_to_an_origin_that_the_policy_does_not_list_gets_no_byte(
    moved: str, tmp_path: Path, make: Make, settings: Settings
) -> None:
    network = TwoOrigins(make.coordinator(rounds=1), moved)
    own = with_policy(settings, tmp_path, {"allow": {"coordinators": [LISTED]}})
    worker = make.worker(make.coordinator(), http=httpx.AsyncClient(transport=network), settings=own)
    with pytest.raises(ClientError, match=f"policy-coordinator: .* not {ELSEWHERE}; nothing was sent there") as end:
        asyncio.run(worker.run())
    assert end.value.exit is Exit.POLICY
    assert network.second == []


def test_a_307_to_an_origin_that_the_policy_lists_is_followed(tmp_path: Path, make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=1)
    network = TwoOrigins(coordinator, "")
    own = with_policy(settings, tmp_path, {"allow": {"coordinators": [LISTED, ELSEWHERE]}})
    worker = make.worker(coordinator, http=httpx.AsyncClient(transport=network), settings=own)
    assert asyncio.run(worker.run()) == Exit.OK
    assert any(path.endswith("/update") for path, _ in network.second)


def test_an_origin_is_compared_as_an_address(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text('version: 1\nallow: {coordinators: ["https://coordinator.example.org:443/"]}\n')
    policy, _ = read_policy(path)
    expect_origin(policy, "https://coordinator.example.org")
    expect_origin(None, "https://anything.example.org")
    for other in ("http://coordinator.example.org", "https://coordinator.example.org:444", "https://example.org"):
        with pytest.raises(ClientError, match="policy-coordinator"):
            expect_origin(policy, other)


Change = Callable[[dict[str, Any]], dict[str, Any]]


def config(**values: Any) -> Change:
    return lambda task: task | {"config": task["config"] | values}


def training(**values: Any) -> Change:
    return lambda task: task | {"config": task["config"] | {"training": task["config"]["training"] | values}}


@pytest.mark.parametrize(
    ("given", "change", "kind"),
    [
        ({"allow": {"methods": ["promptfl"]}}, config(method={"name": "fedpgp"}), "policy-method"),
        (
            {"allow": {"backbones": ["promptfed-tiny/random"]}},
            config(backbone={"model": "promptfed-tiny", "pretrained": "symbols", "precision": "fp32"}),
            "policy-backbone",
        ),
        ({"allow": {"class_names": "federation"}}, config(class_names=None), "policy-classes"),
        ({"limits": {"rounds": 2}}, config(rounds=3), "policy-rounds"),
        ({"limits": {"epochs": 3}}, training(epochs=4), "policy-epochs"),
        ({"limits": {"min_steps": 3}}, training(epochs=1, batch_size=24), "policy-steps"),
        ({"privacy": {"require": "sample", "delta": 1e-3}}, config(privacy=None), "policy-privacy"),
    ],
)
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


@pytest.mark.parametrize(
    ("given", "changes", "kind"),
    [
        ({"limits": {"epochs": 2}}, {"training": {"epochs": 3}}, "policy-epochs"),
        ({"allow": {"class_names": "federation"}}, {"class_names": None}, "policy-classes"),
    ],
)
def test_further_keys_that_a_federation_offends(
    given: dict[str, Any], changes: dict[str, Any], kind: str, tmp_path: Path, make: Make, settings: Settings
) -> None:
    coordinator = make.coordinator(**changes)
    with pytest.raises(ClientError, match=kind) as end:
        asyncio.run(make.worker(coordinator, settings=with_policy(settings, tmp_path, given)).run())
    assert end.value.exit is Exit.POLICY
    assert set(coordinator.received) == {b""}


def test_a_policy_that_has_expired_holds_back_the_update_that_waited(
    tmp_path: Path, make: Make, settings: Settings
) -> None:
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
