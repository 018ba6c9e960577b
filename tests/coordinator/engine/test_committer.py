"""Group commit: what is committed together is judged one by one, and stored all or not at all."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import AsyncMock

import pytest
import torch

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import answers, committer
from promptfed.coordinator.engine.committer import Committer, RegistryClosed
from promptfed.coordinator.engine.recorder import Change, Changes
from promptfed.coordinator.resources.clients import operations as clients_operations
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.testing.clients import ScriptedClient, drive, update_body
from tests.faults.test_full_disk import full_tables
from tests.support.coordinators import InThread
from tests.support.groups import at_once, commits, updates_of
from tests.support.open_phases import kind, open_first_phase, stored_rows
from tests.support.waiting import PATIENCE

NAMES = ("a", "b", "c", "d")


Answered = list[tuple[int, str]]


def send_all(
    clients: list[ScriptedClient], tasks: list[dict[str, Any]], bodies: list[bytes], entries: int | None = None
) -> Answered:
    """Status and refusal of each answer, sent at once; so many ``entries`` of them (all) come to be committed."""
    calls = [
        lambda client=client, task=task, body=body: client.send(task, body)
        for client, task, body in zip(clients, tasks, bodies, strict=True)
    ]
    found = at_once(calls, entries or len(calls))
    return [(one.status_code, kind(one) if one.status_code >= 400 else "") for one in found if one is not None]


@pytest.mark.both_databases(first=True)
def test_answers_that_arrive_together_are_one_commit(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, clients, tasks = open_first_phase(coordinator, *NAMES, rounds=1)
    sizes = commits(coordinator, monkeypatch)
    assert send_all(clients, tasks, updates_of(clients, tasks)) == [(201, "")] * 4
    assert sizes == [4]
    coordinator.until(federation, phase="evaluation")
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    assert [one["client"] for one in phase["counted"]] == list(NAMES)


@pytest.mark.both_databases
def test_a_state_and_the_next_tasks_are_one_commit(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, clients, tasks = open_first_phase(coordinator, *NAMES, rounds=1)
    announced: list[set[bool]] = []
    announce = coordinator.registry._announce

    def noted(changes: Changes) -> None:
        open_tasks = [change.federation.tasks.values() for change in changes.by_id.values()]
        announced.extend({task.payload_sha256 is not None for task in some} for some in open_tasks if some)
        announce(changes)

    monkeypatch.setattr(coordinator.registry, "_announce", noted)
    assert send_all(clients, tasks, updates_of(clients, tasks)) == [(201, "")] * 4
    coordinator.until(federation, phase="evaluation")
    assert announced == [{True}], "the evaluation's tasks, all with their payload"


@pytest.mark.both_databases
def test_a_refusal_in_a_group_is_nothing_to_the_others(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin, another answer to an answered task, and an update that is over the norm."""
    federation, clients, tasks = open_first_phase(coordinator, *NAMES, rounds=1, admission={"max_update_norm": 100.0})
    a, b, c, d = clients
    bodies = updates_of(clients, tasks)
    other = update_body({"context": torch.ones(4, 8)}, tasks[0])
    huge = update_body({"context": torch.full((4, 8), 1e6)}, tasks[2])
    monkeypatch.setattr(clients_operations, "record_refusal", AsyncMock())  # entries too, of other groups
    sizes = commits(coordinator, monkeypatch)
    sent = [bodies[0], bodies[0], other, bodies[1], huge, bodies[3]]
    found = send_all([a, a, a, b, c, d], [*tasks[:1] * 3, *tasks[1:]], sent, entries=5)
    first, second = [(200, ""), (201, ""), (409, "already-answered")], [(201, ""), *[(409, "already-answered")] * 2]
    assert sorted(found[:3]) in (first, second)
    assert found[3:] == [(201, ""), (422, "norm-too-large"), (201, "")]
    assert sizes == [5]
    assert send_all([c], tasks[2:3], bodies[2:3]) == [(201, "")]
    coordinator.until(federation, phase="evaluation")


