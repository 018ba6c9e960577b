"""Enrolment tokens let in whom they were minted for, and nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import httpx
import pytest

from promptfed.coordinator.aggregation import global_state
from promptfed.testing.clients import bearer, secret_of
from tests.support.coordinators import InThread
from tests.support.waiting import PATIENCE


def kind(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, str(response.json()["type"]).rsplit("/", 1)[-1]


def test_a_token_lets_in_one_client_unless_it_says_more(coordinator: InThread) -> None:
    federation = coordinator.create()
    minted = coordinator.post(f"{federation}/enrolment-tokens", status=201)
    assert minted["uses"] == 1
    token = minted["token"]
    assert coordinator.client(federation, "a").enrol(token).status_code == 201
    assert kind(coordinator.client(federation, "b").enrol(token)) == (409, "token-used-up")
    assert coordinator.client(federation, "a").enrol(token).status_code == 200, "its answer may have been lost"
    info = coordinator.http.get(f"/v1/federations/{federation}/enrolment", headers=bearer(token))
    assert info.status_code == 200, "a client that is started again asks with it"
    three = coordinator.token(federation, uses=3)
    answers = [coordinator.client(federation, name).enrol(three).status_code for name in "bcde"]
    assert answers == [201, 201, 201, 409]


def test_many_at_once_are_not_more_than_its_uses(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=2)
    answers: list[int] = []

    def enrol(name: str) -> None:
        answers.append(coordinator.client(federation, name).enrol(token).status_code)

    threads = [threading.Thread(target=enrol, args=(f"c{k}",)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(answers) == [201, 201, *[409] * 6]


def test_a_token_for_one_role_lets_in_no_other(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=2, role="evaluator")
    assert kind(coordinator.client(federation, "a").enrol(token)) == (409, "other-token")
    assert coordinator.client(federation, "a").enrol(token, role="evaluator").status_code == 201


def test_a_withdrawn_client_does_not_come_back_by_its_token(coordinator: InThread) -> None:
    federation = coordinator.create()
    token, other = coordinator.token(federation, uses=5), coordinator.token(federation, uses=5)
    for name in ("a", "b"):
        assert coordinator.client(federation, name).enrol(token).status_code == 201
    coordinator.delete(f"{federation}/clients/a")
    again = coordinator.client(federation, "as-somebody-else").enrol(token)
    assert kind(again) == (409, "token-used-up")
    assert "withdrawn" in again.json()["detail"]
    assert coordinator.client(federation, "b").enrol(token).status_code == 200, "who shared it stays"
    assert coordinator.client(federation, "c").enrol(other).status_code == 201
    coordinator.post(f"{federation}/clients/a/reset")
    mine = coordinator.token(federation, client="a")
    coordinator.delete(f"{federation}/clients/b")
    assert coordinator.client(federation, "a").enrol(mine, secret="e" * 64).status_code == 201


def test_a_token_for_a_reset_name_falls_with_the_client(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a")
    coordinator.post(f"{federation}/clients/a/reset")
    mine = coordinator.token(federation, client="a")
    coordinator.delete(f"{federation}/clients/a")
    assert kind(coordinator.client(federation, "a").enrol(mine, secret="e" * 64)) == (409, "token-used-up")


def test_a_reset_name_is_for_the_token_that_was_minted_for_it(coordinator: InThread) -> None:
    federation = coordinator.create()
    [a] = coordinator.enrol(federation, "a")
    path = f"{federation}/enrolment-tokens"
    assert "reset it first" in coordinator.post(path, {"client": "a"}, status=409)["detail"]
    coordinator.post(path, {"client": "nobody"}, status=404)
    coordinator.post(path, {"client": "a", "uses": 2}, status=422)
    coordinator.post(f"{federation}/clients/a/reset")
    stranger = a.enrol(coordinator.token(federation), secret="e" * 64)
    assert kind(stranger) == (409, "name-taken")
    mine = coordinator.token(federation, client="a")
    assert kind(coordinator.client(federation, "b").enrol(mine)) == (409, "other-token")
    assert a.enrol(mine, secret="f" * 64).status_code == 201


@pytest.mark.both_databases
def test_tokens_are_listed_and_taken_back(coordinator: InThread) -> None:
    federation = coordinator.create()
    path = f"{federation}/enrolment-tokens"
    ward = coordinator.post(path, {"name": "ward-3", "role": "trainer", "uses": 2}, status=201)
    spare = coordinator.post(path, status=201)
    coordinator.post(path, {"name": "ward-3"}, status=409)
    assert coordinator.client(federation, "a").enrol(ward["token"]).status_code == 201
    listed = coordinator.get(path)
    assert listed["next"] is None
    views = {view["name"]: view for view in listed["tokens"]}
    assert set(views) == {"ward-3", spare["id"]}
    shown = {key: views["ward-3"][key] for key in ("role", "uses", "used", "closed", "client", "clients")}
    assert shown == {"role": "trainer", "uses": 2, "used": 1, "closed": False, "client": None, "clients": ["a"]}
    assert ward["token"] not in str(listed)
    first = coordinator.get(path, params={"limit": 1})
    rest = coordinator.get(path, params={"limit": 1, "after": first["next"]})
    assert first["tokens"] + rest["tokens"] == listed["tokens"]
    coordinator.delete(f"{path}/ward-3")
    coordinator.delete(f"{path}/ward-3", status=404)
    assert kind(coordinator.client(federation, "b").enrol(ward["token"])) == (401, "unauthorized")
    assert coordinator.client(federation, "a").task().status_code == 204, "who came by it stays"
    assert [view["id"] for view in coordinator.get(path)["tokens"]] == [spare["id"]]


def test_what_a_token_has_let_in_is_known_after_a_restart(
    coordinator_with: Callable[..., InThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = coordinator_with()
    federation = first.create(class_names=None)
    token, closed = first.token(federation, uses=2), first.token(federation, uses=2)
    first.client(federation, "a").enrol(token)
    first.client(federation, "gone").enrol(closed)
    first.delete(f"{federation}/clients/gone")
    named = first.registry.get(federation).named
    first.stop()
    again = coordinator_with()
    assert again.registry.get(federation).named == named
    assert again.client(federation, "b").enrol(token).status_code == 201
    assert kind(again.client(federation, "c").enrol(token)) == (409, "token-used-up")
    assert kind(again.client(federation, "c").enrol(closed)) == (409, "token-used-up")


def test_nobody_who_enrols_keeps_a_federation_from_starting(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody comes while each initial state is made: it was made again for as long as anybody came."""
    federation = coordinator.create()
    coordinator.enrol(federation, "a", "b")
    token, made, refused = coordinator.token(federation), [0], []
    real = global_state.initial_state

    def made_while_somebody_comes(*arguments: object) -> object:
        made[0] += 1
        assert made[0] < 20, "the federation does not start"
        refused.append(coordinator.client(federation, f"late-{made[0]}").enrol(token))
        return real(*arguments)

    monkeypatch.setattr(global_state, "initial_state", made_while_somebody_comes)
    assert coordinator.post(f"{federation}/start")["state"] == "running"
    assert (made[0], [kind(answer) for answer in refused]) == (1, [(503, "starting")])
    assert refused[0].headers["retry-after"] == "1"
    late = coordinator.client(federation, "late-1").enrol(token)
    assert late.status_code == 201, "once the rounds have begun, it comes in as any newcomer"
    coordinator.delete(f"{federation}/clients/late-1")


