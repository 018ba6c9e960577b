"""An export served over HTTP: the answers of `predict`; and what is refused."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from promptfed.cli.predicting import model_of_export
from promptfed.client_service.serving import image_bodies
from promptfed.client_service.serving.api import create_export_app
from promptfed.export.adapted_model import predictor_of
from promptfed.shared.service.reasons import Exit
from tests.promptfed.conftest import command
from tests.support import exports
from tests.support.own_images import SHAPES, write_folder
from tests.support.waiting import PATIENCE

Ask = Callable[..., TestClient]


@pytest.fixture
def images(tmp_path: Path) -> list[Path]:
    write_folder(tmp_path / "in", ("circle", "bar"), seed=9, each=2)
    return sorted((tmp_path / "in").rglob("*.png"))


@pytest.fixture(scope="module")
def ask(exported: Path) -> Ask:
    model, names = model_of_export(exported)
    predictor = predictor_of(model.serve(exports.backbone(), names))
    about = {"stage": "serving", "name": "promptfl", "federation": "export", "round": 1}

    def make(token: str | None = None) -> TestClient:
        host = "127.0.0.1" if token is None else "0.0.0.0"
        return TestClient(create_export_app(about, predictor, token, host), base_url="http://127.0.0.1")

    return make


TYPED = {"Content-Type": image_bodies.IMAGE_TYPE}


def test_answers_are_those_of_predict(exported: Path, images: list[Path], ask: Ask) -> None:
    told = json.loads(command("predict", *images, "--export", exported, "--json").stdout)
    answers = [ask().post("/v1/predict", content=path.read_bytes(), headers=TYPED).json() for path in images]
    for wanted, answer in zip(told, answers, strict=True):
        assert answer == {key: value for key, value in wanted.items() if key != "image" and value is not None}


def test_the_page_is_there_and_a_token_guards_the_rest(ask: Ask, images: list[Path]) -> None:
    http = ask("secret")
    assert "What is in these images?" in http.get("/").text
    assert http.get("/healthz").status_code == 200
    assert http.get("/status").status_code == 401
    assert http.post("/v1/predict", content=b"x", headers=TYPED).status_code == 401
    http.headers["Authorization"] = "Bearer secret"
    assert http.get("/status").json()["stage"] == "serving"
    assert http.post("/v1/predict", content=images[0].read_bytes(), headers=TYPED).status_code == 200


def test_what_cannot_be_served_is_refused_in_one_line(exported: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (tmp_path / "empty").write_text("")
        for given, text in (
            ((tmp_path,), "is not a promptfed export"),
            ((exported, "--host", "0.0.0.0"), "needs --token-file"),
            ((exported, "--token-file", tmp_path / "none"), "cannot read the token"),
            ((exported, "--token-file", tmp_path / "empty"), "holds no token"),
            ((exported, "--port", port), "(--port): the address is in use; give another port"),
        ):
            refused = command("serve", *given)
            assert refused.exit_code in (Exit.USAGE, Exit.BAD_INPUT), refused.output
            assert text in refused.stderr
            assert refused.stderr.count("\n") == 1


@pytest.mark.extended
def test_the_command_serves_until_it_is_interrupted(exported: Path, images: list[Path]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "promptfed", "serve", str(exported), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        [url] = re.findall(r"http://[\d.]+:\d+", process.stdout.readline())[:1]
        answer = httpx.post(f"{url}/v1/predict", content=images[0].read_bytes(), headers=TYPED, timeout=PATIENCE)
        assert answer.json()["class_name"] in SHAPES
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0
    finally:
        process.kill()
        process.wait()
