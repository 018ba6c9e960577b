"""What a coordinator serves: crafted payloads are found before training, payloads for one client a round later."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fastapi import Request, Response

from promptfed.client_service.exits import Exit
from promptfed.client_service.privacy.payloads import start_of
from promptfed.client_service.privacy.peers import KEY
from promptfed.client_service.settings import Settings
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.messages import Domain, Task, receipt_body
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface.base import ClientInfo, MethodError, NeedsBackbone, ServerContext
from promptfed.shared.secagg.keys import new_identity, public_identity, sign
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.client_service.conftest import MakeCoordinator, MakeWorker
from tests.support.fake_coordinator import FEDERATION, NAMES, FakeCoordinator


def with_payload(settings: Settings, folder: Path, **rules: Any) -> Settings:
    path = folder / "policy.yaml"
    path.write_text(yaml.safe_dump({"version": 1, "payload": {"on_suspicion": "refuse"} | rules}))
    return settings.model_copy(update={"policy": path})


def before_round(coordinator: FakeCoordinator, round: int, change: Callable[[Tensors], Tensors]) -> None:
    """Change what is served as soon as this round's task is asked for."""
    done = False

    def once(request: Request) -> Response | None:
        nonlocal done
        if not done and request.url.path.endswith("/task") and coordinator.plan[:1] == [("train", round)]:
            coordinator.global_state, done = change(coordinator.global_state), True
        return None

    coordinator.alter = once


def crafted(state: Tensors) -> Tensors:
    return {"context": torch.randn(state["context"].shape, generator=torch.Generator().manual_seed(5)) * 0.02}


def jump(state: Tensors) -> Tensors:
    return {"context": state["context"] + 0.5}


def long_row(state: Tensors) -> Tensors:
    context = state["context"].clone()
    context[0] *= 40
    return {"context": context}


