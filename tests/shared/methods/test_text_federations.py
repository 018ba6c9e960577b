"""FedPGP and FedTPG as services run them: a round by hand comes to the same state; what is private stays private."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from promptfed.client_service.exits import Exit
from promptfed.client_service.joining.parts import Parts
from promptfed.client_service.settings import make_settings
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source
from promptfed.shared.data.classes import SYMBOLS
from promptfed.shared.messages import EnrolRequest, EvaluationRequest
from promptfed.shared.seeds import generator
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from promptfed.shared.versions import RELEASE, SYSTEM
from tests import ROOT
from tests.support.coordinators import InThread, in_thread
from tests.support.fake_coordinator import made_up_source
from tests.support.waiting import PATIENCE


@dataclass
class SentRequest:
    """One request, as it went out."""

    client: str
    method: str
    url: str
    headers: list[tuple[bytes, bytes]]
    body: bytes

    @property
    def everything(self) -> bytes:
        """All that a listener could read."""
        lines = [b"%s: %s" % pair for pair in self.headers]
        return b"\n".join([f"{self.method} {self.url}".encode(), *lines, self.body])


class RecordingTransport(httpx.AsyncHTTPTransport):
    """A network that keeps what goes out over it."""

    def __init__(self, client: str, sent: list[SentRequest]):
        super().__init__()
        self._client, self._sent = client, sent

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        self._sent.append(SentRequest(self._client, request.method, str(request.url), request.headers.raw, body))
        return await super().handle_async_request(request)


@dataclass
class FinishedRun:
    """A federation after its last evaluation."""

    folder: Path
    state: Tensors
    reports: list[dict[str, Any]]
    sent: list[SentRequest] = field(default_factory=list)

    def private(self, client: str) -> Tensors:
        """What the client keeps on its disk."""
        return decode((self.folder / client / "committed.safetensors").read_bytes())[0]


def run(
    server: InThread, spec: dict[str, Any], sources: dict[str, Source], backbone: Backbone, folder: Path
) -> FinishedRun:
    """Let one trainer per source take part to the end."""
    federation = server.post("/v1/federations", spec, status=201)["id"]
    token, sent = server.token(federation), []
    cache = FeatureCache(folder / "features")

    async def work() -> list[Exit]:
        with ThreadPoolExecutor(1) as executor:
            workers = []
            for name, source in sources.items():
                settings = make_settings(
                    coordinator=server.url, federation=federation, name=name, data="made-up", state_dir=folder / name,
                    device="cpu",
                )  # fmt: skip
                http = httpx.AsyncClient(transport=RecordingTransport(name, sent), trust_env=False, timeout=PATIENCE)
                parts = Parts(backbone, source, features=cache, enrolment_token=token)
                workers.append(Worker(settings, parts, http=http, executor=executor))
            running = [asyncio.ensure_future(worker.run()) for worker in workers]
            await asyncio.to_thread(server.until, federation, clients=_enrolled(len(sources)))
            await asyncio.to_thread(server.post, f"{federation}/start")
            return await asyncio.gather(*running)

    assert set(asyncio.run(work())) == {Exit.OK}
    found = server.get(federation)
    assert found["state"] == "finished", found["reason"]
    content = server.http.get(f"/v1/federations/{federation}/prompts", headers=server.operator).content
    reports = [server.get(f"{federation}/rounds/{round}") for round in range(found["round"] + 1)]
    return FinishedRun(folder, decode(content)[0], reports, sent)


def _enrolled(count: int) -> dict[str, int]:
    return {"trainers": count, "evaluators": 0, "withdrawn": 0}


CLASSES = ["anchor", "chess knight", "sun", "umbrella"]


TRAINING = {"epochs": 2, "batch_size": 5, "learning_rate": 0.05, "momentum": 0.9, "weight_decay": 5e-4}


SOURCES = {
    "north": made_up_source(seed=1, count=8, names=CLASSES[:2]),
    "south": made_up_source(seed=2, count=12, names=CLASSES[2:]),
}


SEED = 11


def spec(method: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {
        "name": method["name"], "method": method, "rounds": 1, "training": TRAINING,
        "backbone": {"model": "promptfed-tiny"},
        "participation": {"min_clients": 2}, "template": "a photo of a {}.", "seed": SEED,
    } | changes  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as running:
        yield running


@pytest.fixture(scope="module")
def fedpgp(server: InThread, backbone: Backbone, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    method = {"name": "fedpgp", "m": 4, "b": 2}
    return run(server, spec(method, class_names=CLASSES), SOURCES, backbone, tmp_path_factory.mktemp("fedpgp"))


def windows(tensor: Tensor) -> set[bytes]:
    """Any four numbers in a row, as they would stand in a file."""
    raw = tensor.float().contiguous().numpy().astype("<f4").tobytes()
    return {raw[place : place + 16] for place in range(0, len(raw) - 15, 4)}


def test_every_byte_that_a_fedpgp_client_sends_is_accounted_for(fedpgp: FinishedRun, backbone: Backbone) -> None:
    """Each request is taken apart and put together again from nothing but what may leave the client."""
    kinds: dict[str, int] = {}
    for one in fedpgp.sent:
        verb, place = one.method, one.url.split("?")[0].rsplit("/", 1)[-1]
        kinds[f"{verb} {place}"] = kinds.get(f"{verb} {place}", 0) + 1
        if verb == "GET":
            assert one.body == b""
            assert place in ("enrolment", "task", "payload")
        elif place == "clients":
            allowed = EnrolRequest.model_validate_json(one.body)
            told = allowed.model_dump()
            for key in ("name", "secret", "backbone_fingerprint", "backbone_shape", "device"):
                told.pop(key)
            assert told == {
                "role": "trainer", "num_samples": len(SOURCES[one.client].train), "release": RELEASE, "system": SYSTEM,
                "class_names": list(SOURCES[one.client].class_names),
                "domain": {"name": "noise", "description": "noise of a {}"},
            }  # fmt: skip
            assert json.loads(one.body) == allowed.model_dump(mode="json")
        elif place == "update":
            tensors, about = decode(one.body)
            assert {name: tuple(value.shape) for name, value in tensors.items()} == {
                "global_context": (4, backbone.d_t)
            }
            assert isinstance(about, dict)
            assert set(about) == {"task_id", "payload_sha256", "metrics"}
            assert set(about["metrics"]) == {"loss", "train_seconds", "trained_parameters"}
            assert encode(tensors, about) == one.body
        else:
            assert (verb, place) == ("PUT", "evaluation")
            result = EvaluationRequest.model_validate_json(one.body)
            assert (set(result.splits), set(result.zero_shot)) == ({"test"}, {"test"})
            assert set(result.metrics) == {"evaluate_seconds"}
            assert json.loads(one.body) == result.model_dump(mode="json")
    assert kinds["PUT update"] == 2
    assert kinds["PUT evaluation"] == 4
    assert kinds["POST clients"] == 2


def test_no_private_number_is_among_them(fedpgp: FinishedRun) -> None:
    """Neither U nor V as they started or ended, nor what follows from them: Δp, the personal context, the images."""
    names = {name: [] for name in SOURCES}
    for one in fedpgp.sent:
        names[one.client].append(one.everything)
    for name, requests in names.items():
        stream = b"\n".join(requests)
        sent = {stream[place : place + 16] for place in range(len(stream) - 15)}
        private, draws = fedpgp.private(name), generator(SEED, "fedpgp", name)
        d_t = private["V"].shape[1]
        secrets = [
            *private.values(),
            torch.randn(4, 2, generator=draws) * 0.02,
            torch.randn(2, d_t, generator=draws) * 0.02,
        ]
        delta = private["U"] @ private["V"]
        update = next(
            decode(one.body)[0]
            for one in fedpgp.sent
            if one.client == name and one.url.split("?")[0].endswith("/update")
        )
        secrets += [delta, fedpgp.state["global_context"] + delta, update["global_context"] + delta]
        for secret in secrets:
            assert windows(secret)
            assert not windows(secret) & sent
            digits = [json.dumps(value)[:7].encode() for value in secret.flatten()[:50].tolist()]
            assert sum(number in stream for number in digits) == 0, "not as text either"
        assert windows(update["global_context"]) <= sent, "what may be sent is found this way"
        pixels = np.asarray(SOURCES[name].train.image(0)).tobytes()
        assert pixels[:64] not in stream


# A method that lives in a package of its own (``tests/support/method_package``), installed and run as users would.


PACKAGE = ROOT / "tests" / "support" / "method_package"


DATA = "symbols:{}?topic=weather&per_class=4&test_per_class=2"


RUN = {
    "name": "residuals", "method": {"name": "task_residual"},
    "class_names": [symbol.name for symbol in SYMBOLS if symbol.topic == "weather"], "rounds": 2,
    "training": {"learning_rate": 0.02, "batch_size": 4}, "participation": {"min_clients": 2},
    "clients": [{"name": "north", "data": DATA.format("painting")}, {"name": "south", "data": DATA.format("neon")}],
}  # fmt: skip


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package as pip installs it, in a folder of its own."""
    folder, source = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("source") / "package"
    shutil.copytree(PACKAGE, source)  # a build leaves files beside its source
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", folder, source], check=True)
    return folder


def promptfed(*arguments: str, beside: Path) -> subprocess.CompletedProcess[str]:
    """``promptfed`` in a process; the package is installed in the folder ``beside``."""
    path = os.pathsep.join(filter(None, [str(beside), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "promptfed", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(RUN))
    return path


def test_the_command_lists_it_with_its_package(installed: Path) -> None:
    shown = promptfed("methods", "task_residual", beside=installed)
    assert "(from promptfed-task-residual==0.1.0)" in " ".join(shown.stdout.split()), shown.stderr
    listed = promptfed("methods", "--json", beside=installed)
    assert "task_residual" in [method["name"] for method in json.loads(listed.stdout)]


def run_of_method_package(command: list[str], run_file: Path, installed: Path) -> Any:
    done = promptfed(*command, str(run_file), "--json", beside=installed)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_one_process_and_many_come_to_one_state(installed: Path, run_file: Path) -> None:
    simulated, launched = (
        run_of_method_package(way, run_file, installed) for way in (["simulate"], ["launch", "--gpus", "none"])
    )
    assert simulated["state_hash"] == launched["state_hash"]
    assert simulated["rounds"] == launched["rounds"] == 2
