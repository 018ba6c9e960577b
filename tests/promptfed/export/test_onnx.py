"""An export as an ONNX model: onnxruntime's answers are Python's, and what has no graph is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import promptfed
from promptfed.cli.app import exit_code
from promptfed.cli.main import app
from promptfed.client_service.serving.prediction import OneImage
from promptfed.export import onnx_graph
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.onnx_graph import write_onnx
from promptfed.shared.data import open_source
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods import METHODS, fedotp
from promptfed.shared.service.reasons import Exit
from tests.support import exports
from tests.support.adapted import NAMES, adapted
from tests.support.equality import assert_values
from tests.support.own_images import SHAPES, write_folder


def pictures() -> list[Image.Image]:
    """Other drawings than the exporter compares."""
    test = open_source("symbols:neon?topic=tools&test_per_class=1").test
    return [test.image(at) for at in range(3)]


def preprocessed(image: Image.Image, told: dict) -> np.ndarray:
    """What the description says, in Pillow and numpy."""
    assert (told["resize"], told["crop"], told["mode"]) == ("shorter side", "center", "RGB")
    height, width = told["size"]
    image = image.convert(told["mode"])
    factor = height / min(image.size)
    resized = image.resize(
        (round(image.width * factor), round(image.height * factor)), Image.Resampling[told["interpolation"].upper()]
    )
    left, top = (resized.width - width) // 2, (resized.height - height) // 2
    cut = np.asarray(resized.crop((left, top, left + width, top + height)), dtype=np.float32) / told["divide_by"]
    return ((cut - told["mean"]) / told["std"]).transpose(2, 0, 1).astype(np.float32)


def expect_same_answers(model: AdaptedModel, folder: Path) -> None:
    """Three images at once and one alone, beside Python's classifier of one image."""
    backbone = exports.backbone()
    described = write_onnx(model, NAMES, backbone, folder / "model.onnx")
    assert described == json.loads((folder / "model.json").read_text())
    assert described["class_names"] == list(NAMES)
    pixels = np.stack([preprocessed(image, described["preprocessing"]) for image in pictures()])
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    served, row = model.serve(backbone, NAMES), torch.zeros(1, dtype=torch.int64)
    with torch.no_grad():
        wanted = torch.cat([served.classifier.logits(OneImage(backbone, image), row) for image in pictures()])
    assert_values(torch.from_numpy(session.run(None, {"pixels": pixels})[0]), wanted)
    assert_values(torch.from_numpy(session.run(None, {"pixels": pixels[:1]})[0]), wanted[:1])


def test_steps_that_depend_on_the_image_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedotp, "into_graph", lambda: False)  # as of a method that does not think of graphs
    with pytest.raises(PromptfedError, match="takes other steps from image to image"):
        write_onnx(adapted(exports.backbone(), "fedotp"), NAMES, exports.backbone(), tmp_path / "model.onnx")


def test_a_graph_that_answers_differently_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = onnx_graph._traced
    other = adapted(exports.backbone(), "zero_shot").serve(exports.backbone(), NAMES)
    monkeypatch.setattr(onnx_graph, "_traced", lambda served: traced(other))
    with pytest.raises(PromptfedError, match="differ from Python's by"):
        write_onnx(adapted(exports.backbone(), "promptfl"), NAMES, exports.backbone(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())


CLIENTS_OWN = ("coop", "fedbabu", "fedrep", "pfedpg", "singleset_full", "singleset_vpt")
VARIANTS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fast_pt", {"mixture": "soft"}), ("fedclip", {"features": "normalized"}), ("fedvpt", {"m": 3}),
    ("fedapt", {"t": 1.0}),
)  # fmt: skip


@pytest.mark.parametrize(("name", "hyper"), [*((name, {}) for name in METHODS if name not in CLIENTS_OWN), *VARIANTS])
def test_logits_are_those_of_python(name: str, hyper: dict[str, Any], tmp_path: Path) -> None:
    expect_same_answers(adapted(exports.backbone(), name, **hyper), tmp_path)


@pytest.mark.parametrize("name", CLIENTS_OWN)
def test_others_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(PromptfedError, match="ask a client's own service") as refused:
        write_onnx(adapted(exports.backbone(), name), NAMES, exports.backbone(), tmp_path / "model.onnx")
    assert exit_code(refused.value) == Exit.BAD_INPUT
    assert not list(tmp_path.iterdir())


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
    assert "ends in .onnx" in CliRunner().invoke(app, [*arguments, str(tmp_path / "other")]).stderr
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    assert "promptfed[onnx]" in CliRunner().invoke(app, [*arguments, str(tmp_path / "other.onnx")]).stderr
