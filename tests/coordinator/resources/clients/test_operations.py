"""How clients come in: identities, refusals, newcomers, resets."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from sqlalchemy import select

from promptfed.coordinator.problems import UpdatesMasked, WrongState
from promptfed.coordinator.resources.clients import operations
from promptfed.coordinator.store.tables import EventRow
from promptfed.shared.api.api_schemas import AuditEntry, check_chain
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import Method, Needs
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.versions import PROTOCOL, VERSION
from promptfed.testing.clients import FINGERPRINT, SHAPE, bearer, drive, enrolment, secret_of
from tests.support.coordinators import ForkedCoordinator, InThread, in_thread
from tests.support.groups import at_once, commits
from tests.support.open_phases import answer_all, enrolled, kind, launched, told


def test_the_same_name_and_secret_is_the_same_identity(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation)
    client = coordinator.client(federation, "a")
    first, again = client.enrol(token), client.enrol(token, num_samples=99)
    assert (first.status_code, again.status_code) == (201, 200)
    assert first.json() == again.json()
    assert told(client.enrol(token, secret="0" * 64)) == (409, "name-taken")
    other = coordinator.client(federation, "b")
    assert told(other.enrol(token, secret=secret_of("a"))) == (409, "secret-taken")
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


WRONG: list[tuple[dict[str, Any], int, str]] = [
    ({"backbone_fingerprint": "sha256:" + "0" * 64}, 409, "other-backbone"),
    ({"backbone_shape": {**SHAPE, "d_t": 9}}, 409, "other-backbone"),
    ({"backbone_shape": {"d_e": 8}}, 409, "other-backbone"),
    ({"class_names": ["circle", "dog"]}, 422, "unknown-class"), ({"class_names": []}, 422, "invalid-request"),
    ({"class_names": ["circle", "circle"]}, 422, "invalid-request"), ({"num_samples": 0}, 422, "no-samples"),
    ({"name": "a b"}, 422, "invalid-request"), ({"name": "<script>"}, 422, "invalid-request"),
    ({"role": "boss"}, 422, "invalid-request"), ({"weight": 3}, 422, "invalid-request"),
]  # fmt: skip


def test_what_is_wrong_is_refused(coordinator: InThread) -> None:
    federation = coordinator.create(class_names=["circle", "square", "star"])
    coordinator.enrol(federation, "first")
    for change, status, expected in WRONG:
        body = enrolment("b") | change
        headers = bearer(coordinator.token(federation))
        response = coordinator.http.post(f"/v1/federations/{federation}/clients", json=body, headers=headers)
        assert told(response) == (status, expected), response.text
        assert len(coordinator.get(f"{federation}/clients")["clients"]) == 1


def test_operators_see_at_its_invitation_why_a_site_cannot_join(coordinator: InThread) -> None:
    federation = coordinator.create(class_names=["circle", "square"])
    path, token = f"{federation}/enrolment-tokens", coordinator.token(federation, name="ward", uses=2)
    coordinator.token(federation, name="other")

    def enrol(name: str, **change: Any) -> int:
        body = enrolment(name, class_names=["circle"]) | change
        url = f"/v1/federations/{federation}/clients"
        return coordinator.http.post(url, json=body, headers=bearer(token)).status_code

    def refused() -> dict[str, dict[str, Any] | None]:
        return {one["name"]: one["refused"] for one in coordinator.get(path)["tokens"]}

    for _ in range(3):  # a service that starts again and again
        assert enrol("a", class_names=["cricle"]) == 422
    assert refused()["other"] is None
    assert (seen := refused()["ward"]) is not None
    assert (seen["client"], seen["type"]) == ("a", "unknown-class")
    assert "nearest: 'circle'" in seen["detail"]
    with coordinator.registry.database.read() as session:
        assert len(operations.refused_enrolments(session, federation)) == 1
    assert enrol("a", num_samples=0) == 422
    assert (seen := refused()["ward"]) is not None
    assert seen["type"] == "no-samples"
    assert enrol("a") == 201
    assert refused()["ward"] is None
    assert enrol("b", num_samples=0) == 422
    coordinator.http.delete(f"/v1/federations/{path}/ward", headers=coordinator.operator)
    coordinator.token(federation, name="ward")
    assert refused() == {"other": None, "ward": None}, "made anew"


VERSIONS: list[tuple[str, int, str]] = [
    ("1-3", 3, "the client"),
    (str(VERSION - 1), VERSION - 1, "the client"),
    (str(VERSION + 1), VERSION + 1, "this coordinator"),
    (f"{VERSION + 1}-{VERSION + 2}", VERSION + 2, "this coordinator"),
    ("four", 0, "the client"),
]


def test_another_version_is_told_whom_to_update(coordinator: InThread) -> None:
    federation = coordinator.create()
    path, [client] = f"/v1/federations/{federation}", coordinator.enrol(federation, "first")
    for spoken, version, who in VERSIONS:
        headers = bearer(coordinator.token(federation)) | {PROTOCOL: spoken}
        calls = [
            coordinator.http.get(f"{path}/enrolment", headers=headers),
            coordinator.http.post(f"{path}/clients", json=enrolment("b"), headers=headers),
            coordinator.http.get(f"{path}/task", headers=client.headers | {PROTOCOL: spoken}),
        ]
        for response in calls:
            assert told(response) == (409, "protocol-version")
            assert response.headers[PROTOCOL] == str(VERSION)
            versions = f"version {version} of the protocol, this coordinator version {VERSION}"
            assert response.json()["detail"] == f"the client speaks {versions}: update {who}"
        assert len(coordinator.get(f"{federation}/clients")["clients"]) == 1


def test_the_spec_s_fingerprint_holds_from_the_first_client_on(coordinator: InThread) -> None:
    federation = coordinator.create(backbone={"fingerprint": "sha256:" + "0" * 64})
    response = coordinator.client(federation, "a").enrol(coordinator.token(federation))
    assert told(response) == (409, "other-backbone")


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


def test_an_operator_sees_what_a_client_runs_on(coordinator: InThread) -> None:
    federation = coordinator.create()
    about = {"release": "0.4.0", "system": "Linux x86_64"}
    coordinator.enrol(federation, "a", **about)
    coordinator.enrol(federation, "b")
    a, b = coordinator.get(f"{federation}/clients")["clients"]
    assert {name: a[name] for name in about} == about
    assert {name: b.get(name) for name in about} == dict.fromkeys(about)


def test_a_newcomer_joins_at_the_next_round(coordinator: InThread) -> None:
    federation, clients = launched(coordinator, "a", "b")
    tasks = coordinator.training(clients)
    [late] = coordinator.enrol(federation, "late")
    assert late.task().status_code == 204
    answer_all(clients, tasks)
    drive([*clients, late])
    rounds = coordinator.get(f"{federation}/rounds")["rounds"]
    assert [one["phases"][0]["asked"] for one in rounds[1:]] == [["a", "b"], ["a", "b", "late"]]
    assert coordinator.client(federation, "late").enrol(coordinator.token(federation)).status_code == 200
    response = coordinator.client(federation, "later").enrol(coordinator.token(federation))
    assert told(response) == (409, "wrong-state")


class Described(PromptFL):
    """Needs to know each domain."""

    name = "described"
    needs: ClassVar[Needs] = Needs(domain_descriptions=True)


def test_a_method_may_need_domains(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "described", Described)
    federation = coordinator.create(method={"name": "described"})
    domain = {"name": "sketch", "description": "a sketch of a {}"}
    clients = coordinator.enrol(federation, "a", "b", domain=domain)
    coordinator.post(f"{federation}/start")
    peers = coordinator.task(clients[0])["config"]["peers"]
    assert peers == [{"name": name, "role": "trainer", "domain": domain} for name in ("a", "b")]


def test_a_method_that_describes_clients_takes_so_many(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "described", Described)
    monkeypatch.setattr(operations, "MOST_PEERS", 2)
    federation = coordinator.create(method={"name": "described"})
    domain = {"name": "sketch", "description": "a sketch of a {}"}
    a, _ = coordinator.enrol(federation, "a", "b", domain=domain)
    response = coordinator.client(federation, "c").enrol(coordinator.token(federation), domain=domain)
    assert told(response) == (409, "unfit-client")
    assert "takes 2 at most" in response.json()["detail"]
    assert a.enrol(coordinator.token(federation), domain=domain).status_code == 200, "who is in stays in"
    coordinator.delete(f"{federation}/clients/b")
    assert coordinator.client(federation, "c").enrol(coordinator.token(federation), domain=domain).status_code == 201


def test_a_reset_frees_the_name_and_keeps_the_identity(coordinator: InThread) -> None:
    federation, (a, b) = enrolled(coordinator, "a", "b")
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


def test_who_else_takes_part_is_told_only_where_a_method_needs_domains(coordinator: InThread) -> None:
    federation = coordinator.create()
    clients = coordinator.enrol(federation, "a", "b", domain={"name": "sketch", "description": "a sketch of a {}"})
    coordinator.post(f"{federation}/start")
    assert coordinator.task(clients[0])["config"]["peers"] == []


# Clients that enrol at the same moment: one commit, each judged by itself, and an audit log without a gap.


def together(
    coordinator: InThread, token: str, federation: str, *asked: tuple[str, dict[str, Any]], entries: int | None = None
) -> list[str]:
    """What each of some enrolments at the same moment is answered: its status, or why it is refused.

    ``entries``: how many of them come to be committed, where they have to be one group.
    """
    calls = [
        lambda name=name, changes=changes: coordinator.client(federation, name).enrol(token, **changes)
        for name, changes in asked
    ]
    answers = at_once(calls, entries)
    return [str(one.status_code) if one.status_code < 400 else kind(one) for one in answers if one is not None]


def log(coordinator: InThread) -> list[AuditEntry]:
    entries = coordinator.get("/v1/audit-log", params={"limit": 1000})["entries"]
    return [AuditEntry.model_validate(one) for one in entries]


@pytest.mark.both_databases
def test_one_commit_lets_in_all_but_the_refused(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=10)
    sizes = commits(coordinator, monkeypatch)
    none, other = {"num_samples": 0}, {"backbone_shape": {"d_t": 9, "d_e": 8, "d_v": 8}}
    asked = [*((name, {}) for name in "abcd"), ("no-samples", none), ("evaluator", none | {"role": "evaluator"})]
    assert together(coordinator, token, federation, *asked, entries=6) == ["201"] * 4 + ["no-samples", "201"]
    assert sizes == [6]
    assert together(coordinator, token, federation, ("e", other), ("f", {})) == ["other-backbone", "201"]
    known = [one["name"] for one in coordinator.get(f"{federation}/clients")["clients"]]
    assert known == ["a", "b", "c", "d", "evaluator", "f"]
    [left] = coordinator.get(f"{federation}/enrolment-tokens")["tokens"]
    assert left["used"] == 6
    entries = log(coordinator)
    assert check_chain(entries) == (len(entries), entries[-1].hash)
    told = [entry for entry in entries if entry.act == "client-enrolled"]
    assert sorted(entry.detail["client"] for entry in told) == known
    assert {(entry.role, entry.actor) for entry in told} == {("enrolment", left["name"])}


def test_in_one_group_a_name_is_one_client_s_and_a_token_is_used_up(coordinator: InThread) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=3)
    stolen = {"secret": "0" * 64}
    found = together(coordinator, token, federation, ("a", {}), ("a", {}), ("a", stolen))
    assert sorted(found) in (["200", "201", "name-taken"], ["201", "name-taken", "name-taken"])
    found = together(coordinator, token, federation, *((name, {}) for name in "bcde"))
    assert sorted(found) == ["201", "201", "token-used-up", "token-used-up"]
    known = [one["name"] for one in coordinator.get(f"{federation}/clients")["clients"]]
    assert len(known) == 3
    shared = coordinator.create(name="shared")
    token, same = coordinator.token(shared, uses=3), {"secret": "1" * 64}
    assert sorted(together(coordinator, token, shared, ("x", same), ("y", same))) == ["201", "secret-taken"]


def test_one_that_breaks_something_spoils_no_other(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=5)
    check = Method.check_classes

    def breaks(self: Method, names: Any) -> None:
        if "broken" in names:
            raise RuntimeError("a method's own mistake")
        check(self, names)

    monkeypatch.setattr(Method, "check_classes", breaks)
    asked = (("a", {}), ("b", {"class_names": ["broken"]}), ("c", {}))
    assert together(coordinator, token, federation, *asked) == ["201", "internal-error", "201"]
    assert [one["name"] for one in coordinator.get(f"{federation}/clients")["clients"]] == ["a", "c"]
    assert check_chain(log(coordinator))


@pytest.mark.extended
@pytest.mark.parametrize(("fault", "kept"), [("group-before-commit", set()), ("group-committed", {"a", "b", "c"})])
def test_a_kill_in_a_group_keeps_all_or_none_and_each_comes_again(tmp_path: Path, fault: str, kept: set[str]) -> None:
    folder = tmp_path / "data"
    process = ForkedCoordinator(folder)
    try:
        federation = process.create()
        token = process.token(federation, uses=3)
    finally:
        process.kill()
    process = ForkedCoordinator(folder, fault=fault)
    try:
        clients = [process.client(federation, name) for name in "abc"]
        answers = at_once([lambda client=client: client.enrol(token) for client in clients])
        assert answers == [None] * 3
    finally:
        process.kill()
    with in_thread(folder) as coordinator:
        known = {one["name"] for one in coordinator.get(f"{federation}/clients")["clients"]}
        assert known == kept or (kept and known and known < kept), "a group may have had one of them alone"
        for name in "abc":
            answer = coordinator.client(federation, name).enrol(token)
            assert answer.status_code == (200 if name in known else 201)
        assert check_chain(log(coordinator))


@pytest.mark.parametrize(
    ("kind", "summed"),
    [
        (None, False),
        *((kind, False) for kind in ("train", "share", "mask", "evaluate")),
        ("confirm", True),
        ("unmask", True),
    ],
)
def test_an_update_can_be_dropped_until_its_masked_vector_is_there(kind: str | None, summed: bool) -> None:
    stage = None if kind is None else SimpleNamespace(kind=kind)
    federation: Any = SimpleNamespace(run=SimpleNamespace(stage=stage, round=3))
    with pytest.raises(UpdatesMasked, match="of round 3") if summed else nullcontext():
        operations.expect_discardable(federation)


@pytest.mark.parametrize(
    ("act", "kind"),
    [(partial(operations.withdraw, discard=False), "client-withdrawn"), (operations.reset, "client-reset")],
)
def test_whom_an_act_concerns_is_woken_and_the_stream_tells_of_it_once(
    act: Callable[..., None], kind: str, coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _ = enrolled(coordinator, "a", "b")
    registry, woken = coordinator.registry, list[Any]()
    wake = registry.wake
    monkeypatch.setattr(registry, "wake", lambda keys: woken.append(sorted(keys)) or wake(keys))
    act(registry, federation, "a")
    told = [key for keys in woken for key in keys if key != (federation, "*events")]  # which others tell as well
    assert told == [(federation, "a")], "not b"
    assert any((federation, "*events") in keys for keys in woken)
    if kind == "client-withdrawn":
        act(registry, federation, "a")
    with registry.database.read() as session:
        events = session.scalars(select(EventRow.data).where(EventRow.kind == kind)).all()
    assert [(one["client"], one.get("discard", False)) for one in events] == [("a", False)]
    coordinator.post(f"{federation}/cancel")
    with pytest.raises(WrongState, match="nobody can be withdrawn any more"):
        operations.withdraw(registry, federation, "b", discard=False)
