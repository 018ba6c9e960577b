"""A client without a network takes part by files, beside two online ones: the same state as with three online ones."""

from __future__ import annotations

import asyncio
import html
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.cli import air_gap as airlock
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.parts import Parts, PrivacyParts
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.faults import VARIABLE
from promptfed.client_service.worker import Worker
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, tiny
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import derive_seed
from promptfed.shared.service.airlock import unseal
from promptfed.shared.tensors.torch_tensors import decode
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import PATIENCE, wait_for

DATA = "symbols:{}?topic=weather&per_class=4&test_per_class=2"
SITES = {"east": DATA.format("painting"), "far": DATA.format("neon"), "west": DATA.format("sketch")}
ONLINE = ("east", "west")
SEED = 5
METHODS: dict[str, dict[str, Any]] = {
    "promptfl": {"method": {"name": "promptfl", "m": 2}},
    "plan": {"method": {"name": "plan", "m": 2}},
    "fedpgp": {"method": {"name": "fedpgp", "m": 2}},
    "protected": {
        "method": {"name": "promptfl", "m": 2},
        "privacy": {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0},
    },
    "compressed": {"method": {"name": "promptfl", "m": 2}, "compression": {"up": "int8", "down": "bf16"}},
    "in parts": {"method": {"name": "fedavg"}},  # an update of more than `transfers.RESUMABLE`
}

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


def spec(case: str) -> dict[str, Any]:
    return {
        "name": "gap",
        "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 8},
        "participation": {"min_clients": len(SITES), "deadline_seconds": 3600.0},
        "evaluation": {"every": 2},
        "seed": SEED,
        **METHODS[case],
    }


class Gap:
    """A federation of which the client ``far`` takes part by files."""

    def __init__(
        self, coordinator: InThread, raw: dict[str, Any], folder: Path, backbone: Backbone, features: FeatureCache
    ):
        self.coordinator, self.folder, self.backbone, self.features = coordinator, folder, backbone, features
        self.federation = coordinator.post("/v1/federations", raw, status=201)["id"]
        self.path = f"/v1/federations/{self.federation}"
        self.noise = SeededNoise(derive_seed(SEED, "noise"))
        self.token = folder / "token"
        self.token.write_text(coordinator.token(self.path))
        self.workers = [self._worker(name) for name in ONLINE]
        self._threads: list[threading.Thread] = []

    def parts(self) -> Parts:
        ledger = PrivacyParts(self.noise, Ledger(None), True)
        return Parts(backbone=self.backbone, features=self.features, privacy=ledger)

    def _worker(self, name: str) -> Worker:
        settings = make_settings(
            coordinator=self.coordinator.url,
            federation="gap",
            name=name,
            data=SITES[name],
            device="cpu",
            state_dir=self.folder / name,
            enrolment_token_file=self.token,
            max_epsilon=1000.0,
            give_up_after=5.0,
        )
        return Worker(settings, self.parts())

    def go_online(self) -> None:
        for worker in self.workers:
            self._threads.append(threading.Thread(target=lambda worker=worker: asyncio.run(worker.run())))
            self._threads[-1].start()

    def take(self, wait: float = 0) -> bytes:
        answer = self.coordinator.http.post(
            f"{self.path}/airlock/tasks",
            json={"client": "far"},
            params={"wait": wait},
            headers=self.coordinator.operator,
            timeout=PATIENCE,
        )
        assert answer.status_code == 200, answer.text
        return answer.content

    def work(self, content: bytes) -> airlock.Prepared:
        tasks = self.folder / "tasks"
        tasks.write_bytes(content)
        sealed = airlock.read_tasks(tasks)
        given = {"data": SITES["far"], "device": "cpu", "state_dir": self.folder / "far", "max_epsilon": 1000.0}
        return airlock.work(sealed, airlock.settings_for(sealed, given), self.parts())

    def give(self, content: bytes) -> Any:
        return self.coordinator.http.post(
            f"{self.path}/airlock/answers", content=content, headers=self.coordinator.operator, timeout=PATIENCE
        )

    def status(self) -> dict[str, Any]:
        return self.coordinator.get(self.path)

    def enrol(self) -> None:
        answered = self.give(self.work(self.take()).answers or b"")
        assert answered.json() == {"client": "far", "request": "enrol", "new": True}, answered.text

    def begin(self) -> None:
        self.go_online()
        wait_for("all clients", lambda: self.status()["clients"]["trainers"] == len(SITES))
        self.coordinator.post(f"{self.path}/start")

    def end(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "coordinator") as server:
        yield server


