"""Failed authentication is limited by address: wrong tokens wait, right ones pass unless somebody is guessing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import httpx
import pytest

from promptfed.coordinator.domain import clock
from promptfed.coordinator.http import callers
from promptfed.coordinator.http.callers import GUESSES, AuthThrottle
from promptfed.coordinator.problems import TooManyFailures
from promptfed.testing.clients import bearer, secret_of
from tests.support.coordinators import InThread

MOST = 5


def fail(limit: AuthThrottle, address: str, times: int, token: str = "wrong") -> None:
    for _ in range(times):
        limit.check_wrong(address, token)
        limit.failed(address)


def guess(limit: AuthThrottle, address: str, times: int) -> None:
    """``times`` different wrong tokens, most of which are answered 429."""
    for number in range(times):
        with contextlib.suppress(TooManyFailures):
            limit.check_wrong(address, f"guess-{number}")


def refused(limit: AuthThrottle, address: str, token: str = "other") -> bool:
    """Whether a wrong token is."""
    try:
        limit.check_wrong(address, token)
    except TooManyFailures:
        return True
    return False


def right_refused(limit: AuthThrottle, address: str, token: str = "right") -> bool:
    try:
        limit.check_right(address, token)
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
        limit.check_wrong("1.2.3.4", "any")
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


def test_a_right_token_passes_whatever_else_has_failed(now: list[float]) -> None:
    limit = AuthThrottle(MOST)
    fail(limit, "1.2.3.4", MOST)
    for _ in range(2 * MOST * GUESSES):
        assert refused(limit, "1.2.3.4", "the same again"), "a broken script sends one wrong token again and again"
    assert not right_refused(limit, "1.2.3.4")


def test_guessing_is_limited_whatever_is_guessed(now: list[float]) -> None:
    limit = AuthThrottle(MOST)
    limit.succeeded("1.2.3.4", "right before")
    for address in ("1.2.3.4", "5.6.7.8"):
        fail(limit, address, MOST)
        guess(limit, address, MOST * GUESSES - 2)
        assert not right_refused(limit, address)
        guess(limit, address, MOST * GUESSES)
        assert right_refused(limit, address), "a right guess is not told from a wrong one"
    assert not right_refused(limit, "1.2.3.4", "right before")
    assert right_refused(limit, "5.6.7.8", "right before"), "it was right from another address only"
    now[0] += 60
    assert not right_refused(limit, "5.6.7.8")


def test_memory_is_bounded(now: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callers, "MOST_ADDRESSES", 10)
    monkeypatch.setattr(callers, "MOST_TOKENS", 10)
    limit = AuthThrottle(1)
    for number in range(50):
        fail(limit, f"1.2.3.{number}", 1, f"wrong-{number}")
        limit.succeeded("1.2.3.4", f"token-{number}")
    assert {len(kept) for kept in (limit._failures, limit._guesses, limit._wrong, limit._trusted)} == {10}
    assert refused(limit, "1.2.3.49"), "the latest are remembered"
    assert not refused(limit, "1.2.3.0"), "the oldest are not"


def test_wrong_tokens_wait_and_right_ones_pass(
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
    assert ask(fresh).status_code == 200, "others' failures keep no right token out"
    assert coordinator.http.get(f"{path}/enrolment").status_code == 401, "no token is no guess"
    assert client.task().status_code == 204, "who worked from here before goes on"
    coordinator.get(federation)
    assert any("wrong tokens from 127.0.0.1" in one.getMessage() for one in caplog.records)
    assert "guess-" not in caplog.text


def test_after_a_restart_callers_behind_one_address_pass_beside_strangers(
    coordinator_with: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored coordinator lacks some clients, which keep asking from the address of those that it knows."""
    first = coordinator_with(auth_failures_per_minute=MOST)
    federation = first.create()
    first.enrol(federation, "a", "b")
    first.stop()
    again = coordinator_with(auth_failures_per_minute=MOST)
    this_moment = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: this_moment)
    path = f"/v1/federations/{federation}/task"
    lost = [again.http.get(path, headers=bearer(f"{number % 3:064x}")) for number in range(4 * MOST)]
    assert lost[0].status_code == 401
    assert lost[-1].status_code == 429
    for name in ("a", "b"):
        assert again.http.get(path, headers=bearer(secret_of(name))).status_code == 204
    again.get(federation)
