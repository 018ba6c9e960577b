"""An update between training and its verdict: killed, lost, late, refused; private state follows the coordinator."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request, Response

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training import trainer
from promptfed.shared.methods.promptfl import CoOp
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import state_hash
from tests.client_service.conftest import Killed, Make
from tests.support.fake_coordinator import FakeCoordinator, Wire, problem

TRAINING = TrainingSpec(learning_rate=0.1, batch_size=8).model_dump()
COOP = {"name": "coop", "m": 4}


@pytest.fixture
def trainings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The tasks that were trained, in order, however the training ended."""
    begun: list[str] = []
    real = trainer.TaskWork.train

    def counted(self: trainer.TaskWork, task: Any, *rest: Any) -> Any:
        begun.append(task.task_id)
        return real(self, task, *rest)

    monkeypatch.setattr(trainer.TaskWork, "train", counted)
    return begun


def once(action: Callable[[], None], which: int = 1) -> Callable[[httpx.Request], None]:
    """Do ``action`` at the ``which``-th sending of an update."""
    seen = 0

    def look(request: httpx.Request) -> None:
        nonlocal seen
        if request.url.path.endswith("/update"):
            seen += 1
            if seen == which:
                action()

    return look


def kill() -> None:
    raise Killed


def lose() -> None:
    raise httpx.ReadError("connection reset by peer")


def outcome(coordinator: FakeCoordinator, settings: Settings) -> tuple[str, str, Any]:
    """What must not depend on kills: the global state, the private state, and which task it belongs to."""
    state = PrivateState(settings.state_dir)
    private, provenance = state.committed()
    assert state.pending() is None
    state.close()
    return state_hash(coordinator.global_state), state_hash(private), provenance


@pytest.fixture(params=["promptfl", "coop"])
def method(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"name": request.param, "m": 4}


@pytest.fixture
def undisturbed(make: Make, settings: Settings, tmp_path: Path, method: dict[str, Any]) -> tuple[str, str, Any]:
    own = settings.model_copy(update={"state_dir": tmp_path / "undisturbed"})
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    assert asyncio.run(make.worker(coordinator, settings=own).run()) is Exit.OK
    return outcome(coordinator, own)


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("which", [1, 2])
def test_killed_round_the_sending_the_stored_update_is_sent(
    make: Make,
    settings: Settings,
    undisturbed: tuple[str, str, Any],
    trainings: list[str],
    method: dict[str, Any],
    moment: str,
    which: int,
) -> None:
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    wire = Wire(coordinator.app, **{moment: once(kill, which)})
    with pytest.raises(Killed):
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    stored = (settings.state_dir / "pending" / "update.safetensors").read_bytes()

    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(trainings) == len(set(trainings)) == 2
    assert outcome(coordinator, settings) == undisturbed
    updates = [body for body in coordinator.received if b"payload_sha256" in body]
    assert updates.count(stored) == (1 if moment == "before" else 2)
    statuses = [call[2] for call in coordinator.calls if call[1].endswith("/update")]
    assert statuses == [201, 201] if moment == "before" else sorted(statuses) == [200, 201, 201]


def test_killed_in_training_the_task_is_trained_again_from_committed_state(
    make: Make,
    settings: Settings,
    undisturbed: tuple[str, str, Any],
    trainings: list[str],
    method: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    with monkeypatch.context() as patch:

        def killed(self: PrivateState, *arguments: Any) -> None:
            if len(trainings) == 2:  # in the second round, when all has been trained and nothing is on disk
                raise Killed

            write(self, *arguments)

        write = PrivateState.write_pending
        patch.setattr(PrivateState, "write_pending", killed)
        with pytest.raises(Killed):
            asyncio.run(make.worker(coordinator).run())
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(trainings) == 3
    assert trainings[1] == trainings[2]
    assert outcome(coordinator, settings) == undisturbed


def test_an_answer_that_was_lost_is_asked_for_again_and_commits_once(
    make: Make, settings: Settings, undisturbed: tuple[str, str, Any], trainings: list[str], method: dict[str, Any]
) -> None:
    coordinator = make.coordinator(rounds=2, method=method, training=TRAINING)
    events: list[str] = []
    http = httpx.AsyncClient(transport=Wire(coordinator.app, after=once(lose)))
    worker = make.worker(coordinator, http=http, hook=lambda event, facts: events.append(event))
    assert asyncio.run(worker.run()) is Exit.OK
    assert [call[2] for call in coordinator.calls if call[1].endswith("/update")] == [201, 200, 201]
    assert events.count("accepted") == 2
    assert len(trainings) == 2
    assert outcome(coordinator, settings) == undisturbed


def test_an_update_that_comes_too_late_takes_its_private_state_with_it(
    make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    started_from: list[str] = []
    real = CoOp.train

    def watched(self: CoOp, context: Any, payload: Any, private: Any) -> Any:
        started_from.append(state_hash(private))
        return real(self, context, payload, private)

    monkeypatch.setattr(CoOp, "train", watched)
    coordinator = make.coordinator(rounds=3, method=COOP, training=TRAINING, closed_phases={2})
    events: list[str] = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))
    assert asyncio.run(worker.run()) is Exit.OK
    # Round 3 starts from what round 1 left; round 2 never happened here.
    assert started_from[0] == state_hash({})
    assert started_from[2] == started_from[1] != started_from[0]
    assert events.count("accepted") == 2
    assert events.count("discarded") == 1
    assert outcome(coordinator, settings)[2].round == 3
    refusal = json.loads((settings.state_dir / "last-refusal.json").read_text())
    assert (refusal["kind"], refusal["round"], refusal["status"]) == ("phase-closed", 2, 409)
    assert not coordinator.failures


