"""Standard streams that are closed, read by nobody or on a full disk end no work, and bring no traceback."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from promptfed.shared.service.reasons import Exit
from promptfed.shared.service.streams import Standard, delivered, standard_streams
from tests.support.waiting import PATIENCE

WAYS = {
    "no output": ">&-", "no errors": "2>&-", "nothing at all": "<&- >&- 2>&-", "output that nobody reads": "| true",
    "errors that nobody reads": "2>&1 >/dev/null | true",
}  # fmt: skip
HELP_OF_CLIENT = ("promptfed.client_service", "--help")


def ended(*arguments: str, way: str, cwd: Path, code: str = "${PIPESTATUS[0]}") -> tuple[int, str]:
    """The exit code of ``python -m ...``, and what else its shell saw on stderr."""
    script = f'"$@" {way}; exit {code}'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", *arguments]
    done = subprocess.run(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=PATIENCE, cwd=cwd
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("way", WAYS.values(), ids=list(WAYS))
def test_a_process_succeeds_as_with_dev_null(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1" if "true" in way else "")
    process = ("promptfed", "methods") if way == "| true" else HELP_OF_CLIENT  # which starts in a third of the time
    assert ended(*process, way=way, cwd=tmp_path) == (Exit.OK, "")


@pytest.mark.parametrize(("service", "option"), [("client_service", "--state-dir"), ("coordinator", "--tls-cert")])
def test_services_end_with_their_own_codes(service: str, option: str, tmp_path: Path) -> None:
    assert ended(f"promptfed.{service}", option, ".", way="<&- >&- 2>&-", cwd=tmp_path) == (Exit.USAGE, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_only_output_that_a_disk_did_not_take_is_an_error(tmp_path: Path) -> None:
    code, told = ended(*HELP_OF_CLIENT, way="> /dev/full", cwd=tmp_path)
    assert code == Exit.BAD_INPUT
    assert told.endswith("the disk is full; free some space, or give another place\n")
    assert told.count("\n") == 1
    assert ended(*HELP_OF_CLIENT, way="2> /dev/full", cwd=tmp_path) == (Exit.OK, "")


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))  # so that it is there again afterwards
    return monkeypatch


def test_a_reader_that_went_away_is_replaced_by_nowhere(streams: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    given = io.TextIOWrapper(io.BufferedWriter(io.FileIO(writing, "w")), "ascii")
    streams.setattr(sys, "stdout", given)
    standard_streams()
    print("one", flush=True)
    assert os.read(reading, 9) == b"one\n"
    os.close(reading)
    for _ in range(2):
        print("caf\u00e9" * 9999, flush=True)
    assert delivered(Exit.OK) == Exit.OK
    assert os.fstat(given.fileno()).st_rdev == os.stat(os.devnull).st_rdev


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
def test_a_log_on_a_full_disk_is_dropped(streams: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    with Path("/dev/full").open("w") as full:
        streams.setattr(sys, "stderr", full)
        standard_streams()
        logging.StreamHandler().emit(logging.makeLogRecord({"msg": "lost"}))
        assert isinstance(sys.stderr.buffer.raw, Standard)
        assert sys.stderr.buffer.raw.refused is not None
        assert delivered(Exit.OK) == Exit.OK
        assert delivered(Exit.FAILED) == Exit.FAILED
    assert capfd.readouterr().err == ""


def test_streams_that_are_not_there_are_opened(streams: pytest.MonkeyPatch) -> None:
    for name in ("stdin", "stdout", "stderr"):
        streams.setattr(sys, name, None)
    standard_streams()
    assert sys.stdin.readline() == ""
    print("nowhere", file=sys.stderr)
    assert delivered(Exit.OK) == Exit.OK
