"""A stream of events: where it begins, what ends it, and what it waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.engine.registry import EVENTS, Wait, Wakeups
from promptfed.coordinator.resources.results import routes
from promptfed.coordinator.store.backend import DatabaseAway
from tests.support.coordinators import InProcess


class Streamed:
    """A registry with one federation, events, and all that a stream touches."""

    def __init__(self, state: str = "running"):
        self.wakeups, self.streams = Wakeups(), dict[str, list[Any]]()
        self.open = 0
        gauge = SimpleNamespace(inc=lambda: self._count(1), dec=lambda: self._count(-1))
        self.metrics = SimpleNamespace(streams=gauge)
        self.federations: dict[str, Any] = {"f": SimpleNamespace(run=SimpleNamespace(state=state))}
        self.rows: list[Any] = []
        self.away = False
        self.asked: list[Any] = []
        self.left = 1000.0

    def _count(self, number: int) -> None:
        self.open += number

    def after(self, registry: Any, id: str, last: int | None, newest: int | None) -> list[Any]:
        self.asked.append((last, newest))
        if self.away:
            raise DatabaseAway("gone")
        return [row for row in self.rows if row.id > (last or 0)]

    def stream(self, **about: Any) -> Any:
        viewer: Any = SimpleNamespace(name="anna", seconds_left=lambda registry: self.left)
        federation: Any = SimpleNamespace(id="f")
        return routes.get_events(self, federation, viewer, **about)


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> Streamed:
    one = Streamed()
    monkeypatch.setattr(routes, "_after", one.after)
    one.rows = [event(1, "created"), event(2, "enrolled")]
    return one


def event(id: int, kind: str) -> Any:
    return SimpleNamespace(id=id, kind=kind, data={"n": id}, at="now")


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({}, (0, None)), ({"last_event_id": 1}, (1, None)), ({"newest": 5}, (None, 5)),
        ({"last_event_id": 1, "newest": 5}, (1, 5)),
    ],
)  # fmt: skip
def test_it_begins_where_it_is_asked_to(asked: Any, first: tuple[Any, Any], streamed: Streamed) -> None:
    streamed.federations["f"].run.state = "finished"

    async def told() -> list[int]:
        return [int(one.id) async for one in streamed.stream(**asked)]

    assert asyncio.run(told()) == ([2] if "last_event_id" in asked else [1, 2])
    assert (streamed.asked[0], streamed.asked[-1][0], streamed.open, streamed.streams) == (first, 2, 0, {"anna": []})


def ended(one: Streamed, how: Callable[[Streamed], None]) -> list[str]:
    """What a stream tells until this ends it, after it has told all there is and waits."""

    async def live() -> list[str]:
        told, all_there = list[str](), asyncio.Event()

        async def read() -> None:
            async for event in one.stream():
                told.append(f"{event.id} {event.event} {event.data['n']} {event.data['at']}")
                if len(told) == 2:
                    all_there.set()

        reading = asyncio.create_task(read())
        await all_there.wait()
        await asyncio.sleep(0.005)
        assert (one.open, reading.done()) == (1, False)
        how(one)
        one.wakeups.wake([("f", EVENTS)])
        await asyncio.wait_for(reading, 60)
        return told

    return asyncio.run(live())


def over(one: Streamed) -> None:
    one.streams["anna"][0][1].over = True


@pytest.mark.parametrize(
    "how",
    [
        lambda one: one.wakeups.close(),
        lambda one: setattr(one, "left", 0.0),
        lambda one: one.federations.clear(),
        lambda one: setattr(one.federations["f"].run, "state", "cancelled"),
        over,
    ],
    ids=["the coordinator ends", "the token ends", "deleted", "cancelled", "newer ones"],
)
def test_what_ends_a_stream_wakes_it(how: Callable[[Streamed], None], streamed: Streamed) -> None:
    assert ended(streamed, how) == ["1 created 1 now", "2 enrolled 2 now"]
    assert (streamed.open, streamed.streams["anna"]) == (0, [])


def test_the_last_event_of_all_is_told(streamed: Streamed) -> None:
    def finish(one: Streamed) -> None:
        one.rows.append(event(3, "federation-state"))
        one.federations["f"].run.state = "finished"

    assert ended(streamed, finish)[-1] == "3 federation-state 3 now"


def test_an_away_database_is_waited_for(streamed: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    async def wait(wakeup: Any, seconds: float) -> bool:
        waited.append(seconds)
        streamed.away = False
        streamed.federations["f"].run.state = "finished"
        return True

    monkeypatch.setattr(routes, "wait", wait)
    for left, seconds in ((1000.0, routes.AWAY_SECONDS), (0.5, 0.5)):
        streamed.away, streamed.left, streamed.federations["f"].run.state = True, left, "running"
        told = asyncio.run(read_all(streamed))
        assert (told, waited.pop()) == ([1, 2], seconds)
    streamed.federations["f"].run.state, streamed.left = "running", 7.5
    asyncio.run(read_all(streamed))
    assert waited == [min(7.5, routes.LOOK_AGAIN_SECONDS)], "and then looks again, without a wakeup"


async def read_all(one: Streamed) -> list[int]:
    return [int(event.id) async for event in one.stream()]


def test_the_oldest_of_too_many_streams_ends(streamed: Streamed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_STREAMS", 2)
    older = [("g", Wait()), ("f", Wait())]
    streamed.streams["anna"] = list(older)
    other = streamed.wakeups.listen(("g", EVENTS))
    streamed.federations["f"].run.state = "finished"
    asyncio.run(read_all(streamed))
    assert [wait.over for _, wait in older] == [True, False]
    assert (other.is_set(), streamed.streams["anna"]) == (True, older)


def test_events_come_in_order_and_page_by_page(coordinator: InProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a", "b", "c")
    registry = coordinator.registry
    every = [row.id for row in routes._after(registry, federation, 0, None)]
    assert every == sorted(every)
    assert len(every) > 4
    assert [row.id for row in routes._after(registry, federation, None, 2)] == every[-2:]
    monkeypatch.setattr(routes, "BATCH", 3)
    assert [row.id for row in routes._after(registry, federation, every[0], None)] == every[1:4]
    assert routes._after(registry, "another", 0, None) == []
