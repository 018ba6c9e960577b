"""The command as a whole: sections of its help, one style, one file per command, shell completion, light imports."""

from __future__ import annotations

import errno
import io
import json
import logging
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from PIL import Image
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from typer.testing import CliRunner

from promptfed.cli.app import SECTIONS, Commands, Made
from promptfed.cli.common import AllowBackbone, Written
from promptfed.cli.main import app, main
from promptfed.client_service.exits import ClientError
from promptfed.shared.clip import embedded
from promptfed.shared.data import DataError
from promptfed.shared.errors import Refused
from promptfed.shared.service.reasons import Exit
from tests.support.coordinators import in_thread

PATIENCE = 120


def commands(group: Any = None, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command and group, by the words that name it."""
    for name, command in (group or typer.main.get_command(app)).commands.items():
        yield f"{path}{name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{path}{name} ")


def test_every_command_permits_backbones_by_name() -> None:
    """As `promptfed client` does: no command permits a model that was not named."""

    options = [option for _, command in commands() for option in command.params]
    permits = [option for option in options if "--allow-backbone" in option.opts]
    assert len(permits) > 10
    assert all(option.multiple and not option.is_flag for option in permits)


def test_the_help_has_every_section_and_whole_sentences() -> None:
    shown = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "200"}).stdout
    assert [line[:-1] for line in shown.splitlines() if line.endswith(":") and not line.startswith(" ")][1:] == [
        *SECTIONS
    ]
    for name, command in commands():
        first = command.help.partition("\n\n")[0]
        assert first.rstrip()[-1] in ".?:", name
        assert first[0].isupper(), name
        if " " not in name:
            assert command.rich_help_panel in SECTIONS, name


@pytest.mark.parametrize("words", [name for name, _ in commands()])
def test_every_command_shows_its_help(words: str) -> None:
    shown = CliRunner().invoke(app, [*words.split(), "--help"])
    assert shown.exit_code == Exit.OK
    assert shown.stdout.strip().startswith("Usage: ")


@pytest.mark.parametrize("service", ["client", "coordinator"])
def test_services_look_like_other_commands(service: str) -> None:
    wrong = CliRunner().invoke(app, [service, "--no-such-option"])
    assert wrong.exit_code == Exit.USAGE
    assert "No such option" in wrong.stderr
    assert wrong.stderr.startswith("Usage: ")


def test_shell_completion() -> None:
    words = {"_PROMPTFED_COMPLETE": "complete_bash", "COMP_WORDS": "promptfed federation cl", "COMP_CWORD": "2"}
    done = CliRunner().invoke(app, [], env=words, prog_name="promptfed")
    assert "clients" in done.stdout.split()


def sized(size: Annotated[int, typer.Option(min=1)] = 3) -> Iterator[int]:
    yield size


def test_a_process_ends_with_all_that_was_asked_of_its_end() -> None:
    program = """
import atexit, sys, threading, time
from promptfed.cli.main import command
class Slow:
    def __del__(self): print("taken apart")
slow = Slow()
atexit.register(print, "asked")
threading.Thread(target=lambda: (time.sleep(0.2), print("awaited"))).start()
sys.argv = ["promptfed", "nothing-like-it"]
command()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=PATIENCE
    )
    assert done.returncode == Exit.USAGE
    printed = done.stdout.splitlines()
    assert printed[-1] == "asked"
    assert "awaited" in printed
    assert "taken apart" not in printed


