"""Visual prompts in every shipped configuration with a transformer, against the library's own forward pass.

The configurations are real, with two blocks, pictures of 4 × 4 patches, random weights and float64.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import open_clip
import pytest
import torch
import torch.nn.functional as F
from open_clip.model import _build_vision_tower

from promptfed.shared.clip import BackboneError, FeatureCache, shape_of
from promptfed.shared.clip.caches import PatchCache
from promptfed.shared.clip.loading import seeded
from promptfed.shared.clip.towers.copies import vision_tower
from promptfed.shared.clip.towers.vision import attend_from_everywhere, prompted_tower, refusal_of
from tests.shared.clip.conftest import VISION_TRANSFORMERS, Noise, assert_image_weights_equal, noise
from tests.support.equality import assert_gradients, assert_values

PLAIN = 56


REFUSED = {"TimmModel": 78, "ModifiedResNet": 10}


@cache
def configurations() -> dict[str, list[str]]:
    """Names of configurations by the description of their image tower, cut to two blocks."""
    found: dict[str, list[str]] = {}
    for path in sorted((Path(open_clip.__file__).parent / "model_configs").glob("*.json")):
        config = json.loads(path.read_text())
        wanted = {key: config.get(key, False) for key in ("embed_dim", "vision_cfg", "quick_gelu")}
        if isinstance(wanted["vision_cfg"].get("layers"), int):
            wanted["vision_cfg"] |= {"layers": 2, "image_size": 4 * wanted["vision_cfg"].get("patch_size", 16)}
        found.setdefault(json.dumps(wanted, sort_keys=True), []).append(path.stem)
    return found


def is_plain(description: str) -> bool:
    return isinstance(json.loads(description)["vision_cfg"].get("layers"), int)


def build(description: str) -> Any:
    wanted = json.loads(description)
    return _build_vision_tower(wanted["embed_dim"], wanted["vision_cfg"], wanted["quick_gelu"])


@cache
def refusals() -> dict[str, str | None]:
    with torch.device("meta"):
        return {description: refusal_of(build(description)) for description in configurations()}


SIZES = {"layers", "width", "head_width", "patch_size", "image_size", "mlp_ratio"}


def plain_towers() -> list[Any]:
    """The second tier takes the smallest tower of each kind; the third takes all sizes."""
    kinds, towers = set(), []
    plain = [(json.loads(wanted), wanted) for wanted in configurations() if is_plain(wanted)]
    for options, wanted in sorted(plain, key=lambda one: one[0]["vision_cfg"]["width"]):
        config = options["vision_cfg"]
        kind = str((options["quick_gelu"], sorted((key, config[key]) for key in config.keys() - SIZES)))
        mark = pytest.mark.slow if kind in kinds else pytest.mark.extended
        kinds.add(kind)
        towers.append(pytest.param(wanted, id=configurations()[wanted][0], marks=mark))
    return towers


@pytest.mark.extended
def test_every_configuration_with_a_plain_transformer_takes_prompts() -> None:
    assert sum(len(names) for wanted, names in configurations().items() if refusals()[wanted] is None) == PLAIN
    for kind, count in REFUSED.items():
        refused = [n for wanted, names in configurations().items() if kind in (refusals()[wanted] or "") for n in names]
        assert len(refused) == count, kind
    assert PLAIN + sum(REFUSED.values()) == 144


def fixed_weights(visual: Any) -> str | None:
    """Why the weights of a tower cannot be trained."""
    try:
        vision_tower(visual)
    except BackboneError as error:
        return str(error)
    return None


@pytest.mark.extended
def test_the_weights_of_most_plain_transformers_can_be_trained() -> None:
    with torch.device("meta"):
        plain = {wanted: fixed_weights(build(wanted)) for wanted in configurations() if is_plain(wanted)}
    counts = Counter(reason and reason.rpartition(" ")[2] for wanted, reason in plain.items() for _ in names_of(wanted))
    assert counts == {None: PLAIN}


def names_of(description: str) -> list[str]:
    return configurations()[description]


@contextmanager
def prompts_hooked_in(visual: Any, prompts: Any) -> Any:
    """The library's tower, whose blocks find the prompts after its class token, if it has one, as further ones."""
    depth, n, _ = prompts.shape
    blocks, behind, norm = visual.transformer.resblocks, 1, visual.ln_pre

    def enter(module: Any, inputs: Any) -> Any:
        fresh = norm(prompts[0]).expand(len(inputs[0]), -1, -1)
        return torch.cat([inputs[0][:, :behind], fresh, inputs[0][:, behind:]], dim=1), *inputs[1:]

    def replace(rows: Any) -> Any:
        def hook(module: Any, inputs: Any) -> Any:
            fresh = rows.expand(len(inputs[0]), -1, -1)
            return torch.cat([inputs[0][:, :behind], fresh, inputs[0][:, behind + n :]], dim=1), *inputs[1:]

        return hook

    def leave(module: Any, inputs: Any, output: Any) -> Any:
        return torch.cat([output[:, :behind], output[:, behind + n :]], dim=1)

    with ExitStack() as stack:
        for number in range(depth):
            hook = enter if number == 0 else replace(prompts[number])
            stack.callback(blocks[number].register_forward_pre_hook(hook).remove)
        stack.callback(blocks[-1].register_forward_hook(leave).remove)
        yield


