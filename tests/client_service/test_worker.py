"""A worker against a coordinator of one client, over an in-process transport."""

from __future__ import annotations

import asyncio

from torch import Tensor

from client_service.exits import Exit
from shared.clip import Backbone
from shared.data import Source
from tests.client_service.conftest import MakeCoordinator, MakeWorker


def accuracy_of(context: Tensor, backbone: Backbone, source: Source) -> float:
    """By the plain path: every position of every class, images one by one."""
    text = backbone.encode_prompts(context, backbone.class_prompts(source.class_names, len(context)), path="plain")
    right = 0
    for index in range(len(source.test)):
        image = backbone.preprocess(source.test.image(index)).unsqueeze(0)
        right += int((backbone.encode_images(image) @ text.T).argmax()) == int(source.test.labels[index])
    return right / len(source.test)


def test_a_federation_from_enrolment_to_its_end(
    make_coordinator: MakeCoordinator, make_worker: MakeWorker, backbone: Backbone, source: Source
) -> None:
    coordinator = make_coordinator(rounds=2)
    start = coordinator.global_state["context"].clone()
    events = []
    worker = make_worker(coordinator, hook=lambda event, facts: events.append(event))

    assert asyncio.run(worker.run()) is Exit.OK

    assert events == [
        "enrolled", "evaluated", "trained", "accepted", "trained", "accepted", "evaluated", "ended",
    ]  # fmt: skip
    assert not coordinator.global_state["context"].equal(start)
    assert coordinator.client is not None
    assert coordinator.client.num_samples == 24
    assert [set(found["splits"]) for found in coordinator.evaluations] == [{"test"}, {"test"}]
    for context, found in zip((start, coordinator.global_state["context"]), coordinator.evaluations, strict=True):
        assert found["splits"]["test"] == {"accuracy": accuracy_of(context, backbone, source), "num_samples": 24}
    assert coordinator.evaluations[0]["zero_shot"] == coordinator.evaluations[1]["zero_shot"]
    assert worker.monitor.status.stage == "ended"
    assert worker.monitor.status.accuracy == coordinator.evaluations[1]["splits"]["test"]["accuracy"]
