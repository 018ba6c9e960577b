"""Backbones without text: plain vision transformers of timm, prompted, loaded, refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save_file

from promptfed.shared.clip import BackboneError, load_backbone, shape_of
from promptfed.shared.clip.loading import VisualBackbone
from tests.shared.clip.conftest import noise
from tests.support.equality import assert_gradients, assert_values
from tests.support.small_timm import KINDS, of_timm
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("timm_models")

UNLOADABLE = [
    ("timm:small_plian", None, "timm has no model 'small_plian'; near: small_plain"),
    ("timm:hf-hub:someone/model", None, "timm has no model 'hf-hub:someone/model'"),
    ("timm:local-dir:/tmp", None, "timm has no model 'local-dir:/tmp'"),
    ("timm:vit_tiny_patch16_224.augreg_in21k", None, "by `pretrained: augreg_in21k`"),
    ("timm:vit_tiny_patch16_224", "augreg_in22k", "has no weights 'augreg_in22k'; near: augreg_in21k"),
    ("timm:small_altered", None, "is a Altered, which takes no visual prompts"),
    ("timm:test_resnet", None, "which takes no visual prompts: choose a plain vision transformer"),
]


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


@pytest.mark.extended
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
