"""An export as an ONNX model: onnxruntime's answers are Python's, and what has no graph is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image

from promptfed.client_service.serving.prediction import OneImage
from promptfed.export import onnx_graph
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.onnx_graph import write_onnx
from promptfed.sdk.client import CommandError, Exit
from promptfed.shared.data import open_source
from promptfed.shared.methods import fedotp
from tests.support import exports
from tests.support.adapted import NAMES, adapted
from tests.support.equality import assert_values


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


@pytest.mark.parametrize("name", ["promptfl", "plan", "fedcocoop"])
def test_logits_are_those_of_python(name: str, tmp_path: Path) -> None:
    expect_same_answers(adapted(exports.backbone(), name), tmp_path)


@pytest.mark.parametrize(
    ("name", "hyper", "text"),
    [("pfedpg", {"m": 2}, "classifies with what each client keeps to itself"), ("coop", {"m": 4}, "shares nothing")],
)
def test_a_method_without_a_graph_is_refused(name: str, hyper: dict, text: str, tmp_path: Path) -> None:
    with pytest.raises(CommandError, match=text) as refused:
        write_onnx(adapted(exports.backbone(), name, **hyper), NAMES, exports.backbone(), tmp_path / "model.onnx")
    assert refused.value.exit == Exit.BAD_INPUT
    assert not list(tmp_path.iterdir())


def test_steps_that_depend_on_the_image_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fedotp, "into_graph", lambda: False)  # as of a method that does not think of graphs
    with pytest.raises(CommandError, match="takes other steps from image to image"):
        write_onnx(adapted(exports.backbone(), "fedotp"), NAMES, exports.backbone(), tmp_path / "model.onnx")


def test_a_graph_that_answers_differently_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced = onnx_graph._traced
    other = adapted(exports.backbone(), "zero_shot").serve(exports.backbone(), NAMES)
    monkeypatch.setattr(onnx_graph, "_traced", lambda served: traced(other))
    with pytest.raises(CommandError, match="differ from Python's by"):
        write_onnx(adapted(exports.backbone(), "promptfl"), NAMES, exports.backbone(), tmp_path / "model.onnx")
    assert not list(tmp_path.iterdir())
