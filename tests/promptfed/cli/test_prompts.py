"""`promptfed prompts generate`: a newcomer's context, made from class names alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.sdk.errors import Exit
from promptfed.shared.clip import Backbone, load_backbone, shape_of
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.text_features import name_features
from tests.support.coordinators import InThread, in_thread

METHOD = {"name": "fedtpg", "m": 4}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone("promptfed-tiny", "embedded")


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory, backbone: Backbone) -> Iterator[InThread]:
    """It has a running federation of each kind, with the embedded backbone."""
    shape = shape_of(backbone).model_dump()
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as server:
        for name, method in (("texts", METHOD), ("plain", {"name": "promptfl", "m": 4})):
            federation = server.create(name=name, method=method)
            server.enrol(federation, "a", "b", backbone_fingerprint=backbone.fingerprint, backbone_shape=shape)
            server.post(f"{federation}/start")
        yield server


def run(coordinator: InThread, *arguments: str) -> Result:
    token = coordinator.settings.data_dir / "operator.token"
    options = ["--coordinator", coordinator.url, "--token-file", str(token)]
    return CliRunner().invoke(app, ["prompts", "generate", *arguments, *options])


def test_classes_that_no_client_has_get_a_context(coordinator: InThread, backbone: Backbone, tmp_path: Path) -> None:
    file = tmp_path / "context.safetensors"
    asked = ("--federation", "texts", "--classes", "paint_brush, anvil,,  hot air balloon")
    done = run(coordinator, *asked, "--out", str(file))
    assert done.exit_code == Exit.OK, done.output
    assert "3 classes, from round 0" in done.stdout
    found = load_file(file)
    live = coordinator.registry.find("texts")
    state = load_state(coordinator)
    names = ("paint_brush", "anvil", "hot air balloon")
    wanted = make_method(METHOD).generate(state, name_features(backbone, names), live.context())
    assert set(found) == {"context"}
    assert found["context"].shape == (4, backbone.d_t)
    assert float((found["context"] - wanted["context"]).abs().max()) <= 1e-6
    printed = run(coordinator, *asked)
    assert json.loads(printed.stdout)["tensors"]["context"]["data"] == found["context"].tolist()
    # What was written can start another federation at once: promptfl with as many vectors.
    federation = coordinator.create(name="next", method={"name": "promptfl", "m": 4})
    path = f"/v1/federations/{federation}/initial-state"
    supplied = coordinator.http.put(path, content=file.read_bytes(), headers=coordinator.operator)
    assert supplied.status_code == 200, supplied.text


def load_state(coordinator: InThread) -> dict[str, torch.Tensor]:
    from promptfed.shared.tensors.torch_tensors import decode

    path = "/v1/federations/texts/prompts"
    return decode(coordinator.http.get(path, headers=coordinator.operator).content)[0]


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--federation", "plain", "--classes", "a,b"), Exit.REFUSED, "promptfl learns no prompt generator"),
        (("--federation", "none", "--classes", "a,b"), Exit.REFUSED, "no federation 'none'"),
        (("--federation", "texts", "--classes", " , "), Exit.BAD_INPUT, "--classes is empty"),
        (("--federation", "texts", "--classes", "a,b,a"), Exit.BAD_INPUT, "--classes lists a class twice: a"),
        (("--federation", "texts", "--classes", "a," + "long " * 40), Exit.BAD_INPUT, "shorten it"),
        (("--federation", "texts", "--classes", "a", "--round", "9"), Exit.REFUSED, "round 9 is not over"),
    ],
)
def test_errors_are_one_line(coordinator: InThread, arguments: tuple[str, ...], code: Exit, says: str) -> None:
    done = run(coordinator, *arguments)
    assert done.exit_code == code, done.output
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_another_backbone_makes_no_features(coordinator: InThread) -> None:
    shape = {"d_t": 112, "d_e": 96}
    federation = coordinator.create(name="elsewhere", method=METHOD)
    coordinator.enrol(federation, "a", "b", backbone_shape=shape)
    coordinator.post(f"{federation}/start")
    done = run(coordinator, "--federation", "elsewhere", "--classes", "a,b")
    assert done.exit_code == Exit.BAD_INPUT
    assert "but the backbone here is sha256:" in done.stderr


def test_its_help_imports_no_torch() -> None:
    code = "import sys, promptfed.cli.commands.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
