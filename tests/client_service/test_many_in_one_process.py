"""What clients of one process do differently: they take turns, and what nobody takes up again is not made durable."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.agreement import ANSWERS, FILE
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.shared.methods.core.interface import ClientContext, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from tests.client_service.conftest import Make
from tests.support.waiting import PATIENCE


def test_ephemeral_state_is_neither_locked_nor_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), fsync(handle))[1])
    first = PrivateState(tmp_path / "ephemeral", ephemeral=True)
    identity = first.identity("a", "trainer")
    first.write_pending(b"update", {}, TensorOrigin("task"))
    second = PrivateState(tmp_path / "ephemeral", ephemeral=True)
    assert second.identity("a", "trainer") == identity
    pending = second.pending()
    assert pending is not None
    assert pending.update.read() == b"update"
    second.commit()
    assert second.committed() == ({}, TensorOrigin("task"))
    assert synced == []
    for state in (first, second):
        state.close()
    durable = PrivateState(tmp_path / "durable")
    durable.identity("a", "trainer")
    assert synced
    with pytest.raises(ClientError, match="in use by another client process"):
        PrivateState(tmp_path / "durable")
    durable.close()


def test_an_ephemeral_worker_keeps_nothing_for_predictions(make: Make, settings: Settings) -> None:
    worker = make.worker(make.coordinator(rounds=1), ephemeral=True)
    assert asyncio.run(worker.run()) is Exit.OK
    assert worker.monitor.status.evaluated == 2
    assert worker.predictor.served is None
    assert not list(settings.state_dir.glob("serving*"))
    ordinary = make.worker(make.coordinator(rounds=1), settings=_elsewhere(settings, "ordinary"))
    assert asyncio.run(ordinary.run()) is Exit.OK
    assert ordinary.predictor.served is not None


@pytest.mark.parametrize("resumable", [False, True])
def test_consent_is_written_only_where_another_process_may_read_it(
    resumable: bool, make: Make, settings: Settings
) -> None:
    worker = make.worker(make.coordinator(rounds=1), ephemeral=True, synced=resumable)
    assert asyncio.run(worker.run()) is Exit.OK
    assert worker.work is not None
    assert worker.work.agreement.sent.sent, "answers are counted all the same"
    notes = {name for name in (FILE, ANSWERS) if (settings.state_dir / name).exists()}
    assert notes == ({FILE, ANSWERS} if resumable else set())


def _elsewhere(settings: Settings, name: str) -> Settings:
    return settings.model_copy(update={"state_dir": settings.state_dir.parent / name})


@pytest.mark.parametrize(("turns", "together"), [(1, 1), (2, 2)])
def test_only_so_many_compute_as_there_are_turns(
    turns: int, together: int, make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = PromptFL.train
    running, most, guard = 0, 0, threading.Condition()

    def slow(self: PromptFL, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
            guard.notify_all()
            assert guard.wait_for(lambda: most >= together, PATIENCE), "as many as may come together"
        time.sleep(0.2)  # in which one too many would come
        found = train(self, context, payload, private)
        with guard:
            running -= 1
        return found

    monkeypatch.setattr(PromptFL, "train", slow)

    async def run() -> list[Exit]:
        with ThreadPoolExecutor(3) as executor:
            common = asyncio.Semaphore(turns)
            workers = [
                make.worker(
                    make.coordinator(rounds=2), settings=_elsewhere(settings, name), executor=executor, turns=common
                )
                for name in ("one", "two", "three")
            ]
            return await asyncio.gather(*(worker.run() for worker in workers))

    assert set(asyncio.run(run())) == {Exit.OK}
    assert most == together
