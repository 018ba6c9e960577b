"""The calls of a round are answered alike by the handlers in front of the framework and by the declared routes."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
import torch

from promptfed.coordinator.domain import clock
from promptfed.coordinator.operations import payloads
from promptfed.testing.clients import ScriptedClient, bearer, content_digest, enrolment, trained, update_body
from tests.coordinator.operations.test_submissions import bad_updates
from tests.support.both_ways import Switch, seen
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, open_first_phase, stored_rows
from tests.support.waiting import wait_for

Call = tuple[str, str, dict[str, Any]]


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch) -> Switch:
    return Switch(monkeypatch)


def odd_calls(
    coordinator: InThread, federation: str, a: ScriptedClient, b: ScriptedClient, task: dict[str, Any]
) -> list[Call]:
    """Requests of which each changes nothing: polls, payloads, and answers that are refused or were given before."""
    poll, here = f"/v1/federations/{federation}/task", f"/v1/federations/{federation}/tasks/{task['task_id']}"
    good = update_body({"context": torch.ones(4, 8)}, task)
    signed = a.headers | {"Content-Digest": content_digest(good)}
    scheme, secret = a.headers["Authorization"].split(" ")
    polls = [poll + query for query in ("", "?wait=0", "?wait=0.0", "?wait=x", "?wait=61", "?wait=-1", "?wait=&a=b")]
    polls += [
        "/v1/federations/eyes/task",
        "/v1/federations/nowhere/task",
        poll + "/",
        f"/v1/federations/{'x' * 101}/task",
    ]
    headers: list[dict[str, str]] = [
        {},
        bearer("nobody's"),
        coordinator.operator,
        bearer(coordinator.token(federation)),
        {"Authorization": f"{scheme.lower()} {secret}"},
        {"Authorization": f"{scheme}  {secret}"},
        {"Authorization": f"Basic {secret}"},
        {"Authorization": scheme},
    ]
    calls: list[Call] = [("GET", path, {"headers": a.headers}) for path in polls]
    for path in (poll, f"{here}/payload"):
        calls += [("GET", path, {"headers": who}) for who in headers]
    calls += [(verb, poll, {"headers": a.headers}) for verb in ("HEAD", "POST", "DELETE")]
    calls += [
        ("GET", f"{here}/payload", {"headers": a.headers}),
        ("GET", f"{here}/payload", {"headers": a.headers | {"Range": "bytes=0-9"}}),
        ("GET", f"{here}/payload?x=y", {"headers": a.headers}),
        ("GET", f"{here}/payload", {"headers": b.headers}),
        ("GET", f"/v1/federations/{federation}/tasks/none/payload", {"headers": a.headers}),
        ("GET", f"/v1/federations/{federation}/tasks/a%00b/payload", {"headers": a.headers}),
        ("GET", f"/v1/federations/{federation}/tasks/{'x' * 101}/payload", {"headers": a.headers}),
        ("PUT", f"{here}/update", {"content": good, "headers": a.headers}),
        ("PUT", f"{here}/update", {"content": good, "headers": a.headers | {"Content-Digest": "sha-256=:no:"}}),
        ("PUT", f"{here}/update", {"content": good + b"x", "headers": signed}),
        ("PUT", f"{here}/update", {"content": good, "headers": b.headers | {"Content-Digest": content_digest(good)}}),
        ("POST", f"{here}/update", {"content": good, "headers": signed}),
        ("PUT", f"/v1/federations/{federation}/tasks/none/update", {"content": good, "headers": signed}),
    ]
    for body, _, _ in bad_updates(task).values():
        signed = a.headers | {"Content-Digest": content_digest(body)}
        calls.append(("PUT", f"{here}/update", {"content": body, "headers": signed}))
    splits = {"splits": {"test": {"accuracy": 0.5, "num_samples": 3}}}
    calls += [
        ("PUT", f"{here}/evaluation", {"json": splits, "headers": a.headers}),
        ("PUT", f"{here}/evaluation", {"json": {"splits": {"test": {"accuracy": 1.5}}}, "headers": a.headers}),
        ("PUT", f"{here}/evaluation", {"content": b"{", "headers": a.headers | {"Content-Type": "application/json"}}),
        ("PUT", f"{here}/evaluation", {"content": b"", "headers": a.headers | {"Content-Type": "application/json"}}),
        (
            "PUT",
            f"{here}/evaluation",
            {"content": b"\xff", "headers": a.headers | {"Content-Type": "application/json"}},
        ),
        ("PUT", f"{here}/evaluation", {"content": b"{}", "headers": a.headers | {"Content-Type": "text/plain"}}),
        ("PUT", f"{here}/evaluation", {"content": b"{}", "headers": a.headers}),
        ("PUT", f"{here}/evaluation", {"json": splits, "headers": bearer("nobody's")}),
    ]
    return calls + odd_enrolments(coordinator, federation, a)


def odd_enrolments(coordinator: InThread, federation: str, a: ScriptedClient) -> list[Call]:
    """The same of enrolments: of who is there already, and of whom nobody lets in."""
    path, token = f"/v1/federations/{federation}/clients", bearer(coordinator.token(federation))
    known = enrolment(a.name)
    as_json = {"Content-Type": "application/json"}
    calls: list[Call] = [
        ("POST", path, {"json": body, "headers": token})
        for body in (
            known,
            known | {"secret": "0" * 64},
            known | {"name": "other"},
            known | {"name": "a b"},
            known | {"name": "new", "secret": "1" * 64, "num_samples": 0},
            known | {"more": 1},
            {},
            [],
        )
    ]
    calls += [
        ("POST", path, {"content": body, "headers": token | as_json}) for body in (b"", b"{", b"\xff", b"[" * 9999)
    ]
    calls += [("POST", path, {"json": known, "headers": who}) for who in ({}, bearer("nobody's"), a.headers)]
    calls += [
        ("POST", path, {"json": known, "headers": coordinator.operator}),
        ("POST", path, {"content": b"{}", "headers": token | {"Content-Type": "text/plain"}}),
        ("POST", "/v1/federations/nowhere/clients", {"json": known, "headers": token}),
        ("GET", path, {"headers": token}),
        ("GET", f"/v1/federations/{federation}/task", {"headers": token}),
    ]
    return calls


def test_both_answer_every_odd_request_in_the_same_bytes(
    coordinator: InThread, switch: Switch, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, (a, b), (task, _) = open_first_phase(
        coordinator, name="eyes", admission={"max_update_norm": 10.0, "max_bytes": 2_000_000}
    )
    http = httpx.Client(base_url=coordinator.url)  # one that asks what nobody may ask
    this_moment = clock.monotonic()
    monkeypatch.setattr(clock, "monotonic", lambda: this_moment)  # a task tells how many seconds are left
    before, statuses = stored_rows(coordinator.registry, federation), set()

    def refusals() -> int:
        return sum(one["refusals"] for one in coordinator.get(f"{federation}/clients")["clients"])

    for verb, path, options in odd_calls(coordinator, federation, a, b, task):
        counts = [refusals()]
        fast = http.request(verb, path, **options)
        counts.append(refusals())
        with switch.off():
            declared = http.request(verb, path, **options)
        counts.append(refusals())
        assert seen(fast) == seen(declared), (verb, path)
        assert counts[1] - counts[0] == counts[2] - counts[1], (verb, path)
        statuses.add(fast.status_code)
    http.close()
    assert stored_rows(coordinator.registry, federation) == before
    assert {200, 400, 401, 403, 404, 405, 409, 413, 415, 422} <= statuses
    assert switch.answered > 30, "the handlers have answered, not the routes only"


def test_both_take_good_answers_and_their_twins(coordinator: InThread, switch: Switch) -> None:
    federation = coordinator.create(rounds=1)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    told: dict[str, list[Any]] = {"a": [], "b": []}
    play_in_turns(coordinator, federation, clients, switch, told)
    assert told["a"] == told["b"]
    assert [status for status, _, _ in told["a"]] == [201, 200, 201, 200]


def play_in_turns(
    coordinator: InThread, federation: str, clients: list[ScriptedClient], switch: Switch, told: dict[str, list[Any]]
) -> None:
    """The first client is answered by the handlers, the second by the routes; each sends each answer twice."""
    for wanted in ("evaluate", "train"):
        for client in clients:
            task = coordinator.task(client)
            assert task["kind"] == wanted
            body = update_body(trained(client.payload(task), "same", task), task)
            before = switch.answered
            switch.on = client is clients[0]
            answers = [client.evaluate(task) if wanted == "evaluate" else client.send(task, body) for _ in range(2)]
            assert switch.answered - before == (2 if switch.on else 0)
            switch.on = True
            digests = [str(one.json().get("sha256", "none")) for one in answers]
            told[client.name] += [seen(one, task["task_id"], *digests) for one in answers]


def test_both_let_newcomers_in_alike(coordinator: InThread, switch: Switch) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation)
    told = []
    for name in ("a", "b"):
        switch.on, before = name == "a", switch.answered
        answers = [coordinator.client(federation, name).enrol(token) for _ in range(2)]
        assert switch.answered - before == (2 if switch.on else 0)
        told.append([seen(one, one.json()["client_id"], f'"{name}"') for one in answers])
    switch.on = True
    assert told[0] == told[1]
    assert [status for status, _, _ in told[0]] == [201, 200]
    first, second = [
        entry for entry in coordinator.get("/v1/audit-log")["entries"] if entry["act"] == "client-enrolled"
    ]
    alike = ("actor", "role", "address", "federation")
    assert [first[key] for key in alike] == [second[key] for key in alike]
    assert first["role"] == "enrolment"


def test_what_breaks_is_told_alike_and_logged(
    coordinator: InThread, switch: Switch, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _, (a, _), (task, _) = open_first_phase(coordinator, rounds=1)

    def breaks(*_: Any) -> Any:
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr(payloads, "served_payload", breaks)
    fast = coordinator.http.get(task["payload"]["url"], headers=a.headers)
    assert (fast.status_code, kind(fast)) == (500, "internal-error")
    wait_for("the log", lambda: "a defect of ours" in caplog.text)  # which is written after the answer
    with switch.off():
        assert seen(fast) == seen(coordinator.http.get(task["payload"]["url"], headers=a.headers))


def test_a_withdrawn_client_and_an_ended_federation_are_told_alike(coordinator: InThread, switch: Switch) -> None:
    federation, (a, b), _ = open_first_phase(coordinator, rounds=1)
    coordinator.delete(f"{federation}/clients/a")
    fast = a.task()
    with switch.off():
        assert seen(fast) == seen(a.task())
    assert kind(fast) == "withdrawn"
    coordinator.post(f"{federation}/cancel")
    fast, answered = b.task(), switch.answered
    with switch.off():
        assert seen(fast) == seen(b.task())
    assert (kind(fast), switch.answered) == ("federation-ended", answered)
