"""Kill -9 on a real protected client at every point of its ledger: spends are the releases sent, each once."""

from __future__ import annotations

import hashlib
import signal
from pathlib import Path

import pytest

from promptfed.client_service.exits import Exit
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.protection import reported
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.privacy.accounting import epsilon_of
from promptfed.shared.service.fault_points import VARIABLE
from promptfed.shared.spec.sections import PrivacySpec
from promptfed.shared.spec.spec import TrainingSpec
from tests.client_service.conftest import backbone as backbone
from tests.support.client_processes import ClientProcess, served
from tests.support.fake_coordinator import TOKEN, FakeCoordinator
from tests.support.waiting import PATIENCE

#: The points of one task, in the order in which a protected task reaches them.
POINTS = ("task-affordable", "pending-written", "spend-locked", "spend-half-written", "spend-written", "update-sent")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS, RANDOM_KILLS = 3, 6
PRIVACY = PrivacySpec(level="sample", clip=0.3, noise_multiplier=4.0, delta=1e-3).model_dump()


def coordinator_of(backbone: Backbone) -> FakeCoordinator:
    training = TrainingSpec(epochs=3, batch_size=8).model_dump()
    return FakeCoordinator(shape_of(backbone), class_names=None, rounds=ROUNDS, training=training, privacy=PRIVACY)


def client(folder: Path, url: str) -> ClientProcess:
    (folder / "token").write_text(TOKEN)
    return ClientProcess(
        folder / "client",
        coordinator=url,
        federation="pets",
        name="hospital-a",
        data="digits?shots=2",
        enrolment_token_file=str(folder / "token"),
        ledger=str(folder / "ledger.jsonl"),
    )


def assert_spends_are_the_releases(folder: Path, coordinator: FakeCoordinator) -> None:
    ledger = Ledger(folder / "ledger.jsonl")
    sent = [body for body in coordinator.received if b"payload_sha256" in body]
    released = {hashlib.sha256(body).hexdigest() for body in sent}
    spends = ledger.spends()
    assert {one.release for one in spends} == released
    assert len(spends) == len(released) == len(coordinator.accepted) == ROUNDS
    events = [event for one in spends for event in one.events]
    assert spends[-1].epsilon == pytest.approx(epsilon_of(events, 1e-3))
    assert all(reported(body) is not None for body in sent)


@pytest.mark.parametrize("place", [f"{name}:{count}" for name in POINTS for count in (1, 2)])
def test_at_every_point(place: str, tmp_path: Path, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = coordinator_of(backbone)
    with served(coordinator.app) as url:
        monkeypatch.setenv(VARIABLE, place)
        process = client(tmp_path, url)
        try:
            assert process.wait(PATIENCE) == -signal.SIGKILL, process.text()
            monkeypatch.delenv(VARIABLE)
            process.start()
            assert process.wait(PATIENCE) == Exit.OK, process.text()
        finally:
            process.stop()
    assert_spends_are_the_releases(tmp_path, coordinator)
