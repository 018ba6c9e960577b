"""Every route and every role in the protocol's table: held against the description, tried with every token."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from promptfed.coordinator.app import create_app
from promptfed.coordinator.domain import clock
from promptfed.coordinator.http import throttle
from promptfed.coordinator.http.throttle import GUESSES, AuthThrottle
from promptfed.coordinator.problems import TooManyFailures
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.digests import is_proven
from promptfed.testing.clients import bearer, content_digest, enrolment, secret_of, spec, update_body
from tests import ROOT
from tests.security.test_connections import answer_to_a_beginning
from tests.support.coordinators import InThread, Make, in_thread
from tests.support.open_phases import enrolled, launched

FEDERATION = "/v1/federations/{federation}"

ROLES = ("viewer", "operator", "admin")  # each role includes the rights of the previous one


#: What every route in its place gets to read, so that it is the token alone for which it is refused.
BODIES: dict[str, Any] = {
    "POST /v1/federations": spec(name="another"),
    "POST /v1/federations/run-file": {"text": "name: eyes"},
    "POST .../clients": enrolment("newcomer"),
    "PUT .../tasks/{task_id}/evaluation": {"splits": {"test": {"accuracy": 0.5, "num_samples": 1}}},
    "POST .../tasks/{task_id}/failure": {"type": "broken", "detail": "no reason"},
}


def table() -> dict[str, str]:
    """Who may call what, as docs/reference/protocol.md has it."""
    protocol = (ROOT / "docs" / "reference" / "protocol.md").read_text()
    text = protocol.split("## Who may call what\n")[1].split("\n## ")[0]
    rows = [(call, who) for who, calls in re.findall(r"^\| (\w+) \| (`.+`) \|$", text, re.MULTILINE)
            for call in re.findall("`([^`]+)`", calls)]  # fmt: skip
    found = dict(rows)
    assert len(found) == len(rows), "no call twice"
    return found


OPERATIONS: dict[str, dict[str, Any]] = {
    f"{verb.upper()} {path.replace(FEDERATION, '...')}": operation
    for path, verbs in create_app(Settings()).openapi()["paths"].items()
    for verb, operation in verbs.items()
}


def described() -> dict[str, str]:
    """Who may call what, as the coordinator says itself."""
    found = {}
    for call, operation in OPERATIONS.items():
        schemes = [name for one in operation.get("security", []) for name in one]
        assert len(schemes) <= 1, call
        found[call] = schemes[0] if schemes else "anyone"
    return found


TABLE = table()


def test_the_table_has_every_route_with_its_role() -> None:
    real = described()
    for call, who in real.items():
        assert call in TABLE, f"the protocol has no call `{call}`: add it to the row of {who} if that is right"
        assert TABLE[call] == who, f"the protocol says {TABLE[call]} of `{call}`, and its description {who}"
    assert set(TABLE) == set(real), "the protocol has calls that are no longer there"


def test_each_operation_has_a_name_of_its_own() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)
    assert {"list_federations", "get_task", "put_update"} <= set(names)
    assert [name for name in names if "v1" in name] == []


@dataclass
class Door:
    """A coordinator with two federations; in ``mine``, clients ``a`` and ``b`` have each an open task."""

    coordinator: InThread
    tokens: dict[str, str]
    task: dict[str, Any]
    payload: torch.Tensor

    def address(self, call: str) -> tuple[str, str]:
        """The verb and the path of a call, of ``a``'s task."""
        verb, path = call.split(" ")
        real = {"federation": "mine", "client_id": "a", "task_id": self.task["task_id"], "round": "0"}
        real |= {"token_id": "spare", "operator": "nobody"}
        return verb, path.replace("...", FEDERATION).format(**real, name="promptfl", file="app.js")

    def knock(self, call: str, token: str | None) -> httpx.Response:
        """Call with a token; everything else about the call is as it should be, and it is ``a``'s task."""
        verb, url = self.address(call)
        headers = bearer(token) if token is not None else {}
        if url.endswith(("/update", "/exchange")):
            body = update_body({"context": self.payload}, self.task)
            headers |= {"Content-Digest": content_digest(body)}
            answer = self.coordinator.http.request(verb, url, content=body, headers=headers)
        else:
            answer = self.coordinator.http.request(verb, url, headers=headers, json=BODIES.get(call))
        assert is_proven(answer.headers, answer.content) == (url.startswith("/v1/") and answer.content != b"")
        return answer


