"""Names, files and tokenizers of backbones: what is found, what is near, and what is refused and why."""

from __future__ import annotations

import json
import os
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import open_clip
import pytest
import torch

from promptfed.shared import clip
from promptfed.shared.clip import BackboneError, errors, hub, loading, permission, sizes, slots, tokenizers, weights
from promptfed.shared.clip.backbone import Halves
from promptfed.shared.clip.feature_files import BLOCK, FeatureFolder, Held
from promptfed.shared.clip.towers import vision
from promptfed.shared.clip.towers.text import TextTower
from promptfed.shared.spec.spec import BackboneSpec
from tests.shared.clip.conftest import CLASS_NAMES, noise


@pytest.mark.parametrize(("name", "known", "text"), [
    ("Vit-b", ["ViT-B", "resnet"], "; near: ViT-B"), ("xyz", ["ViT-B", "resnet"], "; it has: ViT-B, resnet"),
    ("qqq", list("abcdefghij"), "; it has: a, b, c, d, e, f, g, h"), ("a", [], ""),
])  # fmt: skip
def test_near_names_are_told(name: str, known: list[str], text: str) -> None:
    assert errors.near(name, known) == text


def test_an_errors_text_is_one_line() -> None:
    assert errors.one_line(ValueError("a\n  b")) == "a b"
    assert errors.one_line(ValueError("")) == "ValueError"
    assert errors.one_line(ValueError("x" * 301)) == "x" * 300
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        clip.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("allowed", "permitted"), [(True, True), (False, False), (["timm:a"], True), (["timm:b", "a"], False), ("a", None)]
)
def test_a_backbone_is_permitted_by_its_very_name(allowed: Any, permitted: bool | None) -> None:
    spec = BackboneSpec(model="timm:a")
    if permitted is None:
        with pytest.raises(BackboneError, match=r"give a list of names, as \['a'\]"):
            permission.permits(allowed, spec)
    else:
        assert permission.permits(allowed, spec) is permitted


def test_weights_are_found_in_a_folder_the_safer_format_first(tmp_path: Path) -> None:
    def refused(path: Path, text: str) -> None:
        with pytest.raises(BackboneError, match=text):
            weights.weights_in(path)

    refused(tmp_path, "holds no weights: give a file, or a folder with model.safetensors")
    refused(tmp_path / "none.pt", "There is no file")
    for name in reversed(weights.IN_FOLDERS):
        (tmp_path / name).touch()
        assert weights.weights_in(tmp_path) == tmp_path / name
    (tmp_path / "a.onnx").touch()
    refused(tmp_path / "a.onnx", "is of unknown type: use .safetensors, .pt, .pth, .bin")


@pytest.mark.parametrize(("content", "names"), [
    ({"a": torch.ones(1), "module.b": torch.ones(1), "c": 3}, ["a", "b"]),
    ({"state_dict": {"a": torch.ones(1)}}, ["a"]),
    ({"state_dict": {"model": {"model_ema": {"a": torch.ones(1)}}}}, ["a"]), ({"model": torch.ones(1)}, ["model"]),
    ([1, 2], None),
])  # fmt: skip
def test_weights_lie_under_the_keys_of_training_scripts(tmp_path: Path, content: Any, names: list[str] | None) -> None:
    torch.save(content, tmp_path / "a.pt")
    if names is None:
        with pytest.raises(BackboneError, match="holds no weights by name"):
            weights.read_weights(tmp_path / "a.pt")
    else:
        assert sorted(weights.read_weights(tmp_path / "a.pt")) == names


def test_a_hub_that_answers_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(httpx, "head", lambda address, timeout: None)
    assert hub.unreachable("http://a") is None
    for error in (httpx.ConnectError("x"), httpx.InvalidURL("x"), OSError("x")):

        def fail(address: str, timeout: float, error: Exception = error) -> None:
            raise error

        monkeypatch.setattr(httpx, "head", fail)
        assert hub.unreachable("http://a") == "cannot be reached (3 s)"
    for value, offline in (("1", True), ("on", True), ("0", False)):
        monkeypatch.setenv("HF_HUB_OFFLINE", value)
        assert ("is not asked" in (hub.unreachable("http://a") or "")) is offline


