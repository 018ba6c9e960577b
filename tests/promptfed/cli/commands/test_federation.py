"""The command against a real coordinator: what it prints, its exit codes, its errors in one line."""

from __future__ import annotations

import json
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.runtime.processes import Processes
from promptfed.shared.clip import load_backbone
from promptfed.shared.service.reasons import Exit
from promptfed.shared.tensors.torch_tensors import state_hash
from tests.support.waiting import PATIENCE

FINGERPRINT = "sha256:" + "1" * 64
SPEC: dict[str, Any] = {"method": {"name": "promptfl", "m": 4}, "rounds": 2, "backbone": {"fingerprint": FINGERPRINT}}


class Command:
    """Runs `promptfed ...` against one coordinator."""

    def __init__(self, folder: Path, url: str, token: Path):
        self.folder, self.url, self.token = folder, url, token

    def __call__(self, *arguments: str, url: str | None = None) -> Result:
        options = ["--coordinator", url or self.url, "--token-file", str(self.token)]
        return CliRunner().invoke(app, ["federation", *arguments, *options])

    def spec(self, name: str, **changes: Any) -> str:
        path = self.folder / f"{name}.yaml"
        path.write_text(json.dumps(SPEC | {"name": name} | changes))
        return str(path)

    def create(self, name: str, **changes: Any) -> dict[str, Any]:
        done = self("create", self.spec(name, **changes), "--no-backbone", "--json")
        assert done.exit_code == Exit.OK, done.output
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def enrol(self, federation: str, name: str, **changes: Any) -> httpx.Response:
        token = json.loads(self("token", federation, "--json").stdout)["token"]
        body = {
            "name": name, "secret": secrets.token_hex(32), "num_samples": 5, "class_names": ["cat", "dog"],
            "backbone_fingerprint": FINGERPRINT, "backbone_shape": {"d_t": 8, "d_e": 8},
        } | changes  # fmt: skip
        url = f"{self.url}/v1/federations/{federation}/clients"
        return httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"}, timeout=PATIENCE)


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    folder = tmp_path_factory.mktemp("cli")
    data, port_file = folder / "data", folder / "url"
    with Processes(folder) as processes:
        managed = processes.start(
            "coordinator", ["-m", "promptfed.coordinator", f"--data-dir={data}", "--port=0", f"--port-file={port_file}"]
        )
        deadline = time.monotonic() + PATIENCE
        while not port_file.exists():
            assert managed.process.poll() is None, managed.tail(20)
            assert time.monotonic() < deadline, managed.tail(20)
            time.sleep(0.05)
        yield Command(folder, port_file.read_text().strip(), data / "operator.token")


def test_create_list_and_status(command: Command) -> None:
    created = command.create("listed")
    listed = json.loads(command("list", "--json").stdout)
    assert created["id"] in {one["id"] for one in listed}
    status = command("status", "listed")
    assert "listed" in status.stdout
    assert "promptfl, enrolling" in status.stdout
    assert FINGERPRINT in status.stdout
    assert json.loads(command("status", created["id"], "--json").stdout)["name"] == "listed"
    assert "listed" in command("list").stdout


def test_dry_run_creates_nothing(command: Command) -> None:
    done = command("create", command.spec("imagined"), "--no-backbone", "--dry-run")
    assert done.exit_code == Exit.OK
    assert "nothing was created" in done.stdout
    assert command("status", "imagined").exit_code == Exit.REFUSED


@pytest.mark.parametrize("backbone", ["--no-backbone", "--backbone"])
def test_all_that_is_wrong_with_a_spec_is_told_at_once(command: Command, backbone: str) -> None:
    changes = {"round": 3, "training": {"epochs": 0}, "method": {"name": "promptfl", "mm": 1}}
    done = command("create", command.spec("worse", **changes), backbone)
    assert done.exit_code == (Exit.REFUSED if backbone == "--no-backbone" else Exit.BAD_INPUT)
    head, *told = done.stderr.strip().splitlines()
    assert head == "promptfed: 3 things are wrong:"
    assert [line.split(":")[0].strip() for line in told] == ["training.epochs", "round", "method.mm"]
    assert "did you mean 'rounds'?" in done.stderr


def test_wrong_moments_say_where_the_federation_stands(command: Command) -> None:
    command.create("early", participation={"min_clients": 2})
    nobody = command("start", "early")
    assert nobody.exit_code == Exit.REFUSED
    assert "2" in nobody.stderr
    assert "0" in nobody.stderr
    for verb in ("pause", "resume"):
        done = command(verb, "early")
        assert done.exit_code == Exit.REFUSED
        assert "enrolling" in done.stderr
    assert "cancelled" in command("cancel", "early", "--yes").stdout
    assert command("watch", "early").exit_code == Exit.FEDERATION_ENDED_BADLY


def test_an_address_of_something_else(command: Command) -> None:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as other:
        threading.Thread(target=other.handle_request).start()
        elsewhere = command("list", url=f"http://127.0.0.1:{other.server_port}")
    assert elsewhere.exit_code == Exit.FAILED
    assert "is that a coordinator's address?" in elsewhere.stderr


def test_an_enrolment_token_is_written_for_its_owner_alone(command: Command, tmp_path: Path) -> None:
    command.create("minted")
    out = tmp_path / "enrolment.token"
    done = command("token", "minted", "--out", str(out))
    assert done.exit_code == Exit.OK
    assert stat.S_IMODE(out.stat().st_mode) == 0o600
    assert out.read_text().strip() not in done.output


