"""While a task is carried out: how far it is, and that it stops as soon as nobody waits for it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import Request, Response

from promptfed.client_service import task_watch
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http.connection import BadAnswer, Refused
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.task_loop import TaskLoop
from promptfed.client_service.task_watch import watched
from promptfed.client_service.training.compute import Compute
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.spec.sections import PrivacySpec, SecureAggregationSpec
from promptfed.shared.spec.spec import TrainingSpec
from tests.client_service.conftest import Make
from tests.support.coordinators import in_thread
from tests.support.fake_coordinator import problem, until
from tests.support.waiting import PATIENCE

LONG = TrainingSpec(epochs=10_000, batch_size=1, learning_rate=1e-4).model_dump()


@pytest.fixture(autouse=True)
def asks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_watch, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(task_watch, "SHORTEST_WATCH", 0.05)


def test_a_cancelled_federation_stops_training_while_the_question_is_held_back(
    tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_watch, "WATCH_SECONDS", 60)  # longer than this test: no second question can tell it
    spec = {
        "rounds": 1, "training": LONG, "backbone": {"model": tiny.MODEL, "pretrained": tiny.PRETRAINED},
        "method": {"name": "promptfl", "m": 4},
    }  # fmt: skip
    with in_thread(tmp_path / "coordinator") as coordinator:
        federation = coordinator.create(**spec, participation={"min_clients": 1})
        token = tmp_path / "token"
        token.write_text(coordinator.token(federation))
        settings = make_settings(
            coordinator=coordinator.url, federation=federation, name="north",
            data="symbols:sketch?topic=signs&per_class=2&test_per_class=1", state_dir=tmp_path / "north",
            enrolment_token_file=token, feature_cache=tmp_path / "features", device="cpu",
        )  # fmt: skip
        worker = Worker(settings, Parts(backbone=backbone))

        def progress() -> float | None:
            found: float | None = next((one["progress"] for one in coordinator.get(federation)["awaited"]), None)
            return found

        async def scenario() -> None:
            running = asyncio.ensure_future(worker.run())
            await until(lambda: coordinator.get(federation)["clients"]["trainers"] == 1)
            coordinator.post(f"{federation}/start")
            await until(lambda: progress() is not None)
            assert worker.monitor.status.stage == "training"
            coordinator.post(f"{federation}/cancel")
            async with asyncio.timeout(PATIENCE):
                assert await running is Exit.OK

        asyncio.run(scenario())
        assert worker.monitor.status.trained == 0


@pytest.mark.parametrize(
    ("answer", "ends", "pause"),
    [
        (Refused(409, "phase-closed", ""), True, (0.0, 0.05)),
        (Refused(409, "busy", ""), False, (0.0, 0.05)),
        (Refused(503, "not-ready", ""), False, (0.0, 0.05)),
        (Refused(404, "not-found", ""), True, (0.0, 0.05)),
        (SimpleNamespace(task_id="another"), True, (0.0, 0.05)),
        (SimpleNamespace(task_id="own"), False, (0.0, 0.05)),
        (None, False, (0.0, 0.05)),
        (BadAnswer("no JSON"), False, (5.0, 10.0)),
        (ClientError(Exit.UNREACHABLE, "away"), False, (5.0, 10.0)),
    ],
)
def test_what_an_answer_says_of_the_task_and_of_the_next_question(
    answer: Any, ends: bool, pause: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses, asked = list[float](), list[Any]()

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def task(wait: float, **given: Any) -> Any:
        asked.append((wait, given))
        if len(asked) > 1:
            raise Refused(410, "ended", "")
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(task_watch, "asyncio", SimpleNamespace(sleep=sleep))
    gone, own = threading.Event(), SimpleNamespace(task_id="own")
    asyncio.run(task_watch._watch(cast(Any, SimpleNamespace(task=task)), cast(Any, own), gone, lambda: 0.5))
    assert gone.is_set()
    assert asked == [(10, {"retry": False, "carrying": "own", "progress": 0.5})] * (1 if ends else 2)
    assert pauses[0] == task_watch.FIRST_SECONDS
    assert pause[0] < pauses[1] <= pause[1]


@pytest.mark.parametrize("hidden", [False, True])
def test_a_long_task_is_asked_about_and_its_progress_told_unless_the_policy_keeps_it(
    make: Make, settings: Settings, hidden: bool, tmp_path: Path
) -> None:
    requests: list[str] = []

    def held_back(request: Request) -> Response | None:
        if "carrying" not in request.query_params:
            return None
        requests.append(request.url.query)
        return Response(status_code=204)

    policy = tmp_path / "policy.yaml"
    policy.write_text(f"version: 1\nmetrics: {{training: {str(not hidden).lower()}, accuracy: plain}}\n")
    coordinator = make.coordinator(rounds=1, training=LONG, alter=held_back)
    worker = make.worker(coordinator, settings=settings.model_copy(update={"policy": policy}))

    async def scenario() -> None:
        running = asyncio.ensure_future(worker.run())
        await until(lambda: len(requests) >= 3)
        worker.stop()
        await running

    asyncio.run(scenario())
    told = ["progress=" in one for one in requests]
    assert all(told[1:]) if not hidden else not any(told)


def test_a_task_that_was_closed_is_dropped_and_the_next_one_carried_out(make: Make) -> None:
    closed: list[str] = []

    def close(request: Request) -> Response | None:
        training = coordinator.plan and coordinator.plan[0][0] == "train"  # an evaluation on a busy machine is long too
        if "carrying" not in request.query_params or closed or not training:
            return None
        closed.append(request.query_params["carrying"])
        coordinator.plan.pop(0)
        return problem(409, "phase-closed")

    coordinator = make.coordinator(rounds=1, training=LONG, alter=close)
    events: list[str] = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))
    assert asyncio.run(worker.run()) is Exit.OK
    assert events[-3:] == ["cancelled", "evaluated", "ended"]
    assert len(closed) == 1
    assert not coordinator.accepted


@pytest.mark.parametrize(
    ("privacy", "sums", "told"), [(None, None, 0.5), (PrivacySpec(), None, None), (None, SecureAggregationSpec(), None)]
)
def test_no_progress_is_told_under_privacy_or_in_secure_sums(privacy: object, sums: object, told: float | None) -> None:
    terms = SimpleNamespace(privacy=privacy, secure_aggregation=sums)
    loop = SimpleNamespace(
        agreement=SimpleNamespace(consent=SimpleNamespace(terms=terms)),
        work=SimpleNamespace(rules=SimpleNamespace(policy=None), progress=0.5),
    )
    assert TaskLoop._progress(cast(TaskLoop, loop)) == told


def test_a_job_is_told_that_its_client_stops() -> None:
    compute = Compute()

    def job(cancelled: Callable[[], bool]) -> tuple[bool, bool]:
        before = cancelled()
        compute.stop()
        return before, cancelled()

    nobody: Any = None
    assert asyncio.run(watched(nobody, compute, nobody, job, lambda: None)) == (False, True)
    compute.close()
