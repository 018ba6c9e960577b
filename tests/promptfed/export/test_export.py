"""`promptfed export` and `promptfed predict`: the card's code runs without promptfed, and answers as promptfed does."""

from __future__ import annotations

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.export import export as exporting
from promptfed.export.adapted_model import AdaptedModel, predictor_of
from promptfed.export.export import ExportOptions
from promptfed.export.reading import read_export
from promptfed.export.snippet import snippet
from promptfed.sdk.result import FederationResult
from promptfed.shared.api.export_card import Accuracies, MeasuredAccuracy
from promptfed.shared.cards.card_text import accuracies as card_accuracies
from promptfed.shared.clip import Backbone
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.text_features import name_features
from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.service.reasons import Exit
from promptfed.shared.tensors.torch_tensors import decode
from tests.support import exports
from tests.support.coordinators import InThread
from tests.support.exports import DOMAINS, NAMES, SPECS
from tests.support.waiting import PATIENCE


def mixing(coordinator: InThread, backbone: Backbone) -> FederationResult:
    """FaST-PT's federation as it is after its last round: both domains have a prompt, and φ tells them apart."""
    draws = torch.Generator().manual_seed(3)
    keys = sorted(domain_key(f"a {name} of a {{}}") for name in DOMAINS)
    return exports.with_state(
        exports.finished_result(coordinator, "fast_pt"),
        domains=torch.tensor(keys),
        classifier_weight=torch.randn(2, backbone.d_e, generator=draws),
        classifier_bias=torch.zeros(2),
        domain_prompts=torch.randn(2, 2, backbone.d_t, generator=draws),
        listed_domains=torch.tensor(keys),
    )