def to_the_end(gap: Gap) -> list[str]:
    """Carry files until the federation has ended; what they held."""
    held = []
    while True:
        tasks = gap.take(wait=30)
        prepared = gap.work(tasks)
        if prepared.answers is None:
            assert gap.status()["state"] == "finished"
            return held
        answered = gap.give(prepared.answers)
        assert answered.status_code == 200, answered.text
        assert answered.json()["new"] is True
        held.append(answered.json()["request"])


@pytest.mark.parametrize("case", METHODS)
def test_by_files_it_comes_to_the_same_state(
    case: str, coordinator: InThread, backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    raw = spec(case)
    sites = [Site(name, uri) for name, uri in SITES.items()]
    expected = simulate(raw, sites, backbone=backbone, features=features)
    gap = Gap(coordinator, raw, tmp_path, backbone, features)
    gap.enrol()
    gap.begin()
    held = to_the_end(gap)
    gap.end()
    assert held.count("update") == (4 if case == "plan" else 2)
    assert gap.status()["state_hash"] == expected.state_hash


@pytest.fixture
def gap(coordinator: InThread, backbone: Backbone, features: FeatureCache, tmp_path: Path) -> Iterator[Gap]:
    """A federation in its first evaluation."""
    made = Gap(coordinator, spec("promptfl"), tmp_path, backbone, features)
    made.enrol()
    made.begin()
    try:
        yield made
    finally:
        coordinator.post(f"{made.path}/cancel")
        made.end()


def carried(gap: Gap) -> tuple[bytes, bytes]:
    """The next files in both directions; the second is given."""
    tasks = gap.take(wait=30)
    answers = gap.work(tasks).answers
    assert answers is not None
    assert gap.give(answers).status_code == 200
    return tasks, answers


def mutations(content: bytes, other: bytes, draw: random.Random) -> Iterator[bytes]:
    """A file changed, cut, lengthened, or with parts of another one, without end."""
    while True:
        kind, place = draw.randrange(5), draw.randrange(len(content))
        if kind == 0:
            yield content[:place] + bytes([content[place] ^ (1 << draw.randrange(8))]) + content[place + 1 :]
        elif kind == 1:
            yield content[:place]
        elif kind == 2:
            yield content + draw.randbytes(draw.randint(1, 9))
        elif kind == 3:
            yield content[:place] + other[place:]
        else:
            cut = draw.randrange(len(content))
            yield content[cut:] + content[:cut] if cut else content[1:]


def test_what_is_changed_cut_or_mixed_is_refused_and_nothing_is_lost(gap: Gap, tmp_path: Path) -> None:
    """A thousand files, half of them in each direction."""
    draw = random.Random(3)
    earlier_tasks, earlier = carried(gap)
    tasks = gap.take(wait=30)
    prepared = gap.work(tasks).answers
    assert prepared is not None
    before = gap.status()
    for content, _ in zip(mutations(prepared, earlier, draw), range(500), strict=False):
        if content not in (prepared, earlier):
            answered = gap.give(content)
            assert answered.status_code == 422, answered.text
            assert answered.json()["type"].endswith("/bad-airlock-file")
    path = tmp_path / "changed"
    for content, _ in zip(mutations(tasks, earlier_tasks, draw), range(500), strict=False):
        if content not in (tasks, earlier_tasks):
            path.write_bytes(content)
            with pytest.raises(ClientError) as refused:
                airlock.read_tasks(path)
            assert refused.value.exit == Exit.BAD_INPUT
    now = gap.status()
    assert {key: now[key] for key in ("state", "round", "phase")} == {
        key: before[key] for key in ("state", "round", "phase")
    }
    assert gap.give(prepared).json()["new"] is True


def test_files_again_and_in_another_order(gap: Gap, tmp_path: Path) -> None:
    first_tasks, first = carried(gap)
    second_tasks, second = carried(gap)
    assert gap.give(second).json() == {"client": "far", "request": "update", "new": False}
    carried(gap)
    for old in (first, second):
        refused = gap.give(old)
        assert refused.status_code == 409
        assert refused.json()["type"].endswith("/phase-closed")
    for old in (first_tasks, second_tasks):
        with pytest.raises(ClientError, match="older than the last one"):
            gap.work(old)


def test_an_answer_that_was_not_given_is_made_again_in_the_same_bytes(gap: Gap) -> None:
    carried(gap)  # the evaluation
    first = gap.work(gap.take(wait=30))
    again = gap.work(gap.take())
    assert first.answers is not None
    assert again.answers is not None
    updates = [
        unseal(file, "answers", lambda header: bytes.fromhex(header["key"])).body
        for file in (first.answers, again.answers)
    ]
    assert updates[0] == updates[1]
    assert gap.give(again.answers).json()["new"] is True


def test_another_signer_is_refused(gap: Gap, tmp_path: Path) -> None:
    """A file of another site, with the same name, and of another coordinator."""
    tasks = gap.take(wait=30)
    path = tmp_path / "tasks"
    path.write_bytes(tasks)
    with pytest.raises(ClientError, match="another coordinator has signed it"):
        airlock.read_tasks(path, "ed25519:" + "0" * 64)
    sealed = airlock.read_tasks(path)
    given = {"data": SITES["far"], "device": "cpu", "state_dir": tmp_path / "impostor", "max_epsilon": 1000.0}
    impostor = airlock.work(sealed, airlock.settings_for(sealed, given), gap.parts())
    refused = gap.give(impostor.answers or b"")
    assert refused.status_code == 422
    assert "the signature is not the sender's" in refused.json()["detail"]


def test_the_sheet_shows_what_leaves(gap: Gap) -> None:
    carried(gap)
    prepared = gap.work(gap.take(wait=30))
    assert prepared.answers is not None
    sealed = unseal(prepared.answers, "answers", lambda header: bytes.fromhex(header["key"]))
    tensor = decode(sealed.body)[0]["context"]
    [line] = [line for line in prepared.summary if line.startswith("tensor context")]
    norm = float(line.split("norm ")[1].split(",")[0])
    assert norm == pytest.approx(float(tensor.double().norm()), rel=1e-5)
    assert f"{tensor.nbytes:,} bytes" in line
    assert "moved by" in line
    assert line in html.unescape(prepared.sheet)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"secure_aggregation": {"step_seconds": 60}, "participation": {"min_clients": 3}},
            "every secure sum takes four exchanges",
        ),
        ({}, "has enrolled over the network"),
    ],
)
def test_who_cannot_take_part_by_files_is_told_why(changes: dict[str, Any], says: str, coordinator: InThread) -> None:
    path = coordinator.create(**changes)
    if not changes:
        coordinator.enrol(path, "far")
    url = f"/v1/federations/{path.rpartition('/')[2]}/airlock/tasks"
    refused = coordinator.http.post(url, json={"client": "far"}, headers=coordinator.operator)
    assert refused.status_code == 409
    assert says in refused.json()["detail"]


