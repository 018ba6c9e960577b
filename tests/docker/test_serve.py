"""The image that serves an export: its answer is that of `promptfed predict` here."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

import promptfed
from promptfed.cli.predicting import model_of_export
from promptfed.export.adapted_model import predictor_of
from tests import ROOT
from tests.docker.conftest import docker, wait_for
from tests.support import exports
from tests.support.own_images import SHAPES, picture, write_folder
from tests.support.ports import free_port

IMAGE = "promptfed-serve-test"


def test_a_container_answers_as_predict_does(engine: None, tmp_path: Path) -> None:
    data = {name: f"folder:{write_folder(tmp_path / name, seed=seed, each=4)}" for seed, name in enumerate("ab")}
    spec = {"name": "promptfl", "m": 2}
    result = promptfed.run(spec, data, rounds=1, class_names=list(SHAPES), backbone=exports.backbone())
    result.export(tmp_path / "export")
    (tmp_path / "token").write_text("secret")
    picture("circle", 1).save(tmp_path / "photo.png")
    for path in (tmp_path, *(tmp_path / "export").rglob("*"), tmp_path / "export", tmp_path / "token"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    built = docker("build", "--quiet", "--target", "serve", "--tag", IMAGE, str(ROOT))
    assert built.returncode == 0, built.stderr
    port = free_port()
    mounts = [f"--volume={tmp_path}/export:/export:ro", f"--volume={tmp_path}/token:/run/secrets/token:ro"]
    started = docker("run", "--detach", "--rm", *mounts, f"--publish=127.0.0.1:{port}:8082", IMAGE)
    assert started.returncode == 0, started.stderr
    try:
        url = f"http://127.0.0.1:{port}"

        def healthy() -> bool:
            try:
                return httpx.get(f"{url}/healthz").status_code == 200
            except httpx.HTTPError:
                return False

        wait_for("the service", healthy)
        headers = {"Content-Type": "application/octet-stream", "Authorization": "Bearer secret"}
        content = (tmp_path / "photo.png").read_bytes()
        told = httpx.post(f"{url}/v1/predict", content=content, headers=headers, timeout=60).json()
    finally:
        docker("kill", started.stdout.strip())
    model, names = model_of_export(tmp_path / "export")
    wanted = predictor_of(model.serve(exports.backbone(), names)).predict(content)
    assert told["class_name"] == wanted["class_name"]
    for here, there in zip(wanted["classes"], told["classes"], strict=True):
        assert there["probability"] == pytest.approx(here["probability"], abs=1e-5)
