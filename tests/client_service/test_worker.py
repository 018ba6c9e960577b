"""A worker against a coordinator of one client, over an in-process transport: the course of a federation."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Request, Response
from torch import Tensor

from promptfed.client_service import task_loop
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training import trainer
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source
from promptfed.shared.methods.core.interface import ClientContext, Needs
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import state_hash
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


def test_a_federation_from_enrolment_to_its_end(make: Make, backbone: Backbone, source: Source) -> None:
    coordinator = make.coordinator(rounds=2)
    start = coordinator.global_state["context"].clone()
    events = []
    worker = make.worker(coordinator, hook=lambda event, facts: events.append(event))

    assert asyncio.run(worker.run()) is Exit.OK

    assert events == [
        "enrolled", "evaluated", "trained", "accepted", "trained", "accepted", "evaluated", "ended",
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


def test_many_workers_share_one_process(make: Make, settings: Settings, tmp_path: Any) -> None:
    def settings_of(name: str) -> Settings:
        return settings.model_copy(update={"name": name, "state_dir": tmp_path / name})

    async def run_all(coordinators: list[Any]) -> list[Exit]:
        with ThreadPoolExecutor(1) as executor:
            workers = [
                make.worker(coordinator, settings=settings_of(f"c{number}"), executor=executor)
                for number, coordinator in enumerate(coordinators)
            ]
            return await asyncio.gather(*(worker.run() for worker in workers))

    # The batches depend on the client's name, nothing on what else runs: the same hashes alone and together.
    alone = []
    for number in range(3):
        coordinator = make.coordinator(rounds=2)
        own = settings.model_copy(update={"name": f"c{number}", "state_dir": tmp_path / f"alone{number}"})
        asyncio.run(make.worker(coordinator, settings=own).run())
        alone.append(state_hash(coordinator.global_state))
    together = [make.coordinator(rounds=2) for _ in range(3)]
    assert asyncio.run(run_all(together)) == [Exit.OK] * 3
    assert [state_hash(coordinator.global_state) for coordinator in together] == alone
    assert len(set(alone)) == 3


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


def test_a_failure_of_another_kind_says_nothing_of_the_machine(
    make: Make, settings: Settings, caplog: pytest.LogCaptureFixture
) -> None:
    coordinator = make.coordinator(rounds=0)
    worker = make.worker(coordinator)

    def spoil(event: str, facts: Mapping[str, Any]) -> None:
        if event == "enrolled":
            (settings.state_dir / "committed.safetensors.tmp").mkdir()

    worker.monitor._hook = spoil
    with caplog.at_level(logging.ERROR):
        assert asyncio.run(worker.run()) is Exit.OK
    assert {failure["detail"] for failure in coordinator.failures} == {"the client's own log says why"}
    assert str(settings.state_dir) in caplog.text
    assert not any(str(settings.state_dir).encode() in body for body in coordinator.received)


def test_a_corrupted_payload_is_not_used(make: Make) -> None:
    def corrupt(request: Request) -> Response | None:
        return Response(b"\0" * 600) if request.url.path.endswith("/payload") else None

    coordinator = make.coordinator(rounds=1, alter=corrupt)
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert [failure["type"] for failure in coordinator.failures] == ["BadAnswer"] * 3
    assert not coordinator.accepted


def test_a_payload_of_another_origin_is_not_fetched(make: Make) -> None:
    def point_elsewhere(task: dict[str, Any]) -> dict[str, Any]:
        return task | {"payload": task["payload"] | {"url": "http://169.254.169.254/latest/meta-data"}}

    coordinator = make.coordinator(rounds=0, garble=point_elsewhere)
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert coordinator.count("GET", "/payload") == coordinator.count("GET", "/latest/meta-data") == 0
    assert "not on the coordinator" in coordinator.failures[0]["detail"]


def test_a_withdrawn_client_ends(make: Make) -> None:
    def withdraw(request: Request) -> Response | None:
        return problem(403, "withdrawn") if request.url.path.endswith("/task") else None

    with pytest.raises(ClientError, match="the operator has withdrawn 'hospital-a'") as end:
        asyncio.run(make.worker(make.coordinator(alter=withdraw)).run())
    assert end.value.exit is Exit.WITHDRAWN


def test_training_stops_when_the_task_is_no_longer_ours(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task_loop, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(task_loop, "WATCH_SECONDS", 0)
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
    monkeypatch.setattr(task_loop, "FIRST_SECONDS", 0.05)
    monkeypatch.setattr(task_loop, "WATCH_SECONDS", 0)
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
    monkeypatch.setattr(trainer, "STOP_SECONDS", 0.1)
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


def test_features_are_those_of_the_specs_number_of_threads(make: Make, tmp_path: Path) -> None:
    threads: list[int] = []

    class Watched(FeatureCache):
        def features(self, *arguments: Any, **options: Any) -> Tensor:
            threads.append(torch.get_num_threads())
            return super().features(*arguments, **options)

    coordinator = make.coordinator(rounds=0, training=TrainingSpec(threads=2).model_dump())
    try:
        asyncio.run(make.worker(coordinator, features=Watched(tmp_path / "features")).run())
    finally:
        torch.set_num_threads(1)
    assert threads == [1, 1, 2]  # train and test before enrolment, test again for the evaluation


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
