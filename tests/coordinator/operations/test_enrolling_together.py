"""Clients that enrol at the same moment: one commit, each judged by itself, and an audit log without a gap."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptfed.shared.api.api_schemas import AuditEntry, check_chain
from promptfed.shared.methods.core.interface import Method
from tests.support.coordinators import ForkedCoordinator, InThread, in_thread
from tests.support.groups import at_once
from tests.support.open_phases import kind


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
def test_one_commit_lets_in_all_but_those_who_are_refused(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = coordinator.create()
    token = coordinator.token(federation, uses=10)
    sizes: list[int] = []
    commit = coordinator.registry.committer._together

    def counted(entries: Any) -> Any:
        sizes.append(len(entries))
        return commit(entries)

    monkeypatch.setattr(coordinator.registry.committer, "_together", counted)
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


@pytest.mark.parametrize(("fault", "kept"), [("group-before-commit", set()), ("group-committed", {"a", "b", "c"})])
def test_a_kill_in_a_group_keeps_all_or_none_of_it_and_each_comes_in_again(
    tmp_path: Path, fault: str, kept: set[str]
) -> None:
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