def test_a_start_that_is_refused_leaves_enrolment_open(coordinator: InThread) -> None:
    federation = coordinator.create(method={"context_init": "a photo of a"})
    coordinator.enrol(federation, "a", "b")
    assert coordinator.http.post(f"/v1/federations/{federation}/start", headers=coordinator.operator).status_code == 409
    assert coordinator.client(federation, "c").enrol(coordinator.token(federation)).status_code == 201


def test_a_secret_of_before_is_not_a_way_in(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a")
    coordinator.delete(f"{federation}/clients/a")
    other = coordinator.client(federation, "b").enrol(coordinator.token(federation), secret=secret_of("a"))
    assert kind(other) == (409, "secret-taken")


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_that_is_not_declared_as_json_is_told_so(coordinator: InThread, kind: str | None) -> None:
    federation = coordinator.create()
    headers = coordinator.operator | ({} if kind is None else {"Content-Type": kind})
    url = f"/v1/federations/{federation}/enrolment-tokens"
    response = coordinator.http.post(url, content=b'{"uses": 2}', headers=headers)
    assert response.status_code == 422
    assert "Content-Type: application/json" in response.json()["detail"]
    # A JSON string is declared well, and wrong otherwise.
    response = coordinator.http.post(url, json="uses", headers=coordinator.operator)
    assert response.status_code == 422
    assert "Content-Type" not in response.json()["detail"]
