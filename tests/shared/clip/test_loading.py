"""What can be loaded, what is refused, and that the same name gives the same backbone."""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import open_clip
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from timm.models._registry import register_model
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from benchmarks import backbone
from benchmarks.backbone import normalise, pretrain, save_weights
from promptfed.shared import __version__
from promptfed.shared.clip import Backbone, BackboneError, FeatureCache, caches, load_backbone, shape_of
from promptfed.shared.clip.backbone import Halves
from promptfed.shared.clip.caches import BATCH, DEVICE_BATCH, agreeing_slots, features_in
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.clip.fingerprint import config_digest, weights_fingerprint
from promptfed.shared.clip.loading import VisualBackbone
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data import readers as data_readers
from promptfed.shared.data.classes import SYMBOLS
from promptfed.shared.data.image_files import middle
from promptfed.shared.data.readers import Readers
from promptfed.shared.data.symbols import symbols_split
from tests import ROOT
from tests.shared.clip.conftest import CLASS_NAMES, CONFIGS, Noise, noise
from tests.support.equality import assert_gradients, assert_values
from tests.support.far_device import far_device, waits
from tests.support.waiting import PATIENCE

UNKNOWN_NAMES = [
    ("ViT-B-16x", None, "open_clip has no model 'ViT-B-16x'; near: ViT-B-16,"),
    ("promptfed-tinny", "embedded", "near: promptfed-tiny"), ("promptfed-tiny", "openai", "use .embedded."),
    ("promptfed-emoji", "openai", "use .embedded."), ("ViT-B-16", "openia", "has no weights 'openia'; near: openai"),
    ("ViT-B-16-SigLIP", "nothing-like-it", "it has: webli"), ("hf-hub:owner/name", None, "--allow-backbone"),
    ("local-dir:/tmp", None, "--allow-backbone"),
    ("timm:small_plain", None, "'timm:small_plain' is outside open_clip's registry.*--allow-backbone"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "pretrained", "message"), UNKNOWN_NAMES)
def test_unknown_names_say_what_is_near(model: Any, pretrained: Any, message: Any) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone(model, pretrained)


BAD_OPTIONS = [
    ({"precision": "fp8"}, "Unknown precision 'fp8'"),
    ({"device": "nonsense"}, "'nonsense' cannot be used: it is none of cpu, cuda and cuda:N. Or give --device cpu"),
    ({"device": "cuda:77"}, "'cuda:77' cannot be used: (there is no GPU|the GPUs here are).* Or give --device cpu"),
]


@pytest.mark.parametrize(("options", "message"), BAD_OPTIONS)
def test_bad_options(small: Any, options: Any, message: Any) -> None:
    with pytest.raises(BackboneError, match=message):
        load_backbone("small-vit", None, **options)


def test_a_path_is_no_name_of_weights(small: Any, tmp_path: Any) -> None:
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in small("small-vit").model.state_dict().items()}, path)
    for model in ("small-vit", "timm:small_plain"):
        with pytest.raises(BackboneError, match=r"has no weights '.*weights\.safetensors'.*--backbone-file"):
            load_backbone(model, str(path), allow_unregistered=True)


class _Payload:
    def __reduce__(self) -> Any:
        return print, ("code from a file of weights ran",)


@pytest.mark.parametrize("model", ["small-vit", "timm:small_plain"])
def test_a_file_with_code_is_refused_and_does_not_run(model: str, small: Any, tmp_path: Any, capsys: Any) -> None:
    torch.save({"state_dict": _Payload()}, tmp_path / "bad.pt")
    with pytest.raises(BackboneError, match="cannot be read as weights alone"):
        load_backbone(model, None, allow_unregistered=True, weights_file=tmp_path / "bad.pt")
    assert "code from a file of weights ran" not in capsys.readouterr().out


def test_a_tokenizer_with_code_is_refused(small: Any, tmp_path: Any) -> None:
    text = CONFIGS["small-vit"]["text_cfg"] | {
        "hf_tokenizer_name": "owner/name",
        "tokenizer_kwargs": {"trust_remote_code": True},
    }
    config = {"model_cfg": CONFIGS["small-vit"] | {"text_cfg": text}}
    (tmp_path / "open_clip_config.json").write_text(json.dumps(config))
    with pytest.raises(BackboneError, match="code of its own"):
        load_backbone(f"local-dir:{tmp_path}", None, allow_unregistered=True)


