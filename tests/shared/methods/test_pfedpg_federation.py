"""pFedPG with the real coordinator and real clients: on both kinds of backbone, what leaves a client, what it keeps."""

from __future__ import annotations

import asyncio
import io
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.serving.prediction import Predictor
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training.data import ClientData
from promptfed.client_service.training.trainer import TaskWork
from promptfed.client_service.worker import Worker
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.client import CommandError
from promptfed.shared.clip import Backbone, FeatureCache, shape_of
from promptfed.shared.data import open_source
from promptfed.shared.messages import Task
from promptfed.shared.methods.core.heads import BIAS, CLASSES, WEIGHT
from promptfed.shared.methods.pfedpg import ADAPTED
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from tests.support.agreed import agreed, asked
from tests.support.fake_coordinator import FakeCoordinator, made_up_source
from tests.support.textless import MODEL, textless_backbone

SMALL = "topic=weather&per_class=2&test_per_class=1"
DATA = {"anna": f"symbols:sketch?{SMALL}", "bert": f"symbols:neon?{SMALL}"}
NAMES = open_source(DATA["anna"]).class_names
SITES = [Site(name, uri) for name, uri in DATA.items()]
TEXTLESS = {"model": MODEL, "pretrained": None}


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "styles",
        "method": {"name": "pfedpg", "m": 3},
        "class_names": list(NAMES),
        "rounds": 2,
        "training": {"epochs": 1, "batch_size": 10, "learning_rate": 0.05},
        "seed": 5,
    } | changes


@dataclass
class Wire:
    """Every body that went over the wire either way: payloads and updates by task."""

    sent: list[bytes] = field(default_factory=list)
    payloads: dict[str, Tensors] = field(default_factory=dict)
    updates: dict[str, Tensors] = field(default_factory=dict)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    seen = Wire()
    handle = InProcess.handle_async_request

    async def recorded(self: InProcess, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        seen.sent.append(body)
        answer = await handle(self, request)
        content = await answer.aread()
        *_, task, last = request.url.path.split("/")
        if last == "update":
            seen.updates[task] = decode(body)[0]
        if last == "payload":
            seen.payloads[task] = decode(content)[0]
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)

    monkeypatch.setattr(InProcess, "handle_async_request", recorded)
    return seen


def private_state(folder: Path, client: str) -> Tensors:
    return decode((folder / f"client-{client}" / "committed.safetensors").read_bytes())[0]


def test_a_federation_on_a_backbone_without_text(wire: Wire, tmp_path: Path) -> None:
    backbone = textless_backbone()
    found = simulate(spec(backbone=TEXTLESS), SITES, backbone=backbone, folder=tmp_path / "run")
    assert found.spec["backbone"]["fingerprint"] == backbone.fingerprint
    assert found.spec["backbone"]["shape"] == shape_of(backbone).model_dump()
    assert all(one.zero_shot is None for one in found.accuracies())
    for report in found.reports:
        for client in report["evaluation"]["clients"].values():
            assert set(client["splits"]) == ({"test", "test@adapted"} if report["round"] else {"test"})
            assert client["zero_shot"] == {}

    assert len(wire.updates) == 4
    last: dict[str, Tensors] = {}
    for task, update in wire.updates.items():
        assert set(update) == {"delta"}
        last[task] = {"adapted": wire.payloads[task]["prompts"] + update["delta"]}
    heads = [private_state(tmp_path / "run", name) for name in DATA]
    for head in heads:
        assert set(head) == {WEIGHT, BIAS, CLASSES, ADAPTED}
        assert any(torch.allclose(head[ADAPTED], one["adapted"], atol=1e-6) for one in last.values())
        for row in head[WEIGHT]:
            trace = row[:4].contiguous().numpy().tobytes()
            assert not any(trace in body for body in wire.sent), "the head stays with the client"
    assert not heads[0][WEIGHT].equal(heads[1][WEIGHT])


def test_the_same_federation_twice_comes_to_the_same_state() -> None:
    runs = [simulate(spec(backbone=TEXTLESS), SITES, backbone=textless_backbone()) for _ in range(2)]
    assert runs[0].state_hash == runs[1].state_hash