def test_weights_of_an_address_or_a_file_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(hub, "unreachable", lambda address: "is away")
    monkeypatch.setattr(hub, "is_cached", lambda repository, file: (repository, file) == ("owner/x", "own.bin"))
    config: dict[str, Any] = {}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: config)
    for given in ({}, {"file": "x", "url": "http://h/w.pt"}, {"hf_hub": "owner/x/own.bin"}):
        config = given
        hub.expect_at_hand("M", "t")
    config = {"url": "http://h:1/w.pt"}
    with pytest.raises(BackboneError, match=r"'t' of M are not .*, and h:1 is away: .*curl -LO http://h:1/w"):
        hub.expect_at_hand("M", "t")
    (tmp_path / ".cache" / "clip").mkdir(parents=True)
    (tmp_path / ".cache" / "clip" / "w.pt").touch()
    hub.expect_at_hand("M", "t")
    config = {"hf_hub": "owner/x/"}
    with pytest.raises(BackboneError, match=r"hf download owner/x open_clip_model.safetensors"):
        hub.expect_at_hand("M", "t")


def test_a_tokenizer_beside_weights_is_used_and_one_out_of_reach_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(open_clip.tokenizer, "HFTokenizer", lambda name, **options: made.append((name, options)))
    monkeypatch.setattr(tokenizers, "is_cached", lambda name, file: False)
    monkeypatch.setattr(tokenizers, "unreachable", lambda address: "is away")
    text = {"hf_tokenizer_name": "owner/x", "context_length": 7, "tokenizer_kwargs": {"clean": "a"}}
    with pytest.raises(BackboneError, match=r"'M' .* \(owner/x is not .* is away\): bring tokenizer"):
        tokenizers.tokenizer_of("M", text, tmp_path)
    (tmp_path / "vocab.txt").touch()
    tokenizers.tokenizer_of("M", text, tmp_path)
    assert made == [(str(tmp_path), {"context_length": 7, "clean": "a"})]
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda source: source)
    assert tokenizers.tokenizer_of("M", {}, tmp_path) == "M"
    assert tokenizers.tokenizer_of("hf-hub:a", text, None) == "hf-hub:a"
    monkeypatch.setattr(tokenizers, "is_cached", lambda name, file: file == "spiece.model")
    assert tokenizers.tokenizer_of("M", text, None) == "M"
    monkeypatch.setattr(open_clip, "get_tokenizer", lambda source: 1 / 0)
    with pytest.raises(BackboneError, match=r"'M' cannot be loaded \(division by zero\)\.$"):
        tokenizers.tokenizer_of("M", {}, None)


@pytest.mark.parametrize(("model", "inside"), [
    ("promptfed-tiny", True), ("promptfed-photo", False), ("ViT-B/16", True), ("RN50", None),
    ("roberta-ViT-B-32", None), ("convnext_base", None), ("no-such-model", None), ("../model", None),
])  # fmt: skip
def test_sizes_are_known_by_name_where_the_towers_are_plain(model: str, inside: bool | None) -> None:
    shape = sizes.shape_by_name(model)
    assert (shape is None) == (inside is None)
    if shape is not None:
        assert (shape.mlp_width is not None) == inside
        assert None not in (shape.d_t, shape.d_e, shape.text_layers, shape.context_length)


def test_a_configuration_without_a_size_has_no_shape() -> None:
    text = {"width": 8, "layers": 1, "heads": 2, "context_length": 5, "vocab_size": 9}
    plain = {"width": 128, "layers": 2, "patch_size": 4, "image_size": 16}
    shape = sizes._shape(4, text, plain)
    assert shape is not None
    found = (shape.mlp_width, shape.patch_tokens, shape.positions, shape.heads_v, shape.heads_t)
    assert found == (512, 16, 17, 2, 2)
    other = sizes._inside(text, plain | {"mlp_ratio": 2.0, "head_width": 32})
    assert (other["mlp_width"], other["heads_v"]) == (256, 4)
    assert sizes._inside(text, plain | {"pool_type": "avg"}) == sizes._inside(text | {"pool_type": "x"}, plain) == {}
    for lacking in ("width", "layers"):
        assert sizes._shape(4, {key: value for key, value in text.items() if key != lacking}, plain) is None


