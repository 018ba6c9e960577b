"""Three coordinators on one database, disturbed while they carry federations out.

Clients that answer with deterministic tensors ask any of the three. Meanwhile the coordinator that holds the federation
is disturbed in one of these ways, each time until another one has taken over:

- ``kill``: SIGKILL, and started again.
- ``stop``: SIGSTOP at any moment, and SIGCONT.
- ``inside``: it stops within a transaction, between statements that were sent together, and SIGCONT.
- ``cut``: nothing passes between it and PostgreSQL, and no connection ends.
- ``store``: nothing passes between it and the object store, and no connection ends.
- ``freeze``: SIGSTOP for a time from 0.2 s to 8 s, whether another one takes over or not, and SIGCONT.
"""

from __future__ import annotations

import hashlib
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import make_url

from promptfed.shared.methods import make_method
from tests.support.coordinators import ForkedCoordinator, in_thread
from tests.support.forked_coordinator import STOPS_INSIDE, STOPS_NOT
from tests.support.kill_campaign import CASES, FILES, Case, play_case
from tests.support.relay import Line
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, AnyOf, as_arguments, own_options, shared_options
from tests.support.stale_answers import Witness
from tests.support.waiting import wait_for

COORDINATORS = 3
WAYS = ("kill", "stop", "inside", "cut", "store", "freeze")
PAUSE_SECONDS = 1.0  # that one stays disturbed once another has taken over
LOOK_SECONDS = 0.05
FREEZES = (0.2, 8.0)  # seconds


@dataclass
class Tally:
    """Disturbances by their kind, seconds of takeovers by kind, and the updates that were answered as accepted."""

    done: Counter[str] = field(default_factory=Counter)
    takeovers: dict[str, list[float]] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, response: httpx.Response) -> None:
        """Remember an update that was answered as accepted: its task and its digest."""
        path = response.request.url.path
        if path.endswith("/update") and response.status_code in (200, 201):
            body = response.request.content
            with self.lock:
                self.accepted[path.split("/")[-2]] = "sha256:" + hashlib.sha256(body).hexdigest()


class Group:
    """The coordinators, each a process of its own with its own lines to PostgreSQL and to the object store.

    ``database`` is the database's name.
    """

    def __init__(self, folder: Path, database_url: str, store: str, environment: dict[str, str]):
        self.processes: dict[str, ForkedCoordinator] = {}
        self.lines: dict[str, Line] = {}
        self.store_lines: dict[str, Line] = {}
        database = make_url(database_url)
        self.database = str(database.database)
        for number in range(COORDINATORS):
            own = own_options()
            line = self.lines[own["advertise_url"]] = Line(f"{database.host}:{database.port}")
            objects = self.store_lines[own["advertise_url"]] = Line(environment["AWS_ENDPOINT_URL"])
            through_line = database.set(port=line.port).render_as_string(hide_password=False)
            options = shared_options(folder / "shared", through_line, store) | own
            process = ForkedCoordinator(
                folder / f"data-{number}", *as_arguments(options), constants=FILES,
                environment=environment | {"AWS_ENDPOINT_URL": objects.url},
            )  # fmt: skip
            if process.dead:
                raise SystemExit(process.log())
            self.processes[own["advertise_url"]] = process

    @property
    def urls(self) -> list[str]:
        """The coordinators' addresses."""
        return list(self.processes)

    def close(self) -> None:
        """End all of them, stopped ones too."""
        for process in self.processes.values():
            process.signal(signal.SIGCONT)
            process.kill()
        for line in (*self.lines.values(), *self.store_lines.values()):
            line.close()


