"""Settings, log lines and the end of a process; a start looks at the server library that it is given."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.__main__ import main as client
from promptfed.client_service.exits import Exit
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.coordinator.__main__ import main as coordinator
from promptfed.coordinator.engine import log_lines
from promptfed.shared.service import fault_points, process, streams
from promptfed.shared.service.process import JsonLines, SettingsHelp, TextLines, unfit_server
from promptfed.shared.service.static_page import StaticPage
from tests import ROOT


def test_the_requirement_has_the_bounds_that_a_start_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (ROOT / "requirements" / "services.txt").read_text().splitlines()
    (bounds,) = (Requirement(line).specifier for line in lines if line.startswith("uvicorn"))
    for found in (version("uvicorn"), "0.53.9", "0.54.0", "0.54.12", "0.55.0", "0.540.0", "1.54.0"):
        monkeypatch.setattr(process, "version", lambda name, found=found: found)
        assert (unfit_server() is None) == bounds.contains(found), found


@pytest.mark.parametrize("service", ["coordinator", "client", "serve"])
def test_a_start_with_another_uvicorn_is_one_line(
    service: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(process, "version", lambda name: "0.55.1")
    if service == "coordinator":
        code, said = coordinator([f"--data-dir={tmp_path / 'data'}", "--port=0"]), capsys.readouterr().err
    elif service == "client":
        given = {"coordinator": "http://127.0.0.1:9", "federation": "a", "name": "b", "data": "digits"}
        given["state-dir"] = str(tmp_path / "state")
        code, said = client([f"--{name}={value}" for name, value in given.items()]), capsys.readouterr().err
    else:
        done = CliRunner().invoke(app, ["serve", str(tmp_path)])
        code, said = done.exit_code, done.stderr
    assert code == Exit.USAGE
    assert "uvicorn 0.55.1 is installed, whose inner classes are others: pip install 'uvicorn>=0.54,<0.55'" in said
    assert len(said.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("text", "shown"), [
    (None, ""), ("a (default: null)", "a"), ("a (default: False)", "a"), ("a (default: [])", "a"),
    ("a (default: 1)", "a (default: 1)"), ("a (required)", "a (required)"),
    ("a; default: that of b (required)", "a; default: that of b"),
])  # fmt: skip
def test_help_says_a_default_once(text: str | None, shown: str) -> None:
    action = argparse.Action(["--a"], "a", help=text)
    assert SettingsHelp("x")._get_help_string(action) == shown


def test_a_list_without_an_end_ends_a_start(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        process.given_settings(ClientSettings, "promptfed client", ["--test=[1"])
    assert ended.value.code == Exit.USAGE
    assert capsys.readouterr().err.startswith("promptfed client: ")
    assert process.given_settings(ClientSettings, "promptfed client", ["--name=a"]) == {"name": "a"}


def test_log_lines_are_json_or_plain_text() -> None:
    try:
        raise ValueError("a\x1bb")
    except ValueError:
        record = logging.makeLogRecord(
            {"name": "n", "levelno": 30, "levelname": "WARNING", "msg": "%s\x1b", "args": ("x",), "created": 0.5,
             "exc_info": sys.exc_info(), "site": "east", "empty": ""}
        )  # fmt: skip
    lines = type("Own", (JsonLines,), {"fields": ("site", "empty", "absent")})()
    told = json.loads(lines.format(record))
    assert told.pop("exception").endswith("ValueError: a\x1bb")
    assert told == {
        "at": "1970-01-01T00:00:00.500+00:00",
        "level": "warning",
        "logger": "n",
        "message": "x\x1b",
        "site": "east",
    }
    text = TextLines().format(record).splitlines()
    assert text[0].endswith(" warning: x\\x1b")
    assert text[-1] == "ValueError: a\\x1bb"
    record.levelno, record.exc_info = 20, None
    assert TextLines("%(message)s").format(record) == "x\\x1b"
    assert "exception" not in json.loads(lines.format(record))


@pytest.mark.parametrize(("format", "terminal", "as_text"), [
    ("auto", True, True), ("auto", False, False), ("text", False, True), ("json", True, False),
])  # fmt: skip
def test_a_coordinators_lines_are_text_where_a_terminal_is_watching(
    format: Any, terminal: bool, as_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up: list[Any] = []
    monkeypatch.setattr(log_lines.process, "log_to_stderr", lambda *given: set_up.extend(given))
    monkeypatch.setattr(log_lines.sys, "stderr", SimpleNamespace(isatty=lambda: terminal))
    log_lines.configure("info", format)
    assert (isinstance(set_up[0], TextLines), isinstance(set_up[0], JsonLines)) == (as_text, not as_text)
    assert set_up[1] == "INFO"


@pytest.mark.parametrize(
    ("end", "code"), [(lambda: 3, 3), (lambda: sys.exit(2), 2), (lambda: sys.exit(), 0), (lambda: 0, 0)]
)
def test_a_process_ends_with_the_code_of_its_work(monkeypatch: pytest.MonkeyPatch, end: Any, code: int) -> None:
    ended: list[Any] = []
    monkeypatch.setattr(streams, "standard_streams", lambda: ended.append("streams"))
    monkeypatch.setattr(logging, "shutdown", lambda: ended.append("logging"))
    monkeypatch.setattr(streams.os, "_exit", ended.append)
    streams.as_process(end)
    assert ended == ["streams", "logging", code]


@pytest.mark.parametrize(("fault", "dies"), [("here:2", [2]), ("here", [1]), ("there", []), ("", [])])
def test_a_fault_point_ends_the_process_the_time_that_is_named(
    monkeypatch: pytest.MonkeyPatch, fault: str, dies: list[int]
) -> None:
    died: list[int] = []
    monkeypatch.setattr(fault_points, "_armed", "")
    monkeypatch.setattr(fault_points, "_reached", fault_points.Counter())
    monkeypatch.setattr(fault_points.os, "kill", lambda pid, number: died.append(len(asked)))
    fault_points.arm(fault)
    asked: list[str] = []
    for _ in range(3):
        asked.append("here")
        fault_points.point(asked[-1])
    assert died == dies


def test_a_page_is_sent_once_with_headers_for_browsers() -> None:
    page = StaticPage("promptfed.coordinator", "blob:")
    etag = page.files["index.html"].etag
    first, again = page.answer("index.html", '"other"'), page.answer("index.html", etag)
    assert (first.status_code, again.status_code) == (200, 304)
    assert first.body == page.files["index.html"].content
    assert (first.headers["etag"], again.body) == (etag, b"")
    assert "img-src blob:" in first.headers["content-security-policy"]
