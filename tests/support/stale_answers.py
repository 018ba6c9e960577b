"""A witness that asks all coordinators for one federation all the time, and notes answers that show an older state.

A stopped coordinator answers the requests that have waited in its socket when it wakes up. An answer is stale if it
shows less than an answer that had arrived, from anybody, before its own request was sent.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

EVERY_SECONDS = 0.2
TIMEOUT = 60.0
MOST = 100  # requests that wait for one coordinator's answer

STATES = ("enrolling", "running", "finished")

Version = tuple[int, ...]


def version_of(view: Mapping[str, Any], phases: Sequence[str]) -> Version | None:
    """What only grows while a federation runs: state, round, phase, whether it is closed, and who has settled it.

    ``phases``: the method's, in order; an evaluation follows them. None: the view does not tell.
    """
    state, stage = view["state"], view["stage"]
    if state not in STATES or (state == "running" and stage is None):
        return None
    version = (STATES.index(state), view["round"])
    if state != "running":
        return version
    phase = phases.index(stage["phase"]) if stage["phase"] in phases else len(phases)
    return *version, phase, stage["closing"], len(view["answered"]) + len(view["failed"])


class Witness:
    """``answers``: how many there were with a state; ``stale``: those that showed less than was known."""

    def __init__(self, urls: Sequence[str], name: str, headers: Mapping[str, str]):
        self.answers = 0
        self.phases: Sequence[str] = ()  # of the method whose federation is watched
        self.stale: list[dict[str, Any]] = []
        self._urls, self._path, self._headers = urls, f"/v1/federations/{name}", dict(headers)
        self._newest: dict[str, Version] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which it asks."""
        done = threading.Event()
        thread = threading.Thread(target=lambda: asyncio.run(self._watch(done)))
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()

    async def _watch(self, done: threading.Event) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=10)
        waiting: dict[str, set[asyncio.Task[None]]] = {url: set() for url in self._urls}
        async with httpx.AsyncClient(headers=self._headers, timeout=TIMEOUT, limits=limits) as http:
            while not done.is_set():
                for url, tasks in waiting.items():
                    if len(tasks) < MOST:
                        task = asyncio.create_task(self._ask(http, url))
                        tasks.add(task)
                        task.add_done_callback(tasks.discard)
                await asyncio.sleep(EVERY_SECONDS)
            for task in set().union(*waiting.values()):
                task.cancel()

    async def _ask(self, http: httpx.AsyncClient, url: str) -> None:
        newest = dict(self._newest)
        try:
            answer = await http.get(url + self._path)
        except httpx.TransportError:
            return
        if answer.status_code != 200:
            return
        view = answer.json()
        version = version_of(view, self.phases)
        if version is None:
            return
        self.answers += 1
        known = newest.get(view["id"], ())
        if version < known:
            self.stale.append({"url": url, "shows": version, "known": known})
        self._newest[view["id"]] = max(version, self._newest.get(view["id"], ()))
