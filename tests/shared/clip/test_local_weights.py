"""Weights from a file of one's own, and what is said where neither is at hand."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from promptfed.shared.clip import Backbone, BackboneError, hub, load_backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.clip.towers.text import LowRank
from tests.shared.clip.conftest import CLASS_NAMES, assert_image_weights_equal, assert_text_weights_equal, noise
from tests.support.equality import assert_values
from tests.support.own_images import SHAPES, picture
from tests.support.small_timm import KINDS, entry


@pytest.fixture
def shaken(small: Callable[[str], Backbone]) -> Backbone:
    """A backbone whose weights are not those that its name alone gives."""
    backbone = load_backbone("small-vit", None)
    generator = torch.Generator().manual_seed(5)
    for parameter in backbone.model.parameters():
        parameter.data += 0.01 * torch.randn(parameter.shape, generator=generator)
    return backbone


def test_a_file_of_weights_gives_the_backbone_that_they_are_of(shaken: Backbone, tmp_path: Path) -> None:
    own = {name: tensor.contiguous() for name, tensor in shaken.model.state_dict().items()}
    (tmp_path / "open_clip").mkdir()
    save_file(own, tmp_path / "open_clip" / "open_clip_model.safetensors")
    torch.save(own, tmp_path / "weights.pt")
    pictures = torch.stack([shaken.preprocess(picture(shape, 1)) for shape in SHAPES])
    for path in ("open_clip", "open_clip/open_clip_model.safetensors", "weights.pt"):
        loaded = load_backbone("small-vit", "of-our-ward", weights_file=tmp_path / path)
        assert loaded.fingerprint == shaken.fingerprint, path
        assert loaded.pretrained == "of-our-ward"
        assert torch.equal(loaded.encode_images(pictures), shaken.encode_images(pictures))
        assert torch.equal(loaded.encode_text(CLASS_NAMES), shaken.encode_text(CLASS_NAMES))


def test_a_tag_decides_all_but_the_weights(shaken: Backbone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """QuickGELU and the preprocessing of a tag belong to the fingerprint, wherever the weights come from."""
    import open_clip

    tags = {"quick": {"quick_gelu": True, "hf_hub": "x/y/"}, "grey": {"mean": [0.5] * 3}, "plain": {"hf_hub": "x/z/"}}
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: tags.get(tag, {}))
    save_file({k: v.contiguous() for k, v in shaken.model.state_dict().items()}, tmp_path / "model.safetensors")
    loaded = {tag: load_backbone("small-vit", tag, weights_file=tmp_path) for tag in tags}
    assert loaded["plain"].fingerprint == shaken.fingerprint
    assert isinstance(loaded["quick"].model.transformer.resblocks[0].mlp.gelu, open_clip.transformer.QuickGELU)
    assert loaded["grey"].open_clip_config["preprocess_cfg"]["mean"] == [0.5] * 3
    assert len({backbone.fingerprint for backbone in loaded.values()}) == 3


def test_files_that_are_no_weights_of_the_model_are_refused(shaken: Backbone, tmp_path: Path) -> None:
    own = {name: tensor.contiguous() for name, tensor in shaken.model.state_dict().items()}
    save_file({name: own[name] for name in list(own)[:-3]}, tmp_path / "part.safetensors")
    save_file(own | {"vision_model.head.gate": torch.zeros(2)}, tmp_path / "siglip.safetensors")
    save_file(own | {"visual.proj": own["visual.proj"][:, :3].contiguous()}, tmp_path / "wide.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "no.pt").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("part.safetensors", r"are not those of small-vit: .*Missing.*token_embedding\.weight.*ln_final\.bias"),
        ("siglip.safetensors", r"vision_model\.head\.gate"),
        ("wide.safetensors", r"mismatch for visual\.proj: .*\[\d+, 3\]"),
        ("other.safetensors", "Missing"),
        ("no.pt", "cannot be read as weights alone"),
        ("gone.pt", "There is no file"),
        ("empty", "holds no weights"),
    ):
        with pytest.raises(BackboneError, match=says) as caught:
            load_backbone("small-vit", None, weights_file=tmp_path / name)
        assert "\n" not in str(caught.value)
    for model in ("promptfed-tiny", "local-dir:models"):
        with pytest.raises(BackboneError, match="is for models of open_clip"):
            load_backbone(model, None, weights_file=tmp_path / "part.safetensors")


def test_weights_not_in_reach_are_told_soon(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def download(*about: object, **options: object) -> None:
        raise AssertionError("a download tries for minutes")

    monkeypatch.setattr("open_clip.factory.download_pretrained", download)
    monkeypatch.setattr("open_clip.factory.download_pretrained_from_hf", download)
    monkeypatch.setattr(hub, "is_cached", lambda repository, file: False)
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # it takes connections and never answers
        for address in (f"http://127.0.0.1:{deaf.getsockname()[1]}", "http://127.0.0.1:9"):
            monkeypatch.setenv("HF_ENDPOINT", address)
            monkeypatch.setattr(hub, "REACH_SECONDS", 0.5)
            with pytest.raises(BackboneError) as caught:
                load_backbone("ViT-B-16", "openai")
            for part in (
                "'openai' of ViT-B-16 are not on this machine",
                address.removeprefix("http://"),
                "hf download timm/vit_base_patch16_clip_224.openai open_clip_model.safetensors",
                "--backbone-file PATH",
            ):
                assert part in str(caught.value)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(BackboneError, match="is not asked"):
        load_backbone("ViT-B-16", "openai")
    assert capfd.readouterr() == ("", "")


def test_weights_that_are_here_are_not_looked_for_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache in the hub's own layout is found."""
    import huggingface_hub

    asked: list[str] = []
    monkeypatch.setattr(hub, "unreachable", lambda address: asked.append(address))
    folder = tmp_path / "models--timm--vit_base_patch16_clip_224.openai"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    (folder / "snapshots" / "abc" / "open_clip_model.safetensors").write_bytes(b"weights")
    find = huggingface_hub.try_to_load_from_cache
    monkeypatch.setattr(
        huggingface_hub, "try_to_load_from_cache", lambda repo, file: find(repo, file, cache_dir=str(tmp_path))
    )
    hub.expect_at_hand("ViT-B-16", "openai")
    assert not asked
    hub.expect_at_hand("ViT-B-32", "openai")
    assert asked == [hub.endpoint()]