UNPLUGGED = ["unshare", "-n"]
POINTS = ("training-step:2", "pending-written:1", "update-sent:1")


@pytest.mark.skipif(shutil.which("unshare") is None or os.geteuid() != 0, reason="unshare -n: needs root on Linux")
def test_killed_without_a_network_it_goes_on(
    coordinator: InThread, backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    """Each `work` runs in a network of its own; those that train die at every point, and are repeated."""
    raw = spec("fedpgp")
    expected = simulate(raw, [Site(name, uri) for name, uri in SITES.items()], backbone=backbone, features=features)
    gap = Gap(coordinator, raw, tmp_path, backbone, features)
    tasks, answers = tmp_path / "tasks.airlock", tmp_path / "answers.airlock"
    command = [*UNPLUGGED, sys.executable, "-m", "promptfed", "airlock", "work", str(tasks), "--out", str(answers)]
    command += ["--data", SITES["far"], "--device", "cpu", "--state-dir", str(tmp_path / "far"), "--yes"]
    command += ["--feature-cache", str(tmp_path / "features")]
    deaths: set[str] = set()
    trained, begun = 0, False
    while gap.status()["state"] != "finished":
        tasks.write_bytes(gap.take(wait=30 if begun else 0))
        answers.unlink(missing_ok=True)
        faults: tuple[str, ...] = ()
        if '"kind": "train"' in (airlock.read_tasks(tasks).header["task"] or ""):
            faults = POINTS if trained == 0 else POINTS[::-1]
            trained += 1
        for fault in (*faults, ""):
            ran = subprocess.run(
                command, env={**os.environ, VARIABLE: fault}, capture_output=True, text=True, timeout=PATIENCE
            )
            if ran.returncode == -9:
                deaths.add(fault)
        assert ran.returncode == 0, ran.stderr
        if answers.exists():
            assert gap.give(answers.read_bytes()).status_code == 200
            assert answers.with_name("answers.airlock.html").exists()
        if not begun:
            gap.begin()
            begun = True
    gap.end()
    assert deaths == set(POINTS)
    assert gap.status()["state_hash"] == expected.state_hash
