"""What the command has of the operator's API: clients, what cannot be undone, rounds and metrics, watching."""

from __future__ import annotations

import csv
import io
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from promptfed.cli import common
from promptfed.cli.main import app
from promptfed.console.progress import Snapshot, Watcher
from promptfed.coordinator.app import create_app
from promptfed.coordinator.settings import Settings
from promptfed.shared.service.reasons import Exit
from promptfed.testing.clients import ScriptedClient, drive
from tests.support.coordinators import InThread, in_thread

# Each call of the operator's API, and the command that makes it.
COMMANDS = {
    "POST /v1/federations": "federation create", "POST /v1/federations/run-file": "federation create",
    "GET /v1/federations": "federation list", "GET /v1/federations/{federation}": "federation status",
    "DELETE /v1/federations/{federation}": "federation delete",
    "POST /v1/federations/{federation}/start": "federation start",
    "POST /v1/federations/{federation}/pause": "federation pause",
    "POST /v1/federations/{federation}/resume": "federation resume",
    "POST /v1/federations/{federation}/cancel": "federation cancel",
    "PUT /v1/federations/{federation}/initial-state": "federation create",
    "POST /v1/federations/{federation}/enrolment-tokens": "federation token",
    "GET /v1/federations/{federation}/enrolment-tokens": "federation token",
    "DELETE /v1/federations/{federation}/enrolment-tokens/{token_id}": "federation token",
    "GET /v1/federations/{federation}/clients": "federation clients",
    "DELETE /v1/federations/{federation}/clients/{client_id}": "federation withdraw",
    "DELETE /v1/federations/{federation}/clients/{client_id}/updates": "federation delete-updates",
    "POST /v1/federations/{federation}/clients/{client_id}/reset": "federation reset",
    "GET /v1/federations/{federation}/events": "federation watch",
    "GET /v1/federations/{federation}/remarks": "federation status",
    "GET /v1/federations/{federation}/privacy": "federation privacy",
    "GET /v1/federations/{federation}/rounds": "federation rounds",
    "GET /v1/federations/{federation}/rounds/{round}": "federation rounds",
    "POST /v1/federations/{federation}/rounds/{round}/replay": "federation replay",
    "GET /v1/federations/{federation}/rounds/{round}/card": "export",
    "POST /v1/federations/{federation}/rounds/{round}/card/signature": "export",
    "GET /v1/federations/{federation}/rounds/{round}/card.md": "export",
    "GET /v1/federations/{federation}/rounds/{round}/export": "export",
    "GET /v1/federations/{federation}/prompts": "federation prompts",
    "GET /v1/federations/{federation}/metrics": "federation metrics", "POST /v1/operators": "operator add",
    "GET /v1/operators": "operator list", "DELETE /v1/operators/{operator}": "operator remove",
    "GET /v1/audit-log": "audit-log show",
}  # fmt: skip


class Command:
    """Runs `promptfed federation ...` against a coordinator in a thread."""

    def __init__(self, server: InThread):
        self.server = server
        self.token = server.settings.data_dir / "operator.token"

    def __call__(self, *arguments: str, **options: Any) -> Result:
        where = ["--coordinator", self.server.url, "--token-file", str(self.token)]
        return CliRunner().invoke(app, ["federation", *arguments, *where], **options)

    def json(self, *arguments: str) -> Any:
        done = self(*arguments, "--json")
        assert done.exit_code == Exit.OK, done.output
        return json.loads(done.stdout)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("operating") / "data") as made:
        yield made


@pytest.fixture(scope="module")
def command(server: InThread) -> Command:
    return Command(server)


@pytest.fixture(scope="module")
def finished(server: InThread) -> str:
    """A federation of two rounds that has come to its end."""
    clients = running(server, "finished")
    drive(clients)
    server.until("finished", state="finished")
    return "finished"