def test_own_weights_prepared_as_published(shaken: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SigLIP's images are normalised to -1...1 whatever name the weights have."""
    import open_clip

    tags = {"a": {"mean": [0.5] * 3, "interpolation": "bicubic"}, "b": {"mean": [0.5] * 3, "interpolation": "bilinear"}}
    monkeypatch.setattr(open_clip, "list_pretrained_tags_by_model", lambda model: list(tags))
    monkeypatch.setattr(open_clip, "get_pretrained_cfg", lambda model, tag: tags.get(tag, {}))
    save_file({k: v.contiguous() for k, v in shaken.model.state_dict().items()}, tmp_path / "model.safetensors")
    prepared = load_backbone("small-vit", "ours", weights_file=tmp_path).open_clip_config["preprocess_cfg"]
    usual = shaken.open_clip_config["preprocess_cfg"]
    assert prepared["mean"] == [0.5] * 3
    assert {key: prepared[key] for key in ("std", "interpolation")} == {
        key: usual[key] for key in ("std", "interpolation")
    }


BIOMEDCLIP: dict[str, Any] = {
    "embed_dim": 32,
    "vision_cfg": {
        "timm_model_name": "vit_tiny_patch16_224", "timm_model_pretrained": False, "timm_pool": "",
        "timm_proj": "linear", "image_size": 224,
    },
    "text_cfg": {
        "hf_model_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract",
        "hf_tokenizer_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract", "hf_proj_type": "mlp",
        "hf_pooler_type": "cls_last_hidden_state_pooler", "context_length": 24,
    },
}  # fmt: skip


BERT = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}


