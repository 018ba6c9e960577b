"""Every method as an ONNX model: the answers are Python's, or it is refused with the reason."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import onnx
import pytest
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.export.onnx_graph import write_onnx
from promptfed.sdk.client import CommandError
from promptfed.shared.methods import METHODS
from tests.promptfed.export.test_onnx import expect_same_answers
from tests.support import exports
from tests.support.adapted import NAMES, adapted
from tests.support.own_images import SHAPES, write_folder

CLIENTS_OWN = ("coop", "fedbabu", "fedrep", "pfedpg", "singleset_full", "singleset_vpt")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fast_pt", {"mixture": "soft"}), ("fedclip", {"features": "normalized"}), ("fedvpt", {"m": 3}),
    ("fedapt", {"mixture": "hard"}), ("fedapt", {"t": 1.0}), ("fedotp", {"transport": "balanced"}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "hyper"), [*((name, {}) for name in METHODS if name not in CLIENTS_OWN), *VARIANTS])
def test_logits_are_those_of_python(name: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    expect_same_answers(adapted(exports.backbone(), name, **hyper), tmp_path)


@pytest.mark.parametrize("name", CLIENTS_OWN)
def test_others_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="ask a client's own service"):
        write_onnx(adapted(exports.backbone(), name), NAMES, exports.backbone(), tmp_path / "model.onnx")


def test_prompts_are_in_the_graph_and_texts_are_constants(tmp_path: Path) -> None:
    sizes = {}
    for name in ("zero_shot", "promptfl", "fedvpt"):
        write_onnx(adapted(exports.backbone(), name), NAMES, exports.backbone(), tmp_path / f"{name}.onnx")
        graph = onnx.load(tmp_path / f"{name}.onnx").graph
        assert [value.name for value in (*graph.input, *graph.output)] == ["pixels", "logits"]
        assert graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        sizes[name] = (tmp_path / f"{name}.onnx").stat().st_size
    assert sizes["promptfl"] < 1.1 * sizes["zero_shot"]  # no text tower


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {name: f"folder:{write_folder(tmp_path / name, seed=seed, each=4)}" for seed, name in enumerate(("a", "b"))}
    result = promptfed.run(
        {"name": "promptfl", "m": 2}, data, rounds=1, class_names=list(SHAPES), backbone=exports.backbone()
    )
    result.export(tmp_path / "export")
    arguments = ["onnx", str(tmp_path / "export"), "--out"]
    done = CliRunner().invoke(app, [*arguments, str(tmp_path / "model.onnx"), "--json"])
    assert done.exit_code == 0, done.output
    card = json.loads((tmp_path / "export" / "card.json").read_text())
    assert json.loads(done.stdout)["state"] == card["hashes"]["state"]
    assert "ends in .onnx" in CliRunner().invoke(app, [*arguments, str(tmp_path / "model")]).stderr
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "promptfed[onnx]" in CliRunner().invoke(app, [*arguments, str(tmp_path / "other.onnx")]).stderr