def running(server: InThread, name: str) -> list[ScriptedClient]:
    federation = server.create(name=name, participation={"min_clients": 2, "deadline_seconds": 3600})
    clients = server.enrol(federation, "a", "b")
    server.post(f"{federation}/start")
    return clients


def test_the_command_has_all_that_operators_have_in_the_api(tmp_path: Path) -> None:
    schema = create_app(Settings(data_dir=tmp_path)).openapi()
    operators = {"viewer", "operator", "admin"}
    calls = {
        f"{verb.upper()} {path}"
        for path, verbs in schema["paths"].items()
        for verb, call in verbs.items()
        if operators & {scheme for one in call.get("security", []) for scheme in one}
    }
    assert calls - set(COMMANDS) == set(), "give these a command"
    assert set(COMMANDS) - calls == set()
    for words in sorted(set(COMMANDS.values())):
        assert CliRunner().invoke(app, [*words.split(), "--help"]).exit_code == Exit.OK, words


def test_clients_are_listed_and_one_is_reset(server: InThread, command: Command) -> None:
    running(server, "listing")
    [first, second] = command.json("clients", "listing")
    assert (first["name"], second["name"]) == ("a", "b")
    shown = command("clients", "listing").stdout
    assert "trainer" in shown
    assert "takes part" in shown
    assert re.search(r" \d\d:\d\d:\d\d ", shown), "a time breaks between its parts, if at all"
    assert "--client b" in command("reset", "listing", "b").stdout
    assert command.json("clients", "listing")[1]["reset"]
    assert command("reset", "listing", "nobody").exit_code == Exit.REFUSED


@pytest.mark.parametrize("verb", ["cancel", "delete", "withdraw", "delete-updates"])
def test_what_cannot_be_undone_asks_and_is_refused_where_nobody_is_there(
    server: InThread, command: Command, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"asked-{verb}"
    running(server, name)
    whom = ["a"] if verb in ("withdraw", "delete-updates") else []
    alone = command(verb, name, *whom)
    assert alone.exit_code == Exit.BAD_INPUT
    assert "give --yes to confirm" in alone.stderr
    assert len(alone.stderr.strip().splitlines()) == 1
    monkeypatch.setattr(common, "at_terminal", lambda: True)
    no = command(verb, name, *whom, input="n\n")
    assert (no.exit_code, "Nothing was done." in no.stderr) == (Exit.DECLINED, True)
    assert server.get(name)["state"] == "running"
    assert server.get(name)["clients"]["withdrawn"] == 0
    if verb == "delete-updates":
        server.delete(f"{name}/clients/a")
    yes = command(verb, name, *whom, input="y\n")
    assert yes.exit_code == Exit.OK, yes.output
    if verb == "cancel":
        assert server.get(name)["state"] == "cancelled"
    elif verb == "delete":
        server.get(name, status=404)
    else:
        assert server.get(name)["clients"]["withdrawn"] == 1


def test_yes_answers_beforehand(server: InThread, command: Command) -> None:
    running(server, "unasked")
    assert command.json("withdraw", "unasked", "a", "--discard", "--yes") == {"withdrawn": "a"}
    assert command.json("delete-updates", "unasked", "a", "--yes") == {"deleted_updates_of": "a"}
    assert command.json("cancel", "unasked", "--yes")["state"] == "cancelled"
    federation = server.get("unasked")["id"]
    assert command.json("delete", "unasked", "--yes") == {"deleted": federation}
    assert command("status", "unasked").exit_code == Exit.REFUSED


def test_metrics_rounds_and_the_key(command: Command, finished: str, tmp_path: Path) -> None:
    out = tmp_path / "metrics.csv"
    printed = command("metrics", finished).stdout
    assert command.json("metrics", finished, "--out", str(out))["bytes"] == out.stat().st_size
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert rows == list(csv.DictReader(out.open()))
    assert {row["round"] for row in rows} >= {"1", "2"}
    numbers = command.json("metrics", finished)["metrics"]
    assert [{key: str(value) for key, value in line.items()} for line in numbers] == [
        row | {"value": str(float(row["value"]))} for row in rows
    ]

    reports = command.json("rounds", finished)
    assert [report["round"] for report in reports] == [0, 1, 2]
    shown = command("rounds", finished).stdout
    assert "50.0 %" in shown
    assert "0.5" in shown
    assert "Nobody's training is protected" in command("privacy", finished).stdout
    assert command.json("privacy", finished)["level"] == "none"
    key = command.server.get("/v1/signing-key")["public_key"]
    anybody = ["--coordinator", command.server.url]
    for where in (anybody, [*anybody, "--token-file", str(command.token)]):
        assert CliRunner().invoke(app, ["federation", "signing-key", *where]).stdout.strip() == key
    assert CliRunner().invoke(app, ["federation", "list", *anybody]).exit_code == Exit.NOT_ALLOWED


def test_privacy_tells_what_each_client_has_spent_and_what_was_planned(server: InThread, command: Command) -> None:
    planned = {"units": 10, "noise_multiplier": 1.0, "epsilon_planned": 4.5, "delta": 1e-3}
    asked = {"level": "sample", "clip": 0.3, "noise_multiplier": None, "epsilon": 5.0}
    federation = server.create(name="protected", privacy=asked)
    client = server.client(federation, "a")
    assert client.enrol(server.token(federation), protection=planned).status_code == 201
    [row] = [line for line in command("privacy", "protected").stdout.splitlines() if "│ a " in line]
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["a", "0", "-", "-", "-", "4.5", "-", "-", "-"]
    [one] = command.json("privacy", "protected")["clients"]
    assert one["planned"] == planned


def test_watch_tells_loss_accuracy_seconds_and_what_is_left(server: InThread, command: Command) -> None:
    clients = running(server, "watched")
    worker = threading.Thread(target=drive, args=(clients,))
    worker.start()
    done = command("watch", "watched")
    worker.join()
    assert done.exit_code == Exit.OK, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("round ")]
    told = {line.partition(":")[0]: line for line in lines if "accuracy" in line}
    assert list(told) == ["round 0", "round 1", "round 2"]
    assert "loss 0.5, accuracy 50.0 % (zero-shot 25.0 %), " in told["round 2"]
    assert told["round 2"].endswith(" s")