def randomise(visual: Any) -> None:
    """Weights that matter: libraries start biases, tokens and layer scales at or near zero."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in visual.parameters():
            weight += 0.1 * weight.std().nan_to_num(0).clamp(min=0.1) * torch.randn(weight.shape, generator=generator)


@pytest.mark.usefixtures("a_tower_ends")
@pytest.mark.parametrize("description", plain_towers())
def test_prompts_equal_the_library_with_further_tokens(description: Any) -> None:
    with seeded():
        visual = build(description).eval().requires_grad_(False)
    randomise(visual)
    visual = visual.double()
    tower, (height, width) = prompted_tower(visual), visual.image_size
    images = noise(1, 3, height, width, dtype=torch.float64)
    if fixed_weights(visual) is None:
        assert_image_weights_equal(vision_tower(visual), images)
    leaves = [noise(2, 3, tower.width, seed=2, dtype=torch.float64).requires_grad_() for _ in range(2)]
    found = tower.encode(images, leaves[0], pooled=False)
    with prompts_hooked_in(visual, leaves[1]):
        wanted = visual(images)
        wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    assert_values(found, wanted)
    weight = noise(*found.shape, seed=2, dtype=torch.float64)
    gradients = [
        torch.autograd.grad((features * weight).sum(), leaf)[0]
        for features, leaf in zip((found, wanted), leaves, strict=True)
    ]
    assert_gradients(*gradients)
    with torch.no_grad():
        ordinary = visual(images)
        bare = tower.encode(images, torch.zeros(1, 0, tower.width, dtype=torch.float64), pooled=False)
    assert_values(bare, ordinary[0] if isinstance(ordinary, tuple) else ordinary)


# Prompted image encoding against a token-by-token reading of its definition.


def literal(backbone: Any, images: Any, prompts: Any, pooled: Any = False) -> Any:
    """Prompts between [cls] and the patches, as the papers draw them, and open_clip's modules one by one."""
    visual, n = backbone.model.visual, prompts.shape[1]
    patches = visual.conv1(images).flatten(2).transpose(1, 2)  # (B, patches, d)
    rows = torch.cat([visual.class_embedding.expand(len(images), 1, -1), patches], dim=1) + visual.positional_embedding
    rows = visual.ln_pre(torch.cat([rows[:, :1], prompts[0].expand(len(images), -1, -1), rows[:, 1:]], dim=1))
    for number, block in enumerate(visual.transformer.resblocks):
        if 1 <= number < len(prompts):
            fresh = prompts[number].expand(len(images), -1, -1)
            rows = torch.cat([rows[:, :1], fresh, rows[:, 1 + n :]], dim=1)
        rows = block(rows)
    own = torch.cat([rows[:, :1], rows[:, 1 + n :]], dim=1)
    if visual.attn_pool is not None:
        feature = visual.ln_post(visual.attn_pool(own))[:, 0]
    elif visual.final_ln_after_pool:
        feature = visual.ln_post(own[:, 1:].mean(dim=1) if visual.pool_type == "avg" else own[:, 0])
    else:
        own = visual.ln_post(own)
        feature = own[:, 1:].mean(dim=1) if visual.pool_type == "avg" else own[:, 0]
    return F.normalize(feature if pooled else feature @ visual.proj, dim=-1)