def test_rows_are_held_in_blocks_and_files_that_are_not_whole_go(tmp_path: Path) -> None:
    held = Held()
    for number in range(BLOCK + 1):
        held.add(f"{number}", torch.tensor([number]))
    assert [held[f"{number}"].item() for number in (0, BLOCK - 1, BLOCK)] == [0, BLOCK - 1, BLOCK]
    assert ("0" in held, "x" in held) == (True, False)
    folder = FeatureFolder(tmp_path)
    name = folder.write({"a": torch.ones(2)})
    (tmp_path / ("0" * 64 + ".safetensors")).write_bytes(b"not what its name says")
    gone = folder.write({"b": torch.ones(2)})
    (tmp_path / gone).unlink()
    assert list(folder.read(["a", "b", "c"])) == ["a"]
    assert (folder.files, folder.seen) == ({"a": name}, {name})
    os.utime(tmp_path / name, (1, 1))
    folder.touch(["a", "b", "c"])
    assert (tmp_path / name).stat().st_mtime > 1
    again = FeatureFolder(tmp_path)
    again.see_new_files()
    assert again.files == {"a": name}
    assert [path.name for path in tmp_path.iterdir()] == [name]
    (tmp_path / name).write_bytes(b"changed since")
    again.see_new_files()
    assert (tmp_path / name).exists(), "a file that is known is not read again"
    folder.files["d"] = gone
    folder.touch(["d"])


def test_what_bits_depend_on_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Any) -> None:
    cpu, other = slots.compute_identity(torch.device("cpu")), slots.compute_identity(torch.device("meta"))
    assert (cpu["batch"], other["batch"], "threads" in cpu, "threads" in other) == (32, 256, True, False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "H")
    cuda = slots.compute_identity(torch.device("cuda"))
    assert (cuda["name"], "tf32" in cuda, "cpu" in cuda) == ("H", True, False)
    rows = torch.zeros(32, 4)
    rows[3:5] = 1
    backbone, agreeing = small("small-vit"), [slot for slot in range(32) if slot not in (3, 4)]
    assert slots.kept_slots(tmp_path, backbone, lambda images: rows) == agreeing
    assert json.loads((tmp_path / slots.SLOTS_FILE).read_text()) == agreeing
    (tmp_path / slots.SLOTS_FILE).write_text("[1, 2]")
    assert slots.kept_slots(tmp_path, backbone, lambda images: rows) == [1, 2]
    (tmp_path / slots.SLOTS_FILE).write_text("[1,")
    assert slots.kept_slots(tmp_path, backbone, lambda images: rows) == agreeing
    assert (tmp_path / slots.SLOTS_FILE).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("device", "gpus", "words"), [
    ("cuda:1", 1, "the GPUs here are cuda:0. Or give"), ("cuda", 0, "there is no GPU, or no driver"),
    ("cuda:0", 1, "'cuda:0' cannot be used: broken. Or give"), ("cuda", 1, "broken. Or give"),
    ("cpu:x", 1, "it is none of cpu, cuda and cuda:N"),
])  # fmt: skip
def test_a_device_that_cannot_be_used_has_its_reason(
    monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, words: str
) -> None:
    def broken(*shape: int, device: str) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(torch, "zeros", broken)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    with pytest.raises(BackboneError, match=words):
        loading.load_backbone("small-vit", None, device=device)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8", "before anything is computed there"


@pytest.mark.parametrize(("changed", "halves"), [
    ({}, True), ({"resize_mode": "squash"}, True), ({"resize_mode": "longest"}, False),
    ({"interpolation": "random"}, False), ({"size": (8, 9)}, False), ({"size": (8, 9), "resize_mode": "squash"}, True),
])  # fmt: skip
def test_a_preprocessing_of_other_steps_has_no_halves(changed: dict[str, Any], halves: bool) -> None:
    given = {"size": 8, "resize_mode": "shortest", "interpolation": "bicubic", "mean": (0,) * 3, "std": (1,) * 3}
    found = Halves.of_config(given | changed)
    assert (found is not None) == halves
    if found is not None:
        size = changed.get("size", (8, 8))
        assert (found.cut.crop, found.cut.scale) == (size, size if "resize_mode" in changed else 8)


def altered(module: Any, **values: Any) -> Any:
    """A copy with other attributes; two underscores lead to one of a part."""
    other = deepcopy(module)
    for name, value in values.items():
        owner, _, own = name.rpartition("__")
        setattr(other.get_submodule(owner.replace("__", ".")) if owner else other, own, value)
    return other


