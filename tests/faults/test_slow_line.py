"""A whole image tower over a line that is cut, with both services killed in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.client_processes import ClientProcess
from tests.support.coordinators import CoordinatorProcess
from tests.support.relay import Cut, Relay
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DATA = "symbols:sketch?topic=weather&per_class=2&test_per_class=1"
MEGABYTE = 1 << 20


def test_an_upload_outlives_cuts_and_kills_of_either_side(tmp_path: Path) -> None:
    coordinator = CoordinatorProcess(tmp_path / "data")
    spec = {
        "name": "tower",
        "method": {"name": "fedavg"},
        "backbone": {"model": "promptfed-tiny"},
        "rounds": 1,
        "participation": {"min_clients": 1, "deadline_seconds": 3600.0},
        "training": {"learning_rate": 0.001, "batch_size": 8},
        "start": "when_ready",
    }
    id = coordinator.post("/v1/federations", json=spec, status=201)["id"]
    (tmp_path / "token").write_text(coordinator.token(id, uses=1))
    # Each cut is for a connection that brings as much, which only an update does.
    cuts = [Cut(up=MEGABYTE), Cut(up=MEGABYTE), Cut(up=MEGABYTE // 2)]
    with Relay(coordinator.url, cuts) as line:
        client = ClientProcess(
            tmp_path / "client",
            coordinator=line.url,
            federation="tower",
            name="north",
            data=DATA,
            enrolment_token_file=str(tmp_path / "token"),
            give_up_after="600",
        )
        try:
            wait_for("calls to be cut off", lambda: len(line.cuts) <= 2)
            coordinator.kill()
            coordinator.start()
            line.upstream = coordinator.url
            wait_for("calls to be cut off", lambda: len(line.cuts) <= 1)
            client.kill()
            client.start()
            assert client.wait() == 0, client.text()
        finally:
            client.stop()
        report = coordinator.get(f"{id}/rounds/1")
        sent = report["bytes_up"]
        assert 3 * MEGABYTE < sent < line.up
        assert [one["client"] for one in report["phases"][0]["counted"]] == ["north"]
        coordinator.kill()
