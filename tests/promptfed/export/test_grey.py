"""How a site reads grey pictures of more than 8 bits goes with the result: card, `predict`, `score`, ONNX's notes."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

import promptfed
from promptfed.cli.main import app
from promptfed.client_service.exits import ClientError
from promptfed.client_service.joining.offer import Offer
from promptfed.client_service.serving import prediction
from promptfed.client_service.settings import Settings
from promptfed.client_service.training.data import check_scales
from promptfed.coordinator.resources.clients.operations import _software
from promptfed.export.reading import open_export
from promptfed.shared.data import open_source
from promptfed.shared.errors import PromptfedError
from promptfed.shared.messages import EnrolRequest

Numbers = np.ndarray[Any, Any]


def picture(seed: int, most: int) -> Numbers:
    """Noise up to 800, and one number ``most``."""
    numbers = np.random.default_rng(seed).integers(0, 800, (48, 48)).astype(np.uint16)
    numbers[0, 0] = most
    return numbers


def write(root: Path, most: int, seed: int = 0) -> str:
    for label, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for k in range(4):
            Image.fromarray(picture(100 * seed + 10 * label + k, most - k)).save(root / name / f"{k}.png")
    return f"folder:{root}"


def shown(most: int, bits: int) -> bytes:
    """The same picture in 8 bits, by a scale of so many bits."""
    file = io.BytesIO()
    levels = np.floor(picture(77, most) / (2**bits - 1) * 255 + 0.5).astype(np.uint8)
    Image.fromarray(levels).save(file, "PNG")
    return file.getvalue()


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export of two sites of 12 bits, one by its files and one by its URI."""
    root = tmp_path_factory.mktemp("sites")
    data = {"a": write(root / "a", 4000), "b": write(root / "b", 900, seed=1) + "?grey=12"}
    return promptfed.run("promptfl", data, rounds=1, backbone="promptfed-tiny").export(root / "out")


def test_the_card_has_each_sites_scale_and_predictions_take_it(exported: Path, tmp_path: Path) -> None:
    card = json.loads((exported / "card.json").read_text())
    assert [client["grey"] for client in card["participants"]] == [[0, 4095]] * 2
    assert "more than 8 bits were read as (a: 12 bits; b: 12 bits)." in (exported / "card.md").read_text()
    Image.fromarray(picture(77, 900)).save(tmp_path / "dim.png")  # alone it comes out as 10 bits
    for bits in (10, 12):
        (tmp_path / f"{bits}.png").write_bytes(shown(900, bits))
    names = ("dim.png", "12.png", "10.png")
    done = command("predict", *(tmp_path / name for name in names), "--export", exported, "--json")
    assert done.exit_code == 0, done.output
    dim, of_12, of_10 = (answer["classes"] for answer in json.loads(done.stdout))
    assert dim == of_12 != of_10
    Image.fromarray(picture(77, 5000)).save(tmp_path / "bright.png")
    refused = command("predict", tmp_path / "bright.png", "--export", exported)
    assert "its numbers are 0 to 5000, where grey pictures are read as 12 bits" in refused.output.replace("\n", " ")


def test_scores_take_the_results_scale_unless_the_uri_says_another(exported: Path, tmp_path: Path) -> None:
    uri = write(tmp_path / "c", 900, seed=2)
    greys = open_export(exported).model.greys
    assert greys == ((0, 4095),)
    assert open_source(uri).grey == (0, 1023)
    assert open_source(uri, "evaluator", greys).grey == (0, 4095)
    assert open_source(f"{uri}?grey=11", "evaluator", greys).grey == (0, 2047)
    assert command("score", exported, uri, "--out", tmp_path / "score").exit_code == 0
    bright = write(tmp_path / "d", 5000)
    assert "are read as 12 bits" in command("score", exported, bright, "--out", tmp_path / "no").output.replace(
        "\n", " "
    )


def test_onnx_notes_have_the_scale(exported: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime", reason="ONNX: pip install '.[onnx]'")
    pytest.importorskip("onnx", reason="ONNX: pip install '.[onnx]'")
    done = command("onnx", exported, "--out", tmp_path / "m.onnx", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["preprocessing"]["grey"] == [[0, 4095]]


def test_sites_that_read_differently_are_told_apart(tmp_path: Path) -> None:
    data = {"a": write(tmp_path / "a", 4000), "b": write(tmp_path / "b", 900, seed=1)}
    result = promptfed.run("promptfl", data, rounds=1, backbone="promptfed-tiny")
    model = open_export(result.export(tmp_path / "out")).model
    assert model.greys == ((0, 1023), (0, 4095))
    with pytest.raises(prediction.BadImage, match="read grey pictures as 10 bits or as 12 bits: send it with 8 bits"):
        prediction.read_image((tmp_path / "a" / "cat" / "0.png").read_bytes(), model.greys)
    assert prediction.read_image(shown(900, 10), model.greys).size == (48, 48)
    refused = command("score", tmp_path / "out", data["a"], "--out", tmp_path / "score")
    assert "grey pictures as 10 bits or as 12 bits; say which with grey=" in refused.output.replace("\n", " ")
    assert command("score", tmp_path / "out", f"{data['a']}?grey=12", "--out", tmp_path / "score").exit_code == 0


def test_a_test_set_of_another_scale_is_refused_unless_both_uris_say_so(tmp_path: Path) -> None:
    own, other = write(tmp_path / "a", 4000), write(tmp_path / "b", 900, seed=1)
    opened = {uri: open_source(uri) for uri in (own, other, f"{own}?grey=12", f"{other}?grey=10", f"{other}?grey=12")}
    for uris in ((own, other), (f"{own}?grey=12", other), (own, f"{other}?grey=10")):
        with pytest.raises(ClientError, match=r"far are read as 10 bits, .* data as 12 bits: say grey= in both"):
            check_scales(opened[uris[0]], {"far": opened[uris[1]]})
    check_scales(opened[own], {"far": opened[f"{other}?grey=12"]})
    check_scales(opened[f"{own}?grey=12"], {"far": opened[f"{other}?grey=10"]})
    with pytest.raises(PromptfedError, match="client a: grey pictures of the test set far are read as 10 bits"):
        promptfed.run("promptfl", {"a": own, "b": own}, rounds=1, backbone="promptfed-tiny", tests={"far": other})


def test_what_a_site_says_is_declared_and_kept_anew_at_each_start(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "a", 4000))
    settings = Settings(name="a", coordinator="https://x", federation="f", data="folder:a")
    offered: Any = SimpleNamespace(privacy=None)
    told = Offer(offered, offered, source, {}, None).declared(settings, 1, None)
    assert told.grey == (0, 4095)
    about = {"secret": "0" * 64, "backbone_fingerprint": "sha256:" + "0" * 64, "backbone_shape": {"d_e": 8}}
    request = EnrolRequest(name="a", num_samples=8, class_names=["cat", "dog"], grey=told.grey, **about)
    assert _software(request) == {"grey": [0, 4095]}
    assert "grey" not in EnrolRequest(name="a", num_samples=8, class_names=["cat", "dog"], **about).model_dump()