def operator(coordinator: InThread, role: str, **more: Any) -> str:
    """A token of an operator's with this role."""
    return str(coordinator.post("/v1/operators", {"name": f"the-{role}", "role": role, **more}, status=201)["token"])


@pytest.fixture(scope="module")
def door(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # The wrong tokens and the right ones come from one address here.
    with in_thread(tmp_path_factory.mktemp("door") / "data", auth_failures_per_minute=100_000) as coordinator:
        mine, other = coordinator.create(name="mine"), coordinator.create(name="other")
        a, b, _ = coordinator.enrol(mine, "a", "b", "gone")
        coordinator.enrol(other, "stranger")
        coordinator.post(f"{mine}/start")
        coordinator.delete(f"{mine}/clients/gone")
        task, _ = coordinator.training([a, b])
        expired = coordinator.post(f"{mine}/enrolment-tokens", {"hours": 1e-9}, status=201)["token"]
        tokens = {
            "admin": coordinator.operator["Authorization"].split()[1],
            **{role: operator(coordinator, role) for role in ROLES[:2]},
            "expired operator": operator(coordinator, "admin", hours=1e-9), "enrolment": coordinator.token(mine),
            "client": secret_of("b"), "withdrawn client": secret_of("gone"), "expired enrolment": expired,
            "enrolment of another federation": coordinator.token(other),
            "client of another federation": secret_of("stranger"), "wrong": "0" * 64,
        }  # fmt: skip
        yield Door(coordinator, tokens, task, a.payload(task)["context"])


def expected(call: str, who: str, token: str) -> tuple[int, str]:
    """Status and kind of the answer to a token that is not good enough."""
    if token == "wrong":
        return 401, "unauthorized"
    if token in ("expired enrolment", "expired operator"):
        return 401, "token-expired"
    if token == f"{who} of another federation":
        return 404, "not-found"
    if who == "client" and token == "withdrawn client":
        return 403, "withdrawn"
    return 403, "wrong-role"


def kind_of(answer: httpx.Response) -> str:
    """A refusal's kind."""
    return str(answer.json()["type"]).rsplit("/", 1)[-1]


@pytest.mark.parametrize("call", [call for call, who in TABLE.items() if who != "anyone"])
def test_no_token_but_its_own_opens_a_route(door: Door, call: str) -> None:
    who = TABLE[call]
    before = door.coordinator.get("mine")
    answer = door.knock(call, None)
    assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
    for name, token in door.tokens.items():
        if name == who or (who in ROLES and name in ROLES[ROLES.index(who) :]):
            continue
        answer = door.knock(call, token)
        assert answer.headers["content-type"] == "application/problem+json", (name, answer.text)
        status, kind = expected(call, who, name)
        assert (answer.status_code, kind_of(answer)) == (status, kind), name
    after = door.coordinator.get("mine")
    for view in (before, after):
        view["stage"].pop("seconds_left")
    assert after == before, "nothing was done on the way"


BROUGHT = [call for call, who in TABLE.items() if who != "anyone" and call.split()[0] in ("POST", "PUT")]


@pytest.mark.parametrize("call", BROUGHT)
def test_the_token_is_checked_before_the_body_is_read(door: Door, call: str) -> None:
    """Of a body of 30 MiB only four bytes arrive, and they are no JSON: the refusal is the token's all the same."""
    verb, url, who = *door.address(call), TABLE[call]
    for name, token in door.tokens.items():
        if name == who or (who in ROLES and name in ROLES[ROLES.index(who) :]):
            continue
        status, kind = expected(call, who, name)
        answer = answer_to_a_beginning(door.coordinator, url, bearer(token), verb)
        assert answer.startswith(f"HTTP/1.1 {status} "), (name, answer)
        assert f"/problems/{kind}" in answer, (name, answer)


@pytest.mark.parametrize("call", [call for call in BROUGHT if "requestBody" in OPERATIONS[call]])
def test_a_body_that_was_damaged_on_the_way_is_not_used(door: Door, call: str) -> None:
    token = secret_of("a") if TABLE[call] == "client" else door.tokens[TABLE[call]]
    verb, url = door.address(call)
    sent = {"content": b'{"name": "eves"}', "headers": bearer(token) | {"Content-Type": "application/json"}}
    sent["headers"] |= {"Content-Digest": content_digest(b'{"name": "eyes"}')}
    before = door.knock("GET /v1/federations", door.tokens["admin"]).json()["federations"]
    answer = door.coordinator.http.request(verb, url, **sent)
    assert (answer.status_code, kind_of(answer)) == (400, "digest-mismatch")
    assert len(door.knock("GET /v1/federations", door.tokens["admin"]).json()["federations"]) == len(before)


@pytest.mark.parametrize("call", [call for call in TABLE if "{task_id}" in call])
def test_another_client_s_task_is_not_there(door: Door, call: str) -> None:
    answer = door.knock(call, door.tokens["client"])
    assert (answer.status_code, kind_of(answer)) == (404, "not-found")


@pytest.mark.parametrize("call", [call for call, who in TABLE.items() if who == "anyone"])
def test_what_is_open_needs_no_token(door: Door, call: str) -> None:
    status = 404 if call == "GET /v1/authority" else 200  # the door's coordinator serves no TLS
    assert door.knock(call, None).status_code == status
    assert door.knock(call, door.tokens["wrong"]).status_code == status


# Events never end, and the federation trains.
ELSEWHERE = ("GET .../events",)

READING = [call for call, who in TABLE.items() if call.startswith("GET") and who != "anyone" and call not in ELSEWHERE]


@pytest.mark.parametrize("call", READING)
def test_the_right_token_opens_what_only_reads(door: Door, call: str) -> None:
    token = secret_of("a") if TABLE[call] == "client" else door.tokens[TABLE[call]]
    assert door.knock(call, token).status_code == 200


HOT = ("GET .../task", "GET .../tasks/{task_id}/payload", "PUT .../tasks/{task_id}/update")


HOT += ("PUT .../tasks/{task_id}/evaluation",)


@pytest.mark.parametrize("call", HOT)
def test_wrong_tokens_count_for_their_address(tmp_path: Path, call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "GUESSES", 1)  # two different wrong tokens are guessing here
    options = {"forwarded_allow_ips": "127.0.0.1", "auth_failures_per_minute": 2}
    with in_thread(tmp_path / "data", **options) as coordinator:
        _, (a, b) = launched(coordinator, "a", "b", name="mine")
        task, _ = coordinator.training([a, b])
        door = Door(coordinator, {}, task, a.payload(task)["context"])
        this_moment = clock.monotonic()
        monkeypatch.setattr(clock, "monotonic", lambda: this_moment)  # failures come back with time

        def knock(address: str, token: str) -> int:
            coordinator.http.headers["X-Forwarded-For"] = address
            return door.knock(call, token).status_code

        good = 409 if call.endswith("evaluation") else 200
        assert knock("203.0.113.1", secret_of("a")) in (good, 201)
        assert [knock("203.0.113.1", wrong * 64) for wrong in "010"] == [401, 401, 429]
        assert knock("203.0.113.1", secret_of("a")) == good, "a token that this address has used is let through"
        assert knock("203.0.113.1", secret_of("b")) == 429, "and no other, right or wrong"
        assert knock("203.0.113.2", secret_of("a")) == good, "nor does another address pay for it"
        assert knock("203.0.113.2", "0" * 64) == 401


# Failed authentication is limited by address: wrong tokens wait, right ones pass unless somebody is guessing.

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
    monkeypatch.setattr(throttle, "MOST_ADDRESSES", 10)
    monkeypatch.setattr(throttle, "MOST_TOKENS", 10)
    limit = AuthThrottle(1)
    for number in range(50):
        fail(limit, f"1.2.3.{number}", 1, f"wrong-{number}")
        limit.succeeded("1.2.3.4", f"token-{number}")
    assert {len(kept) for kept in (limit._failures, limit._guesses, limit._wrong, limit._trusted)} == {10}
    assert refused(limit, "1.2.3.49"), "the latest are remembered"
    assert not refused(limit, "1.2.3.0"), "the oldest are not"


def test_wrong_tokens_wait_and_right_ones_pass(
    coordinator_with: Make, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = coordinator_with(auth_failures_per_minute=MOST)
    federation, [client] = enrolled(coordinator, "a")
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


def test_callers_behind_one_address_pass(coordinator_with: Make, monkeypatch: pytest.MonkeyPatch) -> None:
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
