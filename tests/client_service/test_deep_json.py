"""What a site's readers say of files nested so deeply that Python's reader of JSON gives up: one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.shared.service.reasons import Exit

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("file", "command", "named"),
    [
        ("site-log.jsonl", ["site-log", "show", "{folder}"], "line 1 of"),
        ("site-log.jsonl", ["site-log", "verify", "{folder}"], "line 1 of"),
        ("ledger.jsonl", ["ledger", "show", "--ledger", "{file}"], "at line 0"),
        ("ledger.jsonl", ["ledger", "verify", "--ledger", "{file}"], "at line 0"),
        ("identity.json", ["ledger", "adopt", "--state-dir", "{folder}"], "holds no client"),
        ("card.json", ["score", "{folder}", "symbols:photo", "--out", "{folder}/out"], "card.json"),
    ],
)
def test_deep_json_is_one_line(tmp_path: Path, file: str, command: list[str], named: str) -> None:
    (tmp_path / file).write_text(DEEP + "\n")
    asked = CliRunner().invoke(app, [part.format(folder=tmp_path, file=tmp_path / file) for part in command])
    assert asked.exit_code not in (Exit.OK, 1), asked.output
    assert named in asked.stderr
    assert asked.stderr.count("\n") == 1
