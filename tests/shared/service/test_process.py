"""A start looks at the server library that it is given."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.__main__ import main as client
from promptfed.client_service.exits import Exit
from promptfed.coordinator.__main__ import main as coordinator
from promptfed.shared.service import process
from promptfed.shared.service.process import unfit_server
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