@pytest.mark.extended
def test_biomedclip_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of the hub in a folder: open_clip_config.json, open_clip_pytorch_model.bin and a BERT tokenizer."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    import open_clip
    from open_clip import hf_model

    small = transformers.AutoConfig.for_model(**BERT, num_hidden_layers=2)
    near = SimpleNamespace(from_pretrained=lambda name, **options: small)  # its config.json, as the hub has it
    monkeypatch.setattr(hf_model, "AutoConfig", near)
    folder = tmp_path / "biomedclip"
    folder.mkdir()
    preprocess = {"mean": [0.481, 0.457, 0.408], "std": [0.268, 0.261, 0.275]}
    both = {"model_cfg": BIOMEDCLIP, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(both))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "a", "chest", "x", "-", "ray", "of", "heart", "lung"]
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    made = open_clip.create_model(f"local-dir:{folder}", pretrained_text=False)
    torch.save(made.state_dict(), folder / "open_clip_pytorch_model.bin")
    assert {"text.proj.0.weight", "visual.head.proj.weight", "visual.trunk.blocks.0.attn.qkv.weight"} < set(
        made.state_dict()
    )
    name = "hf-hub:microsoft/BiomedCLIP-PubMedBERT_256-vit_base_patch16_224"
    backbone = load_backbone(name, None, weights_file=folder, allow_unregistered=True)
    assert backbone.model_name == name
    images = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        wanted = made.eval().encode_image(images, normalize=True)
    assert_values(backbone.encode_images(images), wanted)
    texts = backbone.encode_text(["a chest x-ray of a heart.", "a lung."])
    assert texts.shape == (2, 32)
    context = torch.randn(2, backbone.d_t, generator=torch.Generator().manual_seed(1)).requires_grad_()
    prompts = backbone.class_prompts(["heart", "chest x-ray"], 2)
    backbone.encode_prompts(context, prompts).sum().backward()
    assert context.grad is not None
    other = tmp_path / "elsewhere"
    shutil.copytree(folder, other)
    again = load_backbone(name, None, weights_file=other, allow_unregistered=True)
    assert again.fingerprint == backbone.fingerprint  # the folder's place does not matter
    with pytest.raises(BackboneError, match=r"give a folder with open_clip_config\.json"):
        load_backbone(name, None, weights_file=tmp_path, allow_unregistered=True)
    with pytest.raises(BackboneError, match="allow"):
        load_backbone(name, None, weights_file=folder)


# Towers with other weights against open_clip's and timm's own modules: values, gradients, refusals.


VISION = ["small-vit", "small-quick", "small-scale", "small-bidirectional", "small-one-block", "promptfed-tiny"]


TEXT = ["small-vit", "small-quick", "small-scale", "small-eos", "small-custom", "small-one-block", "promptfed-tiny"]


TIMM = ["small_plain", "small_average", "small_prenorm"]


def backbone_of(name: Any, small: Any) -> Any:
    return load_backbone("promptfed-tiny", "random") if name == "promptfed-tiny" else small(name)


@pytest.mark.parametrize("name", VISION)
def test_an_image_tower_of_other_weights_is_open_clip_s_with_them(small: Any, name: Any) -> None:
    backbone = backbone_of(name, small)
    tower, images = backbone.vision_tower(), noise(3, 3, *backbone.image_size)
    assert_values(tower.features(images), backbone.encode_images(images, normalize=False))
    assert_image_weights_equal(tower, images)


@pytest.fixture(scope="module")
def _timm_models() -> None:
    from timm.models.vision_transformer import VisionTransformer

    for kind in TIMM:
        entry(kind, VisionTransformer, KINDS[kind])


@pytest.mark.usefixtures("_timm_models")
@pytest.mark.parametrize("name", TIMM)
def test_an_image_tower_of_timm_with_other_weights_is_timm_s_own_with_them(name: Any) -> None:
    backbone = load_backbone(f"timm:{name}", None, allow_unregistered=True)
    tower, images = backbone.vision_tower(), noise(3, 3, 32, 32)
    assert_values(tower.features(images), backbone.encode_images(images, normalize=False))
    assert_image_weights_equal(tower, images)


