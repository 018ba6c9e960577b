"""What a coordinator's disk has lost, while real clients keep running: they answer again, or send the same again."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from sqlalchemy import select, update

from promptfed.client_service import task_loop
from promptfed.client_service.exits import Exit
from promptfed.client_service.http import connection
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.training.trainer import TaskWork
from promptfed.client_service.worker import Worker
from promptfed.coordinator.engine import scheduler
from promptfed.coordinator.store.tables import BlobRow, UpdateRow
from promptfed.shared.clip import FeatureCache, load_backbone
from tests.support.coordinators import InThread, in_thread
from tests.support.fake_coordinator import made_up_source
from tests.support.waiting import PATIENCE, wait_for

NAMES = ("north", "south")
ROUNDS = 5


def test_clients_that_keep_running_answer_a_restored_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "FIRST_BACKOFF", 0.02)
    monkeypatch.setattr(connection, "LONGEST_BACKOFF", 0.1)
    go, stay = threading.Event(), threading.Event()
    hold_training(monkeypatch, go, stay)
    data, backup, told = tmp_path / "data", tmp_path / "backup", []
    coordinator = InThread(data)
    port = urlsplit(coordinator.url).port
    federation = coordinator.create(rounds=ROUNDS, training={"batch_size": 8, "learning_rate": 0.02})
    with ThreadPoolExecutor(1) as pool:
        workers = [worker(tmp_path, coordinator, federation, name, told.append) for name in NAMES]
        ends = pool.submit(lambda: asyncio.run(together(workers)))
        try:
            wait_for("enrolment", lambda: coordinator.get(federation)["clients"]["trainers"] == len(NAMES))
            coordinator.post(f"{federation}/start")
            wait_for("round 1", lambda: at(coordinator, federation, 1))
            coordinator.stop()
            shutil.copytree(data, backup)  # round 1 is open, and nobody has answered

            coordinator = InThread(data, port=port)
            go.set()
            wait_for("round 3", lambda: at(coordinator, federation, 3))
            coordinator.stop()
            shutil.rmtree(data)
            shutil.copytree(backup, data)

            coordinator = InThread(data, port=port)
            stay.set()
            wait_for("the end", lambda: coordinator.get(federation)["state"] == "finished")
            reports = coordinator.get(f"{federation}/rounds")["rounds"]
            assert ends.result(PATIENCE) == [Exit.OK] * len(NAMES)
        finally:
            go.set()
            stay.set()
            for one in workers:
                one.compute.stop()
            coordinator.stop()
    counted = [[one["client"] for phase in report["phases"] for one in phase["counted"]] for report in reports]
    assert counted == [[], *[list(NAMES)] * ROUNDS]
    assert not any(phase["extended"] for report in reports for phase in report["phases"])
    assert told.count("again") == len(NAMES)
    assert "failed" not in told


def test_a_damaged_update_pauses_until_a_backup_is_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(scheduler, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(task_loop, "POLL_SECONDS", 1)
    go, told = threading.Event(), []
    begun = hold_training(monkeypatch, go, go)
    with in_thread(tmp_path / "data") as coordinator, ThreadPoolExecutor(1) as pool:
        federation = coordinator.create(rounds=2, training={"batch_size": 8, "learning_rate": 0.02})
        workers = [worker(tmp_path, coordinator, federation, name, told.append) for name in NAMES]
        ends = pool.submit(lambda: asyncio.run(together(workers)))
        try:
            wait_for("enrolment", lambda: coordinator.get(federation)["clients"]["trainers"] == len(NAMES))
            coordinator.post(f"{federation}/start")
            wait_for("trainings", lambda: begun == [1] * len(NAMES))  # nobody gets a task of a paused federation
            coordinator.post(f"{federation}/pause")
            go.set()
            wait_for("answers", lambda: coordinator.get(federation)["answered"] == list(NAMES))
            with coordinator.registry.database.write() as session:
                first = session.scalars(select(UpdateRow.sha256)).all()[0]
                blob = update(BlobRow).where(BlobRow.digest == first)
                whole = session.scalars(select(BlobRow.content).where(BlobRow.digest == first)).one()
                session.execute(blob.values(content=b"something else"))
            coordinator.registry.blobs.admitted.forget([first])  # as after a restart
            coordinator.post(f"{federation}/resume")
            coordinator.until(federation, state="paused")
            assert first in coordinator.get(federation)["reason"]
            assert "put it back from a backup, then resume" in coordinator.get(federation)["reason"]
            with coordinator.registry.database.write() as session:
                session.execute(blob.values(content=whole))
            coordinator.post(f"{federation}/resume")
            assert ends.result(PATIENCE) == [Exit.OK] * len(NAMES)
            assert coordinator.get(federation)["state"] == "finished"
            for round in range(3):
                states = coordinator.post(f"{federation}/rounds/{round}/replay", {})["states"]
                assert all(state["same"] for state in states)
        finally:
            go.set()
            for one in workers:
                one.compute.stop()
    assert told.count("trained") == 2 * len(NAMES), "nobody trains again"
    assert "failed" not in told


def hold_training(monkeypatch: pytest.MonkeyPatch, go: threading.Event, stay: threading.Event) -> list[int]:
    """Nobody trains before ``go``, and nobody in round 3 before ``stay``; the rounds of trainings that have begun."""
    real, begun = TaskWork.train, []

    def train(self: TaskWork, task: Any, *arguments: Any) -> dict[str, float]:
        begun.append(task.round)
        assert (stay if task.round == 3 else go).wait(PATIENCE)
        return real(self, task, *arguments)

    monkeypatch.setattr(TaskWork, "train", train)
    return begun


def at(coordinator: InThread, federation: str, round: int) -> bool:
    """Whether ``round`` is open for training."""
    view = coordinator.get(federation)
    return view["round"] == round and view["stage"] is not None and view["stage"]["kind"] == "train"


def worker(folder: Path, coordinator: InThread, federation: str, name: str, told: Callable[[str], None]) -> Worker:
    """A real client with made-up images and a state folder of its own."""
    torch.set_num_threads(1)
    token = folder / f"{name}.token"
    token.write_text(coordinator.token(federation))
    settings = make_settings(
        coordinator=coordinator.url, federation=federation, name=name, data="made-up", state_dir=folder / name,
        enrolment_token_file=token, device="cpu",
    )  # fmt: skip
    return Worker(
        settings,
        Parts(load_backbone("promptfed-tiny", None), made_up_source(), features=FeatureCache(folder / "features")),
        hook=lambda event, facts: told(event),
    )


async def together(workers: list[Worker]) -> list[Exit]:
    """All of them, to their ends."""
    async with asyncio.timeout(PATIENCE):
        return list(await asyncio.gather(*(one.run() for one in workers)))
