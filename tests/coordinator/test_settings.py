"""Settings and the command line: what is closed by default, and errors in one line."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from promptfed.coordinator.__main__ import main
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.command_line import given_settings


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.1.2.3"])
def test_loopback_needs_nothing(host: str) -> None:
    assert Settings(host=host).host == host


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.4", "::", "example.org"])
def test_another_address_needs_tls_or_a_word(host: str) -> None:
    with pytest.raises(ValidationError, match="--allow-plain-http"):
        Settings(host=host)
    assert Settings(host=host, allow_plain_http=True).host == host
    assert Settings(host=host, tls_cert=Path("c"), tls_key=Path("k")).host == host


def test_settings_come_from_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROMPTFED_COORDINATOR_PORT", "1234")
    assert Settings().port == 1234
    assert Settings(port=5).port == 5


def test_every_setting_is_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--port", "7", "--upload-timeout-seconds", "1.5", "--allow-plain-http"]
    settings = Settings(**given_settings(Settings, "coordinator", given))
    changed = {name: getattr(settings, name) for name in settings.model_fields_set}
    assert changed == {
        "port": 7,
        "upload_timeout_seconds": 1.5,
        "allow_plain_http": True,
    }
    with pytest.raises(SystemExit):
        main(["--help"])
    help_ = capsys.readouterr().out
    for name in Settings.model_fields:
        assert re.search(rf"--{name.replace('_', '-')}[ ,]", help_), name


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--host", "0.0.0.0"], "can be reached from outside"),
        (["--port", "99999"], "--port"),
        (["--tls-cert", "x"], "both a certificate and its key"),
        (["--enrolment-token-file", "x"], "needs --bootstrap"),
        (["--bootstrap", "/nowhere/spec.yaml", "--data-dir", "{folder}", "--port", "0"], "cannot read"),
        (["--data-dir", "/dev/null/x", "--port", "0"], "a part of the path is no folder"),
    ],
)
def test_what_cannot_start_is_said_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([one.replace("{folder}", str(tmp_path)) for one in arguments]) == 2
    output = capsys.readouterr().err
    assert told in output
    assert len(output.strip().splitlines()) == 1


def test_a_token_that_could_not_be_written_is_said_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec, token = tmp_path / "spec.yaml", tmp_path / "join" / "enrolment.token"
    spec.write_text("name: eyes\nmethod: {name: promptfl}\n")
    data_dir = str(tmp_path / "data")
    assert main(["--bootstrap", str(spec), "--enrolment-token-file", str(token), "--data-dir", data_dir]) == 2
    (said,) = capsys.readouterr().err.strip().splitlines()
    assert f"cannot write the enrolment token into {token.parent}" in said
    assert "mount the volume" in said


def test_the_app_imports_neither_torch_nor_what_is_seldom_needed() -> None:
    heavy = {"torch", "open_clip", "PIL", "scipy", "dp_accounting", "alembic"}
    script = f"import sys, promptfed.coordinator.server; assert not {heavy} & sys.modules.keys()"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
