"""What can be loaded, what is refused, and that the same name gives the same backbone."""

from __future__ import annotations

import json
import logging
import warnings
from copy import copy, deepcopy
from typing import Any

import open_clip
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from promptfed.shared.clip import Backbone, BackboneError, load_backbone, loading
from promptfed.shared.clip.fingerprint import config_digest, weights_fingerprint
from tests.shared.clip.conftest import CLASS_NAMES, CONFIGS, noise

pytestmark = pytest.mark.usefixtures("timm_models")

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
    hub = load_backbone("hf-hub:owner/name", None, allow_unregistered=True, weights_file=tmp_path)
    assert torch.equal(hub.model.visual.proj, backbone.model.visual.proj)
    assert (hub.model_name, hub.tokenizer_folder) == ("hf-hub:owner/name", tmp_path)
    with pytest.raises(BackboneError, match="--allow-backbone hf-hub:owner/name"):
        load_backbone("hf-hub:owner/name", None, weights_file=tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BackboneError, match="holds no weights"):
        load_backbone("hf-hub:owner/name", None, allow_unregistered=True, weights_file=tmp_path)
    (tmp_path / "open_clip_config.json").unlink()
    with pytest.raises(BackboneError, match="does not hold 'hf-hub:owner/name': give a folder with open_clip_config"):
        load_backbone("hf-hub:owner/name", None, allow_unregistered=True, weights_file=tmp_path)


def test_what_keeps_a_model_from_loading_is_told(small: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "a.pt").touch()
    with pytest.raises(BackboneError, match="open_clip has no model 'small-vot'; near: small-vit"):
        load_backbone("small-vot", "own", weights_file=tmp_path / "a.pt")
    assert loading._tag("vit_tiny_patch16_224", "augreg_in21k") == "augreg_in21k"
    broken = copy(small("small-vit"))
    broken.precision, broken.model = "bf16", deepcopy(broken.model)
    monkeypatch.setattr(broken.model, "encode_text", lambda ids: torch.zeros(1) @ torch.zeros(2))
    with pytest.raises(BackboneError, match="small-vit does not run in bf16, use precision fp32: "):
        loading.check_runs(broken)
    hint = r"X \(tag\) cannot be loaded \(in bf16; try precision fp32\): a b"
    with pytest.raises(BackboneError, match=hint), loading.load_errors("X", "tag", "bf16"):
        raise ValueError("a\nb")
    with pytest.raises(BackboneError, match="backbone X cannot be loaded: a"), loading.load_errors("X", None, "fp32"):
        raise ValueError("a")
    for config, says in (
        ({"tokenizer_kwargs": {"trust_remote_code": True}}, "asks to run code of its own"),
        ({"hf_model_name": "bert"}, "is one of transformers"),
        (None, "configuration of 'm' cannot be read: "),
    ):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr(
            open_clip, "get_model_config", lambda name, text=config: {"text_cfg": dict(text), "vision_cfg": {}}
        )
        with pytest.raises(BackboneError, match=says):
            loading._config("m")


def test_embedded_weights_are_the_same_in_half_precision() -> None:
    whole, half = (load_backbone("promptfed-tiny", "embedded", precision=one) for one in ("fp32", "bf16"))
    assert half.model.visual.proj.dtype == torch.bfloat16
    assert torch.equal(half.model.visual.proj, whole.model.visual.proj.bfloat16())
    assert (half.pretrained, half.precision) == ("embedded", "bf16")


def test_a_tower_without_text_refuses_what_needs_one() -> None:
    backbone = load_backbone("timm:small_plain", None, allow_unregistered=True)
    with pytest.raises(BackboneError, match="gives no patch features: choose a CLIP model"):
        backbone.encode_patches(noise(1, 3, 32, 32))
    assert backbone.patch_tokens is None
    usual = dict(backbone._preprocess)
    image = Image.new("RGB", (40, 36), "red")
    for changed, cut in (({}, True), ({"crop_mode": "squash"}, False), ({"interpolation": "nearest"}, False)):
        other = copy(backbone)
        other.__dict__.pop("_halves", None)
        other.__dict__.pop("_transform", None)
        other._preprocess = usual | changed
        assert (other.cut is not None) == cut
        assert other.preprocess(image).shape == (3, 32, 32)


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
