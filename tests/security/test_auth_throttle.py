"""Failed authentication is limited by address: wrong tokens wait, and so does a right one that is new there."""

from __future__ import annotations

from collections.abc import Callable

import httpx
import pytest

from promptfed.coordinator.domain import clock
from promptfed.coordinator.http import auth_throttle
from promptfed.coordinator.http.auth_throttle import AuthThrottle
from promptfed.coordinator.problems import TooManyFailures
from tests.support.coordinators import InThread
from tests.support.fake_clients import bearer

MOST = 5


def fail(limit: AuthThrottle, address: str, times: int) -> None:
    for _ in range(times):
        limit.check(address, "wrong")
        limit.failed(address)


def refused(limit: AuthThrottle, address: str, token: str = "other") -> bool:
    try:
        limit.check(address, token)
    except TooManyFailures:
        return True
    return False


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [100.0]
    monkeypatch.setattr(clock, "monotonic", lambda: found[0])
    return found


def test_failures_come_back_with_time(now: list[float]) -> None:
    limit = AuthThrottle(MOST)
    fail(limit, "1.2.3.4", MOST)
    with pytest.raises(TooManyFailures, match=r"1\.2\.3\.4.* in 12 s") as refusal:
        limit.check("1.2.3.4", "any")
    assert refusal.value.headers == {"Retry-After": "12"}
    now[0] += 11.9
    assert refused(limit, "1.2.3.4")
    now[0] += 0.2
    fail(limit, "1.2.3.4", 1)
    assert refused(limit, "1.2.3.4")
    now[0] += 3600
    fail(limit, "1.2.3.4", MOST)
    assert refused(limit, "1.2.3.4"), "an hour of rest allows no more than the first minute did"


def test_each_address_has_its_own_and_an_ipv6_network_one(now: list[float]) -> None:
    limit = AuthThrottle(MOST)
    for number in range(MOST):
        fail(limit, f"2001:db8::{number}", 1)
    fail(limit, "::ffff:1.2.3.4", MOST)
    assert refused(limit, "2001:db8::ffff")
    assert refused(limit, "1.2.3.4")
    assert not refused(limit, "2001:db8:0:1::1")
    assert not refused(limit, "1.2.3.5")
    assert not refused(limit, "no address")


def test_a_token_that_was_right_before_passes_from_its_own_address_only(now: list[float]) -> None:
    limit = AuthThrottle(MOST)
    limit.succeeded("1.2.3.4", "right")
    for address in ("1.2.3.4", "5.6.7.8"):
        fail(limit, address, MOST)
    assert not refused(limit, "1.2.3.4", "right")
    assert refused(limit, "5.6.7.8", "right")


def test_memory_is_bounded(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth_throttle, "MOST_ADDRESSES", 10)
    monkeypatch.setattr(auth_throttle, "MOST_TOKENS", 10)
    limit = AuthThrottle(1)
    for number in range(50):
        fail(limit, f"1.2.3.{number}", 1)
        limit.succeeded("1.2.3.4", f"token-{number}")
    assert len(limit._buckets) == len(limit._trusted) == 10
    assert refused(limit, "1.2.3.49"), "the latest are remembered"
    assert not refused(limit, "1.2.3.0"), "the oldest are not"


def test_whoever_has_failed_too_often_waits_whatever_it_sends(
    coordinator_with: Callable[..., InThread], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinator_with(auth_failures_per_minute=MOST)
    federation = coordinator.create()
    [client] = coordinator.enrol(federation, "a")
    assert client.task().status_code == 204
    fresh = coordinator.token(federation)
    this_moment = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: this_moment)  # failures come back with time
    path = f"/v1/federations/{federation}"

    def ask(token: str) -> httpx.Response:
        return coordinator.http.get(f"{path}/enrolment", headers=bearer(token))

    assert [ask(f"guess-{number}").status_code for number in range(MOST + 2)] == [401] * MOST + [429] * 2
    answer = ask("one more")
    assert answer.json()["type"].endswith("/too-many-failures")
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert ask(fresh).status_code == 429, "a right guess is not told from a wrong one"
    assert coordinator.http.get(f"{path}/enrolment").status_code == 401, "no token is no guess"
    assert client.task().status_code == 204, "who worked from here before goes on"
    coordinator.get(federation)
    assert any("wrong tokens from 127.0.0.1" in one.getMessage() for one in caplog.records)
    assert "guess-" not in caplog.text
