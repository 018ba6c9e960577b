"""Variables that nothing reads are told with the nearest one, and none of another's making stops a start."""

from __future__ import annotations

import os
import re
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError
from promptfed.client_service.settings import Settings as ClientSettings
from promptfed.client_service.settings import make_settings
from promptfed.coordinator.__main__ import start
from promptfed.coordinator.settings import Settings, unread
from promptfed.shared.service.environment import CLIENT, COORDINATOR, SINGLE, unread_variables

ROOT = Path(__file__).parents[3]
FIELDS = {COORDINATOR: Settings.model_fields, CLIENT: ClientSettings.model_fields}
LINKS = {
    "PROMPTFED_SERVICE_HOST": "10.0.0.1", "PROMPTFED_SERVICE_PORT": "8080", "PROMPTFED_SERVICE_PORT_HTTP": "8080",
    "PROMPTFED_PORT": "tcp://10.0.0.1:8080", "PROMPTFED_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "PROMPTFED_PORT_8080_TCP_PROTO": "tcp", "PROMPTFED_PORT_8080_TCP_ADDR": "10.0.0.1",
    "PROMPTFED_COORDINATOR_SERVICE_HOST": "10.0.0.1", "PROMPTFED_CLIENT_PORT": "tcp://10.0.0.2:80",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("PROMPTFED_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(("given", "meant"), [
    ("PROMPTFED_CLIENT_NAEM", "PROMPTFED_CLIENT_NAME"), ("PROMPTFED_CLEINT_NAME", "PROMPTFED_CLIENT_NAME"),
    ("PROMPTFED_COORDINATOR_TLS_CERTS", "PROMPTFED_COORDINATOR_TLS_CERT"), ("PROMPTFED_TOKEN", None),
    ("PROMPTFED_OPERATOR_TOKN", "PROMPTFED_OPERATOR_TOKEN"), ("promptfed_client_datas", "PROMPTFED_CLIENT_DATA"),
    ("PROMPTFED_CLIENT_PORT", "PROMPTFED_CLIENT_API_PORT"),
])  # fmt: skip
def test_what_nothing_reads_is_told(monkeypatch: pytest.MonkeyPatch, given: str, meant: str | None) -> None:
    monkeypatch.setenv(given, "8080")
    [line] = unread_variables(FIELDS)
    assert line.startswith(f"nothing reads the variable {given}")
    assert meant is None or line.endswith(f"did you mean {meant}?")
    done = CliRunner().invoke(app, ["methods", "zero_shot"])
    assert (done.exit_code, line in done.stderr) == (0, True)


def test_what_is_read_or_of_others_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in LINKS.items():
        monkeypatch.setenv(name, value)
    for name in ("CLIENT_NAME", "COORDINATOR_PORT", "OPERATOR_TOKEN", "COORDINATOR"):
        monkeypatch.setenv(f"PROMPTFED_{name}", "1")
    for name in ("promptfed_client_federation", "PROMPTFER_CLIENT_NAEM", "_PROMPTFED_COMPLETE"):
        monkeypatch.setenv(name, "f")
    assert [line for line in unread_variables(FIELDS) if "link" not in line] == []
    monkeypatch.setenv("PROMPTFED_CLIENT_NAEM", "f")
    assert unread() == ["PROMPTFED_PORT=tcp://10.0.0.1:8080 is of a link to a service, not a setting: it is not read"]


def test_links_to_services_do_not_stop_a_start(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("COORDINATOR_PORT", "CLIENT_API_PORT"):
        monkeypatch.setenv(f"PROMPTFED_{name}", "tcp://10.0.0.1:8080")
    assert Settings().port == 8080
    assert make_settings(coordinator="http://127.0.0.1:1", federation="f", name="a", data="digits").api_port == 0
    assert all("it is not read" in line for line in unread_variables(FIELDS))
    assert len(unread_variables(FIELDS)) == 2


def test_a_start_that_fails_says_which_variable_was_misspelt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PROMPTFED_CLIENT_DATAS", "digits")
    told = r"--data: .*; nothing reads the variable PROMPTFED_CLIENT_DATAS: did you mean"
    with pytest.raises(ClientError, match=told):
        make_settings(coordinator="http://127.0.0.1:1", federation="f", name="a")
    monkeypatch.setenv("PROMPTFED_COORDINATOR_TLS_KEYS", "k")
    assert start({"tls_cert": "c"}) == 2
    assert "did you mean PROMPTFED_COORDINATOR_TLS_KEY?" in capsys.readouterr().err


def test_every_variable_that_the_tree_names_is_known() -> None:
    asked = ["git", "grep", "-hoE", r"\bPROMPTFED_[A-Z][A-Z_]*[A-Z]\b", "--", f":!{Path(__file__).relative_to(ROOT)}"]
    listed = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    known = {f"{prefix}{name}".upper() for prefix, fields in FIELDS.items() for name in fields}
    known |= {f"PROMPTFED_{name}" for name in SINGLE}
    said = {
        name for name in listed.split() if name not in ("PROMPTFED_COMPLETE", "PROMPTFED_NOTHING", "PROMPTFED_CLIENT")
    }
    assert said <= known, sorted(said - known)
    assert {re.sub("^PROMPTFED_", "", name) for name in said} >= {*SINGLE} - {"COORDINATOR_TARGET"}


@pytest.mark.parametrize("name", sorted(ClientSettings.model_fields))
def test_no_value_of_a_variable_is_a_traceback(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = {"coordinator": "http://127.0.0.1:1", "federation": "f", "name": "a", "data": "digits"}
    for value in ("a=digits", '{"a": [', "\u0663"):
        monkeypatch.setenv(f"PROMPTFED_CLIENT_{name.upper()}", value)
        with suppress(ClientError):  # some settings take any text
            make_settings(**{key: text for key, text in needed.items() if key != name})


def test_a_list_in_a_variable_is_json(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"coordinator": "http://127.0.0.1:1", "federation": "f", "name": "a", "data": "digits"}
    monkeypatch.setenv("PROMPTFED_CLIENT_TEST", '["b=digits"]')
    assert make_settings(**given).tests == {"b": "digits"}
    monkeypatch.setenv("PROMPTFED_CLIENT_TEST", "b=digits")
    with pytest.raises(ClientError, match="PROMPTFED_CLIENT_TEST is no list: write JSON"):
        make_settings(**given)