def test_a_local_folder_brings_its_own_weights(small: Any, tmp_path: Any) -> None:
    (tmp_path / "open_clip_config.json").write_text(json.dumps({"model_cfg": CONFIGS["small-vit"]}))
    with pytest.raises(BackboneError, match="cannot be loaded"):  # no weights: never silently random ones
        load_backbone(f"local-dir:{tmp_path}", None, allow_unregistered=True)
    weights = {name: tensor.contiguous() for name, tensor in small("small-vit").model.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")
    backbone = load_backbone(f"local-dir:{tmp_path}", None, allow_unregistered=True)
    assert backbone.fingerprint == small("small-vit").fingerprint
    with pytest.raises(BackboneError, match="brings its own weights"):
        load_backbone(f"local-dir:{tmp_path}", "openai", allow_unregistered=True)


def test_weights_trained_with_quick_gelu_get_it(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    weights = {name: tensor.contiguous() for name, tensor in small("small-vit").model.state_dict().items()}
    save_file(weights, tmp_path / "weights.safetensors")
    tags = {"tagged": {"file": str(tmp_path / "weights.safetensors"), "quick_gelu": True}}
    monkeypatch.setitem(open_clip.pretrained._PRETRAINED, "small-vit", tags)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_backbone("small-vit", "tagged")
    texts = ["a photo of a dog."]
    assert torch.equal(loaded.encode_text(texts), small("small-quick").encode_text(texts))
    assert not torch.equal(loaded.encode_text(texts), small("small-vit").encode_text(texts))
    assert loaded.fingerprint == small("small-quick").fingerprint


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(
    "name", ["small-vit", "small-custom", "small-resnet", "small-timm", "small-qknorm", "small-coca"]
)
def test_half_precision(small: Any, name: Any, precision: Any) -> None:
    backbone, wide = load_backbone(name, None, precision=precision), small(name)
    assert backbone.precision == precision
    images = noise(2, 3, *backbone.image_size)
    features = backbone.encode_images(images)
    assert features.dtype == torch.float32
    assert torch.cosine_similarity(features, wide.encode_images(images)).min() > 0.999
    context = noise(4, backbone.d_t, scale=0.1).requires_grad_()
    texts = backbone.encode_prompts(context, backbone.class_prompts(CLASS_NAMES, 4))
    assert torch.cosine_similarity(texts, wide.encode_prompts(context, wide.class_prompts(CLASS_NAMES, 4))).min() > 0.99
    (gradient,) = torch.autograd.grad(texts.sum(), context)
    assert gradient.dtype == torch.float32


@pytest.mark.parametrize("name", ["small-bidirectional"])
def test_a_model_that_open_clip_cannot_halve_is_refused(small: Any, name: str) -> None:
    with pytest.raises(BackboneError, match="precision fp32"):
        load_backbone(name, None, precision="bf16")


def test_loading_leaves_logging_alone(capfd: Any) -> None:
    root = logging.getLogger()
    before = (list(root.handlers), list(root.filters), root.level)
    load_backbone("small-vit", "random")
    assert (root.handlers, root.filters, root.level) == before
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["small-vit", "small-coca", "small-timm", "small-resnet", "timm:small_plain"])
def test_random_weights_are_the_same_each_time_and_leave_the_global_generator_alone(
    name: Any, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first = load_backbone(name, None, allow_unregistered=True)
    assert [line.getMessage() for line in caplog.records if "has random weights, since pretrained is null" in line.msg]
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(8)
    caplog.clear()
    assert load_backbone(name, "random", allow_unregistered=True).fingerprint == first.fingerprint
    assert not caplog.records, "it was asked for by its name"
    assert first.pretrained is None


def test_the_fingerprint_is_of_weights_architecture_and_precision(small: Any) -> None:
    backbone = small("small-vit")
    assert backbone.fingerprint.startswith("sha256:")
    assert len(backbone.fingerprint) == len("sha256:") + 64
    others = {small("small-quick").fingerprint, load_backbone("small-vit", None, precision="bf16").fingerprint}
    assert backbone.fingerprint not in others
    assert len(others) == 2
    changed = load_backbone("small-vit", None)
    with torch.no_grad():
        changed.model.ln_final.bias[3] += 1e-6
    assert changed.fingerprint != backbone.fingerprint


def test_the_fingerprint_reads_name_dtype_shape_and_bytes() -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(1)}
    base = weights_fingerprint(tensors, {})
    assert weights_fingerprint(dict(reversed(tensors.items())), {}) == base
    for other in (
        {"a2": tensors["a"], "b": tensors["b"]},
        {"a": tensors["a"].reshape(3, 2), "b": tensors["b"]},
        {"a": tensors["a"].double(), "b": tensors["b"]},
        {"a": tensors["a"] + 1, "b": tensors["b"]},
    ):
        assert weights_fingerprint(other, {}) != base
    assert weights_fingerprint(tensors, {"size": 224}) != base
    assert weights_fingerprint({"a": tensors["a"].T.contiguous().T, "b": tensors["b"]}, {}) == base
    assert config_digest({"b": 1, "a": (2, 3)}) == config_digest({"a": [2, 3], "b": 1})


def test_properties(small: Any) -> None:
    backbone = small("small-vit")
    assert (backbone.d_t, backbone.d_v, backbone.d_e) == (48, 64, 40)
    assert (backbone.text_layers, backbone.vision_layers, backbone.context_length) == (3, 3, 24)
    assert backbone.logit_scale == pytest.approx(1 / 0.07, rel=1e-5)
    assert backbone.device == torch.device("cpu")
    assert backbone.to("cpu") is backbone
    assert not backbone.model.training
    pixels = backbone.preprocess(Image.new("L", (90, 50), 128))
    assert pixels.shape == (3, 32, 32)
    assert small("small-resnet").transform_id != backbone.transform_id
    assert small("small-quick").transform_id == backbone.transform_id


def test_a_slash_in_a_name_is_a_dash(small: Any) -> None:
    with pytest.raises(BackboneError, match="ViT-B-16 has no weights"):
        load_backbone("ViT-B/16", "no-such-tag")


# What the flags of every configuration that open_clip ships allow.


def test_another_kind_of_text_tower_is_refused_but_images_work(small: Any) -> None:
    model = deepcopy(small("small-custom").model)
    model.text = torch.nn.Linear(3, 3)  # stands for a tower of transformers: no TextTransformer
    backbone = Backbone(model, model_name="small-custom", pretrained=None, precision="fp32", config={"embed_dim": 40})
    assert not backbone.supports.text_prompts
    assert backbone.text_layers == 0
    with pytest.raises(BackboneError, match="takes no prompts: it is a Linear"):
        backbone.class_prompts(CLASS_NAMES, 4)
    prompts = small("small-custom").class_prompts(CLASS_NAMES, 4)
    with pytest.raises(BackboneError, match="takes no prompts"):
        backbone.encode_prompts(noise(4, 48), prompts)
    images = noise(2, 3, 32, 32)
    assert torch.equal(backbone.encode_images(images), small("small-custom").encode_images(images))


# The embedded backbone: an ordinary open_clip model, made reproducibly, that behaves as the others need it to.


NAMES = tuple(symbol.name for symbol in SYMBOLS)


CONTEXT_LENGTH, CONTEXT_STD = 16, 0.02


@torch.no_grad()
def image_features(model: open_clip.CLIP, images: Tensor) -> Tensor:
    """Unit features (N, d_e) of uint8 RGB images (N, 3, 48, 48)."""
    parts = [model.encode_image(normalise(part)) for part in torch.split(images, 128)]
    return F.normalize(torch.cat(parts), dim=-1)


@torch.no_grad()
def text_features(model: open_clip.CLIP, names: Sequence[str], template: str) -> Tensor:
    """Unit features (C, d_e) of the template filled with each name."""
    tokenizer = open_clip.get_tokenizer(tiny.MODEL)
    return F.normalize(model.encode_text(tokenizer([template.format(n) for n in names])), dim=-1)


def accuracy(image: Tensor, text: Tensor, labels: Tensor) -> float:
    """Percent of images whose nearest text is their label's."""
    return 100.0 * (image @ text.T).argmax(1).eq(labels).float().mean().item()


@pytest.fixture(scope="module")
def model() -> open_clip.CLIP:
    tiny.register()
    return open_clip.create_model(tiny.MODEL, pretrained=str(tiny.weights_path())).eval().requires_grad_(False)


def test_weights_are_small_and_in_half_precision() -> None:
    assert tiny.weights_path().stat().st_size < 16e6
    with safe_open(tiny.weights_path(), "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118


def test_the_documented_table_is_the_measured_one(model: open_clip.CLIP) -> None:
    """One style's row of docs/explanation/backbone.md, to what rounding on another machine may change."""
    text = (ROOT / "docs" / "explanation" / "backbone.md").read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| sketch |"))
    documented = float(row.split("|")[3])
    split = symbols_split(list(SYMBOLS), "sketch", 10, "test")
    pixels = torch.stack([torch.from_numpy(np.array(split.image(i))) for i in range(len(split))])
    template = text_features(model, NAMES, "a photo of a {}.")
    found = accuracy(image_features(model, pixels.permute(0, 3, 1, 2)), template, split.labels)
    assert abs(found - documented) < 0.5


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"seed": 0, "steps": 2, "batch": 6, "lr": 1e-3} | changes))


