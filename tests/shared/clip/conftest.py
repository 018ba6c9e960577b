"""Small open_clip models, one for each kind of tower, with random weights."""

import gc
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.func import functional_call

from promptfed.shared import machine
from promptfed.shared.clip import Backbone, load_backbone
from promptfed.shared.methods.core.tower import trained_kinds
from tests.support.equality import assert_gradients, assert_values

VISION = {"image_size": 32, "layers": 3, "width": 64, "head_width": 16, "patch_size": 8}
TEXT = {"context_length": 24, "vocab_size": 49408, "width": 48, "heads": 4, "layers": 3}

BACK = {"no_ln_pre": True, "pool_type": "avg", "final_ln_after_pool": True}
ANYWAY = {"no_causal_mask": True, "pool_type": "last", "proj_bias": True, "norm_kwargs": {"eps": 1e-6}}
COCA = {"attentional_pool": True, "attn_pooler_heads": 8, "attn_pooler_queries": 16, "output_tokens": True}
RESNET = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "patch_size": None}
TIMM = {"timm_model_name": "resnet10t", "timm_model_pretrained": False}


def config(vision: dict[str, Any], text: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A small model's, with these changes of its towers."""
    return {"embed_dim": 40, "vision_cfg": VISION | vision, "text_cfg": TEXT | text} | more


CONFIGS: dict[str, dict[str, Any]] = {
    "small-vit": config({}, {}), "small-custom": config({}, {}, custom_text=True),
    "small-quick": config({}, {}, quick_gelu=True),
    "small-scale": config({"ls_init_value": 0.3}, {"ls_init_value": 0.3, "proj_bias": True}),
    "small-eos": config({}, {"pool_type": "eos", "eos_id": 49407, "proj_type": "none"}, embed_dim=48, custom_text=True),
    "small-one-block": config({"layers": 1}, {"layers": 1}), "small-qknorm": config({}, {"qk_norm": True}),
    "small-bidirectional": config(
        BACK, ANYWAY | {"act_kwargs": {"approximate": "tanh"}}, custom_text=True, init_logit_bias=-10
    ), "small-bidirectional-argmax": config({}, {"no_causal_mask": True}, custom_text=True),
    "small-coca": config(
        COCA, {"context_length": 23, "embed_cls": True, "output_tokens": True},
        multimodal_cfg={"context_length": 23, "width": 48, "heads": 4, "layers": 1}, custom_text=True,
    ), "small-resnet": config({}, {}, vision_cfg=RESNET),
    "small-timm": config({}, {}, vision_cfg=TIMM | {"timm_pool": "avg", "timm_proj": "linear", "image_size": 64}),
}  # fmt: skip

PREFIX_MODELS = ["small-vit", "small-custom", "small-quick", "small-scale", "small-eos", "small-resnet"]
SHORT_MODELS = [*PREFIX_MODELS, "small-qknorm"]
PLAIN_ONLY_MODELS = ["small-bidirectional", "small-bidirectional-argmax", "small-coca"]
VISION_TRANSFORMERS = ["small-vit", "small-quick", "small-scale", "small-bidirectional", "small-coca"]

CLASS_NAMES = ["dog", "red fox", "one big red fox dog", "big red fox", "cat", "big red_fox dog", "sun"]


@pytest.fixture(scope="session", autouse=True)
def _registered(tmp_path_factory: pytest.TempPathFactory) -> None:
    import open_clip

    folder: Path = tmp_path_factory.mktemp("configs")
    for name, config in CONFIGS.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    open_clip.add_model_config(folder)


@pytest.fixture(scope="session", autouse=True)
def _one_tokenizer() -> Iterator[None]:
    """All small models have the same tokenizer, which takes 26 MB and a moment to make."""
    import open_clip

    shared, usual = open_clip.SimpleTokenizer(), open_clip.get_tokenizer
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(open_clip, "get_tokenizer", lambda name: shared if name in CONFIGS else usual(name))
        yield


@pytest.fixture(scope="session")
def small(_registered: None) -> Callable[..., Backbone]:
    """`small(name, dtype)`: the backbone of that configuration. A few are held, since each takes 10 MB and more."""

    @lru_cache(maxsize=4)
    def make(name: str, dtype: torch.dtype = torch.float32) -> Backbone:
        backbone = load_backbone(name, None)
        backbone.model.to(dtype)
        return backbone

    return make


def noise(*shape: int, seed: int = 0, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(scale).to(dtype)


class Noise:
    """A split of images that are all different."""

    def __init__(self, count: int, seed: int = 0) -> None:
        self._pixels = np.random.default_rng(seed).integers(0, 255, (count, 40, 36, 3), dtype=np.uint8)

    def __len__(self) -> int:
        return len(self._pixels)

    def image(self, index: int) -> Image.Image:
        return Image.fromarray(self._pixels[index])

    def digest(self, index: int) -> str:
        return hashlib.sha256(self._pixels[index].tobytes()).hexdigest()


@contextmanager
def prompts_hooked_in(embedding: Any, blocks: Any, start: Any, context: Any, deep: Any) -> Any:
    """The library's own model, with the rows of the context overwritten where they enter and before later blocks."""
    stop = start + context.shape[-2]

    def enter(module: Any, inputs: Any, output: Any) -> Any:
        rows = context.expand(output.shape[0], *context.shape[-2:])
        return torch.cat([output[:, :start], rows, output[:, stop:]], dim=1)

    def replace(rows: Any) -> Any:
        def hook(module: Any, inputs: Any) -> Any:
            fresh = rows.expand(inputs[0].shape[0], *rows.shape)
            return torch.cat([inputs[0][:, :start], fresh, inputs[0][:, stop:]], dim=1), *inputs[1:]

        return hook

    with ExitStack() as stack:
        stack.callback(embedding.register_forward_hook(enter).remove)
        for index in range(0 if deep is None else deep.shape[0]):
            stack.callback(blocks[index + 1].register_forward_pre_hook(replace(deep[index])).remove)
        yield


@pytest.fixture
def a_tower_ends() -> Iterator[None]:
    """Modules and their hooks name each other: without a collection, several large towers lie in memory."""
    yield
    gc.collect()
    machine.give_back()


def value_and_gradients(encode: Any, *leaves: Any) -> Any:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    features = encode(*leaves)
    loss = (features * noise(*features.shape, seed=9, dtype=features.dtype)).sum()
    return features.detach(), torch.autograd.grad(loss, leaves)


def called(module: torch.nn.Module, call: Callable[[], Any]) -> Callable[[Any], Any]:
    """What ``call`` gives while the module has other weights, by its own names."""

    class Calling(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self) -> Any:
            return call()

    return lambda weights: functional_call(Calling(), {f"module.{name}": one for name, one in weights.items()}, ())


def assert_weights_equal(found_by: Any, wanted_by: Any, module: torch.nn.Module, names: Any) -> None:
    """Features with other weights of these ``names``, and the gradient of each."""
    given, names = dict(module.named_parameters()), list(names)
    shaken = {
        name: (given[name] + 0.02 * noise(*given[name].shape, seed=3 + place).to(given[name])).detach().requires_grad_()
        for place, name in enumerate(names)
    }

    def passed(call: Any) -> Any:
        features = call(shaken)
        features = features[0] if isinstance(features, tuple) else features
        loss = (features * noise(*features.shape, seed=9, dtype=features.dtype)).sum()
        return features.detach(), torch.autograd.grad(loss, list(shaken.values()))

    (found, gradients), (wanted, slopes) = passed(found_by), passed(wanted_by)
    assert_values(found, wanted)
    for gradient, slope in zip(gradients, slopes, strict=True):
        assert_gradients(gradient, slope)


def assert_image_weights_equal(tower: Any, images: torch.Tensor) -> None:
    """A copy of an image tower with other weights against the library's own module with them, for every kind."""
    copy, module = tower.copy(), tower.module
    frozen = tower.features(images)

    def found_by(weights: Any) -> Any:
        copy.put(weights)
        return copy.features(images)

    names = [name for kind in trained_kinds("all", True) for name in tower.named(kind)]
    assert_weights_equal(found_by, lambda weights: functional_call(module, weights, (images,)), module, names)
    assert tower.features(images).equal(frozen), "the frozen tower is left alone"


def assert_text_weights_equal(tower: Any, module: torch.nn.Module, ids: torch.Tensor, encode: Any) -> None:
    """A text tower with other weights behind its embedding against the library's own module with them."""
    names = [name for name, _ in tower.holder.named_parameters() if name.startswith(("transformer", "ln_f", "text_p"))]
    prefix = "" if tower.holder is module else "text."
    names = [prefix + name for name in names]
    found_by = called(module, lambda: tower.encode_texts(tower.texts(ids)))
    assert_weights_equal(found_by, called(module, lambda: encode(ids)), module, names)


@pytest.fixture(scope="module")
def timm_models() -> None:
    """timm knows the small models of `tests.support.small_timm`."""
    from tests.support.small_timm import register

    register()