def test_towers_say_what_they_cannot_take(small: Any) -> None:
    visual, text = small("small-vit").model.visual, small("small-custom").model
    assert vision.refusal_of(visual) is vision.patch_refusal(visual) is None
    assert vision.refusal_of(altered(visual, transformer__batch_first=False)) == "it is not batch-first"
    assert vision.patch_refusal(altered(visual, pool_type="none")) == "it pools by 'none'"
    assert vision.patch_refusal(altered(visual, pool_type="avg")) is None
    coca = small("small-coca").model.visual
    assert "pools its patches by attention" in (vision.patch_refusal(coca) or "")
    assert (vision.pooled_width(coca), vision.pooled_width(visual), vision.patch_tokens(coca)) == (40, 64, None)
    assert vision.patch_tokens(visual) == 16
    assert (vision._side((4, 4)), vision._side((4, 5))) == (4, None)
    with pytest.raises(BackboneError, match="takes no visual prompts: it is a ModifiedResNet"):
        vision.prompted_tower(small("small-resnet").model.visual)
    kinds = {"text__pool_type": "none"}, {"text__transformer__batch_first": False}
    reasons = [TextTower(altered(text, **changed)).flags.refusal for changed in kinds]
    assert reasons == ["it pools by 'none'", "it is not batch-first"]
    foreign = altered(text)
    foreign.text = torch.nn.Linear(1, 1)
    assert TextTower(foreign).width == 0, "it does not say"
    for config, width in (
        ({"hidden_size": 8, "d_model": 12}, 8),
        ({"hidden_size": 8}, 8),
        ({}, 0),
        ({"d_model": 12}, 12),
    ):
        foreign.text.config = SimpleNamespace(**config)
        assert TextTower(foreign).width == width
    tower = TextTower(foreign)
    assert tower.flags.refusal == "it is a Linear, not a text transformer of open_clip"
    with pytest.raises(BackboneError, match="takes no prompts: it is a Linear"):
        tower.require()


@pytest.mark.parametrize(
    ("name", "kind"), [("small-custom", "first"), ("small-custom", "last"), ("small-coca", "last")]
)
def test_a_text_is_pooled_where_its_tower_says(small: Any, name: str, kind: str) -> None:
    model = altered(small(name).model, text__pool_type=kind)
    tower, ids = TextTower(model), small(name)._tokenizer.texts(["a dog", "a red fox"])
    wanted = model.encode_text(ids, normalize=False)
    assert torch.allclose(tower.encode_texts(tower.texts(ids)), wanted, atol=1e-5)
    assert tower.pooled_position(ids).tolist() == [-1, -1]
    rows, mask = tower.constant_rows(ids)
    for block in tower.blocks:
        rows = block(rows, attn_mask=mask)
    assert torch.allclose(tower._pool(rows, ids), wanted, atol=1e-5)


def test_what_a_backbone_is_asked_wrongly_is_refused(small: Any) -> None:
    backbone = small("small-vit")
    with pytest.raises(BackboneError, match="use at least 1"):
        backbone.class_prompts(CLASS_NAMES, 0)
    with pytest.raises(BackboneError, match="takes a list of texts, not one text"):
        backbone.encode_text("dog")
    prompts = backbone.class_prompts(CLASS_NAMES, 1)
    with pytest.raises(BackboneError, match="Unknown text path 'fast': use auto, dense, prefix, short or plain"):
        backbone.encode_prompts(noise(1, backbone.d_t), prompts, path="fast")
    assert backbone.encode_text([]).shape == (0, backbone.d_e)
    tower = small("small-eos")._text
    with pytest.raises(BackboneError, match="end token is not the one"):
        tower.pooled_position(torch.zeros(1, 24, dtype=torch.long))


def test_texts_at_once_are_many_only_where_the_device_has_room(small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = small("small-vit")
    for path, held, count in (("dense", None, 1 << 16), ("dense", 2, 512), ("prefix", None, 512)):
        monkeypatch.setattr(backbone, "_choose_path", lambda asked, deep, path=path: path)
        monkeypatch.setattr(backbone, "held_images", held)
        assert backbone.texts_at_once == count