def test_pretraining_is_reproducible(tmp_path: Path) -> None:
    recipe = backbone.Recipe()
    for name in ("a", "b"):
        save_weights(pretrain(arguments(), recipe), tmp_path / name)
    save_weights(pretrain(arguments(seed=1), recipe), tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


# Backbones without text: plain vision transformers of timm, prompted, loaded, refused.


SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 4}


KINDS: dict[str, dict[str, Any]] = {
    "small_plain": {}, "small_registers": {"reg_tokens": 2, "no_embed_class": True, "init_values": 0.3},
    "small_average": {"global_pool": "avg", "class_token": False}, "small_prenorm": {"pre_norm": True},
    "small_map": {"global_pool": "map", "class_token": False},
}  # fmt: skip


class Altered(VisionTransformer):
    """Not plain: what its forward pass does is its own affair."""


def entry(name: str, kind: type[VisionTransformer], options: dict[str, Any]) -> None:
    def make(pretrained: bool = False, **given: Any) -> VisionTransformer:
        known = {key: value for key, value in given.items() if key in ("num_classes",)}
        model = kind(**SMALL, **options, **known)
        model.pretrained_cfg = {"input_size": (3, 32, 32), "mean": (0.5,) * 3, "std": (0.25,) * 3, "crop_pct": 1.0}
        return model

    make.__name__ = name
    register_model(make)


