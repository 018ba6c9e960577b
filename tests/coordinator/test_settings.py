"""Settings and the command line: what is closed by default, and errors in one line."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from sqlalchemy import text
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.coordinator import server
from promptfed.coordinator.__main__ import main
from promptfed.coordinator.settings import DEFAULT_PORT, Settings
from promptfed.coordinator.store import writable
from promptfed.coordinator.store.blobs import Blobs
from promptfed.coordinator.store.database import Database
from promptfed.shared.service.process import given_settings
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import kind


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_nothing(host: str) -> None:
    assert Settings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "example.org"])
def test_another_address_needs_tls_or_a_word(host: str) -> None:
    with pytest.raises(ValidationError, match="--allow-plain-http"):
        Settings(host=host)
    assert Settings(host=host, allow_plain_http=True).host == host
    assert Settings(host=host, tls_cert=Path("c"), tls_key=Path("k")).host == host


FILES: dict[str, Any] = {"operator_token_file": Path("t"), "signing_key_file": Path("k")}
SEVERAL: dict[str, Any] = {"database_url": "postgresql://h/n", "store": "s3://b/p", **FILES}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"tls_cert": Path("c")}, "TLS needs both a certificate and its key"),
        ({"tls_key": Path("k")}, "TLS needs both a certificate and its key"),
        ({"tls_client_ca": Path("a")}, "--tls-client-ca asks for certificates, and only TLS brings them"),
        ({"tls_client_ca": Path("a"), "tls_cert": Path("c"), "tls_key": Path("k")}, None),
        ({"enrolment_token_file": Path("t")}, "--enrolment-token-file needs --bootstrap"),
        ({"enrolment_token_file": Path("t"), "bootstrap": Path("b")}, None),
        ({"bootstrap": Path("b")}, None),
        ({"store": "s3://b"}, None),
        ({"advertise_url": "https://c:1"} | SEVERAL, None),
        ({"advertise_url": "https://c:1/"} | SEVERAL, None),
        ({"advertise_url": "http://127.0.0.1:1"} | SEVERAL, None),
        ({"advertise_url": "http://c:1"} | SEVERAL, "clients' secrets sent unencrypted"),
        ({"advertise_url": "http://c:1", "allow_plain_http": True} | SEVERAL, None),
        *(({"advertise_url": url} | SEVERAL, "must be an address") for url in ("c:1", "https://", "https://c/x", "ftp://c",
                                                                             "https://c/?x", "")),
        *(
            ({"advertise_url": "https://c"} | SEVERAL | {name: None}, f"which share {what}: give them")
            for name, what in (
                ("database_url", "--database-url-file (PostgreSQL)"), ("store", "--store"),
                ("operator_token_file", "--operator-token-file"), ("signing_key_file", "--signing-key-file"),
            )
        ),
        ({"port": 0}, None), ({"port": 65_536}, "less than or equal to 65535"),
        ({"port": "tcp://10.0.0.1:80"}, None),
        ({"database_url": "postgresql://h/n", "database_url_file": Path("f")}, "give one of them"),
    ],
)  # fmt: skip
def test_settings_fit_together(given: dict[str, Any], why: str | None) -> None:
    if why is None:
        assert Settings(**given).port in (0, DEFAULT_PORT)
    else:
        with pytest.raises(ValidationError, match=re.escape(why)):
            Settings(**given)


def test_settings_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_COORDINATOR_PORT", "1234")
    assert Settings().port == 1234
    assert Settings(port=5).port == 5


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--port", "7", "--upload-timeout-seconds", "1.5", "--allow-plain-http"]
    settings = Settings(**given_settings(Settings, "coordinator", given))
    changed = {name: getattr(settings, name) for name in settings.model_fields_set}
    assert changed == {"port": 7, "upload_timeout_seconds": 1.5, "allow_plain_http": True}
    with pytest.raises(SystemExit):
        main(["--help"])
    help_ = capsys.readouterr().out
    for name in Settings.model_fields:
        assert re.search(rf"--{name.replace('_', '-')}[ ,]", help_), name


@pytest.mark.extended
def test_the_app_imports_neither_torch_nor_what_is_seldom_needed() -> None:
    heavy = {"torch", "open_clip", "PIL", "scipy", "dp_accounting", "alembic"}
    script = f"import sys, promptfed.coordinator.server; assert not {heavy} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


# A start on what a disk has left: one line and the right exit code, or everything goes on but what cannot be read.

FILE = "coordinator.sqlite3"

PAGE = 4096


@pytest.fixture(scope="module")
def once_made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("settings") / "data"
    with in_thread(folder) as coordinator:
        clients = coordinator.enrol(coordinator.create(name="done", rounds=1), "a", "b")
        coordinator.post("done/start")
        drive(clients)
        coordinator.enrol(coordinator.create(name="runs"), "a", "b")
        coordinator.post("runs/start")
        coordinator.until("runs", state="running")
    return folder


@pytest.fixture
def folder(once_made: Path, tmp_path: Path) -> Path:
    """A data folder with a federation that has ended and one that runs."""
    return shutil.copytree(once_made, tmp_path / "data")


def starting(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """The exit code of a start that cannot be, and the lines on stderr that are no log."""
    capsys.readouterr()
    code = server.serve(Settings(data_dir=folder, port=0))
    return code, [line for line in capsys.readouterr().err.splitlines() if not line.startswith('{"at"')]


def overwrite(path: Path, begin: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(begin)
        file.write(content)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"garbage" * PAGE),
        lambda path: os.truncate(path, path.stat().st_size // 3),
        lambda path: overwrite(path, 3 * PAGE, b"\xff" * (path.stat().st_size - 3 * PAGE)),
    ],
    ids=["no database", "cut off", "pages of garbage"],
)
def test_a_damaged_database(folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None]) -> None:
    damage(folder / FILE)
    code, lines = starting(folder, capsys)
    assert code == 2
    [line] = lines
    assert line.startswith(f"coordinator: the database at {folder / FILE} cannot be used: ")
    assert "its file is damaged, put a backup back" in line


def test_a_full_disk_is_one_line_and_a_start_once_there_is_room(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Database, session: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr("promptfed.coordinator.store.queries.Batch.write", full)
        code, lines = starting(folder, capsys)
    assert (code, lines) == (2, [f"coordinator: the disk of {folder / FILE} is full: make room, and start it again"])
    with in_thread(folder) as coordinator:
        assert coordinator.get("runs")["state"] == "running"


UNREADABLE = {
    "rounds: ": "spec = json_set(spec, '$.rounds', -3)",
    "novelty: ": "spec = json_set(spec, '$.novelty', 1)",
    "JSONDecodeError: ": "spec = '{'",
    "shape: ": "shape = '[1]'",
}


def test_an_unreadable_federation_is_listed_and_the_others_run(folder: Path) -> None:
    with contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None)) as rows:
        kept = rows.execute("SELECT spec, shape, state FROM federations WHERE name = 'done'").fetchone()
        for why, change in UNREADABLE.items():
            rows.execute(f"UPDATE federations SET {change} WHERE name = 'done'")
            with in_thread(folder) as coordinator:
                listed = {one["name"]: one for one in coordinator.get("/v1/federations")["federations"]}
                assert listed["done"]["state"] == "failed"
                assert listed["done"]["reason"].startswith(f"unreadable: its stored spec or rows cannot be read: {why}")
                assert listed["runs"]["state"] == "running"
                assert coordinator.get("done", status=503)["type"].endswith("/method-absent")
                if change.startswith("shape"):
                    drive([coordinator.client("runs", name) for name in "ab"])
                    assert coordinator.get("runs")["state"] == "finished"
            stored = rows.execute("SELECT state FROM federations WHERE name = 'done'").fetchone()
            assert stored == kept[2:], "what is stored stays as it is"
            rows.execute("UPDATE federations SET spec = ?, shape = ? WHERE name = 'done'", kept[:2])
    with in_thread(folder) as coordinator:
        assert coordinator.get("done")["state"] == "finished"


@pytest.mark.extended
@pytest.mark.parametrize(
    ("statement", "why"),
    [
        ("UPDATE federations SET created_at = 'never'", "created_at: "),
        ("UPDATE federations SET started_at = x'ff'", "started_at: "),
        ("UPDATE federations SET ended_at = '{}'", "ended_at: "),
        ("UPDATE federations SET state = 'hovering'", "state: "),
        ("UPDATE federations SET reason = x'ff'", "reason: "),
        ("UPDATE federations SET work = 'x'", "work: "),
        ("UPDATE phases SET kind = 'x'", ""),
    ],
)
def test_damaged_rows_are_told_in_the_list(folder: Path, statement: str, why: str) -> None:
    """The federation that ran is listed by id and name with the reason, and the other one is as it was."""
    with in_thread(folder) as coordinator:
        before = {one["name"]: one for one in coordinator.get("/v1/federations")["federations"]}
        where = "id" if "federations" in statement else "federation_id"
        with coordinator.registry.database.write() as session:
            session.execute(text(f"{statement} WHERE {where} = :id"), {"id": before["runs"]["id"]})
    with in_thread(folder) as coordinator:
        done, runs = coordinator.get("/v1/federations")["federations"]
        assert done == before["done"]
        assert (runs["id"], runs["name"]) == (before["runs"]["id"], "runs")
        assert runs["unreadable"].startswith(f"its stored spec or rows cannot be read: {why}")
        options = ["--coordinator", coordinator.url, "--token-file", str(folder / "operator.token")]
        listed = CliRunner().invoke(app, ["federation", "list", *options])
        assert listed.exit_code == 0, listed.output
        assert f"runs ({runs['id']}) is unreadable: its stored spec or rows cannot be read: {why}" in listed.output


@pytest.mark.parametrize("spec", ["{", '{"name": "done"}'])
def test_an_unreadable_federation_can_be_deleted(folder: Path, spec: str) -> None:
    with in_thread(folder) as coordinator, coordinator.registry.database.write() as session:
        session.execute(text("UPDATE federations SET spec = :spec WHERE name = 'done'"), {"spec": spec})
    with in_thread(folder) as coordinator:
        refused = coordinator.client("done", "a").task()
        assert (refused.status_code, kind(refused), refused.headers["Retry-After"]) == (503, "method-absent", "60")
        coordinator.delete("done")
        assert [one["name"] for one in coordinator.get("/v1/federations")["federations"]] == ["runs"]


def test_not_ready_where_nothing_can_be_written(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writable, "FRESH_SECONDS", 0.0)
    ready = coordinator.http.get("/readyz")
    assert ready.json() == {"status": "ok"}

    def full(self: Blobs) -> Path:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")

    with monkeypatch.context() as patched:
        patched.setattr(Blobs, "temporary", full)
        answer = coordinator.http.get("/readyz")
        assert (answer.status_code, kind(answer)) == (503, "not-ready")
        assert answer.json()["detail"] == "nothing can be written: the disk is full, make room"
    with coordinator.registry.database.write() as session:
        session.execute(text("ALTER TABLE store RENAME TO stored"))
    answer = coordinator.http.get("/readyz")
    assert answer.json()["detail"] == "nothing can be written: the coordinator's log says why"
    with coordinator.registry.database.write() as session:
        session.execute(text("ALTER TABLE stored RENAME TO store"))
    assert coordinator.http.get("/readyz").status_code == 200
