"""Many federations divided among three coordinators, one of which dies: how fast, and how evenly, others take over."""

from __future__ import annotations

import itertools
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import psutil

from promptfed.testing.clients import ScriptedClient, spec
from tests.support.postgres import PostgresServer
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, AnyOf
from tests.support.takeovers import Group
from tests.support.waiting import wait_for

CLIENTS = ("a", "b")  # of each running federation
ROUNDS = 1000  # more than are played
PLAYERS = 4  # threads that answer for all clients
ASKERS = 4  # threads that ask for federations
EVERY_SECONDS = 0.05
REST_SECONDS = 60.0  # in which federations may move after the coordinator has returned


@dataclass
class Many:
    """The federations' ids by the coordinator that created them, and the clients of those that are running."""

    made_by: dict[str, list[str]]
    running: set[str]
    clients: list[ScriptedClient]


def kill_one_of_three(group: Group, postgres: PostgresServer, count: int, running: int) -> dict[str, Any]:
    """Make federations, kill one coordinator while clients answer, and let it return; figures."""
    many = _made(group, count, running)
    leases = _Leases(postgres, group.database)
    before = leases.all()
    dead = group.urls[0]
    lost = {id for id, (url, _) in before.items() if url == dead}
    megabytes = {url: _megabytes(group, url) for url in group.urls[1:]}
    with _played(many):
        time.sleep(2.0)
        begun = time.monotonic()
        group.processes[dead].signal(signal.SIGKILL)
        held = _seconds(begun, lambda: all(url not in (None, dead) for url, _ in leases.of(lost).values()))
        others = group.urls[1:]
        answered = _seconds(begun, lambda: _all_answer(others, lost & many.running))
        after = leases.all()
        waits = _first_answers({id: str(after[id][0]) for id in lost - many.running})
        grown = {url: _megabytes(group, url) - megabytes[url] for url in others}
        process = group.processes[dead]
        process.wait()
        process.http.close()
        process.start()
        back = time.monotonic()
        fair = count / len(group.urls)
        evened = _seconds(back, lambda: all(abs(n - fair) <= 0.2 * fair for n in _counts(leases.all(), group.urls)))
        time.sleep(max(0.0, REST_SECONDS - evened))
        rested = leases.all()
    moves = Counter(rested[id][1] - after[id][1] for id in after)
    return {
        "federations": count,
        "running": running,
        "of_the_dead_coordinator": {"all": len(lost), "running": len(lost & many.running)},
        "seconds_until": {"all_leases_have_a_holder": held, "running_ones_answer": answered},
        "seconds_of_the_first_answer_of_an_idle_one": {"median": statistics.median(waits), "most": max(waits)},
        "held_after_the_takeover": _counts(after, others),
        "running_held_after_the_takeover": _counts({id: after[id] for id in many.running}, others),
        "megabytes_more": list(grown.values()),
        "seconds_until_even_after_the_return": evened,
        "held_after_the_return": _counts(rested, group.urls),
        "running_held_after_the_return": _counts({id: rested[id] for id in many.running}, group.urls),
        "federations_by_moves_after_the_return": {str(number): moves[number] for number in sorted(moves)},
    }


class _Leases:
    """The leases as the database has them."""

    def __init__(self, postgres: PostgresServer, database: str):
        self._postgres, self._database = postgres, database

    def all(self) -> dict[str, tuple[str | None, int]]:
        """The holder's address and the epoch of each federation."""
        query = "SELECT federation_id, url, epoch FROM leases LEFT JOIN coordinators ON holder = coordinators.id"
        return {str(id): (url, int(epoch)) for id, url, epoch in self._postgres.execute(query, self._database)}

    def of(self, ids: set[str]) -> dict[str, tuple[str | None, int]]:
        """Those of some federations."""
        return {id: lease for id, lease in self.all().items() if id in ids}


def _made(group: Group, count: int, running: int) -> Many:
    made_by: dict[str, list[str]] = {url: [] for url in group.urls}
    turns = itertools.cycle(group.urls)
    many = Many(made_by, set(), [])
    with httpx.Client(headers=OPERATOR, timeout=60.0) as http:
        for number in range(count):
            url = next(turns)
            made_by[url].append(_create(http, url, f"many-{number}"))
    for number in range(running):
        url = group.urls[number % len(group.urls)]
        id = made_by[url][number // len(group.urls)]
        api = ResendingApi(AnyOf([url, *(other for other in group.urls if other != url)]), OPERATOR)
        many.clients += api.enrol(id, *CLIENTS)
        api.start(id)
        many.running.add(id)
    return many


def _create(http: httpx.Client, url: str, name: str) -> str:
    """The id of a new federation; asked for again where a busy coordinator cannot create it at the moment."""
    raw = spec(name=name, rounds=ROUNDS, participation={"min_clients": len(CLIENTS)})

    def created() -> str | None:
        answer = http.post(f"{url}/v1/federations", json=raw, headers={"Idempotency-Key": name})
        return str(answer.json()["id"]) if answer.status_code in (200, 201) else None

    return str(wait_for("a federation", created, every=EVERY_SECONDS))


@contextmanager
def _played(many: Many) -> Iterator[None]:
    """A block in which a few threads answer the tasks of all running federations in turn."""
    done = threading.Event()

    def play(clients: Sequence[ScriptedClient]) -> None:
        for client in itertools.cycle(clients):
            if done.is_set():
                return
            answer = client.task(wait=0)
            if answer.status_code == 200:
                client.answer(answer.json())

    with ThreadPoolExecutor(PLAYERS) as pool:
        playing = [pool.submit(play, many.clients[number::PLAYERS]) for number in range(PLAYERS)]
        try:
            yield
        finally:
            done.set()
    for player in playing:
        player.result()


def _all_answer(urls: Sequence[str], ids: set[str]) -> bool:
    """Whether each federation is answered for by one of the coordinators at ``urls``."""

    def answers(id: str) -> bool:
        return any(http.get(f"{url}/v1/federations/{id}", headers=OPERATOR).status_code == 200 for url in urls)

    with httpx.Client(timeout=10.0) as http, ThreadPoolExecutor(ASKERS) as pool:
        return all(pool.map(answers, sorted(ids)))


def _first_answers(holders: dict[str, str]) -> list[float]:
    """Seconds that each federation's holder takes to answer for it, which reads it into memory."""

    def wait(id: str) -> float:
        begun = time.monotonic()
        wait_for(
            "an answer", lambda: http.get(f"{holders[id]}/v1/federations/{id}", headers=OPERATOR).status_code == 200
        )
        return time.monotonic() - begun

    with httpx.Client(timeout=10.0) as http, ThreadPoolExecutor(ASKERS) as pool:
        return list(pool.map(wait, sorted(holders)))


def _seconds(begun: float, condition: Callable[[], bool]) -> float:
    wait_for("the takeover", condition, every=EVERY_SECONDS)
    return round(time.monotonic() - begun, 2)


def _counts(leases: dict[str, tuple[str | None, int]], urls: Sequence[str]) -> list[int]:
    held = Counter(url for url, _ in leases.values())
    return [held[url] for url in urls]


def _megabytes(group: Group, url: str) -> float:
    rss: int = psutil.Process(group.processes[url].pid).memory_info().rss
    return round(rss / 2**20, 1)
