"""A worker against a coordinator of one client, over an in-process transport: the course of a federation."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fastapi import Request, Response
from torch import Tensor

from promptfed.client_service import task_loop, task_watch
from promptfed.client_service import worker as worker_module
from promptfed.client_service.__main__ import main
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.http import connection
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.client_service.monitor import EventJsonLines, EventTextLines, Monitor, Status, sentence
from promptfed.client_service.privacy.agreement import ANSWERS, FILE
from promptfed.client_service.privacy.identity import meet, own_fingerprint
from promptfed.client_service.settings import Settings
from promptfed.client_service.state import trained_images
from promptfed.client_service.state.private_state import PrivateState, TensorOrigin
from promptfed.client_service.training import compute
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import DataError, Source, Split
from promptfed.shared.messages import Task
from promptfed.shared.methods.core.interface import ClientContext, Needs, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import problem, until
from tests.support.waiting import PATIENCE

LONG = TrainingSpec(epochs=10_000).model_dump()


def accuracy_of(context: Tensor, backbone: Backbone, source: Source) -> float:
    """By the plain path: every position of every class, images one by one."""
    text = backbone.encode_prompts(context, backbone.class_prompts(source.class_names, len(context)), path="plain")
    right = 0
    for index in range(len(source.test)):
        image = backbone.preprocess(source.test.image(index)).unsqueeze(0)
        right += int((backbone.encode_images(image) @ text.T).argmax()) == int(source.test.labels[index])
    return right / len(source.test)


def test_a_federation_from_enrolment_to_its_end(
    make: Make, backbone: Backbone, source: Source, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    coordinator = make.coordinator(rounds=2)
    start = coordinator.global_state["context"].clone()
    events = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))

    assert asyncio.run(worker.run()) is Exit.OK

    assert events == [
        "enrolled", "evaluated", *["trained", "sending", "accepted"] * 2, "evaluated", "ended",
    ]  # fmt: skip
    assert not coordinator.global_state["context"].equal(start)
    assert coordinator.client is not None
    assert coordinator.client.num_samples == 24
    for context, found in zip((start, coordinator.global_state["context"]), coordinator.evaluations, strict=True):
        told = {name: found["splits"]["test"][name] for name in ("accuracy", "num_samples")}
        assert told == {"accuracy": accuracy_of(context, backbone, source), "num_samples": 24}
    assert coordinator.evaluations[0]["zero_shot"] == coordinator.evaluations[1]["zero_shot"]
    assert worker.monitor.status.stage == "ended"
    assert worker.monitor.status.accuracy == coordinator.evaluations[1]["splits"]["test"]["accuracy"]
    digests = {source.train.digest(row) for row in range(len(source.train))}
    assert trained_images.read_trained(worker.settings.state_dir) == digests
    assert "did not know its data" not in caplog.text, "it is new"


@pytest.mark.parametrize("exit", [Exit.DECLINED, Exit.REFUSED])
def test_a_decision_is_not_called_an_error(
    exit: Exit, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def ends(worker: Worker) -> Exit:
        raise ClientError(exit, "not joined")

    monkeypatch.setattr(worker_module, "serve", ends)
    with caplog.at_level(logging.INFO):
        assert worker_module.run(settings) == exit
    [record] = [one for one in caplog.records if one.getMessage() == "not joined"]
    assert record.levelno == (logging.INFO if exit is Exit.DECLINED else logging.ERROR)


def test_what_is_sent_is_told_when_it_is_sent(make: Make) -> None:
    """The receipt is held until there is another task, which may be long after."""
    told: list[tuple[str, int, int]] = []

    def look(request: Request) -> None:
        if request.url.path.endswith(("/update", "/evaluation")):
            status = worker.monitor.status
            told.append((request.url.path.rpartition("/")[2], status.trained, status.evaluated))
            assert events[-1] == {"update": "sending", "evaluation": "evaluated"}[told[-1][0]]
            assert status.stage == "waiting"

    events: list[str] = []
    worker = make.worker(make.coordinator(rounds=1, alter=look), hook=lambda event, facts: events.append(event))
    assert asyncio.run(worker.run()) is Exit.OK
    assert told == [("evaluation", 0, 1), ("update", 1, 1), ("evaluation", 1, 2)]


def test_the_update_names_its_task_its_payload_and_finite_metrics(make: Make) -> None:
    coordinator = make.coordinator(rounds=1)
    facts: dict[str, Mapping[str, Any]] = {}
    asyncio.run(make.worker(coordinator, hook=facts.__setitem__).run())
    assert set(facts["trained"]) == {
        "round", "rounds", "phase", "payload", "loss", "train_seconds", "trained_parameters",
    }  # fmt: skip
    assert all(value >= 0 for key, value in facts["trained"].items() if key not in ("phase", "payload"))
    assert facts["trained"]["trained_parameters"] == coordinator.global_state["context"].numel()
    (update,) = (body for body in coordinator.received if b"payload_sha256" in body)
    assert b'\\"task_id\\":\\"task-2\\"' in update


class Payload(bytes):
    """Knows how many there are."""

    living: ClassVar[int] = 0

    def __new__(cls, content: bytes) -> Payload:
        cls.living += 1
        return super().__new__(cls, content)

    def __del__(self) -> None:
        Payload.living -= 1


def test_no_payload_is_kept_while_a_receipt_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make.coordinator(rounds=2)
    fetch = CoordinatorClient.payload
    living: list[int] = []

    async def payload(self: CoordinatorClient, task: Task, folder: Path | None = None) -> Payload:
        content = await fetch(self, task, folder)
        assert isinstance(content, bytes)
        return Payload(content)

    def look(request: Request) -> None:
        if request.method == "PUT":
            living.append(Payload.living)

    monkeypatch.setattr(CoordinatorClient, "payload", payload)
    coordinator.alter = look
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert living == [0, 0, 0, 0]
    assert coordinator.count("GET", "/task") == 2, "the first and the last question: receipts bring the other tasks"


def test_labels_follow_the_federations_order_of_classes(make: Make, backbone: Backbone, source: Source) -> None:
    names = ["zebra", *reversed(source.class_names), "apple"]
    coordinator = make.coordinator(rounds=1, class_names=names)
    asyncio.run(make.worker(coordinator).run())
    context = coordinator.global_state["context"]
    text = backbone.encode_prompts(context, backbone.class_prompts(names, len(context)))
    right = 0
    for index in range(len(source.test)):
        image = backbone.preprocess(source.test.image(index)).unsqueeze(0)
        right += (
            names[int((backbone.encode_images(image) @ text.T).argmax())]
            == source.class_names[int(source.test.labels[index])]
        )
    assert coordinator.evaluations[1]["splits"]["test"]["accuracy"] == right / len(source.test)


def test_an_evaluator_declares_its_test_images_and_is_never_asked_for_others(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=0)
    features = FeatureCache(settings.features_dir)
    worker = make.worker(coordinator, settings=settings.model_copy(update={"role": "evaluator"}), features=features)
    assert asyncio.run(worker.run()) is Exit.OK
    assert coordinator.client is not None
    assert (coordinator.client.role, coordinator.client.num_samples) == ("evaluator", 24)
    assert features.images_computed == 24
    assert len(coordinator.evaluations) == 1
    assert trained_images.read_trained(settings.state_dir) is None


@pytest.mark.parametrize(("seconds", "then"), [(1e9, 0), (0.0, 48)])
def test_features_that_take_little_are_computed_after_the_enrolment(
    seconds: float, then: int, make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("promptfed.client_service.joining.joining.BEHIND_SECONDS", seconds)
    features, computed = FeatureCache(settings.features_dir), dict[str, int]()
    coordinator = make.coordinator(rounds=0)
    note = lambda event, facts: computed.setdefault(event, features.images_computed)  # noqa: E731
    assert asyncio.run(make.worker(coordinator, features=features, hook=note).run()) is Exit.OK
    assert computed["enrolled"] == then
    assert computed["evaluated"] == 48


@pytest.mark.parametrize("split", ["train", "test"])
def test_an_image_that_cannot_be_read_is_found_before_the_enrolment(split: str, make: Make, source: Source) -> None:
    def damaged(row: int) -> Any:
        raise DataError("seven.png cannot be read as an image; repair or remove it.")

    spoiled = replace(source, **{split: Split(getattr(source, split).labels, damaged)})
    coordinator = make.coordinator(rounds=0)
    with pytest.raises(ClientError, match=r"seven.png cannot be read") as end:
        asyncio.run(make.worker(coordinator, source=spoiled).run())
    assert end.value.exit is Exit.BAD_INPUT
    assert coordinator.client is None


def test_a_paused_federation_is_waited_for(make: Make) -> None:
    coordinator = make.coordinator(rounds=0, state="paused")

    async def scenario() -> None:
        running = asyncio.ensure_future(make.worker(coordinator).run())
        await until(lambda: coordinator.count("GET", "/task") >= 2)
        coordinator.state = "running"
        assert await running is Exit.OK

    asyncio.run(scenario())
    assert len(coordinator.evaluations) == 1


def test_a_method_that_cannot_is_reported_and_the_client_goes_on(make: Make) -> None:
    words = "many more words than there is room for here"
    coordinator = make.coordinator(rounds=1, method={"name": "coop", "m": 1, "context_init": words})
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert [failure["type"] for failure in coordinator.failures] == ["MethodError"] * 3
    assert "raise m or use fewer words" in coordinator.failures[0]["detail"]


def test_a_failure_of_another_kind_says_nothing_of_the_machine(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    coordinator = make.coordinator(rounds=0)
    worker = make.worker(coordinator)

    def spoil(event: str, facts: Mapping[str, Any]) -> None:
        if event == "enrolled":
            (make.settings.state_dir / "committed.safetensors.tmp").mkdir()

    worker.monitor._hook = spoil
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(worker.run()) is Exit.OK
    assert {failure["detail"] for failure in coordinator.failures} == {"the client's own log says why"}
    assert str(make.settings.state_dir) in caplog.text
    assert not any(str(make.settings.state_dir).encode() in body for body in coordinator.received)


def test_a_corrupted_payload_is_not_used_but_asked_for_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_BACKOFF", 0.01)
    left = [5]

    def corrupt(request: Request) -> Response | None:
        if not request.url.path.endswith("/payload") or not left[0]:
            return None
        left[0] -= 1
        return Response(b"\0" * 600)

    coordinator = make.coordinator(rounds=1, alter=corrupt)
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert (left, coordinator.failures, len(coordinator.accepted)) == ([0], [], 1)


def test_a_withdrawn_client_ends(make: Make) -> None:
    def withdraw(request: Request) -> Response | None:
        return problem(403, "withdrawn") if request.url.path.endswith("/task") else None

    with pytest.raises(ClientError, match="the operator has withdrawn 'hospital-a'") as end:
        asyncio.run(make.worker(make.coordinator(alter=withdraw)).run())
    assert end.value.exit is Exit.WITHDRAWN


@pytest.mark.parametrize("own", [True, False])
def test_a_connection_is_closed_by_who_opened_it(own: bool, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = make.coordinator(rounds=1)
    worker = make.worker(coordinator, http=(http := coordinator.http()))
    if own:
        worker._http = None
        monkeypatch.setattr(worker_module, "open_http", lambda settings: http)
    assert asyncio.run(worker.run()) is Exit.OK
    assert http.is_closed is own


def test_training_stops_when_the_task_is_no_longer_ours(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_watch, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(task_watch, "WATCH_SECONDS", 0)
    coordinator = make.coordinator(rounds=1, training=LONG)
    events = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))

    async def scenario() -> None:
        running = asyncio.ensure_future(worker.run())
        await until(lambda: worker.monitor.status.stage == "training")
        await asyncio.sleep(0.2)
        coordinator.plan.pop(0)  # its deadline has passed: the next task is the evaluation
        assert await running is Exit.OK

    asyncio.run(scenario())
    assert events[-3:] == ["cancelled", "evaluated", "ended"]
    assert not coordinator.accepted


@pytest.mark.parametrize("stage", ["training", "waiting"])
def test_a_stop_ends_training_and_polls_at_once(make: Make, settings: Settings, stage: str) -> None:
    coordinator = make.coordinator(rounds=1, training=LONG, poll_seconds=2 * PATIENCE)
    if stage == "waiting":
        coordinator.state = "paused"
    events: list[str] = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))

    async def scenario() -> None:
        running = asyncio.ensure_future(worker.run())
        await until(lambda: worker.monitor.status.stage == stage)
        await asyncio.sleep(0.1)
        worker.stop()
        async with asyncio.timeout(PATIENCE):  # of which a poll takes twice as much
            assert await running is Exit.OK

    asyncio.run(scenario())
    assert "trained" not in events, "it has stopped in the middle of the training"
    assert worker.monitor.status.stage == "stopped"
    assert not worker.compute.busy
    PrivateState(settings.state_dir).close()  # the lock is free again


def test_a_client_that_is_withdrawn_while_it_trains_stops(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_watch, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(task_watch, "WATCH_SECONDS", 0)
    coordinator = make.coordinator(rounds=1, training=LONG)
    worker = make.worker(coordinator)

    async def scenario() -> None:
        running = asyncio.ensure_future(worker.run())
        await until(lambda: worker.monitor.status.stage == "training")
        coordinator.alter = lambda request: problem(403, "withdrawn")
        with pytest.raises(ClientError) as end:
            await running
        assert end.value.exit is Exit.WITHDRAWN

    asyncio.run(scenario())
    assert coordinator.count("PUT", "/update") == 0


@pytest.mark.parametrize("role", ["trainer", "evaluator"])
def test_private_state_is_prepared_once_and_again_when_the_peers_change(
    make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    prepared: list[tuple[tuple[str, ...], bool]] = []

    def prepare(self: PromptFL, context: ClientContext, private: Tensors) -> Tensors:
        prepared.append((tuple(peer.name for peer in context.peers), "prepared" in private))
        return {"prepared": torch.tensor([float(len(context.peers))])}

    monkeypatch.setattr(PromptFL, "prepare", prepare, raising=False)
    monkeypatch.setattr(PromptFL, "needs", Needs(domain_descriptions=True))
    domain = {"name": "sketch", "description": "a sketch of a {}"}
    peers = [{"name": "b", "role": "trainer", "domain": domain}, {"name": "c", "role": "evaluator", "domain": None}]
    own = settings.model_copy(update={"role": role})
    for rounds, those in (([0, 1], peers[:1]), ([2], peers[:1]), ([3], peers[::-1])):  # started again in between
        coordinator = make.coordinator(rounds=3, peers=those)
        coordinator.plan = [("evaluate", round) for round in rounds]
        asyncio.run(make.worker(coordinator, settings=own).run())
    state = PrivateState(settings.state_dir)
    private, _ = state.committed()
    state.close()
    if role == "evaluator":  # it has nothing to prepare from
        assert (prepared, private) == ([], {})
    else:
        assert prepared == [(("b",), False), (("c", "b"), True)]
        assert private["prepared"].tolist() == [2.0]


class Stuck(FeatureCache):
    """A computation that does not notice a stop."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def features(self, *arguments: Any, **options: Any) -> Tensor:
        self.begun.set()
        self.go_on.wait(PATIENCE)
        return super().features(*arguments, **options)


