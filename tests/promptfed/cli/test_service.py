"""`promptfed service install`: the unit that it writes, and that it starts nothing by itself."""

from __future__ import annotations

import configparser
import os
import plistlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
from tests import ROOT

OPTIONS = [
    "--coordinator",
    "https://example.org",
    "--domain",
    'a 50% "$x" \\ of\na {}',
    "--data",
    "folder:/images",
    "--yes",
]
SYSTEMCTL = '#!/bin/sh\necho "$@" >> "$CALLS"\necho "Access denied" >&2\nexit ${FAILS:-0}\n'


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with the calls of a systemctl that stands in for the real one; units of a user go below ``tmp_path``."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "systemctl").write_text(SYSTEMCTL)
    (tmp_path / "bin" / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "calls"


def install(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["service", "install", *map(str, arguments)])


def read(file: Path) -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.optionxform = str
    unit.read(file)
    return unit["Service"]


def started_by(section: configparser.SectionProxy) -> list[str]:
    """The arguments of ExecStart: quotes and backslashes are those of a shell, except for a line's end."""
    words = shlex.split(section["ExecStart"].replace("\\n", "\n"))
    return [word.replace("%%", "%").replace("$$", "$") for word in words]


def test_the_unit_runs_the_service_with_its_options_and_nothing_is_started(calls: Path, tmp_path: Path) -> None:
    done = install("client", "--folder", tmp_path, "--name", "ward-3", "--account", "ml", "--", *OPTIONS)
    assert done.exit_code == Exit.OK, done.output
    assert done.stdout.splitlines()[1:] == ["  systemctl daemon-reload", "  systemctl enable --now ward-3"]
    assert not calls.exists()
    unit = read(tmp_path / "ward-3.service")
    assert started_by(unit) == [sys.executable, "-m", "promptfed", "client", *OPTIONS, "--state-dir=%S/ward-3"]
    assert (unit["User"], unit["StateDirectory"], unit["WorkingDirectory"]) == ("ml", "ward-3", str(tmp_path))
    final = {int(code) for code in unit["RestartPreventExitStatus"].split()}
    assert Exit.DECLINED in final
    assert not final & {Exit.FAILED, Exit.UNREACHABLE}


def test_systemd_accepts_the_units(calls: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    for service, options in (("client", OPTIONS), ("coordinator", ["--host", "0.0.0.0"])):
        assert install(service, "--folder", tmp_path, "--account", "root", "--", *options).exit_code == Exit.OK
        file = tmp_path / f"promptfed-{service}.service"
        found = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True)
        assert (found.returncode, found.stderr) == (0, "")
        file.write_text(file.read_text().replace("ExecStart=", "ExecStart=relative/"))
        assert subprocess.run(["systemd-analyze", "verify", file], capture_output=True).returncode != 0


def test_a_service_of_a_user_is_started_when_asked(calls: Path, tmp_path: Path) -> None:
    done = install("coordinator", "--user", "--start", "--", "--data-dir=kept")
    assert done.exit_code == Exit.OK, done.output
    assert calls.read_text().splitlines() == ["--user daemon-reload", "--user enable --now promptfed-coordinator"]
    unit = read(tmp_path / "config" / "systemd" / "user" / "promptfed-coordinator.service")
    assert "User" not in unit
    assert started_by(unit)[3:] == ["coordinator", "--data-dir=kept"]


def test_what_systemctl_refuses_is_told(calls: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAILS", "1")
    done = install("coordinator", "--user", "--start")
    assert done.exit_code == Exit.FAILED
    assert "systemctl --user daemon-reload: Access denied" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["client", "--folder", ".", "--", "--no-such-option"], "No such option: --no-such-option"),
        (["client", "--folder", ".", "--name", "a b", "--", *OPTIONS], "--name 'a b': use letters"),
        (["client", "--folder", ".", "--account", "x\ny", "--", *OPTIONS], "--account"),
        (["client", "--folder", "file/below", "--", *OPTIONS], "cannot be written (Not a directory)"),
        (["client", "--folder", "other", "--", *OPTIONS], "exists and is another one: remove it, or give --name"),
        (["client", "--folder", ".", "--start", "--", *OPTIONS], "leave out --folder"),
    ],
)
def test_what_cannot_be_installed_is_refused(arguments: list[str], words: str, calls: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "promptfed-client.service").write_text("[Unit]\n")
    done = install(*arguments)
    assert done.exit_code in (Exit.USAGE, Exit.BAD_INPUT)
    assert words in " ".join(done.stderr.split())
    assert not calls.exists()
    assert not (tmp_path / "promptfed-client.service").exists()


def test_the_guides_for_other_systems_give_options_that_there_are(calls: Path) -> None:
    page = (ROOT / "docs" / "guides" / "machines.md").read_text()
    launchd, windows = re.findall(r"```xml\n(.*?)```", page, re.DOTALL)
    arguments = ElementTree.fromstring(windows).findtext("arguments")
    for command in (plistlib.loads(launchd.encode())["ProgramArguments"][1:], shlex.split(arguments)):
        done = install("--folder", ".", "--name", f"options-{len(command)}", command[0], "--", *command[1:])
        assert done.exit_code == Exit.OK, done.output