def test_a_federation_on_a_clip_model_has_the_template_beside_it(backbone: Backbone, features: FeatureCache) -> None:
    named = {"model": "promptfed-tiny", "pretrained": "random"}
    found = simulate(spec(rounds=1, backbone=named), SITES, backbone=backbone, features=features)
    assert {one.split for one in found.final()} == {"test", "test@adapted"}
    assert all(one.zero_shot is not None for one in found.final())


@pytest.mark.parametrize("method", ["zero_shot", "promptfl", "plan"])
def test_a_method_that_needs_text_is_refused_by_the_command_that_creates_it(method: str) -> None:
    with pytest.raises(CommandError, match=f"{method} needs a text tower"):
        simulate(spec(backbone=TEXTLESS, method={"name": method}), SITES, backbone=textless_backbone())


def test_a_client_whose_backbone_lacks_what_the_method_needs_says_so_before_it_enrols(tmp_path: Path) -> None:
    shape = shape_of(textless_backbone()).model_copy(update={"d_t": 8})
    coordinator = FakeCoordinator(shape, model=MODEL, pretrained=None)
    token = tmp_path / "token"
    token.write_text("enrolment-token\n")
    settings = make_settings(
        coordinator="http://127.0.0.1:1",
        federation="pets",
        name="anna",
        data="made-up",
        state_dir=tmp_path / "state",
        enrolment_token_file=token,
        device="cpu",
    )
    worker = Worker(settings, Parts(textless_backbone(), made_up_source()), http=coordinator.http())
    with pytest.raises(ClientError, match="promptfl needs a text tower") as error:
        asyncio.run(worker.run())
    assert error.value.exit is Exit.BACKBONE
    assert coordinator.client is None


def task(kind: str, round: int, payload: bytes) -> Task:
    config = spec() | {"backbone": TEXTLESS, "template": "a photo of a {}.", "peers": []}
    config["training"] = {"epochs": 2, "batch_size": 10, "learning_rate": 0.1}
    return asked(kind, round, "train" if kind == "train" else "evaluation", payload, config)


def picture() -> bytes:
    content = io.BytesIO()
    open_source(DATA["anna"]).test.image(3).save(content, "PNG")
    return content.getvalue()


def test_head_and_predictions_outlive_a_restart(features: FeatureCache, tmp_path: Path) -> None:
    backbone = textless_backbone()
    payload = encode({"prompts": torch.randn(3, 24, generator=torch.Generator().manual_seed(1)) * 0.1})

    def started() -> TaskWork:
        data = ClientData(open_source(DATA["anna"]), backbone, features)
        state = PrivateState(tmp_path)
        return TaskWork("anna", "trainer", backbone, data, state, Predictor(), agreed(state, {"name": "pfedpg"}))

    work = started()
    work.evaluate(task("evaluate", 0, payload), payload, lambda: False)
    untrained = work.predictor.predict(picture())
    work.train(task("train", 1, payload), payload, lambda: False)
    work.state.commit()
    head = work.state.committed()[0]
    work.evaluate(task("evaluate", 1, payload), payload, lambda: False)
    told = work.predictor.predict(picture())
    assert told != untrained, "predictions are made with the trained head"
    assert [one["zero_shot"] for one in told["classes"]] == [None] * len(NAMES)
    assert {one["name"] for one in told["classes"]} == set(NAMES)
    work.state.close()

    again = started()
    again.restore_serving(lambda: False)
    assert again.predictor.predict(picture()) == told
    assert again.state.committed()[0][WEIGHT].equal(head[WEIGHT])
    again.train(task("train", 2, payload), payload, lambda: False)
    again.state.close()

    undisturbed = tmp_path / "undisturbed"
    data = ClientData(open_source(DATA["anna"]), backbone, features)
    state = PrivateState(undisturbed)
    other = TaskWork("anna", "trainer", backbone, data, state, Predictor(), agreed(state, {"name": "pfedpg"}))
    for round in (1, 2):
        other.train(task("train", round, payload), payload, lambda: False)
        other.state.commit()
    final, ended = other.state.committed()[0], tmp_path / "pending" / "private.safetensors"
    kept = decode(ended.read_bytes())[0]
    assert all(kept[name].equal(final[name]) for name in (WEIGHT, BIAS, ADAPTED)), "training went on from the kept head"
    other.state.close()