class Disturber:
    """Disturbs the coordinator that holds a federation, until nothing is left to do or the block has ended."""

    def __init__(self, group: Group, tally: Tally, wanted: Mapping[str, int], seed: int):
        self._group, self._tally = group, tally
        self._wanted = [way for way in WAYS for _ in range(wanted.get(way, 0))]
        self._chance = random.Random(seed)
        self._chance.shuffle(self._wanted)
        self._done = threading.Event()
        self.failure: BaseException | None = None

    @property
    def left(self) -> int:
        """Number of disturbances that are still to come."""
        return len(self._wanted)

    @contextmanager
    def at(self, name: str) -> Iterator[None]:
        """A block in which the federation called ``name`` is disturbed."""
        self._done.clear()
        thread = threading.Thread(target=self._run, args=(name,))
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()

    def _run(self, name: str) -> None:
        try:
            while self._wanted and not self._done.wait(self._chance.uniform(0.05, 1.0)):
                holder = self._holder(name)
                if holder is not None and not self._done.is_set():
                    way = self._wanted.pop()
                    if self._disturb(name, holder, way):
                        self._tally.done[way] += 1
                    else:
                        self._wanted.insert(0, way)  # the federation ended meanwhile
        except BaseException as error:
            self.failure = error

    def _disturb(self, name: str, holder: str, way: str) -> bool:
        """Disturb the holder, and undo it; whether it was disturbed."""
        process = self._group.processes[holder]
        line = (self._group.store_lines if way == "store" else self._group.lines)[holder]
        if way == "kill":
            process.signal(signal.SIGKILL)
        elif way in ("cut", "store"):
            line.cut()
        elif way == "inside":
            process.signal(STOPS_INSIDE)
            if not self._stops(process):
                return False
        else:
            process.signal(signal.SIGSTOP)
        try:
            begun = time.monotonic()
            if way == "freeze":
                time.sleep(self._chance.uniform(*FREEZES))
            else:
                self._wait_for_another(name, holder, way, begun)
                time.sleep(0.0 if way == "kill" else PAUSE_SECONDS)
        finally:
            if way == "kill":
                process.wait()
                process.http.close()
                process.start()
            line.mend()
            process.signal(signal.SIGCONT)
        return True

    def _wait_for_another(self, name: str, holder: str, way: str, begun: float) -> None:
        wait_for(f"the takeover after {way}", lambda: self._holder(name, besides=holder), every=LOOK_SECONDS)
        seconds = time.monotonic() - begun
        self._tally.takeovers.setdefault(way, []).append(seconds)
        print(f"{way}: taken over after {seconds:.2f} s; {self.left} left", flush=True)

    def _stops(self, process: ForkedCoordinator) -> bool:
        """Whether the process stops by itself, before the federation has ended."""
        while not _is_stopped(process):
            if self._done.wait(0.01):
                process.signal(STOPS_NOT)
                time.sleep(PAUSE_SECONDS)
                return _is_stopped(process)
        return True

    def _holder(self, name: str, besides: str | None = None) -> str | None:
        """The address of the coordinator that works."""
        for url in self._group.urls:
            if url == besides:
                continue
            try:
                answer = httpx.get(f"{url}/v1/federations/{name}", headers=OPERATOR, timeout=2.0)
            except httpx.TransportError:
                continue
            if answer.status_code == 200:
                return url
        return None


def _is_stopped(process: ForkedCoordinator) -> bool:
    status = Path(f"/proc/{process.pid}/stat").read_text()
    return status.rpartition(")")[2].split()[0] == "T"


def undisturbed(case: Case, folder: Path) -> dict[str, Any]:
    """The outcome of the federation at one coordinator, on SQLite and a folder."""
    with in_thread(folder) as server:
        return play_case(server, case)


def check_updates(api: ResendingApi, tally: Tally) -> int:
    """Compare the answers to clients with the stored federation; the number of stored updates."""
    stored: dict[str, str] = {}
    after: str | None = None
    while True:
        page = api.get("campaign/rounds", params={"limit": 50} | ({"after": after} if after else {}))
        for report in page["rounds"]:
            for phase in report["phases"]:
                counted = [update["client"] for update in phase["counted"]]
                assert len(counted) == len(set(counted)), "nobody counts twice in a phase"
                stored |= {update["task_id"]: update["sha256"] for update in phase["updates"]}
        after = page["next"]
        if after is None:
            break
    lost = {task: digest for task, digest in tally.accepted.items() if stored.get(task) != digest}
    assert not lost, f"{len(lost)} updates that were accepted are not what is stored"
    return len(stored)


def campaign(
    wanted: Mapping[str, int], rounds: int, methods: Sequence[str], seed: int, folder: Path, group: Group
) -> dict[str, Any]:
    """Play federations until the holders were disturbed as ``wanted``, by way; figures.

    AssertionError where an outcome differs, or an update is lost.
    """
    tally, witness = Tally(), Witness(group.urls, "campaign", OPERATOR)
    disturber = Disturber(group, tally, wanted, seed)
    expected: dict[str, dict[str, Any]] = {}
    updates, runs, begun = 0, 0, time.monotonic()
    while disturber.left:
        case = replace(CASES[methods[runs % len(methods)]], rounds=rounds)
        if case.name not in expected:
            expected[case.name] = undisturbed(case, folder / f"undisturbed-{len(expected)}")
        tally.accepted.clear()
        witness.phases = [phase.name for phase in make_method(case.method).phases(1, rounds)]
        asker = AnyOf(group.urls, tally.note)
        api = ResendingApi(asker, OPERATOR)
        with witness.watching(), disturber.at("campaign"):
            outcome = play_case(api, case)
        if disturber.failure is not None:
            raise disturber.failure
        assert outcome == expected[case.name], f"{case.name} has ended otherwise"
        updates += check_updates(api, tally)
        api.delete("campaign")
        asker.close()
        runs += 1
        print(f"{case.name}: as undisturbed; {disturber.left} left; {len(witness.stale)} stale answers", flush=True)
    return {
        "disturbances": dict(tally.done), "federations": runs, "as_undisturbed": runs, "updates": updates,
        "watched_answers": witness.answers, "stale_answers": witness.stale,
        "takeover_seconds": _figures(tally.takeovers), "seconds": time.monotonic() - begun,
    }  # fmt: skip


def _figures(takeovers: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    every = sorted(seconds for kind in takeovers.values() for seconds in kind)
    return {
        "median": statistics.median(every), "p95": every[int(0.95 * (len(every) - 1))], "most": every[-1],
        "all": {way: [round(seconds, 2) for seconds in kind] for way, kind in takeovers.items()},
    }  # fmt: skip
