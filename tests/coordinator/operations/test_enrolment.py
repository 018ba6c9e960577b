"""How clients come in: identities, refusals, newcomers, resets."""

from __future__ import annotations

from typing import Any, ClassVar

import httpx
import pytest

from promptfed.coordinator.operations import enrolment as operations
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Needs
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.spec.section import PROTOCOL, VERSION
from promptfed.testing.clients import FINGERPRINT, SHAPE, bearer, drive, enrolment, secret_of
from tests.support.coordinators import InThread


def kind(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, str(response.json()["type"]).rsplit("/", 1)[-1]


def test_the_same_name_and_secret_is_the_same_identity(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation)
    client = coordinator.client(federation, "a")
    first, again = client.enrol(token), client.enrol(token, num_samples=99)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert kind(client.enrol(token, secret="0" * 64)) == (409, "name-taken")
    other = coordinator.client(federation, "b")
    assert kind(other.enrol(token, secret=secret_of("a"))) == (409, "secret-taken")
    assert [one["num_samples"] for one in coordinator.get(f"{federation}/clients")["clients"]] == [10]


def test_a_client_is_told_what_it_needs_before_it_enrols(coordinator: InThread) -> None:
    federation = coordinator.create(class_names=["circle", "square", "star"])
    path = f"/v1/federations/{federation}/enrolment"
    info = coordinator.http.get(path, headers=bearer(coordinator.token(federation))).json()
    assert (info["federation_id"], info["method"]["name"], info["state"]) == (federation, "promptfl", "enrolling")
    assert (info["class_names"], info["backbone"]["fingerprint"]) == (["circle", "square", "star"], None)
    coordinator.enrol(federation, "a")
    info = coordinator.http.get(path, headers=bearer(coordinator.token(federation))).json()
    assert info["backbone"]["fingerprint"] == FINGERPRINT


@pytest.mark.parametrize(
    ("change", "status", "expected"),
    [
        ({"backbone_fingerprint": "sha256:" + "0" * 64}, 409, "other-backbone"),
        ({"backbone_shape": {**SHAPE, "d_t": 9}}, 409, "other-backbone"),
        ({"backbone_shape": {"d_e": 8}}, 409, "other-backbone"),
        ({"class_names": ["circle", "dog"]}, 422, "unknown-class"),
        ({"class_names": []}, 422, "invalid-request"),
        ({"class_names": ["circle", "circle"]}, 422, "invalid-request"),
        ({"num_samples": 0}, 422, "no-samples"),
        ({"name": "a b"}, 422, "invalid-request"),
        ({"name": "<script>"}, 422, "invalid-request"),
        ({"secret": "short"}, 422, "invalid-request"),
        ({"role": "boss"}, 422, "invalid-request"),
        ({"weight": 3}, 422, "invalid-request"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_door(
    coordinator: InThread, change: dict[str, Any], status: int, expected: str
) -> None:
    federation = coordinator.create(class_names=["circle", "square", "star"])
    coordinator.enrol(federation, "first")
    body = enrolment("b") | change
    response = coordinator.http.post(
        f"/v1/federations/{federation}/clients", json=body, headers=bearer(coordinator.token(federation))
    )
    assert kind(response) == (status, expected), response.text
    assert len(coordinator.get(f"{federation}/clients")["clients"]) == 1


@pytest.mark.parametrize(
    ("told", "version", "who"),
    [
        ("1-3", 3, "the client"),
        (str(VERSION - 1), VERSION - 1, "the client"),
        (str(VERSION + 1), VERSION + 1, "this coordinator"),
        (f"{VERSION + 1}-{VERSION + 2}", VERSION + 2, "this coordinator"),
        ("four", 0, "the client"),
    ],
)
def test_a_client_of_another_version_is_told_which_side_to_update(
    coordinator: InThread, told: str, version: int, who: str
) -> None:
    federation = coordinator.create()
    path, [client] = f"/v1/federations/{federation}", coordinator.enrol(federation, "first")
    headers = bearer(coordinator.token(federation)) | {PROTOCOL: told}
    calls = [
        coordinator.http.get(f"{path}/enrolment", headers=headers),
        coordinator.http.post(f"{path}/clients", json=enrolment("b"), headers=headers),
        coordinator.http.get(f"{path}/task", headers=client.headers | {PROTOCOL: told}),
    ]
    for response in calls:
        assert kind(response) == (409, "protocol-version")
        assert response.headers[PROTOCOL] == str(VERSION)
        text = f"the client speaks version {version} of the protocol, this coordinator version {VERSION}: update {who}"
        assert response.json()["detail"] == text
    assert len(coordinator.get(f"{federation}/clients")["clients"]) == 1


def test_the_spec_s_fingerprint_holds_from_the_first_client_on(coordinator: InThread) -> None:
    federation = coordinator.create(backbone={"fingerprint": "sha256:" + "0" * 64})
    response = coordinator.client(federation, "a").enrol(coordinator.token(federation))
    assert kind(response) == (409, "other-backbone")


def test_a_backbone_that_the_method_cannot_use_is_refused(coordinator: InThread) -> None:
    federation = coordinator.create()
    response = coordinator.client(federation, "a").enrol(coordinator.token(federation), backbone_shape={"d_e": 8})
    assert kind(response) == (409, "cannot-start")
    assert coordinator.get(federation)["backbone"]["fingerprint"] is None


@pytest.mark.both_databases
def test_clients_are_listed_in_pages_with_when_they_were_seen(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "c", "a", "b")
    first = coordinator.get(f"{federation}/clients", params={"limit": 2})
    rest = coordinator.get(f"{federation}/clients", params={"limit": 2, "after": first["next"]})
    assert [one["name"] for one in first["clients"] + rest["clients"]] == ["a", "b", "c"]
    assert rest["next"] is None
    before = first["clients"][0]["last_seen"]
    coordinator.client(federation, "a").task()
    assert coordinator.get(f"{federation}/clients")["clients"][0]["last_seen"] > before


def test_a_newcomer_joins_at_the_next_round(coordinator: InThread) -> None:
    federation = coordinator.create()
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    [late] = coordinator.enrol(federation, "late")
    assert late.task().status_code == 204
    for client, task in zip(clients, tasks, strict=True):
        client.answer(task)
    drive([*clients, late])
    rounds = coordinator.get(f"{federation}/rounds")["rounds"]
    assert [one["phases"][0]["asked"] for one in rounds[1:]] == [["a", "b"], ["a", "b", "late"]]
    assert coordinator.client(federation, "late").enrol(coordinator.token(federation)).status_code == 200
    response = coordinator.client(federation, "later").enrol(coordinator.token(federation))
    assert kind(response) == (409, "wrong-state")


class Described(PromptFL):
    """Needs to know each domain."""

    name = "described"
    needs: ClassVar[Needs] = Needs(domain_descriptions=True)


def test_a_method_may_need_domains(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "described", Described)
    federation = coordinator.create(method={"name": "described"})
    domain = {"name": "sketch", "description": "a sketch of a {}"}
    response = coordinator.client(federation, "a").enrol(coordinator.token(federation))
    assert kind(response) == (422, "domain-missing")
    clients = coordinator.enrol(federation, "a", "b", domain=domain)
    coordinator.post(f"{federation}/start")
    peers = coordinator.task(clients[0])["config"]["peers"]
    assert peers == [{"name": name, "role": "trainer", "domain": domain} for name in ("a", "b")]


def test_a_method_that_describes_clients_to_each_other_takes_no_more_than_clients_accept(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "described", Described)
    monkeypatch.setattr(operations, "MOST_PEERS", 2)
    federation = coordinator.create(method={"name": "described"})
    domain = {"name": "sketch", "description": "a sketch of a {}"}
    a, _ = coordinator.enrol(federation, "a", "b", domain=domain)
    response = coordinator.client(federation, "c").enrol(coordinator.token(federation), domain=domain)
    assert kind(response) == (409, "unfit-client")
    assert "takes 2 at most" in response.json()["detail"]
    assert a.enrol(coordinator.token(federation), domain=domain).status_code == 200, "who is in stays in"
    coordinator.delete(f"{federation}/clients/b")
    assert coordinator.client(federation, "c").enrol(coordinator.token(federation), domain=domain).status_code == 201


@pytest.mark.both_databases
def test_a_reset_frees_the_name_and_keeps_the_identity(coordinator: InThread) -> None:
    federation = coordinator.create()
    a, b = coordinator.enrol(federation, "a", "b")
    identity = a.enrol(coordinator.token(federation)).json()["client_id"]
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training([a, b])
    assert coordinator.post(f"{federation}/clients/a/reset")["reset"] is True
    assert a.task().status_code == 401
    fresh = "f" * 64
    response = a.enrol(coordinator.token(federation, client="a"), secret=fresh)
    assert (response.status_code, response.json()["client_id"]) == (201, identity)
    response = coordinator.http.get(f"{a.path}/task", headers=bearer(fresh))
    assert response.json()["task_id"] == tasks[0]["task_id"], "its open task is still its own"


def test_a_withdrawn_client_can_come_back_after_a_reset(coordinator: InThread) -> None:
    federation = coordinator.create()
    [a] = coordinator.enrol(federation, "a")
    coordinator.delete(f"{federation}/clients/a")
    coordinator.delete(f"{federation}/clients/a")
    assert kind(a.enrol(coordinator.token(federation))) == (403, "withdrawn")
    coordinator.post(f"{federation}/clients/a/reset")
    assert a.enrol(coordinator.token(federation, client="a")).status_code == 201
    assert coordinator.get(federation)["clients"] == {"trainers": 1, "evaluators": 0, "withdrawn": 0}


def test_tokens_expire(coordinator: InThread) -> None:
    federation = coordinator.create()
    minted = coordinator.post(f"{federation}/enrolment-tokens", {"hours": 1e-6}, status=201)
    response = coordinator.client(federation, "a").enrol(minted["token"])
    assert kind(response) == (401, "token-expired")
    coordinator.post(f"{federation}/enrolment-tokens", {"hours": -1}, status=422)


def test_who_else_takes_part_is_told_only_where_a_method_needs_domains(coordinator: InThread) -> None:
    federation = coordinator.create()
    clients = coordinator.enrol(federation, "a", "b", domain={"name": "sketch", "description": "a sketch of a {}"})
    coordinator.post(f"{federation}/start")
    assert coordinator.task(clients[0])["config"]["peers"] == []