def test_parameters_are_made_of_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PROMPTFED_BACKBONE_FILE", raising=False)
    monkeypatch.delenv("PROMPTFED_CLIENT_BACKBONE_FILE", raising=False)
    own, seen = Commands(), []

    @own.add()
    def look(size: Annotated[Iterator[int], Made(sized)], allow_backbone: AllowBackbone, written: Written) -> None:
        """Look."""
        seen.append((next(size), allow_backbone, set(written)))

    @own.add()
    def other() -> None:
        """Make `own` a group."""

    assert CliRunner().invoke(own, ["look"]).exit_code == 0
    assert CliRunner().invoke(own, ["look", "--size", "5", "--allow-backbone", "timm:a"]).exit_code == 0
    assert seen == [(3, [], set()), (5, ["timm:a"], {"size", "allow_backbone"})]
    assert CliRunner().invoke(own, ["look", "--size", "0"]).exit_code == Exit.USAGE


@pytest.mark.parametrize(("error", "code"), [
    (Refused("wrong"), Exit.REFUSED),
    (ClientError(Exit.STATE, "wrong"), Exit.STATE),
    (DataError("wrong"), Exit.BAD_INPUT),
    (KeyboardInterrupt(), Exit.INTERRUPTED),
])  # fmt: skip
def test_expected_errors_are_one_line(error: BaseException, code: Exit) -> None:
    own = Commands()

    @own.add()
    def fail() -> None:
        """Fail."""
        raise error

    done = CliRunner().invoke(own, [])
    assert done.exit_code == code
    assert done.stderr.strip() in ("promptfed: wrong", "promptfed: interrupted")


SURROUNDINGS = [
    (OSError(errno.ENOSPC, "No space left on device", "/tmp/x"), "/tmp/x cannot be used: the disk is full"),
    (PermissionError(errno.EACCES, "Permission denied", "/etc/shadow"),
     "/etc/shadow cannot be used: permission denied"),
    (FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"), "set TMPDIR to another"),
    (UnicodeEncodeError("latin-1", "\u732b", 0, 1, "ordinal not in range"), "cannot be written in latin-1"),
    (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), "it is not text in UTF-8"),
    (sqlite3.OperationalError("database or disk is full"), "the database cannot be used: the disk is full"),
    (OperationalError("select", {}, sqlite3.OperationalError("no such table")), "cannot be used: no such table"),
    (RecursionError("maximum recursion depth exceeded"), "nested too deeply"),
    (ExceptionGroup("several", [OSError(errno.EDQUOT, "Disk quota exceeded")]), "the disk quota is used up"),
]  # fmt: skip


def registered(group: Any = app) -> Iterator[Any]:
    yield from (entry.callback for entry in group.registered_commands)
    for below in group.registered_groups:
        yield from registered(below.typer_instance)


