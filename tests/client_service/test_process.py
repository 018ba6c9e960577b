"""Real client processes: signals, exit codes, predictions after the end, and the command line."""

from __future__ import annotations

import fcntl
import io
import json
import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from promptfed.client_service.__main__ import main
from promptfed.client_service.exits import Exit
from promptfed.client_service.state.site_log import FILE
from promptfed.shared import machine
from promptfed.shared.data import open_source
from promptfed.shared.spec.spec import TrainingSpec
from tests.client_service.conftest import Make
from tests.support.client_processes import ClientProcess, served
from tests.support.fake_coordinator import TOKEN, FakeCoordinator
from tests.support.waiting import PATIENCE, wait_for

DATA = "digits?shots=2"


IMAGE = {"Content-Type": "application/octet-stream"}


LONG = TrainingSpec(epochs=10_000).model_dump()


Start = Callable[..., ClientProcess]


@pytest.fixture(scope="session")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Those of all clients here; their image features lie in one folder, as they may."""
    folder = tmp_path_factory.mktemp("clients")
    (folder / "token").write_text(TOKEN)
    return {
        "federation": "pets", "name": "hospital-a", "data": DATA, "enrolment_token_file": str(folder / "token"),
        "feature_cache": str(folder / "features"), "device": "cpu",
    }  # fmt: skip


@pytest.fixture
def start(tmp_path: Path, options: dict[str, str]) -> Iterator[Start]:
    """Starts client processes and leaves none running."""
    started: list[ClientProcess] = []

    def begin(url: str, *flags: str) -> ClientProcess:
        started.append(ClientProcess(tmp_path / "client", *flags, coordinator=url, **options))
        return started[-1]

    yield begin
    for process in started:
        process.stop()


def small(make: Make, **changes: Any) -> FakeCoordinator:
    training = TrainingSpec(epochs=15, batch_size=4, learning_rate=0.05).model_dump()
    return make.coordinator(**({"class_names": None, "rounds": 2, "training": training} | changes))


@pytest.mark.parametrize(("number", "stage", "code"), [
    pytest.param(signal.SIGTERM, "training", Exit.OK, id="sigterm-in-training", marks=pytest.mark.slow),
    pytest.param(signal.SIGINT, "waiting", Exit.INTERRUPTED, id="ctrl-c-in-a-poll"),
])  # fmt: skip
def test_a_signal_ends_it_in_time(make: Make, start: Start, number: signal.Signals, stage: str, code: Exit) -> None:
    coordinator = small(make, training=LONG, state="paused" if stage == "waiting" else "running")
    coordinator.poll_seconds = 2 * PATIENCE
    with served(coordinator.app) as url:
        process = start(url)
        wait_for("the stage", lambda: process.stage() == stage)
        if stage == "waiting":
            second = start(url)
            assert second.wait() == Exit.STATE
            assert "is in use by another client process" in second.text()
        process.process.send_signal(number)
        assert process.wait() == code, process.text()
        assert stage != "waiting" or coordinator.count("GET", "/task") == 0, "the poll was cut off"
        assert not coordinator.accepted
    assert "Traceback" not in process.text()
    assert ("interrupted: the same command goes on where this one was" in process.text()) is (number == signal.SIGINT)


def test_it_serves_predictions_after_the_end_until_stopped(make: Make, start: Start) -> None:
    source = open_source(DATA)
    file = io.BytesIO()
    source.test.image(0).save(file, "PNG")
    coordinator = small(make, rounds=1)
    with served(coordinator.app) as url:
        process = start(url, "--serve")
        wait_for("the end", lambda: process.stage() == "ended")
    answer = process.api("POST", "/v1/predict", content=file.getvalue(), headers=IMAGE)
    assert answer.status_code == 200
    assert {row["name"] for row in answer.json()["classes"]} == set(source.class_names)
    assert process.api("POST", "/v1/predict", content=b"no image", headers=IMAGE).status_code == 422
    assert process.api("POST", "/v1/predict", content=b"\0" * (21 << 20), headers=IMAGE).status_code == 413
    process.process.send_signal(signal.SIGTERM)
    assert process.wait() == Exit.OK


@pytest.fixture
def command(tmp_path: Path, options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command line in this process; what it says goes to stderr."""
    monkeypatch.setattr(logging.root, "handlers", [])

    def call(**changes: str) -> int:
        given = options | {"state_dir": str(tmp_path / "state")} | changes
        return main([f"--{key.replace('_', '-')}={value}" for key, value in given.items()])

    return call


def last_line(captured: pytest.CaptureFixture[str]) -> str:
    text = captured.readouterr().err
    assert "Traceback" not in text
    return text.splitlines()[-1]


def test_a_data_uri_that_is_unknown(command: Callable[..., int], capsys: pytest.CaptureFixture[str]) -> None:
    assert command(coordinator="http://127.0.0.1:1", data="floppy:a", log_format="json") == Exit.BAD_INPUT
    said = json.loads(last_line(capsys))
    assert said["level"] == "error"
    assert "unknown data source 'floppy'" in said["message"]


def test_help_names_the_command_and_what_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("usage: client_service ")
    assert text.count("(required)") == 3  # coordinator, federation, data; name and state folder are found out


@pytest.mark.parametrize("module", [
    "promptfed.client_service", "promptfed.client_service.settings", "promptfed.client_service.exits",
    "promptfed.client_service.__main__",
])  # fmt: skip
def test_what_the_command_imports_is_free_of_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=PATIENCE).returncode == 0


# A whole client on a machine that has nothing of POSIX, as promptfed's own modules see it.


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
            wait_for("updates", lambda: client.process.poll() is not None or coordinator.count("PUT", "/update") == 2)
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
