"""Patch features: those of open_clip's modules one by one, kept in 16 bits, the same bits computed and read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from promptfed.shared.clip import BackboneError, FeatureCache, shape_of
from promptfed.shared.clip.caches import PatchCache
from promptfed.shared.clip.towers.vision import attend_from_everywhere
from tests.shared.clip.conftest import Noise, noise
from tests.support.equality import assert_values

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


def test_where_a_tower_pools_by_the_mean_before_it_projects_that_is_the_image(small: Any) -> None:
    backbone, images = small("small-vit"), noise(2, 3, 32, 32)
    assert not torch.allclose(backbone.encode_patches(images).mean(1), backbone.encode_images(images), atol=0.05)


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


@pytest.mark.parametrize("accident", ["deleted", "cut", "altered"])
def test_files_that_are_lost_or_damaged_are_computed_again(small: Any, tmp_path: Any, accident: Any) -> None:
    backbone, split = small("small-vit"), Noise(6)
    cache = PatchCache(tmp_path)
    wanted = cache.rows(backbone, split, range(6))
    (file,) = tmp_path.glob("*/*.safetensors")
    content = file.read_bytes()
    if accident == "deleted":
        file.unlink()
        assert torch.equal(cache.rows(backbone, split, range(6)), wanted)
    else:
        file.write_bytes(content[:-10] if accident == "cut" else content[:-1] + bytes([content[-1] ^ 1]))
    fresh = PatchCache(tmp_path)
    assert torch.equal(fresh.rows(backbone, split, range(6)), wanted)
    assert fresh.images_computed == (0 if accident == "deleted" else 6)


def test_they_stand_beside_the_pooled_features(small: Any, tmp_path: Any) -> None:
    backbone, split = small("small-vit"), Noise(4)
    cache = FeatureCache(tmp_path, max_bytes=1)
    cache.patches.fill(backbone, split, range(4))
    pooled = cache.features(backbone, split)
    assert_values(pooled, backbone.encode_images(torch.stack([backbone.preprocess(split.image(k)) for k in range(4)])))
    assert len(list((tmp_path / "patches").glob("*/*.safetensors"))) == 1, "the pooled features' bound is their own"
    assert Path(tmp_path / "patches").is_dir()
