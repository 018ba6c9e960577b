"""Three coordinators on one database, killed and paused while they carry federations out.

Clients that answer with deterministic tensors ask any of the three. Meanwhile the coordinator that holds the federation
is killed with SIGKILL and started again, or stopped with SIGSTOP for longer than a lease lasts.
"""

from __future__ import annotations

import hashlib
import random
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from tests.support.coordinators import ForkedCoordinator, in_thread
from tests.support.kill_campaign import CASES, FILES, Case, play_case
from tests.support.resending import ResendingApi
from tests.support.several import OPERATOR, AnyOf, as_arguments, own_options, shared_options
from tests.support.waiting import PATIENCE

COORDINATORS = 3
PAUSE_SECONDS = 1.0  # that one stays stopped once another has taken over
LOOK_SECONDS = 0.05


@dataclass
class Tally:
    """Signals to the coordinators, seconds of takeovers, and the updates that were answered as accepted."""

    kills: int = 0
    stops: int = 0
    takeovers: list[float] = field(default_factory=list)
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
    """The coordinators, each a process of its own."""

    def __init__(self, folder: Path, database_url: str, store: str, environment: dict[str, str]):
        shared = shared_options(folder / "shared", database_url, store)
        self.processes: dict[str, ForkedCoordinator] = {}
        for number in range(COORDINATORS):
            own = own_options()
            process = ForkedCoordinator(
                folder / f"data-{number}", *as_arguments(shared | own), constants=FILES, environment=environment
            )
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


class Disturber:
    """Kills and stops the coordinator that holds a federation, until no signal is left or the block has ended."""

    def __init__(self, group: Group, tally: Tally, kills: int, stops: int, seed: int):
        self._group, self._tally = group, tally
        self._wanted = ["kill"] * kills + ["stop"] * stops
        self._chance = random.Random(seed)
        self._chance.shuffle(self._wanted)
        self._done = threading.Event()
        self.failure: BaseException | None = None

    @property
    def left(self) -> int:
        """Number of signals that are still to be sent."""
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
                    self._disturb(name, holder, self._wanted.pop())
        except BaseException as error:
            self.failure = error

    def _disturb(self, name: str, holder: str, how: str) -> None:
        process = self._group.processes[holder]
        begun = time.monotonic()
        if how == "kill":
            process.signal(signal.SIGKILL)
            self._tally.kills += 1
        else:
            process.signal(signal.SIGSTOP)
            self._tally.stops += 1
        while self._holder(name, besides=holder) is None:
            if time.monotonic() - begun > PATIENCE:
                raise AssertionError(f"nobody takes over after {how}")
            time.sleep(LOOK_SECONDS)
        self._tally.takeovers.append(time.monotonic() - begun)
        print(f"{how}: taken over after {self._tally.takeovers[-1]:.2f} s; {self.left} left", flush=True)
        if how == "kill":
            process.wait()
            process.http.close()
            process.start()
        else:
            time.sleep(PAUSE_SECONDS)
            process.signal(signal.SIGCONT)  # not before: on a busy machine it might come back to its own lease

    def _holder(self, name: str, besides: str | None = None) -> str | None:
        """The address of the coordinator that answers for the federation itself."""
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
    kills: int, stops: int, rounds: int, methods: Sequence[str], seed: int, folder: Path, group: Group
) -> dict[str, Any]:
    """Play federations until all signals were sent; figures. AssertionError where an outcome differs."""
    tally = Tally()
    disturber = Disturber(group, tally, kills, stops, seed)
    expected: dict[str, dict[str, Any]] = {}
    updates, runs, begun = 0, 0, time.monotonic()
    while disturber.left:
        case = replace(CASES[methods[runs % len(methods)]], rounds=rounds)
        if case.name not in expected:
            expected[case.name] = undisturbed(case, folder / f"undisturbed-{len(expected)}")
        tally.accepted.clear()
        asker = AnyOf(group.urls, tally.note)
        api = ResendingApi(asker, OPERATOR)
        with disturber.at("campaign"):
            outcome = play_case(api, case)
        if disturber.failure is not None:
            raise disturber.failure
        assert outcome == expected[case.name], f"{case.name} has ended otherwise"
        updates += check_updates(api, tally)
        api.delete("campaign")
        asker.close()
        runs += 1
        print(f"{case.name}: as undisturbed; {disturber.left} signals left", flush=True)
    return {
        "kills": tally.kills,
        "stops": tally.stops,
        "federations": runs,
        "updates": updates,
        "takeover_seconds": {
            "median": statistics.median(tally.takeovers),
            "most": max(tally.takeovers),
            "all": [round(seconds, 2) for seconds in tally.takeovers],
        },
        "seconds": time.monotonic() - begun,
    }
