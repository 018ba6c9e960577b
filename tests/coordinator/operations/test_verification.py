"""``--verify``: whatever is damaged is named, and the exit code says that there is something."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.store import blobs
from promptfed.testing.clients import drive
from tests.support.coordinators import in_thread


def played(folder: Path, **options: Any) -> None:
    with in_thread(folder, **options) as coordinator:
        federation = coordinator.create(rounds=1)
        clients = coordinator.enrol(federation, "a", "b")
        coordinator.post(f"{federation}/start")
        drive(clients)


def looked(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, list[str]]:
    capsys.readouterr()
    code = main(["--verify", "--data-dir", str(folder), *options])
    return code, capsys.readouterr().out.splitlines()


def changed(folder: Path, *statements: str) -> None:
    with in_thread(folder) as coordinator, coordinator.registry.database.write() as session:
        for statement in statements:
            assert session.execute(text(statement)).rowcount > 0


UPDATE = "(SELECT sha256 FROM updates ORDER BY sha256 LIMIT 1)"
STATE = "(SELECT sha256 FROM states ORDER BY id DESC LIMIT 1)"


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        (f"UPDATE blobs SET content = zeroblob(9) WHERE digest = {UPDATE}", "the update of "),
        (f"DELETE FROM blobs WHERE digest = {UPDATE}", "is missing"),
        (
            f"UPDATE blobs SET content = zeroblob(length(content)) WHERE digest = {STATE}",
            "the state of round 1 of eyes",
        ),
        (
            "UPDATE blobs SET content = zeroblob(9) WHERE digest = (SELECT payload_sha256 FROM tasks LIMIT 1)",
            "the payload of round ",
        ),
        ("UPDATE states SET state_hash = 'sha256:0' WHERE round = 1", "is another state than the recorded sha256:0"),
        ("UPDATE updates SET bytes = bytes + 1", "instead of the recorded"),
        ("UPDATE evaluations SET body = json_set(body, '$.splits.test.accuracy', 1)", "an evaluation of "),
        ("UPDATE audit_log SET actor = 'somebody' WHERE number = 2", "the audit log: entry 2 was changed"),
        ("UPDATE federations SET spec = json_set(spec, '$.rounds', -1)", "the spec of eyes: rounds: "),
        ("UPDATE federations SET spec = '{'", "the spec of eyes: Expecting property name"),
    ],
)
def test_what_is_damaged_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], statement: str, wanted: str
) -> None:
    played(tmp_path / "data")
    assert looked(tmp_path / "data", capsys)[0] == 0
    changed(tmp_path / "data", statement)
    code, lines = looked(tmp_path / "data", capsys)
    assert code == 1
    assert any(line.startswith("damaged: ") and wanted in line for line in lines), lines
    assert lines[-1].endswith(f"damaged in {tmp_path / 'data' / 'coordinator.sqlite3'}")


def test_files_are_looked_at_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "SMALL_BYTES", -1)
    played(tmp_path / "data")
    code, lines = looked(tmp_path / "data", capsys)
    assert (code, len(lines)) == (0, 1)
    files = list((tmp_path / "data" / "blobs").glob("*/*"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    code, lines = looked(tmp_path / "data", capsys)
    assert code == 1
    for path in files:
        assert any(f"sha256:{path.name}" in line and "has changed" in line for line in lines)


def test_pages_of_garbage_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    played(tmp_path / "data")
    database = tmp_path / "data" / "coordinator.sqlite3"
    with closing(sqlite3.connect(database)) as connection:
        [page] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'evaluations'").fetchone()
    content = bytearray(database.read_bytes())
    content[(page - 1) * 4096 : page * 4096] = b"\xff" * 4096
    database.write_bytes(content)
    code, lines = looked(tmp_path / "data", capsys)
    assert code == 1
    assert any(line.startswith("damaged: the database itself") for line in lines)
    assert any(line.startswith("damaged: evaluations cannot be read: ") for line in lines)


def test_nothing_is_made_or_taken_from_a_coordinator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert looked(tmp_path / "nothing", capsys) == (2, [])
    assert not (tmp_path / "nothing").exists()
    with in_thread(tmp_path / "data"):
        assert main(["--verify", "--data-dir", str(tmp_path / "data")]) == 2
        assert "another coordinator works on" in capsys.readouterr().err
    changed(tmp_path / "data", "UPDATE alembic_version SET version_num = '0008'")
    assert main(["--verify", "--data-dir", str(tmp_path / "data")]) == 2
    assert "have the form 0008 of promptfed before 0.4.0" in capsys.readouterr().err


@pytest.mark.both_databases
def test_a_database_is_looked_at_whole(
    tmp_path: Path, database: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    played(tmp_path / "data", **database)
    options = [f"--{key.replace('_', '-')}={value}" for key, value in database.items()]
    assert looked(tmp_path / "data", capsys, *options)[0] == 0
    with in_thread(tmp_path / "data", **database) as coordinator, coordinator.registry.database.write() as session:
        session.execute(text(f"DELETE FROM blobs WHERE digest = {UPDATE}"))
    code, lines = looked(tmp_path / "data", capsys, *options)
    assert (code, len(lines)) == (1, 2)
    assert "is missing" in lines[0]


def test_as_a_process(tmp_path: Path) -> None:
    played(tmp_path / "data")
    command = [sys.executable, "-m", "promptfed.coordinator", "--verify", "--data-dir", str(tmp_path / "data")]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout.count("\n")) == (0, 1), found.stderr