@pytest.mark.parametrize(("error", "says"), SURROUNDINGS, ids=lambda value: type(value).__name__)
def test_no_command_prints_a_traceback_for_its_surroundings(
    error: Exception, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise error

    seen = list(registered())
    assert len(seen) == sum(not hasattr(command, "commands") for _, command in commands())
    for command in seen:
        cells = dict(zip(command.__code__.co_freevars, command.__closure__, strict=True))
        kept = {name: cells[name].cell_contents for name in ("function", "makers")}
        cells["function"].cell_contents, cells["makers"].cell_contents = fails, {}
        try:
            with pytest.raises(typer.Exit) as end:
                command()
        finally:
            for name, content in kept.items():
                cells[name].cell_contents = content
        told = capsys.readouterr().err
        assert (end.value.exit_code, told.count("\n")) == (Exit.BAD_INPUT, 1)
        assert told.startswith("promptfed: ")
        assert says in told


@pytest.fixture
def as_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Calls the entry point with some arguments and stdout as a process does; its exit code."""
    handlers = list(logging.getLogger().handlers)
    monkeypatch.setattr(embedded, "EMBEDDED", {})  # so that none is loaded to name pictures

    def run(stdout: io.TextIOWrapper, *arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["promptfed", *arguments])
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as end:
            main()
        return int(end.value.code or 0)

    yield run
    logging.captureWarnings(False)
    logging.getLogger().handlers[:] = handlers


@pytest.mark.parametrize("encoding", ["latin-1", "cp1252", "ascii"])
def test_names_that_an_encoding_lacks_are_shown(encoding: str, as_process: Callable[..., int], tmp_path: Path) -> None:
    for name in ("\u732b", "dog"):
        (tmp_path / "d" / name).mkdir(parents=True)
        for k in range(2):
            Image.new("RGB", (32 + k, 32)).save(tmp_path / "d" / name / f"{k}.png")
    written = io.BytesIO()
    arguments = ["data", "show", f"folder:{tmp_path / 'd'}", "--out", str(tmp_path / "s.png")]
    assert as_process(io.TextIOWrapper(written, encoding), *arguments) == Exit.OK
    assert "\\u732b" in written.getvalue().decode(encoding)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full device")
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_output_that_cannot_be_written(
    more: list[str], as_process: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        assert as_process(full, "methods", *more) == Exit.BAD_INPUT
    told = capfd.readouterr().err
    assert told.endswith("the disk is full; free some space, or give another place\n")
    assert told.count("\n") == 1


# `promptfed operator` and `promptfed audit-log` against a real coordinator.


def test_operators_are_named_and_the_log_is_verified(tmp_path: Path) -> None:
    with in_thread(tmp_path / "data") as coordinator:
        token = (tmp_path / "data" / "operator.token").read_text().strip()
        runner = CliRunner(env={"PROMPTFED_COORDINATOR": coordinator.url, "PROMPTFED_OPERATOR_TOKEN": token})
        out = tmp_path / "anna.token"
        added = runner.invoke(app, ["operator", "add", "anna", "--role", "viewer", "--out", str(out)])
        assert added.exit_code == Exit.OK, added.output
        assert stat.S_IMODE(out.stat().st_mode) == 0o600
        assert out.read_text().strip() not in added.output
        asking = runner.invoke(app, ["federation", "list", "--token-file", str(out)])
        assert asking.exit_code == Exit.OK
        [listed] = json.loads(runner.invoke(app, ["operator", "list", "--json"]).stdout)
        assert (listed["name"], listed["role"]) == ("anna", "viewer")
        assert "anna" in runner.invoke(app, ["operator", "list"]).stdout
        assert runner.invoke(app, ["operator", "remove", "anna"]).exit_code == Exit.OK
        refused = runner.invoke(app, ["federation", "list", "--token-file", str(out)])
        assert refused.exit_code == Exit.NOT_ALLOWED

        verified = json.loads(runner.invoke(app, ["audit-log", "verify", "--json"]).stdout)
        assert verified["entries"] == 2
        shown = runner.invoke(app, ["audit-log", "show"]).stdout.splitlines()
        assert "operator.token 127.0.0.1 operator-revoked operator=anna" in shown[1]
        kept = tmp_path / "audit.jsonl"
        kept.write_text(runner.invoke(app, ["audit-log", "show", "--json"]).stdout)
        again = runner.invoke(app, ["audit-log", "verify", "--file", str(kept), "--head", verified["head"]])
        assert again.exit_code == Exit.OK, again.output
        lines = kept.read_text().splitlines()
        kept.write_text(lines[0] + "\n")
        cut = runner.invoke(app, ["audit-log", "verify", "--file", str(kept), "--head", verified["head"]])
        assert (cut.exit_code, "its end was cut" in cut.stderr) == (Exit.REFUSED, True)
        kept.write_text(lines[1] + "\n")
        gap = runner.invoke(app, ["audit-log", "verify", "--file", str(kept)])
        assert (gap.exit_code, "entry 1 is missing" in gap.stderr) == (Exit.REFUSED, True)

        with coordinator.registry.database.write() as session:
            session.execute(text("UPDATE audit_log SET actor = 'nobody' WHERE number = 1"))
        tampered = runner.invoke(app, ["audit-log", "verify"])
        assert (tampered.exit_code, "entry 1 was changed" in tampered.stderr) == (Exit.REFUSED, True)