@pytest.fixture(scope="module", autouse=True)
def _timm_registered() -> None:
    for name, options in KINDS.items():
        entry(name, VisionTransformer, options)
    entry("small_altered", Altered, {})


@cache
def of_timm(name: str, dtype: torch.dtype = torch.float32) -> VisualBackbone:
    backbone = load_backbone(f"timm:{name}", None, allow_unregistered=True)
    assert isinstance(backbone, VisualBackbone)
    backbone.model.to(dtype)
    return backbone


def literal(model: Any, images: torch.Tensor, prompts: torch.Tensor) -> torch.Tensor:
    """Prompts between the tower's own first tokens and the patches, and timm's modules one by one."""
    n, first = prompts.shape[1], model.num_prefix_tokens
    rows = model.norm_pre(model._pos_embed(model.patch_embed(images)))
    for number, block in enumerate(model.blocks):
        if number < len(prompts):
            fresh = model.norm_pre(prompts[0]) if number == 0 else prompts[number]
            own = rows if number == 0 else torch.cat([rows[:, :first], rows[:, first + n :]], dim=1)
            rows = torch.cat([own[:, :first], fresh.expand(len(images), -1, -1), own[:, first:]], dim=1)
        rows = block(rows)
    own = model.norm(torch.cat([rows[:, :first], rows[:, first + n :]], dim=1))
    if model.global_pool == "token":
        return model.fc_norm(own[:, 0])
    if model.global_pool == "map":
        return model.fc_norm(model.attn_pool(own))
    return model.fc_norm(own.mean(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("name", KINDS)
def test_prompted_images_equal_the_definition(name: str, depth: int, dtype: torch.dtype) -> None:
    backbone = of_timm(name, dtype)
    images = noise(2, 3, 32, 32, dtype=dtype)
    leaves = [noise(depth, 5, backbone.d_v, seed=1, scale=0.5, dtype=dtype).requires_grad_() for _ in range(2)]
    found = backbone.encode_images_prompted(images, leaves[0], pooled=True, normalize=False)
    wanted = literal(backbone.model, images, leaves[1])
    assert_values(found, wanted)
    weight = noise(*found.shape, seed=2, dtype=dtype)
    (gradient,) = torch.autograd.grad((found * weight).sum(), leaves[0])
    (wanted_gradient,) = torch.autograd.grad((wanted * weight).sum(), leaves[1])
    assert_gradients(gradient, wanted_gradient)
    assert all(weight.grad is None for weight in backbone.model.parameters())


@pytest.mark.parametrize("name", KINDS)
def test_without_prompt_tokens_it_is_timm_s_own_encoding(name: str) -> None:
    backbone = of_timm(name)
    images = noise(3, 3, 32, 32)
    with torch.no_grad():
        wanted = backbone.model.forward_head(backbone.model.forward_features(images), pre_logits=True)
    assert_values(backbone.encode_images(images, normalize=False), wanted)
    assert_values(backbone.encode_images(images), F.normalize(wanted, dim=-1))
    none = torch.zeros(2, 0, backbone.d_v)
    assert_values(backbone.encode_images_prompted(images, none, normalize=False), wanted)


def test_what_it_says_of_itself() -> None:
    backbone = of_timm("small_plain")
    assert (backbone.has_text, backbone.supports.text_prompts, backbone.supports.visual_prompts) == (False, False, True)
    assert shape_of(backbone).model_dump() == {
        "d_t": None, "d_v": 48, "d_e": 48, "text_layers": None, "vision_layers": 3, "context_length": None,
        "patch_size": 8, "patch_tokens": None, "mlp_width": 192, "positions": 17, "heads_v": 4, "heads_t": None,
    }  # fmt: skip
    assert backbone.image_size == (32, 32)


def test_images_are_prepared_as_timm_says() -> None:
    backbone = of_timm("small_plain")
    grey = Image.fromarray(np.full((64, 48, 3), 51, dtype=np.uint8))
    pixels = backbone.preprocess(grey)
    assert pixels.shape == (3, 32, 32)
    assert_values(pixels, torch.full((3, 32, 32), (51 / 255 - 0.5) / 0.25))


def test_all_that_needs_text_is_refused() -> None:
    backbone = of_timm("small_plain")
    calls = [
        lambda: backbone.encode_text(["a photo of a sun."]), lambda: backbone.class_prompts(["sun"], 4),
        lambda: backbone.embed_words("a photo"), lambda: backbone.encode_prompts(torch.zeros(1, 1), None),
        lambda: backbone.logit_scale, lambda: backbone.d_t, lambda: backbone.context_length,
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(BackboneError, match="'timm:small_plain' has no text tower"):
            call()


def test_the_fingerprint_knows_weights_and_preprocessing() -> None:
    made = [load_backbone("timm:small_plain", None, allow_unregistered=True) for _ in range(3)]
    assert all(isinstance(one, VisualBackbone) for one in made)
    made[1].model.cls_token += 1e-6
    made[2]._preprocess["crop_pct"] = 0.9
    assert len({one.fingerprint for one in made}) == 3
    assert made[2].transform_id != made[0].transform_id == made[1].transform_id


@pytest.mark.parametrize("kind", ["safetensors", "pth", "wrapped.pt"])
def test_a_file_of_timm_s_weights_without_its_classifier(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(1)
    trained = timm.create_model("small_plain", num_classes=7)
    path = tmp_path / f"weights.{kind}"
    state = trained.state_dict()
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if kind == "wrapped.pt" else state, path)
    backbone = load_backbone("timm:small_plain", "of-our-ward", allow_unregistered=True, weights_file=path)
    assert torch.equal(backbone.model.cls_token, trained.cls_token)
    assert backbone.pretrained == "of-our-ward"


@pytest.mark.parametrize("content", [{"cls_token": torch.zeros(2)}, [1, 2]])
def test_files_that_are_not_weights_of_this_model(tmp_path: Path, content: Any) -> None:
    path = tmp_path / "weights.pt"
    torch.save(content, path)
    with pytest.raises(BackboneError, match=r"cannot be loaded|no weights by name"):
        load_backbone("timm:small_plain", None, allow_unregistered=True, weights_file=path)


UNLOADABLE = [
    ("timm:small_plian", None, "timm has no model 'small_plian'; near: small_plain"),
    ("timm:hf-hub:someone/model", None, "timm has no model 'hf-hub:someone/model'"),
    ("timm:local-dir:/tmp", None, "timm has no model 'local-dir:/tmp'"),
    ("timm:vit_tiny_patch16_224.augreg_in21k", None, "by `pretrained: augreg_in21k`"),
    ("timm:vit_tiny_patch16_224", "augreg_in22k", "has no weights 'augreg_in22k'; near: augreg_in21k"),
    ("timm:small_altered", None, "is a Altered, which takes no visual prompts"),
    ("timm:test_resnet", None, "which takes no visual prompts: choose a plain vision transformer"),
]


@pytest.mark.parametrize(("model", "pretrained", "text"), UNLOADABLE)
def test_names_that_cannot_be_loaded(model: str, pretrained: str | None, text: str) -> None:
    with pytest.raises(BackboneError) as refused:
        load_backbone(model, pretrained, allow_unregistered=True)
    assert text in str(refused.value)


@pytest.mark.parametrize("shape", [(4, 48), (1, 4, 64), (4, 2, 48), (0, 2, 48)])
def test_prompts_that_do_not_fit(shape: tuple[int, ...]) -> None:
    with pytest.raises(BackboneError, match="depth of 1 to 3"):
        of_timm("small_plain").encode_images_prompted(noise(2, 3, 32, 32), noise(*shape))


def test_half_precision_gives_wide_features() -> None:
    backbone = load_backbone("timm:small_plain", None, precision="bf16", allow_unregistered=True)
    prompts = noise(1, 2, 48).requires_grad_()
    features = backbone.encode_images_prompted(noise(2, 3, 32, 32), prompts)
    assert features.dtype == torch.float32
    (gradient,) = torch.autograd.grad(features[0, 0], prompts)
    assert bool(gradient.abs().sum() > 0)


def test_neither_open_clip_nor_a_tokenizer_is_loaded() -> None:
    code = (
        "import json, sys, torch; torch.set_num_threads(1)\n"
        "from promptfed.shared.clip import load_backbone, shape_of\n"
        "backbone = load_backbone('timm:test_vit', 'random', allow_unregistered=True)\n"
        "backbone.encode_images_prompted(torch.zeros(1, 3, 160, 160), torch.zeros(1, 2, 64))\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('open_clip', 'transformers', 'ftfy')]\n"
        "print(json.dumps([loaded, shape_of(backbone).d_t]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [[], None]


# The feature cache: each image once, the same bits in any order, in any process, after any accident.


TOWERS = ["small-vit", "small-bidirectional", "small-coca", "small-resnet", "small-timm"]


@pytest.mark.parametrize("name", TOWERS)
def test_features_are_those_of_the_tower(small: Any, tmp_path: Any, name: Any) -> None:
    backbone, split = small(name), Noise(5)
    images = torch.stack([backbone.preprocess(split.image(index)) for index in range(5)])
    features = FeatureCache(tmp_path).features(backbone, split)
    assert features.dtype == torch.float32
    assert_values(features, backbone.encode_images(images))


@pytest.mark.parametrize("name", TOWERS)
def test_the_same_bits_whatever_is_kept_already(small: Any, tmp_path: Any, name: Any) -> None:
    backbone, split = small(name), Noise(75)
    whole = FeatureCache(tmp_path / "whole").features(backbone, split)
    order = torch.randperm(75, generator=torch.Generator().manual_seed(3)).tolist()
    cache = FeatureCache(tmp_path / "parts")
    for first in (0, 1, 4, 40):
        part = order[first : first * 2 + 7]
        assert torch.equal(cache.features(backbone, split, indices=part), whole[part])
    assert torch.equal(cache.features(backbone, split), whole)
    assert cache.images_computed == 75


@pytest.mark.parametrize("name", TOWERS)
def test_what_else_is_in_a_batch_changes_no_bit(small: Any, name: Any) -> None:
    backbone = small(name)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(BATCH, 3, *backbone.image_size, generator=generator)
    together = backbone.encode_images(images)
    slots = agreeing_slots(backbone)
    for slot in (slots[0], slots[-1]):
        alone = torch.zeros_like(images)
        alone[slot] = images[slot]
        assert torch.equal(backbone.encode_images(alone)[slot], together[slot])


def test_each_image_goes_through_the_tower_once(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Noise(40)
    cache = FeatureCache(tmp_path)
    cache.features(backbone, split, indices=[3, 3, 5])
    assert cache.images_computed == 2
    cache.features(backbone, split)
    cache.features(backbone, split)
    assert cache.images_computed == 40
    again = FeatureCache(tmp_path)
    again.features(backbone, split)
    assert again.images_computed == 0
    assert cache.features(backbone, split, indices=[]).shape == (0, backbone.d_e)


def test_rows_that_are_held_in_blocks_are_those_of_the_files(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(caches, "BLOCK", 4)
    monkeypatch.setattr(caches, "PART", 3)
    backbone, split = small("small-vit"), Noise(10)
    cache = FeatureCache(tmp_path)
    whole = torch.cat([cache.features(backbone, split, indices=part) for part in ([7, 2, 9], [0, 1, 7, 3, 4, 5, 6, 8])])
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert torch.equal(cache.features(backbone, split, indices=[7, 2, 9, 0, 1, 7, 3, 4, 5, 6, 8]), whole)
    assert cache.images_computed == 10
    other = FeatureCache(tmp_path / "other")
    assert torch.equal(other.features(backbone, split), cache.features(backbone, split))
    again = FeatureCache(tmp_path / "other")
    again.features(backbone, split, indices=[0])
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert torch.equal(again.features(backbone, split), cache.features(backbone, split))
    assert again.images_computed == 9


def test_a_device_without_room_for_a_batch_computes_it_in_parts(
    small: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backbone = small("small-vit")
    wanted, encode = FeatureCache(tmp_path / "all").features(backbone, Noise(5)), backbone.encode_images
    room = BATCH // 4
    passed: list[int] = []

    def with_little_room(images: Tensor, **options: bool) -> Tensor:
        passed.append(len(images))
        if len(images) > room:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(images, **options)

    monkeypatch.setattr(backbone, "encode_images", with_little_room)
    assert_values(FeatureCache(tmp_path / "parts").features(backbone, Noise(5)), wanted)
    assert set(passed) == {BATCH, BATCH // 2, room}
    room = 0
    with pytest.raises(torch.OutOfMemoryError, match="no room for the features of one image"):
        FeatureCache(tmp_path / "none").features(backbone, Noise(5))


def test_other_weights_and_other_transforms_have_their_own_features(small: Any, tmp_path: Any) -> None:
    split, cache = Noise(3), FeatureCache(tmp_path)
    first = cache.features(small("small-vit"), split)
    second = cache.features(small("small-quick"), split)
    assert cache.images_computed == 6
    assert not torch.equal(first, second)
    assert len(list(tmp_path.iterdir())) == 2


def test_places_that_disagree_are_not_used(small: Any, tmp_path: Any, monkeypatch: Any) -> Any:
    backbone, split = small("small-vit"), Noise(70)
    exact = backbone.encode_images

    def uneven(images: Any, **options: Any) -> Any:
        features = exact(images, **options).clone()
        features[-3:] = torch.nextafter(features[-3:], torch.full_like(features[-3:], torch.inf))
        return features

    wanted, slots = FeatureCache(tmp_path / "even").features(backbone, split), agreeing_slots(backbone)
    monkeypatch.setattr(backbone, "encode_images", uneven)
    assert agreeing_slots(backbone) == [slot for slot in slots if slot < BATCH - 3]
    assert torch.equal(FeatureCache(tmp_path / "uneven").features(backbone, split), wanted)


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        del data[len(data) // 2 :]
    elif kind == "flipped":
        data[-3] ^= 1
    else:
        data.clear()
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty"])
def test_a_damaged_file_is_computed_again(small: Any, tmp_path: Any, kind: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(caches, "FILE_ROWS", 1)  # a file for each batch
    backbone = small("small-vit")
    whole = len(agreeing_slots(backbone))  # how many images a file holds is the CPU's
    split = Noise(whole + 1)
    wanted = FeatureCache(tmp_path).features(backbone, split)
    files = sorted(tmp_path.glob("*/*.safetensors"))
    assert len(files) == 2
    damage(files[0], kind)
    cache = FeatureCache(tmp_path)
    assert torch.equal(cache.features(backbone, split), wanted)
    assert cache.images_computed in (1, whole)
    assert sorted(tmp_path.glob("*/*.safetensors")) == files


def test_an_interrupted_write_leaves_nothing_behind(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    backbone, split = small("small-vit"), Noise(3)
    cache = FeatureCache(tmp_path)
    cache.features(backbone, split, indices=[0])
    before = sorted(tmp_path.rglob("*"))

    def fail(source: Any, target: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        cache.features(backbone, split)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_size_bound_drops_what_was_unused_longest(small: Any, tmp_path: Any) -> None:
    backbone = small("small-vit")
    whole = len(agreeing_slots(backbone))
    splits = [Noise(whole, seed) for seed in range(3)]
    FeatureCache(tmp_path).features(backbone, splits[0])
    (first,) = tmp_path.glob("*/*.safetensors")
    FeatureCache(tmp_path).features(backbone, splits[1])
    second = next(path for path in tmp_path.glob("*/*.safetensors") if path != first)
    for age, path in ((100, second), (200, first)):
        os.utime(path, (path.stat().st_atime - age, path.stat().st_mtime - age))
    bounded = FeatureCache(tmp_path, max_bytes=2 * first.stat().st_size + 100)
    bounded.features(backbone, splits[0])  # used now: the second split's file is the oldest
    bounded.features(backbone, splits[2])
    assert first.exists()
    assert not second.exists()
    assert bounded.images_computed == whole


SCRIPT = """
import sys, torch
from pathlib import Path
import open_clip
from promptfed.shared.clip import FeatureCache, load_backbone
from tests.shared.clip.conftest import Noise
torch.set_num_threads(1)
open_clip.add_model_config(Path(sys.argv[1]))
cache = FeatureCache(Path(sys.argv[2]))
split = Noise(150)
order = list(range(150)) if sys.argv[3] == "up" else list(range(149, -1, -1))
features = cache.features(load_backbone("small-vit", None), split, indices=order)
torch.save(features, sys.argv[4])
"""


def test_several_processes_share_a_folder(small: Any, tmp_path: Any) -> None:
    import json

    from tests.shared.clip.conftest import CONFIGS

    (tmp_path / "small-vit.json").write_text(json.dumps(CONFIGS["small-vit"]))
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "small-vit.json"), str(tmp_path / "cache")]
    running = [subprocess.Popen([*command, way, str(tmp_path / way)]) for way in ("up", "down")]
    assert [process.wait(timeout=PATIENCE) for process in running] == [0, 0]
    up, down = torch.load(tmp_path / "up"), torch.load(tmp_path / "down")
    assert torch.equal(up, down.flip(0))
    here = FeatureCache(tmp_path / "cache")
    assert torch.equal(here.features(small("small-vit"), Noise(150)), up)
    assert here.images_computed == 0


class Watched(Noise):
    """Notes which images were asked for; ``broken`` cannot be read."""

    def __init__(self, count: int, broken: int | None = None) -> None:
        super().__init__(count)
        self.asked: set[int] = set()
        self.second_batch = threading.Event()
        self._broken = broken

    def image(self, index: int) -> Image.Image:
        self.asked.add(index)
        if index >= BATCH:
            self.second_batch.set()
        if index == self._broken:
            raise DataError(f"image {index} cannot be read")
        return super().image(index)


def test_the_next_images_are_read_while_the_tower_runs(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    backbone, split = small("small-vit"), Watched(BATCH + 8)
    cache = FeatureCache(tmp_path)
    cache.features(backbone, Noise(1, seed=5))  # the places of a batch are measured
    real = backbone.encode_images
    waited: list[bool] = []

    def encode(images: Any, **options: Any) -> Any:
        waited.append(split.second_batch.wait(PATIENCE))
        return real(images, **options)

    monkeypatch.setattr(backbone, "encode_images", encode)
    features = cache.features(backbone, split)
    assert waited == [True, True]
    monkeypatch.undo()
    assert torch.equal(features, FeatureCache(tmp_path / "other").features(backbone, Noise(BATCH + 8)))


@pytest.mark.parametrize("size", [(320, 240), (240, 320), (224, 224), (97, 311), (48, 20), (1000, 7)])
def test_the_two_halves_of_a_preprocessing_give_its_bits(small: Any, size: tuple[int, int]) -> None:
    """Of each kind of resizing: the shorter side, also of a side that is cut, and both sides."""
    from open_clip.transform import PreprocessCfg, image_transform_v2

    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    squashed = {"size": 32, "resize_mode": "squash", "interpolation": "bilinear"}
    for given in ({"size": 32}, {"size": 32, "interpolation": "bilinear"}, squashed):
        cfg = PreprocessCfg(**given)
        whole, halves = image_transform_v2(cfg, is_train=False), Halves.of_config(asdict(cfg))
        assert halves is not None
        for shown in (image, image.convert("L"), image.convert("RGBA")):
            cut = torch.from_numpy(halves.cut.pixels(shown))
            assert cut.dtype == torch.uint8
            assert torch.equal(halves.numbers(cut[None], torch.device("cpu"))[0], whole(middle(shown)))
    for loaded in (small("small-vit"), of_timm("small_plain")):
        assert loaded.pixels(image).dtype == torch.uint8
        assert torch.equal(loaded.preprocess(image), loaded._transform(middle(image)))
        assert torch.equal(loaded.images(loaded.pixels(image)[None])[0], loaded.preprocess(image))
    padded = asdict(PreprocessCfg(size=32, resize_mode="longest"))
    assert Halves.of_config(padded) is None, "it does more than scale and cut"


def test_other_processes_read_the_same_images(small: Any, tmp_path: Any, monkeypatch: Any, caplog: Any) -> None:
    """Also where no package for medical images is installed."""
    hiding = tmp_path / "absent" / "pydicom"
    hiding.mkdir(parents=True)
    (hiding / "__init__.py").write_text("raise ModuleNotFoundError('pydicom')")
    monkeypatch.syspath_prepend(hiding.parent)
    monkeypatch.setattr(data_readers, "_readers", {})
    backbone, pictures = small("small-vit"), Noise(11)
    for number in range(len(pictures)):
        place = tmp_path / "images" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        pictures.image(number).save(place / f"{number}.png")
    split = open_source(f"folder:{tmp_path}/images", "evaluator").test
    wanted = FeatureCache(tmp_path / "here").features(backbone, split)
    monkeypatch.setattr(caches, "apart_on", lambda device: True)
    asked: list[Any] = []
    submit = Readers.submit
    monkeypatch.setattr(Readers, "submit", lambda *given: asked.append(given[1]) or submit(*given))
    assert torch.equal(FeatureCache(tmp_path / "apart").features(backbone, split), wanted)
    assert [len(request.settings["paths"]) for request in asked] == [8, 3]
    monkeypatch.setattr(caches, "kept_slots", lambda *given: [1, 2, 4, 8, 9, 10, 11, 12, 13])
    assert torch.equal(FeatureCache(tmp_path / "places").features(backbone, split), wanted)
    assert not caplog.records, "they were read apart"
    path = split.path(4)
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match="cannot be read as an image"):
        FeatureCache(tmp_path / "again").features(backbone, split)
    data_readers.readers().close()


def test_a_device_is_only_waited_for_by_what_reads_rows_back(small: Any, tmp_path: Any) -> None:
    split = Noise(DEVICE_BATCH + 40)
    wanted = FeatureCache(tmp_path / "cpu").features(small("small-vit"), split)
    with far_device() as device:
        backbone, cache = load_backbone("small-vit", None).to(device), FeatureCache(tmp_path / "device")
        cache.features(backbone, Noise(1, seed=5))  # the places of a batch are measured
        with waits() as counted:
            found = cache.features(backbone, split)
    assert_values(found, wanted)
    assert not counted, "it waits for its own copies alone, which arrive no sooner"
    assert len(list(tmp_path.glob("*/*/*.safetensors"))) == 1 + 1 + 1, (
        "the CPU's and the device's are not the same rows"
    )


def test_many_batches_share_a_file_and_what_was_computed_is_kept(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    backbone, split = small("small-vit"), Noise(4 * BATCH)
    told: list[int] = []

    def stop(images: int) -> None:
        told.append(images)
        if len(told) == 3:
            raise KeyboardInterrupt

    cache = FeatureCache(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        cache.features(backbone, split, done=stop)
    assert sum(told) == cache.images_computed < len(split)
    (_,) = tmp_path.glob("*/*.safetensors")
    again = FeatureCache(tmp_path)
    again.features(backbone, split)
    assert again.images_computed == len(split) - sum(told)
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 2
    monkeypatch.setattr(caches, "FILE_SECONDS", 0)
    FeatureCache(tmp_path / "slow").features(backbone, split)
    assert len(list(tmp_path.glob("slow/*/*.safetensors"))) >= 4, "a kill costs little where a tower is slow"


def test_an_image_that_cannot_be_read_ends_the_reading(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Watched(4 * BATCH, broken=3)
    before = threading.active_count()
    with pytest.raises(DataError, match="image 3 cannot be read"):
        FeatureCache(tmp_path).features(backbone, split)
    assert max(split.asked) < 2 * BATCH
    assert threading.active_count() == before


def test_features_of_embedded_pictures_alone_lie_in_the_user_s_own_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, usual, given = tmp_path / "own", tmp_path / "usual", tmp_path / "given"
    monkeypatch.setenv("XDG_CACHE_HOME", str(own))
    embedded = ["symbols:neon?topic=weather", "digits", "emoji:flat"]
    shared = features_in(None, usual, embedded)
    assert shared._root == own / "promptfed" / "features" / __version__
    assert shared._root.stat().st_mode & 0o777 == 0o700
    assert shared._max_bytes == caches.OWN_BYTES
    assert features_in(None, usual, [*embedded, "folder:symbols"])._root == usual, "a site's own pictures stay there"
    assert features_in(None, usual, embedded, patches=True)._root == usual
    assert features_in(given, usual, embedded)._root == given
    with monkeypatch.context() as full:
        full.setattr(caches, "OWN_BYTES", 1 << 60)  # more than any disk has free
        assert features_in(None, usual, embedded)._root == usual
    own.joinpath("file").write_text("")
    for nowhere in (own / "file", Path("/proc/none")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere))
        assert features_in(None, usual, embedded)._root == usual
