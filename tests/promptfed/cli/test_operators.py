"""`promptfed operator` and `promptfed audit-log` against a real coordinator."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from sqlalchemy import text
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.shared.service.reasons import Exit
from tests.support.coordinators import in_thread


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
