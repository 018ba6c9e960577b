"""`promptfed launch`: GPUs dealt out, what is refused before anything starts, and a real federation of processes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

from promptfed.cli.commands import run
from promptfed.cli.main import app
from promptfed.runtime.containers import choose_gpus, gpus_of_engine
from promptfed.runtime.processes import ProcessFailed, Services, Site
from promptfed.runtime.run_file import read_run
from promptfed.sdk.client import Answer, Coordinator, Request
from promptfed.shared.errors import PromptfedError
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import parse_spec
from tests import ROOT
from tests.promptfed.sdk.test_client import FEDERATION
from tests.promptfed.sdk.test_result import result
from tests.support.waiting import PATIENCE

SPEC = """
name: tiny
method: {name: promptfl}
rounds: 2
participation: {min_clients: 2}
clients:
  - {name: a, data: "symbols:neon?per_class=2&test_per_class=2"}
  - {name: b, data: "symbols:quickdraw?per_class=2&test_per_class=2"}
  - {name: referee, data: "symbols:sketch?test_per_class=2", role: evaluator}
"""


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(SPEC)
    return path


class OperatorCalls(Coordinator):
    """A coordinator that answers what `Services` asks of it."""

    def __init__(self) -> None:
        super().__init__("http://127.0.0.1:9", "token")
        self.calls: list[tuple[Any, ...]] = []
        self.enrolled = 0

    def send(self, request: Request[Any]) -> Answer[Any]:
        if request.verb == "GET":
            assert request.path == "/v1/federations/fed-1/clients"
            answer: dict[str, Any] = {"clients": [{}] * self.enrolled, "next": None}
        else:
            self.calls.append(
                (request.verb, request.path, request.options.get("json") or request.options.get("content"))
            )
            answer = {"id": "fed-1", "token": "enrol-me", "expires_at": "2026-01-01T00:00:00Z"}
            answer |= {"name": "t", "uses": 2, "role": None}
        return Answer(request.model, self.url, {}, json.dumps(answer).encode())


class Fake(Services):
    """Services that only remember what they were told to start; each client enrols at the next look."""

    def __init__(self) -> None:
        self.api: OperatorCalls = OperatorCalls()
        self.started: list[tuple[str, str | None]] = []
        self.token = ""
        self.dies: str | None = None

    def hand_out(self, token: str) -> None:
        assert not self.started, "a client would look for a token that is not there yet"
        self.token = token

    def start_client(self, federation: str, site: Site, gpu: str | None) -> None:
        assert federation == "fed-1"
        self.started.append((site.name, gpu))

    def watch(self) -> list[str]:
        if self.dies:
            raise ProcessFailed(self.dies)
        self.api.enrolled += 1
        return []


def sites(count: int) -> list[Site]:
    return [Site(f"site-{number}", "symbols:neon") for number in range(count)]


def test_gpus_are_dealt_out_in_turn() -> None:
    services, heard = Fake(), []
    services.enrol("fed-1", sites(5), heard.append, ["cuda:0", "cuda:1"])
    assert [gpu for _, gpu in services.started] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert services.token == "enrol-me"
    assert heard == [0, 1, 2, 3, 4, 5]
    without = Fake()
    without.enrol("fed-1", sites(2), heard.append)
    assert without.started == [("site-0", None), ("site-1", None)]


def test_a_client_that_ends_instead_of_enrolling() -> None:
    services = Fake()
    services.dies = "client-site-0 ended with 3: no such folder"
    with pytest.raises(ProcessFailed, match="no such folder"):
        services.enrol("fed-1", sites(1), lambda count: None)


def test_an_initial_state_is_sent_where_there_is_one() -> None:
    services = Fake()
    assert services.create({"name": "x"}) == "fed-1"
    assert services.create({"name": "y"}, b"tensors") == "fed-1"
    assert [call[2] for call in services.api.calls] == [{"name": "x"}, {"name": "y"}, b"tensors"]
    assert services.api.calls[-1][:2] == ("PUT", "/v1/federations/fed-1/initial-state")


@pytest.mark.parametrize(
    ("asked", "chosen"), [("auto", ["g0", "g1"]), ("none", []), ("1", ["g0"]), ("2", ["g0", "g1"])]
)
def test_gpus_that_there_are(asked: str, chosen: list[str]) -> None:
    assert choose_gpus(asked, lambda: ["g0", "g1"]) == chosen


def test_gpus_that_there_are_not() -> None:
    with pytest.raises(PromptfedError, match=r"--gpus 3 asks for more GPUs than there are \(2\)"):
        choose_gpus("3", lambda: ["g0", "g1"])
    assert choose_gpus("auto", list) == []
    for asked in ("all", "0", "-1", "1.5", ""):
        with pytest.raises(PromptfedError, match="use auto, none or a number"):
            choose_gpus(asked, lambda: ["g0"])


def test_gpus_of_the_engine_are_those_of_nvidias_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpus_of_engine() == []
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$*" = "--query-gpu=uuid --format=csv,noheader" ] && printf "GPU-a\\nGPU-b\\n"\n')
    tool.chmod(0o755)
    assert gpus_of_engine() == ["GPU-a", "GPU-b"]
    tool.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert gpus_of_engine() == []


def refusal(*arguments: str) -> tuple[int, str]:
    """Exit code and the one line on stderr of ``promptfed launch``."""
    done = CliRunner().invoke(app, ["launch", *arguments])
    assert done.stderr.count("\n") == 1, done.stderr
    return done.exit_code, done.stderr


@pytest.mark.parametrize("runtime", ["process", "docker"])
def test_more_gpus_than_there_are(spec: Path, runtime: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        f"promptfed.runtime.containers.gpus_of_{'torch' if runtime == 'process' else 'engine'}", lambda: ["one"]
    )
    code, said = refusal(str(spec), "--runtime", runtime, "--gpus", "2")
    assert code == Exit.BAD_INPUT
    assert "--gpus 2 asks for more GPUs than there are (1)" in said


def test_the_documented_run_file(tmp_path: Path) -> None:
    (block,) = re.findall(r"```yaml\n(name: .*?)```", (ROOT / "docs" / "guides" / "deploy.md").read_text(), re.DOTALL)
    path = tmp_path / "styles.yaml"
    path.write_text(block)
    run = read_run(path)
    assert [site.role for site in run.sites] == ["trainer", "trainer", "evaluator"]
    assert parse_spec(run.spec).participation.min_clients == 2


def start(*options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "promptfed", "launch", *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_a_federation_of_processes(spec: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    launched = start(str(spec), "--json", "--keep", str(folder), "--gpus", "none")
    out, errors = launched.communicate(timeout=PATIENCE)
    assert launched.returncode == Exit.OK, errors
    result = json.loads(out)
    assert (result["method"], result["runtime"], result["rounds"]) == ("promptfl", "process", 2)
    assert set(result["federated"]) == {"client:a", "client:b", "unseen:sketch"} == set(result["zero_shot"])
    assert result["state_hash"].startswith("sha256:")
    assert {"coordinator.log", "client-a.log", "client-b.log", "client-referee.log"} <= set(os.listdir(folder))


def test_a_result_of_sites_without_common_classes_is_shown_with_the_coordinator_s_remarks(
    spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Accuracies alone have no card, which would say how many classes each trainer has."""
    asked: list[str] = []

    def send(request: Request[Any]) -> Any:
        asked.append(request.path)
        return SimpleNamespace(view=request.model(remarks=["a learns\x1b nothing"]))

    monkeypatch.setattr(run, "started_services", lambda *given, **named: nullcontext(Mock(api=Mock(send=send))))
    monkeypatch.setattr(run, "conduct", lambda *given: result({"a": 50, "b": 50}, spec={"class_names": None}))
    shown = CliRunner().invoke(app, ["launch", str(spec), "--gpus", "none"])
    assert (shown.exit_code, asked) == (Exit.OK, [f"/v1/federations/{FEDERATION.id}/remarks"]), shown.output
    assert "a learns\\x1b nothing" in shown.output, "as plain text"
    assert "80.0 %" in shown.output
    as_json = CliRunner().invoke(app, ["launch", str(spec), "--gpus", "none", "--json"])
    assert json.loads(as_json.stdout)["federated"] == {"client:a": 0.8, "client:b": 0.8}