def test_enrolment_tokens_are_minted_for_somebody_listed_and_taken_back(command: Command) -> None:
    command.create("handed-out")
    asked = ["--uses", "2", "--role", "trainer", "--name", "ward-3", "--hours", "2", "--json"]
    minted = json.loads(command("token", "handed-out", *asked).stdout)
    assert (minted["name"], minted["uses"], minted["role"]) == ("ward-3", 2, "trainer")
    [listed] = json.loads(command("token", "handed-out", "--list", "--json").stdout)
    assert (listed["name"], listed["used"], listed["clients"]) == ("ward-3", 0, [])
    assert "0 of 2" in command("token", "handed-out", "--list").stdout
    assert command("token", "handed-out", "--revoke", "ward-3").exit_code == Exit.OK
    assert json.loads(command("token", "handed-out", "--list", "--json").stdout) == []
    gone = command("token", "handed-out", "--revoke", "ward-3")
    assert (gone.exit_code, "has no enrolment token 'ward-3'" in gone.stderr) == (Exit.REFUSED, True)
    both = command("token", "handed-out", "--list", "--revoke", "x")
    assert both.exit_code == Exit.BAD_INPUT


def test_start_pause_resume_and_prompts(command: Command, tmp_path: Path) -> None:
    command.create("running")
    assert command.enrol("running", "hospital-a", secret="5e" * 32).status_code == 201
    assert "running" in command("start", "running").stdout
    url, secret = f"{command.url}/v1/federations/running/task", {"Authorization": f"Bearer {'5e' * 32}"}
    task = httpx.get(url, params={"wait": 30}, headers=secret, timeout=PATIENCE).json()
    httpx.get(url, params={"carrying": task["task_id"], "progress": 0.42}, headers=secret, timeout=PATIENCE)
    assert "waiting for hospital-a (42% done) until 20" in command("status", "running").stdout
    assert "paused" in command("pause", "running").stdout
    assert "running" in command("resume", "running").stdout
    out = tmp_path / "prompts.safetensors"
    written = json.loads(command("prompts", "running", "--out", str(out), "--json").stdout)
    assert load_file(out)["context"].shape == (4, 8)
    assert written["state_hash"] == state_hash(load_file(out))
    assert command("prompts", "running", "--round", "7", "--out", str(out)).exit_code == Exit.REFUSED


def test_words_become_a_context_where_the_command_has_the_backbone(command: Command, tmp_path: Path) -> None:
    words = {"name": "promptfl", "m": 4, "context_init": "a photo of a"}
    bare = command("create", command.spec("bare-words", method=words), "--no-backbone")
    assert bare.exit_code == Exit.OK
    assert command.enrol("bare-words", "hospital-a").status_code == 201
    refused = command("start", "bare-words")
    assert refused.exit_code == Exit.REFUSED
    assert "initial-state" in refused.stderr

    random = {"model": "promptfed-tiny", "pretrained": "random"}
    made = command("create", command.spec("words", method=words, backbone=random), "--json")
    assert made.exit_code == Exit.OK, made.output
    backbone = load_backbone("promptfed-tiny", "random")
    found = json.loads(made.stdout)
    assert found["backbone"]["fingerprint"] == backbone.fingerprint
    shape = {"d_t": backbone.d_t, "d_e": backbone.d_e}
    other = command.enrol("words", "hospital-a", backbone_shape=shape)
    assert other.status_code == 409, other.text
    full = found["spec"]["backbone"]["shape"]
    enrolled = command.enrol("words", "hospital-a", backbone_fingerprint=backbone.fingerprint, backbone_shape=full)
    assert enrolled.status_code == 201, enrolled.text
    assert command("start", "words").exit_code == Exit.OK
    out = tmp_path / "words.safetensors"
    assert command("prompts", "words", "--out", str(out)).exit_code == Exit.OK
    assert torch.equal(load_file(out)["context"], backbone.embed_words("a photo of a"))


def test_a_backbone_that_is_not_there(command: Command) -> None:
    done = command("create", command.spec("lost", backbone={"model": "ViT-B-61"}))
    assert done.exit_code == Exit.BAD_INPUT
    assert "ViT-B-16" in done.stderr
    other = {"model": "promptfed-tiny", "pretrained": "random", "fingerprint": FINGERPRINT}
    wrong = command("create", command.spec("lost", backbone=other))
    assert wrong.exit_code == Exit.BAD_INPUT
    assert "fingerprint" in wrong.stderr
    shaped = {"model": "promptfed-tiny", "pretrained": "random", "shape": {"d_e": 96, "d_t": 9}}
    wrong = command("create", command.spec("lost", backbone=shaped))
    assert wrong.exit_code == Exit.BAD_INPUT
    assert "backbone.shape is not that of the backbone here: d_t 112 instead of 9; leave it out" in wrong.stderr


def test_methods_are_listed_and_described() -> None:
    listed = json.loads(CliRunner().invoke(app, ["methods", "--json"]).stdout)
    assert {"zero_shot", "coop", "promptfl", "promptfl_prox"} <= {one["name"] for one in listed}
    one = CliRunner().invoke(app, ["methods", "promptfl_prox"])
    assert "mu" in one.stdout
    assert "context (m, d_t) float32" in one.stdout