def test_a_computation_that_does_not_stop_is_left_behind(
    make: Make, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compute, "STOP_SECONDS", 0.1)
    stuck = Stuck(tmp_path / "features")
    worker = make.worker(make.coordinator(), features=stuck)

    async def scenario() -> None:
        running = asyncio.ensure_future(worker.run())
        await until(stuck.begun.is_set)
        worker.stop()
        assert await running is Exit.OK
        assert worker.compute.busy
        with pytest.raises(ClientError, match="is in use"):  # it may still write: nobody else may yet
            PrivateState(settings.state_dir)
        stuck.go_on.set()
        await until(lambda: not worker.compute.busy)

    asyncio.run(scenario())


def test_features_are_those_of_the_specs_number_of_threads(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The number is noted instead of set: threads of this process would look for work long after the test."""
    given, threads = list[int](), list[int]()
    monkeypatch.setattr(torch, "set_num_threads", given.append)

    class Watched(FeatureCache):
        def features(self, *arguments: Any, **options: Any) -> Tensor:
            threads.append(given[-1])
            return super().features(*arguments, **options)

    coordinator = make.coordinator(rounds=0, training=TrainingSpec(threads=2).model_dump())
    asyncio.run(make.worker(coordinator, features=Watched(tmp_path / "features")).run())
    assert set(threads) == {2}


def test_a_worker_that_was_stopped_before_it_ran_does_nothing(make: Make) -> None:
    coordinator = make.coordinator()
    worker: Worker = make.worker(coordinator)
    worker.stop()
    assert asyncio.run(worker.run()) is Exit.OK
    assert not coordinator.calls


def test_a_task_that_was_answered_is_not_carried_out_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_loop, "SHORTEST_POLL", 0.05)
    stale: list[dict[str, Any]] = []

    def repeat(task: dict[str, Any]) -> dict[str, Any]:
        stale.append(task)
        return stale[0] if len(stale) in (2, 3) else task

    coordinator = make.coordinator(rounds=1, garble=repeat)
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert coordinator.count("PUT", "/evaluation") == 2


# What clients of one process do differently: they take turns, and what nobody takes up again is not made durable.


def test_ephemeral_state_is_neither_locked_nor_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(handle), fsync(handle))[1])
    first = PrivateState(tmp_path / "ephemeral", ephemeral=True)
    identity = first.identity("a", "trainer")
    first.write_pending(b"update", {}, TensorOrigin("task"))
    second = PrivateState(tmp_path / "ephemeral", ephemeral=True)
    assert first.identity("a", "trainer") == identity
    assert not list((tmp_path / "ephemeral").glob("*.json"))
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
def test_consent_is_written_only_where_another_process_may_read_it(resumable: bool, make: Make) -> None:
    worker = make.worker(make.coordinator(rounds=1), ephemeral=True, synced=resumable)
    assert asyncio.run(worker.run()) is Exit.OK
    assert worker.work is not None
    assert worker.work.agreement.sent.sent, "answers are counted all the same"
    notes = {name for name in (FILE, ANSWERS) if (make.settings.state_dir / name).exists()}
    assert notes == ({FILE, ANSWERS} if resumable else set())


def _elsewhere(settings: Settings, name: str) -> Settings:
    return settings.model_copy(update={"state_dir": settings.state_dir.parent / name})


def test_only_so_many_compute_as_there_are_turns(
    make: Make, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = PromptFL.train
    running, most, guard = 0, 0, threading.Condition()

    def slow(self: PromptFL, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        nonlocal running, most
        with guard:
            running += 1
            most = max(most, running)
            guard.notify_all()
            assert guard.wait_for(lambda: most >= 2, PATIENCE), "as many as may come together"
        time.sleep(0.2)  # in which one too many would come
        found = train(self, context, payload, private)
        with guard:
            running -= 1
        return found

    monkeypatch.setattr(PromptFL, "train", slow)

    async def run() -> list[Exit]:
        with ThreadPoolExecutor(3) as executor:
            common = asyncio.Semaphore(2)
            workers = [
                make.worker(
                    make.coordinator(rounds=2), settings=_elsewhere(settings, name), executor=executor, turns=common
                )
                for name in ("one", "two", "three")
            ]
            return await asyncio.gather(*(worker.run() for worker in workers))

    assert set(asyncio.run(run())) == {Exit.OK}
    assert most == 2


# What a data owner reads while a client takes part: a tidy line for each step, events as JSON where asked for.


def lines(formatter: logging.Formatter, caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the course of a round looks like."""
    monitor = Monitor(Status("a", "trainer", "pets", "http://127.0.0.1:1"))
    with caplog.at_level(logging.INFO, "promptfed.client"):
        for event, facts in COURSE:
            monitor.tell(event, **facts)
    return [formatter.format(record) for record in caplog.records]


COURSE: list[tuple[str, Mapping[str, Any]]] = [
    ("enrolled", {"client_id": "cli-1", "train": 24, "test": 8}),
    ("trained", {"round": 1, "rounds": 8, "phase": "train", "loss": 1.20394, "train_seconds": 1.84}),
    ("accepted", {"round": 1, "phase": "train", "bytes": 7368}),
    ("evaluated", {"round": 1, "rounds": 8, "accuracy": 0.435, "zero_shot": 0.334}),
    ("evaluated", {"round": 2, "rounds": 8, "accuracy": 0.5, "zero_shot": None}),
    ("evaluated", {"round": 3, "rounds": 8, "accuracy": None, "zero_shot": None}),
    ("evaluated", {"round": 4, "rounds": 8, "accuracy": 0.25, "zero_shot": None, "one_class": True}),
    ("sending", {"round": 4, "phase": "train", "bytes": 1234}),
    ("met", {"round": 4, "members": 5, "new": 3, "listed": 2}),
    ("again", {"round": 4, "rounds": 8, "phase": "train"}),
    ("sent_again", {"round": 4, "rounds": 8, "phase": "train", "bytes": 1234}),
    (
        "trained",
        {"round": 4, "rounds": 8, "phase": "train", "payload": "sha256:0123456789abcdef", "train_seconds": 0.5},
    ),
    ("refused", {"round": 4, "status": 422, "detail": "not so"}),
    ("failed", {"round": 4, "phase": "train", "type": "MethodError", "detail": "lower training.learning_rate"}),
    ("ended", {"federation": "pets", "detail": "the federation finished"}),
]


def test_lines_for_people(caplog: pytest.LogCaptureFixture) -> None:
    assert lines(EventTextLines("%(message)s"), caplog) == [
        "enrolled as cli-1: 24 training and 8 test images; tasks come once the federation has started",
        "round 1/8 train: loss 1.204, 1.8 s",
        "round 1 train: the coordinator has the update, 7,368 bytes", "round 1/8 accuracy 43.5% (zero-shot 33.4%)",
        "round 2/8 accuracy 50.0%", "round 3/8 evaluated",
        "round 4/8 accuracy 25.0%; nearly all answers are one class: these images are shifted",
        "round 4 train: sending the update, 1,234 bytes",
        "round 4: 3 of the 5 others in the secure sum are new to this client, 2 are peers that its policy lists",
        "warning: the coordinator asks for round 4/8 train again, as one does that was restored from a backup",
        "round 4/8 train: the coordinator's disk had lost the update, the same bytes went again",
        "round 4/8 train: 0.5 s, from sha256:0123456789ab...", "warning: refused round=4 status=422 detail=not so",
        "warning: failed round=4 phase=train type=MethodError detail=lower training.learning_rate",
        "the federation pets has ended",
    ]  # fmt: skip


def test_what_happened_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    told = list[str]()
    monitor = Monitor(Status("a", "trainer", "pets", "http://127.0.0.1:1"), lambda event, facts: told.append(event))
    monitor.record = lambda event, facts: told.append(f"{event} on record")
    for event, facts in COURSE:
        monitor.tell(event, **facts)
    assert told == [text for event, _ in COURSE for text in (f"{event} on record", event)]
    status = monitor.status
    assert (status.trained, status.evaluated, status.accuracy, status.zero_shot) == (2, 4, 0.25, None)
    assert (status.last_refusal, status.last_error) == ("not so", "lower training.learning_rate")
    assert status.met == {"round": 4, "members": 5, "new": 3, "listed": 2}
    caplog.set_level(logging.INFO)
    monitor.task(5, "train", "training")
    monitor.tell("lost", loss=0.123456, none=None)
    assert caplog.messages[-1] == "lost loss=0.1235"
    values = dict(line.rsplit(" ", 1) for line in monitor.exposition().decode().splitlines() if line[:1] != "#")
    assert float(values["promptfed_client_training_seconds_total"]) == pytest.approx(2.34)
    assert float(values['promptfed_client_events_total{event="evaluated"}']) == 4
    assert float(values['promptfed_client_accuracy{prompts="learned"}']) == 0.25
    assert float(values['promptfed_client_accuracy{prompts="template"}']) == 0.334
    assert (float(values["promptfed_client_round"]), status.stage) == (5, "training")


@pytest.mark.parametrize(("stopped_by", "serving", "stage", "exit"), [
    (None, False, "ended", Exit.OK), (signal.SIGINT, True, "ended", Exit.INTERRUPTED),
    (signal.SIGTERM, True, "ended", Exit.OK), (signal.SIGINT, False, "stopped", Exit.INTERRUPTED),
    (signal.SIGTERM, False, "stopped", Exit.OK),
])  # fmt: skip
def test_a_client_serves_to_its_end_or_until_it_is_stopped(
    stopped_by: int | None, serving: bool, stage: Any, exit: Exit,
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO)
    (tmp_path / "api-token").write_text("t\n")
    own = settings.model_copy(update={"serve": serving, "api_token_file": tmp_path / "api-token", "api_port": 7})
    worker, seen, stops = Worker(own), list[Any](), list[Any]()

    async def run(self: Worker) -> Exit:
        seen.append(self.api_url)
        self.monitor.stage(stage)
        if stopped_by is not None:  # while it takes part, or once it only serves
            asyncio.get_running_loop().call_later(0.01, stops[0], stopped_by) if serving else stops[0](stopped_by)
        return Exit.OK

    @asynccontextmanager
    async def api(app: Any, host: str, port: int) -> AsyncIterator[str]:
        seen.append((app, host, port))
        yield "http://here"
        seen.append("closed")

    monkeypatch.setattr(Worker, "run", run)
    monkeypatch.setattr(Worker, "stop", lambda self: seen.append("stop"))
    monkeypatch.setattr(worker_module, "on_signals", lambda loop, stop: stops.append(stop))
    monkeypatch.setattr(worker_module, "create_app", lambda *given: given)
    monkeypatch.setattr(worker_module, "running_api", api)
    assert asyncio.run(asyncio.wait_for(worker_module.serve(worker), PATIENCE)) is exit
    app = (worker.monitor, worker.predictor, "t", own.api_host)
    assert seen == [(app, own.api_host, 7), "http://here", *["stop"] * (stopped_by is not None), "closed"]
    assert ("the same command goes on" in caplog.text) is (stopped_by == signal.SIGINT and stage == "stopped")
    assert ("serving predictions at http://here until stopped" in caplog.text) is serving


@pytest.mark.parametrize("busy", [False, True])
def test_a_process_says_what_ended_it_and_waits_for_no_computation(
    busy: bool, settings: Settings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def fails(worker: Worker) -> Exit:
        raise ValueError("unforeseen")

    class Left(BaseException):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(worker_module, "serve", fails)
    monkeypatch.setattr(worker_module, "leave", leave)
    monkeypatch.setattr(compute.Compute, "busy", busy)
    if busy:
        with pytest.raises(Left) as left:
            worker_module.run(settings)
        assert left.value.args == (Exit.FAILED,)
    else:
        assert worker_module.run(settings) == Exit.FAILED
    assert "the client failed" in caplog.text
    assert "ValueError: unforeseen" in caplog.text


def test_protected_training_tells_no_seconds() -> None:
    told = sentence("trained", {"round": 1, "rounds": 8, "phase": "train", "steps": 5, "trained_parameters": 256})
    assert told == "round 1/8 train: 5 steps"


def test_events_for_programs(caplog: pytest.LogCaptureFixture) -> None:
    told = [json.loads(line) for line in lines(EventJsonLines(), caplog)]
    assert [(one["event"], one["facts"]) for one in told] == [(event, dict(facts)) for event, facts in COURSE]


def test_a_traceback_that_another_handler_has_formatted_is_cleaned_too() -> None:
    try:
        raise ValueError("colour \x1b[31m")
    except ValueError as error:
        record = logging.makeLogRecord(
            {"msg": "failed", "levelno": logging.ERROR, "levelname": "ERROR", "exc_info": (type(error), error, None)}
        )
    assert "\x1b" in logging.Formatter().format(record)  # keeps its text in the record
    assert "\x1b" not in EventTextLines("%(message)s").format(record)


def test_peers_are_remembered_from_their_first_use(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    listed = frozenset({"ed25519:" + "aa" * 32})
    first = meet(state, ["bb" * 32, "aa" * 32], 1, listed)
    assert list(json.loads((tmp_path / "peers.json").read_bytes())) == sorted(
        json.loads((tmp_path / "peers.json").read_bytes())
    ), "in an order that tells nothing of the sum's"
    assert (first.members, first.new, first.listed) == (2, 2, 1)
    state.close()
    again = meet(PrivateState(tmp_path), ["aa" * 32, "bb" * 32, "cc" * 32], 4, listed)
    assert (again.members, again.new, again.listed) == (3, 1, 1)
    assert '"ed25519:' in (tmp_path / "peers.json").read_text()


def test_the_fingerprint_is_that_of_the_key_that_signs_also_while_the_client_runs(tmp_path: Path) -> None:
    made = own_fingerprint(tmp_path)
    state = PrivateState(tmp_path)
    assert own_fingerprint(tmp_path) == made
    assert made.startswith("ed25519:")
    state.close()


def test_the_command_prints_fingerprint_and_needs_no_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--coordinator", "http://127.0.0.1:9", "--federation", "eyes", "--state-dir", str(tmp_path)]
    assert main(["--fingerprint", *options]) == Exit.OK
    assert capsys.readouterr().out == own_fingerprint(tmp_path) + "\n"
