"""A whole federation with real clients in this process, and what came of it."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from pathlib import Path
from typing import Any

from promptfed.client_service.exits import Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.testing.clients import spec as small
from promptfed.testing.coordinator import OperatorCalls
from tests.support.fake_coordinator import made_up_source
from tests.support.waiting import PATIENCE

NAMES = ("north", "south")
ROUNDS = 2
NUMBERS = itertools.count(1)


class RealFederations:
    """Runs federations of two clients with the same backbone; ``seconds`` is the limit for each."""

    def __init__(self, folder: Path, backbone: Backbone, features: FeatureCache, seconds: float = 2 * PATIENCE):
        self._folder, self._backbone, self._features, self._seconds = folder, backbone, features, seconds
        self.workers: list[Worker] = []  # of the last federation

    def run(
        self,
        coordinator: OperatorCalls,
        url: str,
        *,
        spec: dict[str, Any] | None = None,
        pause: float = 0.0,
        **settings: Any,
    ) -> dict[str, Any]:
        """What came of a federation whose clients know the coordinator under ``url``.

        Args:
            coordinator: where it is created, not through what is between.
            url: the coordinator's address for clients.
            spec: sections of the federation's spec that differ.
            pause: seconds that the clients wait for the first round.
            settings: further ones of the clients.
        """
        name = f"f{next(NUMBERS)}"
        usual = small(name=name, rounds=ROUNDS, training={"batch_size": 4, "learning_rate": 0.02})
        federation = coordinator.post("/v1/federations", usual | (spec or {}), status=201)["id"]
        token = self._folder / f"{name}.token"
        token.write_text(coordinator.token(federation))
        given = {"federation": name, "data": "made-up", "device": "cpu", "give_up_after": PATIENCE} | settings
        given |= {"coordinator": url, "enrolment_token_file": token}
        self.workers = [
            Worker(
                make_settings(name=client, state_dir=self._folder / name / client, **given),
                Parts(self._backbone, made_up_source(), features=self._features),
            )
            for client in NAMES
        ]
        threading.Thread(target=self._start, args=(coordinator, federation, pause)).start()
        assert asyncio.run(self._together()) == [Exit.OK] * len(NAMES)
        reports = coordinator.get(f"{federation}/rounds")["rounds"]
        return {
            "state": coordinator.get(federation)["state"],
            "hashes": [one["state_hash"] for one in reports],
            "counted": [[[u["client"] for u in phase["counted"]] for phase in one["phases"]] for one in reports],
            "splits": [{n: c["splits"] for n, c in one["evaluation"]["clients"].items()} for one in reports],
            "federation": federation,
        }

    async def _together(self) -> list[Exit]:
        async with asyncio.timeout(self._seconds):
            return list(await asyncio.gather(*(worker.run() for worker in self.workers)))

    def _start(self, coordinator: OperatorCalls, federation: str, pause: float) -> None:
        """Start once all are there."""
        end = time.monotonic() + self._seconds
        while coordinator.get(federation)["clients"]["trainers"] < len(NAMES):
            assert time.monotonic() < end
            time.sleep(0.02)
        time.sleep(pause)
        coordinator.post(f"{federation}/start")


def without_id(found: dict[str, Any]) -> dict[str, Any]:
    """What is the same for all such federations."""
    assert found["state"] == "finished"
    return {key: value for key, value in found.items() if key != "federation"}