def test_a_kill_while_the_late_update_is_discarded_changes_nothing(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=1, method=COOP, training=TRAINING)
    wire = Wire(coordinator.app, before=once(kill))
    with pytest.raises(Killed):
        asyncio.run(make.worker(coordinator, http=httpx.AsyncClient(transport=wire)).run())
    coordinator.plan.pop(0)  # the deadline passes while the client is away
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert outcome(coordinator, settings)[1] == state_hash({})


@pytest.mark.parametrize(("status", "kind"), [(413, "too-large"), (422, "norm-too-large"), (422, "wrong-shape")])
def test_an_update_that_is_refused_is_reported_and_not_sent_for_ever(
    make: Make, settings: Settings, status: int, kind: str
) -> None:
    def refuse(request: Request) -> Response | None:
        return problem(status, kind, "not like this") if request.url.path.endswith("/update") else None

    coordinator = make.coordinator(rounds=1, method=COOP, alter=refuse)
    worker = make.worker(coordinator)
    assert asyncio.run(worker.run()) is Exit.OK
    assert coordinator.failures == [{"type": "update-refused", "detail": f"{kind}: not like this"}]
    assert coordinator.count("PUT", "/update") == 1
    assert worker.monitor.status.last_refusal == "not like this"
    assert outcome(coordinator, settings)[1] == state_hash({})


@pytest.mark.parametrize(("status", "kind"), [(401, "unauthorized"), (403, "withdrawn"), (307, "redirect")])
def test_an_update_without_a_verdict_is_kept(make: Make, settings: Settings, status: int, kind: str) -> None:
    def refuse(request: Request) -> Response | None:
        return problem(status, kind, location="/elsewhere") if request.url.path.endswith("/update") else None

    coordinator = make.coordinator(rounds=1, method=COOP, alter=refuse)
    with pytest.raises(ClientError):
        asyncio.run(make.worker(coordinator).run())
    assert (settings.state_dir / "pending").exists()
    coordinator.alter = lambda request: None
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert outcome(coordinator, settings)[2].round == 1


def test_no_private_tensor_is_in_any_byte_that_is_sent(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=3, method=COOP, training=TRAINING)
    private: list[bytes] = []
    worker = make.worker(coordinator)

    def collect(event: str, facts: Any) -> None:
        if event == "trained":
            private.append((settings.state_dir / "pending" / "private.safetensors").read_bytes())

    worker.monitor._hook = collect
    assert asyncio.run(worker.run()) is Exit.OK

    sent = b"".join(coordinator.received)
    rows = [stored[-4 * coordinator.shape.d_t :] for stored in private]
    assert len(set(rows)) == 3
    for row in rows:
        # Eight bytes are two numbers: no pair of neighbours of any trained vector was sent.
        assert not any(row[start : start + 8] in sent for start in range(0, len(row), 4))
    updates = [body for body in coordinator.received if b"payload_sha256" in body]
    assert len(updates) == 3
    for body in updates:
        header = json.loads(body[8 : 8 + int.from_bytes(body[:8], "little")])
        assert set(header) == {"__metadata__"}
        assert len(body) == 8 + int.from_bytes(body[:8], "little")
        about = json.loads(header["__metadata__"]["promptfed"])
        assert set(about) == {"task_id", "payload_sha256", "metrics"}
        assert set(about["metrics"]) == {"loss", "train_seconds", "trained_parameters"}
