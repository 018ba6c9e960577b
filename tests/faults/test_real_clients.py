"""Real clients behind a network in trouble, with a coordinator that is away, and with clocks that are apart."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.http import connection
from promptfed.coordinator.domain import clock
from promptfed.coordinator.store.tables import UpdateRow
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from tests.faults.test_partition import TROUBLES, now_and_then
from tests.support.coordinators import InThread, in_thread
from tests.support.proxy import DAMAGES, ProxiedRequest, Proxy, Trouble
from tests.support.real_clients import NAMES, ROUNDS, RealFederations, without_id


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone("promptfed-tiny", None)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients try again at once."""
    monkeypatch.setattr(connection, "FIRST_BACKOFF", 0.02)
    monkeypatch.setattr(connection, "LONGEST_BACKOFF", 0.1)


@pytest.fixture
def run(backbone: Backbone, features: FeatureCache, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Runs a whole federation with two real clients that know the coordinator under ``url``; what came of it."""
    return RealFederations(tmp_path, backbone, features).run


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "data") as server:
        yield server


class Jumping(datetime):
    """A wall clock that somebody sets forward and back by hours, all the time."""

    chance = random.Random(3)

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> datetime:
        return datetime.now(UTC) + timedelta(hours=cls.chance.uniform(-20, 20))


def test_in_trouble_and_with_clocks_apart_they_come_to_the_state_of_a_quiet_run(
    coordinator: InThread, run: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = without_id(run(coordinator, coordinator.url))
    # Clocks that jump change nothing.
    with monkeypatch.context() as patch:
        # What clients are told of deadlines is then hours before or after what they take for now.
        patch.setattr(clock, "datetime", Jumping)
        assert without_id(run(coordinator, coordinator.url)) == quiet
    for troubles in (TROUBLES, DAMAGES):
        with Proxy(coordinator.url, now_and_then(11, troubles=troubles)) as proxy:
            disturbed = run(coordinator, proxy.url)
            assert sum(proxy.seen[one] for one in troubles) > 10
        assert without_id(disturbed) == quiet
        assert coordinator.get(f"{disturbed['federation']}/rounds/1")["phases"][0]["failed"] == []
    with coordinator.registry.database.read() as session:
        stored = session.query(UpdateRow).count()
    assert stored == 4 * ROUNDS * len(NAMES), "each task of all runs was answered once"


def away_for(seconds: float, after: int) -> Callable[[ProxiedRequest], Trouble]:
    """From the request with number ``after`` on nobody answers for so long, and four requests at least."""
    begun: list[float] = []

    def trouble(asked: ProxiedRequest) -> Trouble:
        if asked.number < after:
            return "none"
        begun.append(time.monotonic())
        return "refused" if begun[-1] - begun[0] < seconds or len(begun) <= 4 else "none"

    return trouble


@pytest.mark.parametrize("seconds", [1.0, pytest.param(60.0, marks=pytest.mark.slow)])
def test_they_wait_for_a_coordinator_that_is_away(
    coordinator: InThread, run: Callable[..., dict[str, Any]], seconds: float
) -> None:
    begun = time.monotonic()
    with Proxy(coordinator.url, away_for(seconds, after=14)) as proxy:
        found = run(coordinator, proxy.url)
        assert proxy.seen["refused"] > 3
    assert time.monotonic() - begun >= seconds
    assert found["counted"][1:] == [[list(NAMES)]] * ROUNDS
