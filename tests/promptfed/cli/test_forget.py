"""`promptfed forget`: shows its cost, asks, writes a certificate that verifies, and overwrites names in logs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
from promptfed.testing.clients import drive
from tests.support.coordinators import in_thread


def test_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with in_thread(tmp_path / "data") as server:
        token = str(server.settings.data_dir / "operator.token")
        where = ["--coordinator", server.url, "--token-file", token]

        def run(*arguments: str) -> Result:
            return CliRunner().invoke(app, ["forget", *arguments])

        federation = server.create(rounds=2, privacy={"level": "none"})
        clients = server.enrol(federation, "a", "b", "quokka")
        server.post(f"{federation}/start")
        drive(clients)
        log = tmp_path / "service.log"
        log.write_text("quokka enrolled\nb enrolled\n")
        asked = run("quokka", *where)
        assert asked.exit_code == Exit.BAD_INPUT
        assert "2 rounds are repeated, from a new start on." in asked.output
        assert "give --yes to confirm" in asked.output
        done = run("quokka", "--yes", "--log", str(log), *where)
        assert done.exit_code == 0, done.output
        assert log.read_text() == "****** enrolled\nb enrolled\n"
        drive(clients[:2])
        again = run("quokka", "--yes", "--out", "again.json", *where)
        assert again.exit_code == 0, again.output
        assert run("wombat", "--yes", *where).exit_code == Exit.REFUSED
        key = server.get("/v1/signing-key")["public_key"]
        verified = run("quokka", "--verify", "forgotten.json", "--key", key)
        assert verified.exit_code == 0
        assert "says nothing about disks" in verified.output
        assert run("a", "--verify", "forgotten.json").exit_code == Exit.REFUSED
        assert run("--verify", "forgotten.json", "--key", "0" * 64).exit_code == Exit.REFUSED
        certificate = json.loads(Path("forgotten.json").read_text())
        assert "quokka" not in json.dumps(certificate)
        certificate["report"]["done"]["blobs"] += 1
        Path("forged.json").write_text(json.dumps(certificate))
        assert "not as it was signed" in run("--verify", "forged.json").output
        assert run("--verify", "service.log").exit_code == Exit.BAD_INPUT
        audit = CliRunner().invoke(app, ["audit-log", "verify", *where])
        assert audit.exit_code == 0, audit.output