@pytest.mark.parametrize("name", TEXT)
def test_a_text_tower_of_other_weights_is_open_clip_s_with_them(small: Any, name: Any) -> Any:
    backbone = backbone_of(name, small)
    tower, model = backbone.text_tower(), backbone.model
    texts = [f"a photo of a {one}." for one in CLASS_NAMES]
    ids = backbone.tokens(texts)
    given = tower.texts(ids)
    assert given.rows.shape[1] == int(given.ends.max()) + 1 < ids.shape[1]
    assert_values(tower.encode_texts(given), backbone.encode_text(texts, normalize=False))
    assert_text_weights_equal(tower, model, ids, model.encode_text)


@pytest.mark.parametrize("name", ["small-vit", "small-bidirectional"])
def test_a_low_rank_branch_is_the_merged_weight(small: Any, name: Any) -> None:
    tower = small(name).vision_tower()
    d, rows = tower.width, noise(2, 5, tower.width)
    low = {2: LowRank(noise(3, 2, d, seed=1), noise(3, d, 2, seed=2), 0.3)}
    branch = tower.run(rows, low_rank=low)
    merged, change = tower.copy(), low[2].change()
    [(place, weight)] = merged.named("in_proj_weight", 2).items()
    merged.put({place: weight + change.reshape(3 * d, d)})
    assert branch.shape[1] == (1 if name == "small-vit" else 5)
    assert_values(branch, merged.run(rows))
    assert not torch.allclose(branch, tower.run(rows))


def test_dropout_of_a_low_rank_branch_keeps_the_mean_and_repeats_with_its_seed() -> Any:
    rows = torch.ones(4000, 3)
    a, b = torch.ones(1, 1, 3), torch.ones(1, 3, 1)

    def drawn(seed: Any) -> Any:
        return LowRank(a, b, 1.0, 0.25, torch.Generator().manual_seed(seed)).branch(0, rows)

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    assert float(drawn(1).mean()) == pytest.approx(3.0, abs=0.1)
    assert drawn(1).unique().tolist() == pytest.approx([0.0, 4 / 3, 8 / 3, 4.0])


@pytest.mark.parametrize(
    ("name", "why"), [("small-resnet", "it is a ModifiedResNet"), ("small-timm", "it is a TimmModel")]
)
def test_other_image_towers_are_refused_by_name(small: Any, name: Any, why: Any) -> None:
    backbone = small(name)
    with pytest.raises(BackboneError, match=f"image tower cannot be computed with other weights.*{why}"):
        backbone.vision_tower()
    assert backbone.sizes == dict.fromkeys(("mlp_width", "positions", "heads_v")) | {"heads_t": 4}


@pytest.mark.parametrize("name", ["small-qknorm"])
def test_other_text_towers_are_refused(small: Any, name: Any) -> None:
    with pytest.raises(BackboneError, match="text tower cannot be computed with other weights"):
        small(name).text_tower()


def test_a_copy_shares_the_frozen_weights_wherever_the_model_was_moved(small: Any) -> None:
    backbone = load_backbone("small-vit", None)
    copy, visual = backbone.vision_tower().copy(), backbone.model.visual
    backbone.model.to(torch.float64)
    again = backbone.vision_tower().copy()
    assert again.module is not visual
    for name, weight in visual.named_parameters():
        assert again.module.get_parameter(name) is weight
        assert copy.module.get_parameter(name) is weight
        assert not weight.requires_grad
    again.put({"proj": torch.zeros(64, 40)})
    assert again.module.proj.dtype == torch.float64, "as the tower computes"
    assert bool(visual.proj.any())


def test_sizes_inside_the_towers_are_told_with_the_model_and_without_it() -> None:
    real = shape_of(load_backbone("promptfed-tiny", "random"))
    assert (real.mlp_width, real.positions, real.heads_v, real.heads_t) == (512, 37, 4, 4)
    large = shape_by_name("ViT-L-14")
    assert large is not None
    assert (large.mlp_width, large.positions, large.heads_v, large.heads_t) == (4096, 257, 16, 12)
    coca = shape_by_name("coca_ViT-B-32")
    assert coca is not None
    assert coca.mlp_width is None