def run_snippets(*folders: Path) -> list[torch.Tensor]:
    """The logits that the cards' code gives in a process without promptfed, each in the folder of its export."""
    for folder in folders:
        (folder / "snippet.py").write_text(exports.code_of(folder / "card.md"))
        exports.picture().save(folder / "image.png")
    command = [exports.PYTHON, "-c", exports.WITHOUT_PROMPTFED, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("%") == len(NAMES) * len(folders)
    return [load_file(folder / "logits.safetensors")["logits"] for folder in folders]


def export(result: FederationResult, folder: Path, options: ExportOptions, backbone: Backbone) -> dict[str, Any]:
    """Write the export; its card, as JSON has it."""
    return exporting.export(result, folder, options, backbone).model_dump(mode="json")


def ours(found: FederationResult, backbone: Backbone) -> dict[str, Any]:
    model = AdaptedModel.of(found.facts, found.state)
    return predictor_of(model.serve(backbone, NAMES)).predict(png())


def png() -> bytes:
    import io

    file = io.BytesIO()
    exports.picture().save(file, "PNG")
    return file.getvalue()


def test_the_cards_code_answers_as_promptfed_does_without_promptfed(
    coordinator: InThread, backbone: Backbone, tmp_path: Path
) -> None:
    """Once with the text of one context, once with FaST-PT's texts of each domain: two kinds of code."""
    both = [exports.finished_result(coordinator, "fedtpg"), mixing(coordinator, backbone)]
    folders = [tmp_path / found.federation.name for found in both]
    cards = [export(found, folder, ExportOptions(), backbone) for found, folder in zip(both, folders, strict=True)]
    for found, card, logits in zip(both, cards, run_snippets(*folders), strict=True):
        expected = {row["name"]: row["probability"] for row in ours(found, backbone)["classes"]}
        given = dict(zip(card["class_names"], logits.softmax(-1)[0].tolist(), strict=True))
        assert given == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(("method", "shared", "told"), [
    ("promptfl", "context", "With open_clip alone"), ("fedpgp", "global_context", "what the clients share"),
])  # fmt: skip
def test_class_weights_are_the_shared_prompts_text_features(
    method: str, shared: str, told: str, coordinator: InThread, backbone: Backbone, tmp_path: Path
) -> None:
    found = exports.finished_result(coordinator, method)
    export(found, tmp_path / "out", ExportOptions(), backbone)
    weights = load_file(tmp_path / "out" / "class_weights.safetensors")
    context = load_file(tmp_path / "out" / "prompts.safetensors")[shared]
    expected = backbone.encode_prompts(context, backbone.class_prompts(NAMES, 4), path="plain")
    assert set(weights) == {"class_weights", "zero_shot_weights"}
    assert torch.allclose(weights["class_weights"], expected, atol=1e-5)
    template = backbone.encode_text([f"a photo of a {name}." for name in NAMES])
    assert torch.allclose(weights["zero_shot_weights"], template, atol=1e-5)
    assert told in (tmp_path / "out" / "card.md").read_text()


def test_fedtpg_makes_the_context_for_given_names(coordinator: InThread, backbone: Backbone, tmp_path: Path) -> None:
    found, names = exports.finished_result(coordinator, "fedtpg"), ("violin", "cactus", "moon")
    card = export(found, tmp_path / "out", ExportOptions(("violin", "cactus", "moon")), backbone)
    method = make_method({"name": "fedtpg", "m": 4})
    context = method.context_of(decode(found.body)[0], name_features(backbone, names))
    expected = backbone.encode_prompts(context, backbone.class_prompts(names, 4), path="plain")
    weights = load_file(tmp_path / "out" / "class_weights.safetensors")["class_weights"]
    assert torch.allclose(weights, expected, atol=1e-5)
    assert card["class_names"] == list(names)
    assert card["class_names_from"] == "who exported it"
    assert "exactly these class names" in (tmp_path / "out" / "card.md").read_text()


def test_every_method_exports_what_it_has_and_nothing_wrong(
    coordinator: InThread, backbone: Backbone, tmp_path: Path
) -> None:
    plain, with_towers, not_at_all = set(), set(), set()
    for method in SPECS:
        folder = tmp_path / method
        card = export(exports.finished_result(coordinator, method), folder, ExportOptions(), backbone)
        text = (folder / "card.md").read_text()
        has_weights = (folder / "class_weights.safetensors").exists()
        assert has_weights == card["use"]["open_clip"] == ("```python" in text)
        if has_weights:
            plain.add(method)
            continue
        (with_towers if card["use"]["promptfed"] else not_at_all).add(method)
        assert card["use"]["why_not_open_clip"] in text
        assert ("promptfed predict" in text) == card["use"]["promptfed"]
        if method in not_at_all:
            model, _ = read_export(folder)
            with pytest.raises(PromptfedError, match="/v1/predict"):
                model.serve(backbone, NAMES)
    assert plain == {"promptfl", "fedpgp", "fedtpg", "fast_pt", "zero_shot"}
    assert with_towers == {"fedclip", "plan"}
    assert not_at_all == {"pfedpg", "coop"}


def test_the_card_tells_what_it_is(coordinator: InThread, backbone: Backbone, tmp_path: Path) -> None:
    found = exports.finished_result(coordinator, "promptfl")
    card = export(found, tmp_path / "out", ExportOptions(), backbone)
    assert json.loads((tmp_path / "out" / "card.json").read_text()) == card
    assert card["hashes"]["state"] == found.state_hash
    assert card["backbone"]["fingerprint"] == backbone.fingerprint
    assert (card["round"], card["rounds"]) == (0, found.spec["rounds"])
    assert [(one["name"], one["domain"]) for one in card["participants"]] == [("a", "sketch"), ("b", "neon")]
    assert card["files"]["prompts.safetensors"]["tensors"]["context"] == {"shape": [4, 112], "dtype": "float32"}
    for name, about in card["files"].items():
        body = (tmp_path / "out" / name).read_bytes()
        assert (len(body), hashlib.sha256(body).hexdigest()) == (about["bytes"], about["sha256"])
    hidden = export(found, tmp_path / "hidden", ExportOptions(anonymous=True), backbone)
    assert [one["name"] for one in hidden["participants"]] == ["client 1", "client 2"]


def test_the_card_has_calibration_where_clients_tell_it() -> None:
    row = MeasuredAccuracy(client="a", role="trainer", split="test", adapted=0.5, zero_shot=0.25, num_samples=8)
    silent = card_accuracies(Accuracies(round=3, clients=[row], mean={"trainer": {"adapted": 0.5}}))
    assert "ECE" not in silent
    assert row.model_dump().keys() >= {"adapted"}
    assert "ece" not in row.model_dump(), "what nobody told is not in the file"
    told = row.model_copy(update={"ece": 0.125, "macro_f1": 0.375})
    text = card_accuracies(Accuracies(round=3, clients=[told, row], mean={"trainer": {"adapted": 0.5, "ece": 0.125}}))
    assert "| a | trainer | test | 25.0 % | 50.0 % | 8 | - | - | 37.5 % | 12.5 % |" in text
    assert "| a | trainer | test | 25.0 % | 50.0 % | 8 | - | - | - | - |" in text
    assert "| mean of the trainers |  | test | - | 50.0 % | 16 | - | - | - | 12.5 % |" in text


def test_names_of_others_are_no_markup_in_the_card(coordinator: InThread, backbone: Backbone, tmp_path: Path) -> None:
    found = exports.finished_result(coordinator, "promptfl")
    export(found, tmp_path / "out", ExportOptions(("<img src=x>", "[a](b) | c")), backbone)
    text = (tmp_path / "out" / "card.md").read_text()
    assert "<img" not in text.replace("\\<img", "")
    assert "\\[a\\](b) \\| c" in text


def test_without_class_names_state_alone_is_exported(coordinator: InThread, backbone: Backbone, tmp_path: Path) -> None:
    found = exports.finished_result(coordinator, "promptfl")
    found.federation.spec.class_names = None
    named = export(found, tmp_path / "named", ExportOptions(), backbone)
    assert (named["class_names"], named["class_names_from"]) == (NAMES, "the federation's trainers")
    found.federation.class_names = None
    card = export(found, tmp_path / "out", ExportOptions(), backbone)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["card.json", "card.md", "prompts.safetensors"]
    assert "--classes" in card["use"]["why_not_open_clip"]


@pytest.mark.parametrize(("model", "pretrained", "arguments"), [
    ("ViT-B-16", "openai", '"ViT-B-16", pretrained="openai", force_quick_gelu=True'),
    ("ViT-B-16", "laion2b_s34b_b88k", '"ViT-B-16", pretrained="laion2b_s34b_b88k"'),
    ("ViT-B-16", "random", '"local-dir:backbone"'), ("promptfed-emoji", "embedded", '"local-dir:backbone"'),
    ("hf-hub:a/b", None, '"hf-hub:a/b"'),
    ("local-dir:/here", None, '"local-dir:backbone"'),
    ("ViT-B-16", 'a"); exit("', r'"ViT-B-16", pretrained="a\"); exit(\""'),
])  # fmt: skip
def test_the_code_asks_open_clip_for_the_very_backbone(
    coordinator: InThread, model: str, pretrained: str | None, arguments: str
) -> None:
    found = exports.finished_result(coordinator, "promptfl")
    backbone = found.facts.backbone.model_copy(update={"model": model, "pretrained": pretrained})
    code = snippet(backbone, {"class_weights": torch.zeros(4, 96)})
    assert f"create_model_and_transforms({arguments})" in code
    compile(code, "card.md", "exec")


def test_a_damaged_export_is_refused(coordinator: InThread, backbone: Backbone, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    export(exports.finished_result(coordinator, "zero_shot"), folder, ExportOptions(), backbone)
    export(exports.finished_result(coordinator, "promptfl"), tmp_path / "other", ExportOptions(), backbone)
    (folder / "prompts.safetensors").write_bytes((tmp_path / "other" / "prompts.safetensors").read_bytes())
    with pytest.raises(PromptfedError, match="not the one that card"):
        read_export(folder)
    (folder / "card.json").write_text("{}")
    with pytest.raises(PromptfedError, match="damaged"):
        read_export(folder)
    with pytest.raises(PromptfedError, match="not a promptfed export"):
        read_export(tmp_path)


def test_another_backbone_is_refused(coordinator: InThread, backbone: Backbone) -> None:
    found = exports.finished_result(coordinator, "promptfl")
    found.facts.backbone.fingerprint = "sha256:" + "0" * 64
    with pytest.raises(PromptfedError, match="the backbone here is"):
        ours(found, backbone)


class Command:
    """Runs `promptfed ...` against the coordinator."""

    def __init__(self, server: InThread):
        self._options = ["--coordinator", server.url, "--token-file", str(server.settings.data_dir / "operator.token")]

    def __call__(self, *arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, *([] if "--export" in arguments else self._options)])


@pytest.fixture
def command(coordinator: InThread, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The command, with the backbone at hand."""
    monkeypatch.setattr("promptfed.shared.clip.load_backbone", lambda *names, **how: backbone)
    return Command(coordinator)


def test_export_and_predict_from_the_command_line(
    command: Command, coordinator: InThread, backbone: Backbone, tmp_path: Path
) -> None:
    image = tmp_path / "image.png"
    image.write_bytes(png())
    made = command("export", "promptfl", "--out", str(tmp_path / "out"))
    assert made.exit_code == Exit.OK, made.output
    assert "promptfl of promptfl, round 0" in made.stdout
    expected = ours(exports.finished_result(coordinator, "promptfl"), backbone)
    for source in (["--export", str(tmp_path / "out")], ["--federation", "promptfl"]):
        done = command("predict", str(image), *source, "--json")
        assert done.exit_code == Exit.OK, done.output
        assert json.loads(done.stdout) == [{"image": str(image), **expected}]
    shown = command("predict", str(image), "--export", str(tmp_path / "out"), "--top", "2")
    assert expected["class_name"] in shown.stdout
    assert shown.stdout.count("█") > 0
    key = coordinator.http.get("/v1/signing-key").json()["public_key"]
    assert CliRunner().invoke(app, ["verify", str(tmp_path / "out"), "--key", key]).exit_code == Exit.OK
    other = CliRunner().invoke(app, ["verify", str(tmp_path / "out"), "--key", "00" * 32])
    assert (other.exit_code, "is not signed by the key" in other.stderr) == (Exit.REFUSED, True)
    again = command("export", "promptfl", "--out", str(tmp_path / "out"))
    assert again.exit_code == Exit.BAD_INPUT
    assert "not an empty folder" in again.stderr


def test_a_method_that_is_not_installed_is_told_with_its_remedy(
    command: Command, coordinator: InThread, backbone: Backbone, tmp_path: Path
) -> None:
    remedy = ": install the package that brings it beside promptfed, if you trust it"
    found = exports.finished_result(coordinator, "promptfl")
    export(found, tmp_path / "out", ExportOptions(), backbone)
    card = tmp_path / "out" / "card.json"
    card.write_text(json.dumps(json.loads(card.read_text()) | {"method": {"name": "elsewhere"}}))
    image = tmp_path / "image.png"
    image.write_bytes(png())
    done = command("predict", str(image), "--export", str(tmp_path / "out"))
    assert done.exit_code == Exit.FAILED
    assert "there is no method 'elsewhere'" in done.stderr
    assert done.stderr.endswith(f"{remedy}\n")
    found.facts.method["name"] = "elsewhere"
    with pytest.raises(PromptfedError, match=f"{remedy}$"):
        export(found, tmp_path / "other", ExportOptions(), backbone)
    found.facts.method.update(name="promptfl", unheard="of")
    with pytest.raises(PromptfedError, match=r"unheard: unknown key; promptfed [0-9.]+ has none of this name$"):
        export(found, tmp_path / "other", ExportOptions(), backbone)


def test_what_cannot_be_predicted_with_is_said_in_one_line(command: Command, tmp_path: Path) -> None:
    text, image = tmp_path / "text.png", tmp_path / "image.png"
    text.write_text("no image")
    image.write_bytes(png())
    for arguments, code, why in (
        ([str(text), "--federation", "promptfl"], Exit.BAD_INPUT, "text.png cannot be read as an image"),
        ([str(tmp_path / "none.png"), "--federation", "promptfl"], Exit.BAD_INPUT, "there is no such file"),
        ([str(image)], Exit.USAGE, "--export FOLDER or --federation NAME"),
        ([str(image), "--federation", "nothing"], Exit.REFUSED, "nothing"),
        ([str(image), "--federation", "promptfl", "--round", "7"], Exit.REFUSED, "round 7"),
        ([str(image), "--federation", "promptfl", "--classes", "a,a"], Exit.BAD_INPUT, "twice"),
        ([str(image), "--federation", "promptfl", "--classes", "sun", "--data", "digits"], Exit.BAD_INPUT, "give one"),
        ([str(image), "--federation", "promptfl", "--data", "nowhere:x"], Exit.BAD_INPUT, "nowhere"),
        ([str(image), "--federation", "pfedpg"], Exit.BAD_INPUT, "each client keeps to itself"),
        ([str(image), "--export", str(tmp_path)], Exit.BAD_INPUT, "not a promptfed export"),
    ):
        done = command("predict", *arguments)
        assert (done.exit_code, why in done.stderr) == (code, True), done.stderr
        assert done.stderr.count("\n") == 1


def test_the_mixture_of_domains_is_told(coordinator: InThread, backbone: Backbone) -> None:
    found = mixing(coordinator, backbone)
    told = ours(found, backbone)["domains"]
    assert {one["name"] for one in told} == set(DOMAINS)
    feature = backbone.encode_images(backbone.preprocess(exports.picture()).unsqueeze(0))
    state = decode(found.body)[0]
    shares = (feature @ state["classifier_weight"].T).softmax(-1)[0]
    keys = {domain_key(f"a {name} of a {{}}"): name for name in DOMAINS}
    expected = {keys[key]: float(share) for key, share in zip(state["domains"].tolist(), shares, strict=True)}
    assert {one["name"]: one["share"] for one in told} == pytest.approx(expected, abs=1e-5)
    assert ours(exports.finished_result(coordinator, "promptfl"), backbone)["domains"] is None