@pytest.mark.parametrize(("depth", "dtype"), [(1, torch.float32), (2, torch.float64), (3, torch.float32)])
@pytest.mark.parametrize("pooled", [False, True])
@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_prompted_images_equal_the_definition(small: Any, name: Any, pooled: Any, depth: Any, dtype: Any) -> None:
    backbone = small(name, dtype)
    images = noise(2, 3, 32, 32, dtype=dtype)
    leaves = [noise(depth, 5, backbone.d_v, seed=1, scale=0.5, dtype=dtype).requires_grad_() for _ in range(2)]
    found = backbone.encode_images_prompted(images, leaves[0], pooled=pooled)
    wanted = literal(backbone, images, leaves[1], pooled=pooled)
    assert_values(found, wanted)
    weight = noise(*found.shape, seed=2, dtype=dtype)
    (gradient,) = torch.autograd.grad((found * weight).sum(), leaves[0])
    (wanted_gradient,) = torch.autograd.grad((wanted * weight).sum(), leaves[1])
    assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize("name", VISION_TRANSFORMERS)
def test_without_prompt_tokens_it_is_the_ordinary_encoding(small: Any, name: Any) -> None:
    backbone = small(name)
    images = noise(3, 3, 32, 32)
    found = backbone.encode_images_prompted(images, torch.zeros(2, 0, backbone.d_v))
    assert_values(found, backbone.encode_images(images))
    assert_values(
        backbone.encode_images(images), F.normalize(backbone.model.encode_image(images, normalize=False), dim=-1)
    )


@pytest.mark.parametrize("name", ["small-resnet", "small-timm"])
def test_other_image_towers_encode_but_take_no_prompts(small: Any, name: Any) -> None:
    backbone = small(name)
    assert not backbone.supports.visual_prompts
    assert backbone.vision_layers == 0
    features = backbone.encode_images(noise(2, 3, 64, 64))
    assert features.shape == (2, backbone.d_e)
    with pytest.raises(BackboneError, match="takes no visual prompts"):
        backbone.encode_images_prompted(noise(2, 3, 64, 64), noise(1, 4, backbone.d_v))


@pytest.mark.parametrize("shape", [(4, 64), (1, 4, 48), (4, 2, 64), (0, 2, 64)])
def test_prompts_that_do_not_fit(small: Any, shape: Any) -> None:
    with pytest.raises(BackboneError, match="depth of 1 to 3"):
        small("small-vit").encode_images_prompted(noise(2, 3, 32, 32), noise(*shape))


def test_no_gradient_reaches_a_weight_or_the_ordinary_encoding(small: Any) -> None:
    backbone = small("small-vit")
    images = noise(2, 3, 32, 32)
    assert not backbone.encode_images(images).requires_grad
    prompts = noise(3, 2, backbone.d_v).requires_grad_()
    backbone.encode_images_prompted(images, prompts).sum().backward()
    assert prompts.grad is not None
    assert bool((prompts.grad.abs().amax(dim=(1, 2)) > 0).all())
    assert all(weight.grad is None for weight in backbone.model.parameters())


# Patch features: those of open_clip's modules one by one, kept in 16 bits, the same bits computed and read.


TRANSFORMERS = ["small-vit", "small-quick", "small-scale", "small-bidirectional"]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_a_transformers_patches(small: Any, name: Any) -> None:
    """Behind the last block, the norm and the projection; without the class token."""
    backbone, images = small(name), noise(2, 3, 32, 32)
    visual = backbone.model.visual
    rows = visual.conv1(images).flatten(2).transpose(1, 2)
    rows = torch.cat([visual.class_embedding.expand(2, 1, -1), rows], dim=1) + visual.positional_embedding
    rows = visual.ln_pre(rows)
    for block in visual.transformer.resblocks:
        rows = block(rows)
    wanted = torch.stack([F.normalize(visual.ln_post(row) @ visual.proj, dim=-1) for row in rows[:, 1:].unbind(1)], 1)
    found = backbone.encode_patches(images)
    assert found.shape == (2, 16, 40)
    assert backbone.patch_tokens == shape_of(backbone).patch_tokens == 16
    assert_values(found, wanted)


