"""Whole federations of any method, played by clients without a backbone, while the coordinator is killed.

The clients answer with deterministic tensors of the right shapes, try again when nobody answers, and never compute an
update twice: what comes out depends on the coordinator alone.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import torch

from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.shared.seeds import generator
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.testing.clients import ScriptedClient, spec, update_body
from promptfed.testing.coordinator import OperatorCalls
from tests.support.coordinators import ForkedCoordinator
from tests.support.fault_points import DELETION_POINTS, OF_FILES, OF_ROWS, POINTS
from tests.support.resending import Resending, ResendingApi
from tests.support.waiting import wait_for
from tests.support.whole_federation import play

SHAPE = {"d_t": 8, "d_e": 8, "d_v": 8, "text_layers": 2, "vision_layers": 2, "context_length": 16, "patch_size": 4}
NAMES = ("a", "B", "c", "d", "e", "f")  # by code point B comes first, in a dictionary a
ONCE = 4  # the first points are reached once in a run


@dataclass(frozen=True)
class Case:
    """A federation: so many clients from the start, and a newcomer after the second round."""

    method: dict[str, Any]
    rounds: int
    clients: int = 2
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        aggregation = self.changes.get("aggregation", {})
        rule = aggregation.get("rule") or aggregation.get("server", {}).get("optimizer")
        return str(self.method["name"]) + (f" with {rule}" if rule else "")

    def spec(self) -> dict[str, Any]:
        participation = {"min_clients": self.clients}
        return spec(name="campaign", method=None, rounds=self.rounds, participation=participation, **self.changes) | {
            "method": self.method
        }


CASES = {
    case.name: case
    for case in (
        Case({"name": "promptfl", "m": 4}, rounds=8),
        Case({"name": "promptfl", "m": 4}, rounds=8, clients=5, changes={"aggregation": {"rule": "multi_krum"}}),
        Case({"name": "promptfl", "m": 4}, rounds=8, changes={"aggregation": {"server": {"optimizer": "adam"}}}),
        Case({"name": "pfedmoap", "m": 4}, rounds=8), Case({"name": "promptfl_amp", "m": 4}, rounds=8),
        Case({"name": "two_phase"}, rounds=6), Case({"name": "plan", "m": 2}, rounds=6),
        Case({"name": "pfedpg", "m": 4}, rounds=8), Case({"name": "fast_pt", "m": 4}, rounds=8),
        Case({"name": "fedtpg", "m": 4}, rounds=8), Case({"name": "fedpgp", "m": 4}, rounds=8),
    )
}  # fmt: skip


class MethodClient(ScriptedClient):
    """A fake that can take part in any method, as a domain of its own."""

    def enrol(self, token: str, **changes: Any) -> httpx.Response:
        words = {"name": f"style-{self.name}", "description": f"a drawing of a {{}} by {self.name}"}
        return super().enrol(token, backbone_shape=SHAPE, domain=words, **changes)

    def answer(self, task: dict[str, Any]) -> httpx.Response:
        if task["kind"] == "train" and task["task_id"] not in self.sent:
            self.sent[task["task_id"]] = update_body(self._trained(task), task)
        return super().answer(task)

    def _trained(self, task: dict[str, Any]) -> Tensors:
        payload, config = self.payload(task), task["config"]
        method = make_method(config["method"])
        phases = {phase.name: phase for phase in method.phases(task["round"], config["rounds"])}
        draws = generator(0, task["round"], self.name, task["phase"])
        update = {}
        for tensor in phases[task["phase"]].up:
            start = payload.get(tensor.name)
            if start is None:
                start = torch.zeros(tensor.resolve(method.dims(_context(config))))
            update[tensor.name] = start + 0.1 * torch.randn(start.shape, generator=draws)
        return update


def _context(config: dict[str, Any]) -> ServerContext:
    training = TrainingSpec.model_validate(config["training"])
    return ServerContext(training, BackboneShape.model_validate(SHAPE), None, (), config["seed"], config["rounds"])


def play_case(api: OperatorCalls, case: Case) -> dict[str, Any]:
    """A whole federation; what came of it."""
    return play(api, case.spec(), NAMES[: case.clients + 1], MethodClient, accuracy_step=0.05, seconds=1500)


class Restarting(Resending):
    """Speaks to a coordinator that dies: starts it again with the next fault and sends the request again."""

    def __init__(self, process: ForkedCoordinator, faults: list[str]):
        self.process = process
        self._faults = faults

    def request(self, verb: str, url: str, **options: Any) -> httpx.Response:
        for _ in range(100):
            try:
                return self.process.http.request(verb, url, **options)
            except httpx.TransportError:
                self._revive()
        raise AssertionError(f"no answer to {verb} {url}")

    def _revive(self) -> None:
        code = self.process.wait()
        if code != -signal.SIGKILL:
            raise AssertionError(f"it ended by itself:\n{self.process.log()}")
        self.resent += 1
        self.process.http.close()
        self.process.start(self._faults.pop(0) if self._faults else "")


class KilledApi(ResendingApi):
    """The operator of a coordinator that dies."""

    def __init__(self, process: ForkedCoordinator, faults: list[str]):
        super().__init__(Restarting(process, faults), process.operator)

    @property
    def deaths(self) -> int:
        """How often it has died: a request is sent again for no other reason."""
        return self.resent


FILES = {"promptfed.coordinator.store.blobs.SMALL_BYTES": -1.0}
"""Constants of a coordinator that keeps every blob as a file, as it does with large ones."""


def at_every_point(first: int, *, files: bool = False) -> list[str]:
    """A fault at every named point, in the order of a run: the first or second time that it is reached, in turns.

    A coordinator with the constants ``FILES`` reaches other points (``files``) than one that has only small blobs.
    """
    reached = [name for name in POINTS if name not in (OF_ROWS if files else OF_FILES)]
    return [
        f"{name}:{1 + (number + first) % 2}" if number >= ONCE else f"{name}:1" for number, name in enumerate(reached)
    ]


DELETION_FAULTS = (f"{DELETION_POINTS[0]}:1", f"{DELETION_POINTS[1]}:1", f"{DELETION_POINTS[1]}:2")


def delete_while_killed(process: ForkedCoordinator, name: str) -> int:
    """Delete a federation while the coordinator dies at each of ``DELETION_FAULTS``; how often it has died.

    It dies by the request first, then by what it takes up again at its starts. At the end it lives.
    """
    process.kill()
    faults = list(DELETION_FAULTS)
    process.start(faults.pop(0))
    api = KilledApi(process, faults)
    deleted = api.http.request("DELETE", f"/v1/federations/{name}", headers=api.operator)
    assert deleted.status_code in (204, 404), deleted.text
    wait_for("every point", lambda: not api.get("/v1/federations")["federations"] and api.deaths == 3)
    return api.deaths


@contextmanager
def killed_at_random(process: ForkedCoordinator, kills: int, seed: int) -> Iterator[None]:
    """A block in which the coordinator is killed so many times, whenever it happens."""
    chance, done = random.Random(seed), threading.Event()

    def kill_now_and_then() -> None:
        for _ in range(kills):
            if done.wait(chance.uniform(0.03, 0.5)):
                return
            # Not while it is dead or starting: that would be waiting, not another kill.
            while not done.is_set() and (process.dead or not process.folder.with_suffix(".url").exists()):
                done.wait(0.01)
            if not done.is_set():
                process.signal(signal.SIGKILL)

    killer = threading.Thread(target=kill_now_and_then)
    killer.start()
    try:
        yield
    finally:
        done.set()
        killer.join()