def test_status_and_watch_remark_what_looks_wrong(server: InThread, command: Command) -> None:
    clients = running(server, "remarked")
    for client in clients:
        client.accuracy = 0.1  # the template's is 0.25
    drive(clients)
    remark = "Below zero-shot by 15.0 points: try a lower training.learning_rate"
    for verb in ("status", "watch"):
        assert remark in " ".join(command(verb, "remarked").stdout.split())
    told = server.http.get("/v1/federations/remarked/remarks", headers=server.operator).json()["remarks"]
    assert [text[:12] for text in told] == ["Zero-shot is", "Below zero-s"]
    drive(running(server, "good"))
    assert "zero-shot by" not in command("status", "good").stdout


def test_progress_shows_time_left_also_where_rounds_are_quicker_than_looks(capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    with Watcher(10, clock=lambda: now) as watcher:
        for seconds, round in ((0.0, 0), (100.0, 1), (108.0, 3), (116.0, 5)):
            now = seconds
            watcher.show(Snapshot("running", None, round, 10, "train", (), ()))
    told = [line for line in capsys.readouterr().err.splitlines() if line]
    assert [line.partition("; ")[2] for line in told] == ["", "", "", "about 24 s left"]
    with Watcher(3) as watcher:  # of a simulation: a line for each round, none for what has no answer yet
        for ended in ("", "round 0: accuracy 25.0 %", "round 0: accuracy 25.0 %", "round 1: loss 1"):
            watcher.show(Snapshot("running", None, 1, 3, "train", (), ("a",), ended))
    assert capsys.readouterr().err.split("\n")[:3] == ["round 0: accuracy 25.0 %", "round 1: loss 1", ""]