def test_a_resnets_patches(small: Any) -> None:
    """Position 0 is open_clip's own pooled feature; the others ask in the same way."""
    backbone, images = small("small-resnet"), noise(2, 3, 64, 64)
    pool, seen = backbone.model.visual.attnpool, []
    handle = pool.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    wanted = backbone.model.encode_image(images, normalize=False)
    handle.remove()
    everywhere = attend_from_everywhere(pool, seen[0])
    assert_values(everywhere[:, 0], wanted)
    found = backbone.encode_patches(images, normalize=False)
    assert found.shape == (2, 4, 40)
    assert backbone.patch_tokens == 4
    assert_values(found, everywhere[:, 1:])


@pytest.mark.parametrize(("name", "why"), [("small-coca", "by attention"), ("small-timm", "is a TimmModel, neither")])
def test_towers_without_patch_features(small: Any, name: Any, why: Any) -> None:
    backbone = small(name)
    assert backbone.patch_tokens is None
    assert shape_of(backbone).patch_tokens is None
    with pytest.raises(BackboneError, match=f"gives no patch features: it .*{why}"):
        backbone.encode_patches(noise(1, 3, *backbone.image_size))


@pytest.mark.parametrize("name", ["small-vit", "small-resnet"])
def test_what_is_kept_and_what_is_not_are_the_same_bits(small: Any, tmp_path: Any, name: Any) -> None:
    backbone, split = small(name), Noise(70)
    kept, computed = PatchCache(tmp_path / "kept"), PatchCache(tmp_path / "computed", keep=False)
    rows = [3, 69, 4, 3]
    first = kept.rows(backbone, split, rows)
    again = PatchCache(tmp_path / "kept").rows(backbone, split, rows)
    apart = computed.rows(backbone, split, rows)
    assert first.dtype == torch.float32
    assert torch.equal(first, again)
    assert torch.equal(first, apart)
    assert torch.equal(first, first.half().float())
    images = torch.stack([backbone.preprocess(split.image(row)) for row in rows])
    assert float((first - backbone.encode_patches(images)).abs().max()) <= 1e-3
    kept.fill(backbone, split, range(70))
    assert torch.equal(kept.rows(backbone, split, rows), first)
    assert kept.images_computed == 70
    kept.fill(backbone, split, range(70))
    assert kept.images_computed == 70
    computed.rows(backbone, split, rows)
    assert computed.images_computed == 6
    assert not list((tmp_path / "computed").glob("*/*.safetensors"))
    assert kept.rows(backbone, split, []).shape == (0, backbone.patch_tokens, 40)


def test_the_cost_is_known_before_it_is_paid(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Noise(40)
    cache = PatchCache(tmp_path)
    before = cache.cost(backbone, [split, Noise(5, seed=1), Noise(3)])
    assert before.images == 45, "three are images that were counted already"
    assert before.bytes == 45 * 16 * 40 * 2
    assert before.fits
    assert cache.images_computed == 0
    cache.fill(backbone, split, range(40))
    assert cache.cost(backbone, [split]).images == 0
    written = sum(path.stat().st_size for path in tmp_path.glob("*/*.safetensors"))
    assert 40 * 16 * 40 * 2 <= written <= 1.1 * 40 * 16 * 40 * 2
    assert PatchCache(tmp_path / "none", keep=False).cost(backbone, [split]).bytes == 0


def test_they_stand_beside_the_pooled_features(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Noise(4)
    cache = FeatureCache(tmp_path, max_bytes=1)
    cache.patches.fill(backbone, split, range(4))
    pooled = cache.features(backbone, split)
    assert_values(pooled, backbone.encode_images(torch.stack([backbone.preprocess(split.image(k)) for k in range(4)])))
    assert len(list((tmp_path / "patches").glob("*/*.safetensors"))) == 1, "the pooled features' bound is their own"
    assert Path(tmp_path / "patches").is_dir()