def test_nothing_is_suspected_of_an_ordinary_federation(
    tmp_path: Path, make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    coordinator = make_coordinator(rounds=3)
    worker = make_worker(coordinator, settings=with_payload(settings, tmp_path))
    told: list[str] = []
    worker.monitor._hook = lambda event, facts: told.append(facts["verdict"]) if event == "payload" else None
    assert asyncio.run(worker.run()) == Exit.OK
    assert told == ["ok"] * 3
    assert coordinator.failures == []
    status = worker.monitor.as_dict()["payload"]
    assert status["verdict"] == "ok"
    assert 0 < status["change"] < 10


@pytest.mark.parametrize(
    ("round", "change", "rules", "said"),
    [
        (1, crafted, {}, "the first payload is not what the spec's seed gives"),
        (2, jump, {"max_change": 2.0}, r"times this client's own last change for each; payload\.max_change is 2"),
        (2, long_row, {"max_change": 1e6}, "a row of context is"),
    ],
)
def test_a_crafted_payload_is_refused_before_anything_is_computed_from_it(
    round: int,
    change: Callable[[Tensors], Tensors],
    rules: dict[str, Any],
    said: str,
    tmp_path: Path,
    make_coordinator: MakeCoordinator,
    make_worker: MakeWorker,
    settings: Settings,
) -> None:
    coordinator = make_coordinator(rounds=2)
    before_round(coordinator, round, change)
    worker = make_worker(coordinator, settings=with_payload(settings, tmp_path, **rules))
    assert asyncio.run(worker.run()) == Exit.OK
    refused = [one for one in coordinator.failures if one["type"] == "policy-payload"]
    assert refused, coordinator.failures
    assert re.search(said, refused[0]["detail"]), refused[0]["detail"]
    assert len(coordinator.accepted) == round - 1, "nothing was sent of the round that was refused"
    assert worker.monitor.as_dict()["payload"]["verdict"] == "suspicious"


def test_bytes_of_an_earlier_round_are_suspected(
    tmp_path: Path, make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    coordinator = make_coordinator(rounds=2)
    first = dict(coordinator.global_state)
    before_round(coordinator, 2, lambda state: first)
    asyncio.run(make_worker(coordinator, settings=with_payload(settings, tmp_path)).run())
    assert [one["type"] for one in coordinator.failures] == ["policy-payload"]
    assert "these very bytes were served for round 1" in coordinator.failures[0]["detail"]


def test_where_the_policy_warns_training_goes_on_and_the_status_tells(
    tmp_path: Path, make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    coordinator = make_coordinator(rounds=1)
    coordinator.global_state = crafted(coordinator.global_state)
    worker = make_worker(coordinator, settings=with_payload(settings, tmp_path, on_suspicion="warn"))
    assert asyncio.run(worker.run()) == Exit.OK
    assert len(coordinator.accepted) == 1
    found = worker.monitor.as_dict()["payload"]
    assert (found["verdict"], "seed" in found["why"]) == ("suspicious", True)


def signed(private: bytes, at: int, digest: str, **changes: Any) -> dict[str, Any]:
    """A witness's receipt of what this round served; ``changes`` are to what is signed."""
    body = receipt_body(FEDERATION, at, "train", digest) | changes
    key = public_identity(private).hex()
    return {"identity_key": key, "payload_sha256": digest, "signature": sign(private, "receipt", body).hex()}


OTHERS = [new_identity() for _ in range(3)]
ELSEWHERE = "sha256:" + "5" * 64


@pytest.mark.parametrize(
    ("witnesses", "said"),
    [
        (lambda round, digest: [signed(key, round, digest) for key in OTHERS], None),
        (lambda round, digest: [signed(key, round, digest) for key in OTHERS[:2]], None),
        (lambda round, digest: [signed(OTHERS[0], round, digest)] * 2, "1 other has signed round 1, train's payload"),
        (
            lambda round, digest: [signed(OTHERS[0], round, digest), signed(OTHERS[1], round, digest, round=7)],
            "1 other has signed",
        ),
        (lambda round, digest: [], "0 others have signed"),
        (
            lambda round, digest: [
                *(signed(key, round, digest) for key in OTHERS[:2]),
                signed(OTHERS[2], round, ELSEWHERE),
            ],
            "1 client has signed another payload",
        ),
    ],
)
def test_others_must_have_signed_the_same_payload(
    witnesses: Any,
    said: str | None,
    tmp_path: Path,
    make_coordinator: MakeCoordinator,
    make_worker: MakeWorker,
    settings: Settings,
) -> None:
    """Found a round later, before the next payload is fetched: what was sent by then was sent."""
    coordinator = make_coordinator(rounds=2)
    coordinator.witnesses = witnesses
    worker = make_worker(coordinator, settings=with_payload(settings, tmp_path, witnesses=2))
    assert asyncio.run(worker.run()) == Exit.OK
    if said is None:
        assert coordinator.failures == []
        assert len(coordinator.accepted) == 2
        return
    assert {one["type"] for one in coordinator.failures} == {"policy-witnesses"}
    assert said in coordinator.failures[0]["detail"]
    assert len(coordinator.accepted) == 1


def test_ones_own_signature_is_no_witness(
    tmp_path: Path, make_coordinator: MakeCoordinator, make_worker: MakeWorker, settings: Settings
) -> None:
    coordinator = make_coordinator(rounds=2)

    def own(round: int, digest: str) -> list[dict[str, Any]]:
        private = bytes.fromhex((settings.state_dir / KEY).read_text())
        return [signed(private, round, digest)]

    coordinator.witnesses = own
    asyncio.run(make_worker(coordinator, settings=with_payload(settings, tmp_path, witnesses=1)).run())
    assert {one["type"] for one in coordinator.failures} == {"policy-witnesses"}
    assert "0 others" in coordinator.failures[0]["detail"]


def a_task(method: dict[str, Any], phase: str) -> Task:
    config = {"method": method, "training": TrainingSpec().model_dump(), "backbone": {"model": "promptfed-tiny"}}
    return Task.model_validate(
        {
            "task_id": "t",
            "kind": "train",
            "round": 1,
            "phase": phase,
            "deadline": "2026-11-22T10:00:00Z",
            "seconds_left": 1,
            "payload": {"url": "/", "bytes": 1, "sha256": ELSEWHERE},
            "config": config | {"class_names": NAMES, "template": "{}", "rounds": 3, "seed": 7, "peers": []},
        }
    )


def test_the_start_of_no_method_is_suspected_without_a_reason(backbone: Backbone) -> None:
    """What a client computes of the first payload is what the coordinator serves, or cannot be told."""
    compared = []
    domain = Domain(name="d", description="a {}")
    clients = tuple(ClientInfo(name, "trainer", 10, tuple(NAMES), domain) for name in ("a", "b", "c"))
    for name in sorted(METHODS):
        method = make_method({"name": name})
        phase = method.phases(1, 3)[0] if method.phases(1, 3) else None
        if phase is None:
            continue
        context = ServerContext(TrainingSpec(), shape_of(backbone), tuple(NAMES), clients, 7, 3)
        try:
            state = method.initial_state(context, initial_draws(7))
        except NeedsBackbone:
            state = method.initial_state_with(backbone, context, initial_draws(7))
        except MethodError:
            continue  # this backbone is none for it
        served = method.payload(state, phase, clients[0], context)
        own = start_of(method, backbone, a_task({"name": name}, phase.name), clients[0])
        if own is not None:
            compared.append(name)
            assert own.keys() == served.keys(), name
            assert all(torch.allclose(own[key], served[key], atol=1e-6) for key in own), name
    assert {"promptfl", "fedpgp", "fedclip"} <= set(compared), compared
