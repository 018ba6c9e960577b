"""What is removed of rounds, clients and federations, some rows at a time, and that nothing else goes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import func, select, update

from promptfed.coordinator.engine import retention
from promptfed.coordinator.engine.committer import RegistryClosed
from promptfed.coordinator.store.blobs import digest_of
from promptfed.coordinator.store.tables import (
    DELETING,
    BlobRow,
    EventRow,
    FederationRow,
    PhaseRow,
    StateRow,
    TaskRow,
    UpdateRow,
)
from tests.support.coordinators import InProcess
from tests.support.open_phases import completed, open_first_phase


def rows(coordinator: InProcess, *columns: Any, where: Any = True) -> list[Any]:
    with coordinator.registry.database.read() as session:
        query = select(*columns).where(where)
        return (
            sorted(tuple(row) for row in session.execute(query)) if len(columns) > 1 else sorted(session.scalars(query))
        )


def test_rounds_before_the_last_one_are_retired_in_one_go(coordinator: InProcess) -> None:
    federation, _ = completed(coordinator, "a", "b", rounds=3)
    registry = coordinator.registry
    with registry.database.write() as session:
        session.execute(update(PhaseRow).values(noise_key="aa"))
        before = {row.round: row.sha256 for row in session.execute(select(StateRow.round, StateRow.sha256))}
        digests = set(retention._retire_rows(session, federation, 2))
    assert {before[0], before[1]} <= digests
    assert {before[2], before[3]}.isdisjoint(digests - set(rows(coordinator, TaskRow.payload_sha256)))
    assert rows(coordinator, StateRow.round, StateRow.stored) == [(0, False), (1, False), (2, True), (3, True)]
    joined = PhaseRow.id == TaskRow.phase_id
    stored = set(rows(coordinator, PhaseRow.round, TaskRow.payload_stored, where=joined))
    assert stored == {(0, False), (1, False), (2, True), (3, True)}
    sent = set(rows(coordinator, PhaseRow.round, UpdateRow.stored, where=joined & (TaskRow.id == UpdateRow.task_id)))
    assert sent == {(1, False), (2, True), (3, True)}
    kept = set(rows(coordinator, PhaseRow.round, func.coalesce(PhaseRow.noise_key, "")))
    assert kept == {(0, ""), (1, ""), (2, "aa"), (3, "aa")}
    with registry.database.write() as session:
        again = set(retention._retire_rows(session, federation, 9))
    assert before[2] in again
    stored = rows(coordinator, StateRow.round, StateRow.stored)
    assert stored[2:] == [(2, False), (3, True)], "the last state stays whatever is asked for"


def test_a_client_s_updates_go_with_the_keys_of_what_they_were_counted_in(coordinator: InProcess) -> None:
    federation, _ = completed(coordinator, "a", "b", rounds=1)
    registry = coordinator.registry
    with registry.database.write() as session:
        session.execute(update(PhaseRow).values(noise_key="aa"))
        digests = retention.remove_updates(session, federation, "a")
    own = rows(coordinator, UpdateRow.sha256, where=(UpdateRow.task_id == TaskRow.id) & (TaskRow.client == "a"))
    payloads = rows(coordinator, TaskRow.payload_sha256, where=TaskRow.client == "a")
    assert digests == {*own, *payloads}
    assert set(rows(coordinator, TaskRow.client, TaskRow.payload_stored)) == {("a", False), ("b", True)}
    sent = rows(coordinator, TaskRow.client, UpdateRow.stored, where=UpdateRow.task_id == TaskRow.id)
    assert sent == [("a", False), ("b", True)]
    keys = set(rows(coordinator, PhaseRow.kind, func.coalesce(PhaseRow.noise_key, "")))
    assert ("train", "") in keys, "of the phase in which it was counted"
    with registry.database.read() as session:
        assert not retention.awaits_computing(session, federation, "a")


def test_an_accepted_update_is_awaited_until_its_phase_is_over(coordinator: InProcess) -> None:
    federation, (a, _), (task, _) = open_first_phase(coordinator)
    told = []
    for answer in (False, True):
        if answer:
            a.answer(task).raise_for_status()
        with coordinator.registry.database.read() as session:
            told.append([retention.awaits_computing(session, federation, name) for name in "ab"])
    assert told == [[False, False], [True, False]]


def test_a_sweep_reads_page_after_page_and_takes_what_no_row_names(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "SWEPT_AT_ONCE", 2)
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    completed(coordinator, "a", "b", rounds=1)
    registry = coordinator.registry
    named = set(registry.blobs.all())
    litter = {digest_of(bytes([number])): bytes([number]) for number in range(7)}
    with registry.database.write() as session:
        session.add_all(BlobRow(digest=digest, content=content) for digest, content in litter.items())
    with registry.database.read() as session:
        found, last = [], ""
        while last is not None:
            last, unnamed = retention._unnamed_after(session, BlobRow.digest, last)
            assert len(unnamed) <= 2
            found += unnamed
    assert found == sorted(litter), "each once, in order"
    retention.sweep(registry)
    assert set(registry.blobs.all()) == named
    registry.wakeups.closed = True
    with registry.database.write() as session:
        session.add_all(BlobRow(digest=digest, content=content) for digest, content in litter.items())
    retention.sweep(registry)
    assert set(registry.blobs.all()) > named, "an end is not delayed by it"
    registry.wakeups.closed = False


def test_a_federation_goes_row_by_row_and_no_other_does(
    coordinator: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "ROWS_AT_ONCE", 2)
    registry = coordinator.registry
    gone, _ = completed(coordinator, "a", "b", rounds=1, name="gone")
    kept, _ = completed(coordinator, "a", "b", rounds=1, name="kept", seed=8)
    tables: tuple[Any, ...] = (TaskRow, *retention.BEHIND_TASKS)
    supplied: list[str] = []
    for id in (gone, kept):
        with registry.blobs.hold() as held, registry.change(id) as change:
            supplied.append(held.put(id.encode()))
            change.keep(held)
            change.federation_row().supplied_state = supplied[-1]
            change.federation = replace(change.federation, supplied_state=supplied[-1])
    assert {*supplied} <= set(registry.blobs.all())
    before = [len(rows(coordinator, table.id, where=table.federation_id == kept)) for table in tables]
    monkeypatch.setattr(retention, "_let_others_in", lambda: setattr(registry.wakeups, "closed", True))
    with pytest.raises(RegistryClosed):
        retention.delete_federation(registry, gone)
    assert registry.leftovers
    assert rows(coordinator, FederationRow.state, where=FederationRow.id == gone) == [DELETING]
    assert 0 < len(rows(coordinator, TaskRow.id, where=TaskRow.federation_id == gone)) < before[0]
    registry.wakeups.closed = False
    monkeypatch.setattr(retention, "_let_others_in", lambda: None)
    with monkeypatch.context() as patched:
        patched.setattr(retention, "_delete_some", lambda *about: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            retention.finish(registry)
        assert registry.leftovers, "it is tried again"
    retention.finish(registry)
    assert not registry.leftovers
    for table, count in zip(tables, before, strict=True):
        assert rows(coordinator, table.id, where=table.federation_id == gone) == []
        assert len(rows(coordinator, table.id, where=table.federation_id == kept)) == count
    assert rows(coordinator, FederationRow.id) == [kept]
    shared = {*rows(coordinator, StateRow.sha256), *rows(coordinator, UpdateRow.sha256), supplied[1]}
    assert shared <= set(registry.blobs.all())
    assert set(registry.blobs.all()) - shared <= {*rows(coordinator, TaskRow.payload_sha256)}
    assert rows(coordinator, EventRow.id, where=EventRow.federation_id == gone) == []


def test_blobs_go_some_at_a_time_and_others_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    removed, inside = list[Any](), list[None]()

    @contextmanager
    def exclusively() -> Iterator[None]:
        inside.append(None)
        yield
        inside.clear()

    def remove(digests: set[str]) -> None:
        assert inside
        removed.append(digests)

    registry: Any = SimpleNamespace(exclusively=exclusively, blobs=SimpleNamespace(remove=remove))
    registry.database = SimpleNamespace(read=nullcontext)
    monkeypatch.setattr(retention, "AT_ONCE", 2)
    monkeypatch.setattr(retention, "_named", lambda session, digests: {"b", "z"})
    sleep = lambda seconds: removed.append((seconds, len(inside)))  # noqa: E731
    monkeypatch.setattr(retention, "time", SimpleNamespace(sleep=sleep))
    retention.collect(registry, "ecadb")
    turn = (retention.TURN_SECONDS, 0)
    assert removed == [{"a"}, turn, {"c", "d"}, turn, {"e"}, turn]