@pytest.mark.both_databases
def test_refusals_of_a_group_are_stored_together(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, clients, tasks = open_first_phase(coordinator, *NAMES, rounds=1)
    sizes = commits(coordinator, monkeypatch)
    for _ in range(2):
        found = send_all(clients, [*tasks[1:], tasks[0]], updates_of(clients, tasks), entries=4)
        assert found == [(404, "not-found")] * 4
    for view in coordinator.get(f"{federation}/clients")["clients"]:
        assert (view["refusals"], view["last_refusal"]["type"]) == (2, "not-found")
    assert sizes == [4, 4]


@pytest.mark.both_databases(first=True)
def test_an_entry_that_breaks_off_spoils_no_other(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, clients, tasks = open_first_phase(coordinator, *NAMES, rounds=1)
    enter = answers.Answer.enter

    def breaks(self: Any, change: Change) -> bool:
        new = enter(self, change)
        if self.client.name == "b":
            change.batch.updates[-1]["task_id"] = "no such task"  # which only the database finds out
        return new

    sizes = commits(coordinator, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(answers.Answer, "enter", breaks)
        found = send_all(clients, tasks, updates_of(clients, tasks))
    assert found == [(201, ""), (500, "internal-error"), (201, ""), (201, "")]
    assert sizes == [4, 1, 1, 1, 1]
    assert send_all(clients[1:2], tasks[1:2], updates_of(clients[1:2], tasks[1:2])) == [(201, "")]
    drive(clients)
    assert coordinator.get(federation)["state"] == "finished"


@pytest.mark.both_databases(first=True)
def test_a_full_disk_refuses_a_whole_group_and_stores_nothing_of_it(coordinator: InThread) -> None:
    federation, clients, tasks = open_first_phase(coordinator, *NAMES, rounds=1)
    before, bodies = stored_rows(coordinator.registry, federation), updates_of(clients, tasks)
    with full_tables(coordinator):
        assert send_all(clients, tasks, bodies) == [(507, "storage-full")] * 4
    assert stored_rows(coordinator.registry, federation) == before
    assert send_all(clients, tasks, bodies) == [(201, "")] * 4
    coordinator.until(federation, phase="evaluation")


class Noted:
    """An entry that does nothing; what the registry's own do is tested with them."""

    def __init__(self, federation: str, task_id: str | None = None):
        self.federation = federation
        self.task_id = task_id

    def enter(self, change: Change) -> bool:
        return True


def groups_of(
    monkeypatch: pytest.MonkeyPatch,
    play: Callable[[Committer], Awaitable[Any]],
    quiet: float,
    most: float,
    open_tasks: int = 0,
) -> list[int]:
    """The sizes of the groups that a play's entries are committed in."""
    monkeypatch.setattr(committer, "QUIET_SECONDS", quiet)
    monkeypatch.setattr(committer, "MOST_SECONDS", most)
    sizes: list[int] = []

    @contextmanager
    def changes() -> Iterator[Any]:
        changes = types.SimpleNamespace(of=lambda _: None, write=lambda: None)
        yield changes
        changes.committed()

    async def run() -> None:
        made = Committer(changes, lambda error: False, lambda federation: open_tasks)
        together = made._together

        def counted(entries: Any) -> Any:
            sizes.append(len(entries))
            return together(entries)

        monkeypatch.setattr(made, "_together", counted)
        made.open(asyncio.get_running_loop())
        try:
            await play(made)
        finally:
            await asyncio.to_thread(made.close)

    asyncio.run(run())
    return sizes


LONGER = PATIENCE  # than a test that does not wait for it, on any machine


def test_one_that_comes_alone_is_committed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def alone(made: Committer) -> None:
        await asyncio.sleep(0.1)  # `LATELY` times the quiet time, and more
        made.notice()
        with made.coming():
            assert await made.submit(Noted("a"))

    begun = time.monotonic()
    assert groups_of(monkeypatch, alone, quiet=0.001, most=LONGER) == [1]
    assert time.monotonic() - begun < LONGER


def test_a_group_waits_for_an_answer_that_is_being_received(monkeypatch: pytest.MonkeyPatch) -> None:
    async def another_comes(made: Committer) -> None:
        async def slow() -> None:
            with made.coming():
                await asyncio.sleep(0.2)
                await made.submit(Noted("b"))

        other = asyncio.create_task(slow())
        await asyncio.sleep(0)
        with made.coming():
            await asyncio.gather(made.submit(Noted("a")), other)

    assert groups_of(monkeypatch, another_comes, quiet=0.001, most=LONGER) == [2]
    assert groups_of(monkeypatch, another_comes, quiet=0.001, most=0.01) == [1, 1], "but not for ever"


def test_a_group_waits_while_others_ask_for_something(monkeypatch: pytest.MonkeyPatch) -> None:
    async def others_ask(made: Committer) -> None:
        made.notice()
        made.notice()
        first = asyncio.create_task(made.submit(Noted("a")))
        for _ in range(10):
            await asyncio.sleep(0)
        await asyncio.gather(first, made.submit(Noted("b")))

    assert groups_of(monkeypatch, others_ask, quiet=0.5, most=LONGER) == [2]


def test_a_group_that_answers_all_open_tasks_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_answer(made: Committer) -> None:
        made.notice()
        made.notice()
        answers = [made.submit(Noted("f", task)) for task in ("a", "a", "b", "c")]
        await asyncio.gather(*answers)

    begun = time.monotonic()
    assert groups_of(monkeypatch, all_answer, quiet=LONGER, most=LONGER, open_tasks=3) == [4]
    assert time.monotonic() - begun < LONGER


def test_no_group_is_too_large_and_what_waits_at_the_end_is_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def many(made: Committer) -> None:
        waiting = [asyncio.create_task(made.submit(Noted("a"))) for _ in range(committer.MOST + 3)]
        await asyncio.sleep(0.05)
        await asyncio.to_thread(made.close)
        assert await asyncio.gather(*waiting) == [True] * len(waiting)
        with pytest.raises(RegistryClosed):
            await made.submit(Noted("a"))

    assert groups_of(monkeypatch, many, quiet=LONGER, most=LONGER) == [committer.MOST, 3]


# What requests need of a federation without asking the database.


def test_the_context_is_kept_while_it_is_the_same(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a whole run with a newcomer and a withdrawn client: whenever it is asked for, it is as made anew."""
    asked: list[tuple[ServerContext, ServerContext]] = []
    context = Federation.context

    def compared(self: Federation, names: list[str] | None = None) -> Any:
        found = context(self, names)
        if names is None:
            asked.append((found, self._context([n for n, member in self.run.members.items() if member.joined])))
        return found

    monkeypatch.setattr(Federation, "context", compared)
    federation, clients, _ = open_first_phase(coordinator, "a", "b", "c", rounds=2)
    known = coordinator.registry.federations[federation]
    assert known.context() is known.context()
    clients += coordinator.enrol(federation, "late")
    coordinator.delete(f"{federation}/clients/c")
    del clients[2]
    drive(clients)
    assert coordinator.get(federation)["state"] == "finished"
    assert all(kept == plain for kept, plain in asked)
    rosters = {tuple((one.name, one.active) for one in kept.clients) for kept, _ in asked}
    assert (("a", True), ("b", True), ("c", True)) in rosters
    assert (("a", True), ("b", True), ("c", False), ("late", True)) in rosters
    assert len({id(kept) for kept, _ in asked}) < len(asked)
