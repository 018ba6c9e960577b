"""A whole client on a machine that has nothing of POSIX, as promptfed's own modules see it."""

from __future__ import annotations

import fcntl
import json
import signal
from pathlib import Path

import pytest

from promptfed.client_service.exits import Exit
from promptfed.client_service.state.site_log import FILE
from promptfed.shared import machine
from tests.client_service.conftest import Make
from tests.support.client_processes import ClientProcess, served, wait_for
from tests.support.fake_coordinator import TOKEN


class WithoutPosix(ClientProcess):
    """The same client, started by `tests.support.windows_like`."""

    module = "tests.support.windows_like"


def test_a_client_without_posix_takes_part(make: Make, tmp_path: Path) -> None:
    """Its folder is locked while it runs, a signal ends it, and its record of what it sent is whole."""
    (tmp_path / "token").write_text(TOKEN)
    coordinator = make.coordinator(class_names=None, rounds=2)
    with served(coordinator.app) as url:
        options = {
            "coordinator": url, "federation": "pets", "name": "hospital-a", "data": "digits?shots=2",
            "enrolment_token_file": str(tmp_path / "token"), "feature_cache": str(tmp_path / "features"),
        }  # fmt: skip
        client = WithoutPosix(tmp_path / "client", "--serve", **options)
        try:
            wait_for(lambda: client.process.poll() is not None or coordinator.count("PUT", "/update") == 2)
            assert client.process.poll() is None, client.text()
            with (client.state_dir / "lock").open("r+b") as lock, pytest.raises(BlockingIOError):
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, machine.LOCKED_BYTE)
            client.process.send_signal(signal.SIGTERM)
            assert client.wait() == Exit.OK, client.text()
        finally:
            client.stop()
    assert "Traceback" not in client.text()
    assert coordinator.count("PUT", "/update") == 2
    lines = [json.loads(line) for line in (client.state_dir / FILE).read_text().splitlines()]
    assert [line["n"] for line in lines] == list(range(1, len(lines) + 1))
