"""Weights from a file of one's own, names of the hub, and what is said where neither is at hand."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from promptfed.shared.clip import Backbone, BackboneError, load_backbone, published, shape_of
from promptfed.shared.clip.weights import hub
from promptfed.shared.clip.weights.hub import known_as
from tests.shared.clip.conftest import CLASS_NAMES
from tests.support.equality import assert_values
from tests.support.own_images import SHAPES, picture


def as_transformers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights of an open_clip model as the transformers library's CLIPModel names them, written out by hand."""
    own = model.state_dict()
    named = {
        "logit_scale": own["logit_scale"],
        "text_projection.weight": own["text_projection"].T,
        "visual_projection.weight": own["visual.proj"].T,
        "text_model.embeddings.token_embedding.weight": own["token_embedding.weight"],
        "text_model.embeddings.position_embedding.weight": own["positional_embedding"],
        "text_model.embeddings.position_ids": torch.arange(24)[None],
        "vision_model.embeddings.class_embedding": own["visual.class_embedding"],
        "vision_model.embeddings.patch_embedding.weight": own["visual.conv1.weight"],
        "vision_model.embeddings.position_embedding.weight": own["visual.positional_embedding"],
    }
    norms = {
        "text_model.final_layer_norm": "ln_final",
        "vision_model.pre_layrnorm": "visual.ln_pre",
        "vision_model.post_layernorm": "visual.ln_post",
    }
    inside = {
        "layer_norm1": "ln_1",
        "layer_norm2": "ln_2",
        "self_attn.out_proj": "attn.out_proj",
        "mlp.fc1": "mlp.c_fc",
        "mlp.fc2": "mlp.c_proj",
    }
    for there, here in (("text_model", ""), ("vision_model", "visual.")):
        for layer in range(3):
            block, theirs = f"{here}transformer.resblocks.{layer}", f"{there}.encoder.layers.{layer}"
            norms |= {f"{theirs}.{name}": f"{block}.{own_name}" for name, own_name in inside.items()}
            for kind in ("weight", "bias"):
                parts = own[f"{block}.attn.in_proj_{kind}"].chunk(3)
                for name, part in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                    named[f"{theirs}.self_attn.{name}.{kind}"] = part
    for there, here in norms.items():
        for kind in ("weight", "bias"):
            named[f"{there}.{kind}"] = own[f"{here}.{kind}"]
    return {name: tensor.contiguous() for name, tensor in named.items()}


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
    (tmp_path / "transformers").mkdir()
    save_file(own, tmp_path / "open_clip" / "open_clip_model.safetensors")
    save_file(as_transformers(shaken.model), tmp_path / "transformers" / "model.safetensors")
    torch.save(own, tmp_path / "weights.pt")
    pictures = torch.stack([shaken.preprocess(picture(shape, 1)) for shape in SHAPES])
    for path in ("open_clip", "transformers", "transformers/model.safetensors", "weights.pt"):
        loaded = load_backbone("small-vit", "of-our-ward", weights_file=tmp_path / path)
        assert loaded.fingerprint == shaken.fingerprint, path
        assert loaded.pretrained == "of-our-ward"
        assert torch.equal(loaded.encode_images(pictures), shaken.encode_images(pictures))
        assert torch.equal(loaded.encode_text(CLASS_NAMES), shaken.encode_text(CLASS_NAMES))


def test_a_tag_decides_on_all_but_the_weights(
    shaken: Backbone, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    foreign = as_transformers(shaken.model)
    save_file({name: own[name] for name in list(own)[:-3]}, tmp_path / "part.safetensors")
    save_file(foreign | {"vision_model.head.gate": torch.zeros(2)}, tmp_path / "siglip.safetensors")
    save_file(own | {"visual.proj": own["visual.proj"][:, :3].contiguous()}, tmp_path / "wide.safetensors")
    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    (tmp_path / "no.pt").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name, says in (
        ("part.safetensors", r"are not those of small-vit: missing: token_embedding\.weight, .*, ln_final\.bias\."),
        ("siglip.safetensors", r"not of this model: vision_model\.head\.gate\."),
        ("wide.safetensors", r"of another shape: visual\.proj \[\d+, 3\] for \[\d+, \d+\]\."),
        ("other.safetensors", r"missing: (\S+, ){7}\S+ and \d+ more; not of this model: a\."),
        ("no.pt", "cannot be read as weights alone"),
        ("gone.pt", "There is no file"),
        ("empty", "holds no weights"),
    ):
        with pytest.raises(BackboneError, match=says) as caught:
            load_backbone("small-vit", None, weights_file=tmp_path / name)
        assert "\n" not in str(caught.value)
    for model in ("timm:vit_base_patch16_224", "promptfed-tiny", "local-dir:models"):
        with pytest.raises(BackboneError, match="is for models of open_clip"):
            load_backbone(model, None, weights_file=tmp_path / "part.safetensors")


def test_names_of_the_hub_are_those_of_open_clip() -> None:
    assert known_as("openai/clip-vit-base-patch16", "embedded") == ("ViT-B-16", "openai")
    assert known_as("laion/CLIP-ViT-B-32-laion2B-s34B-b79K", None) == ("ViT-B-32", "laion2b_s34b_b79k")
    assert known_as("openai/clip-vit-base-patch16", "random") == ("ViT-B-16", "random")
    assert known_as("ViT-B/16", "openai") == ("ViT-B/16", "openai")
    with pytest.raises(BackboneError, match="brings its own weights, 'openai'"):
        known_as("openai/clip-vit-base-patch16", "laion400m_e32")


def test_weights_that_are_neither_here_nor_within_reach_are_told_soon(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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


SIGLIP = {
    "embed_dim": 48,
    "init_logit_bias": -10,
    "custom_text": True,
    "vision_cfg": {
        "image_size": 32,
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_model_pretrained": False,
        "timm_pool": "map",
        "timm_proj": "none",
    },
    "text_cfg": {
        "context_length": 24,
        "vocab_size": 49408,
        "width": 48,
        "heads": 4,
        "layers": 2,
        "no_causal_mask": True,
        "proj_bias": True,
        "pool_type": "last",
        "norm_kwargs": {"eps": 1e-6},
    },
}


@pytest.fixture
def small_siglip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Backbone:
    """SigLIP's towers of timm and open_clip, two blocks deep and narrow."""
    import open_clip
    import timm

    create = timm.create_model
    narrow = {"depth": 2, "embed_dim": 48, "num_heads": 4, "img_size": 32, "patch_size": 8, "class_token": False}

    def small(name: str, **options: object) -> torch.nn.Module:
        return create("vit_base_patch16_siglip_224", **options, **narrow)

    monkeypatch.setattr(timm, "create_model", small)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small-siglip.json").write_text(json.dumps(SIGLIP))
    open_clip.add_model_config(tmp_path / "configs")
    return load_backbone("small-siglip", None)


def test_siglip_s_layout_of_transformers(small_siglip: Backbone, tmp_path: Path) -> None:
    """SiglipModel's names and layout, as SigLIP, SigLIP 2 and MedSigLIP are published; against that class's answers."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    sizes = {"hidden_size": 48, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": 49408, "max_position_embeddings": 24, "projection_size": 48, "pad_token_id": 1}
    config = transformers.SiglipConfig(
        text_config=sizes | text | {"hidden_act": "gelu", "bos_token_id": 49406, "eos_token_id": 49407},
        vision_config=sizes | {"image_size": 32, "patch_size": 8, "hidden_act": "gelu"},
    )
    torch.manual_seed(3)
    theirs = transformers.SiglipModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path / "siglip")
    ours = load_backbone("small-siglip", "medsiglip", weights_file=tmp_path / "siglip")
    assert ours.fingerprint != small_siglip.fingerprint
    images, ids = torch.randn(3, 3, 32, 32), torch.randint(5, 400, (2, 24))
    with torch.no_grad():
        answers = theirs(input_ids=ids, pixel_values=images)
        features = torch.nn.functional.normalize(ours.model.encode_text(ids), dim=-1)
    assert_values(ours.encode_images(images), answers.image_embeds)
    assert_values(features, answers.text_embeds)
    assert ours.model.logit_scale.item() == pytest.approx(theirs.logit_scale.item())
    assert ours.model.logit_bias.item() == pytest.approx(theirs.logit_bias.item())
    weights = {name: tensor.contiguous() for name, tensor in theirs.state_dict().items()}
    save_file(weights | {"vision_model.head.gate": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(BackboneError, match=r"not of this model: vision_model\.head\.gate\."):
        load_backbone("small-siglip", None, weights_file=tmp_path / "other.safetensors")


def test_clip_s_layout_of_transformers(small: Callable[[str], Backbone], tmp_path: Path) -> None:
    """CLIPModel's names, as OpenAI's models and PLIP are published; against that class's answers."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    vision, text = (small("small-quick").model.state_dict()[name].shape for name in ("visual.proj", "text_projection"))
    sizes = {"num_hidden_layers": 3, "hidden_act": "quick_gelu"}
    config = transformers.CLIPConfig(
        text_config=sizes
        | {"hidden_size": text[0], "intermediate_size": 4 * text[0], "num_attention_heads": 4, "vocab_size": 49408}
        | {"max_position_embeddings": 24, "eos_token_id": 49407, "bos_token_id": 49406},
        vision_config=sizes
        | {"hidden_size": vision[0], "intermediate_size": 4 * vision[0], "num_attention_heads": vision[0] // 16}
        | {"image_size": 32, "patch_size": 8},
        projection_dim=vision[1],
    )
    torch.manual_seed(3)
    theirs = transformers.CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.05 * torch.randn(parameter.shape)
    theirs.save_pretrained(tmp_path / "clip")
    ours = load_backbone("small-quick", "ours", weights_file=tmp_path / "clip")
    images, ids = torch.randn(3, 3, 32, 32), torch.randint(5, 400, (2, 24))
    ids[:, -1] = 49407
    with torch.no_grad():
        answers = theirs(input_ids=ids, pixel_values=images)
        features = torch.nn.functional.normalize(ours.model.encode_text(ids), dim=-1)
    assert_values(ours.encode_images(images), answers.image_embeds)
    assert_values(features, answers.text_embeds)


def test_plip_s_layout_is_clip_s(shaken: Backbone, tmp_path: Path) -> None:
    """PLIP is published as pytorch_model.bin of transformers' CLIPModel, with the buffers of early releases."""
    named = as_transformers(shaken.model) | {"vision_model.embeddings.position_ids": torch.arange(17)[None]}
    torch.save(named, tmp_path / "pytorch_model.bin")
    assert load_backbone("small-vit", "plip", weights_file=tmp_path).fingerprint == shaken.fingerprint


@pytest.fixture
def small_conch(monkeypatch: pytest.MonkeyPatch) -> None:
    """CONCH with narrow towers of two blocks and small images; its classes and its configuration are the real ones."""
    import open_clip
    import timm

    create, factory = timm.create_model, open_clip.factory
    narrow = {"depth": 2, "embed_dim": 48, "num_heads": 4, "img_size": 32, "patch_size": 8}
    monkeypatch.setattr(timm, "create_model", lambda name, **options: create(name, **options, **narrow))
    published.register()
    config = factory._MODEL_CONFIGS[published.CONCH]
    text = config["text_cfg"] | {"width": 24, "heads": 4, "layers": 2, "vocab_size": 320}
    vision = config["vision_cfg"] | {"image_size": 32}
    small = config | {"embed_dim": 16, "text_cfg": text, "vision_cfg": vision}
    monkeypatch.setitem(factory._MODEL_CONFIGS, published.CONCH, small)


def conch_tokenizer(folder: Path) -> None:
    """A tokenizer file of CONCH's kind: byte pairs, lower case, <pad> 0, <start_of_text> 1, <end_of_text> 2."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    special = ["<pad>", "<start_of_text>", "<end_of_text>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {word: number for number, word in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start_of_text> $A <end_of_text>", special_tokens=[("<start_of_text>", 1), ("<end_of_text>", 2)]
    )
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "conch_byte_level_bpe_uncased.json"))


def conch_image(w: dict[str, torch.Tensor], trunk: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
    """The image feature by CONCH's equations: one query attends to the normed rows of a vision transformer."""
    rows = torch.nn.functional.layer_norm(
        trunk.forward_features(images), (48,), w["attn_pool_contrast.ln_k.weight"], w["attn_pool_contrast.ln_k.bias"]
    )
    query = torch.nn.functional.layer_norm(
        w["attn_pool_contrast.query"],
        (16,),
        w["attn_pool_contrast.ln_q.weight"],
        w["attn_pool_contrast.ln_q.bias"],
    )
    biases = w["attn_pool_contrast.attn.in_proj_bias"].chunk(3)
    q, k, v = (
        given @ w[f"attn_pool_contrast.attn.{kind}_proj_weight"].T + bias
        for kind, given, bias in zip("qkv", (query, rows, rows), biases, strict=True)
    )
    heads = []
    for part in range(8):
        own = slice(2 * part, 2 * part + 2)
        shares = torch.softmax(q[:, own] @ k[..., own].mT / 2**0.5, dim=-1)
        heads.append(shares @ v[..., own])
    mixed = torch.cat(heads, dim=-1)[:, 0] @ w["attn_pool_contrast.attn.out_proj.weight"].T
    pooled = torch.nn.functional.layer_norm(
        mixed + w["attn_pool_contrast.attn.out_proj.bias"], (16,), w["ln_contrast.weight"], w["ln_contrast.bias"]
    )
    return torch.nn.functional.normalize(pooled @ w["proj_contrast"], dim=-1)


def conch_text(w: dict[str, torch.Tensor], tokens: list[int]) -> torch.Tensor:
    """The text feature by CoCa's equations: that of a class token, which attends to tokens and not to itself."""
    length = len(tokens)
    ids = torch.tensor([*tokens, 0])  # one position of padding is seen, since the published mask lies one to the left
    rows = torch.cat([w["token_embedding.weight"][ids], w["cls_emb"][None]])
    rows = rows + torch.cat([w["positional_embedding"][: length + 1], w["positional_embedding"][127:128]])
    size = length + 2
    mask = torch.full((size, size), -torch.inf).triu(1)
    mask[-1, -1] = -torch.inf
    for number in range(2):
        block = {name.removeprefix(f"transformer.resblocks.{number}."): tensor for name, tensor in w.items()}
        normed = torch.nn.functional.layer_norm(rows, (24,), block["ln_1.weight"], block["ln_1.bias"])
        q, k, v = (normed @ block["attn.in_proj_weight"].T + block["attn.in_proj_bias"]).chunk(3, dim=-1)
        heads = []
        for part in range(4):
            own = slice(6 * part, 6 * part + 6)
            heads.append(torch.softmax(q[:, own] @ k[:, own].T / 6**0.5 + mask, dim=-1) @ v[:, own])
        rows = rows + torch.cat(heads, dim=-1) @ block["attn.out_proj.weight"].T + block["attn.out_proj.bias"]
        normed = torch.nn.functional.layer_norm(rows, (24,), block["ln_2.weight"], block["ln_2.bias"])
        hidden = torch.nn.functional.gelu(normed @ block["mlp.c_fc.weight"].T + block["mlp.c_fc.bias"])
        rows = rows + hidden @ block["mlp.c_proj.weight"].T + block["mlp.c_proj.bias"]
    pooled = torch.nn.functional.layer_norm(rows[-1], (24,), w["ln_final.weight"], w["ln_final.bias"])
    return torch.nn.functional.normalize(pooled @ w["text_projection"], dim=-1)


@pytest.mark.usefixtures("small_conch")
def test_conch_s_layout(tmp_path: Path) -> None:
    """Names of MahmoodLab/CONCH's pytorch_model.bin, as its code (mahmoodlab/CONCH, e9c9e5b) reads them."""
    pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    start = load_backbone(published.CONCH, None)
    generator = torch.Generator().manual_seed(4)
    weights = {
        name: tensor + 0.2 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in start.model.state_dict().items()
        if not name.endswith("attn_mask")
    }
    published_names = {
        "visual.trunk.cls_token",
        "visual.trunk.blocks.1.attn.qkv.weight",
        "visual.attn_pool_contrast.attn.k_proj_weight",
        "visual.attn_pool_contrast.ln_q.weight",
        "visual.ln_contrast.bias",
        "visual.proj_contrast",
        "text.cls_emb",
        "text.text_projection",
        "text.transformer.resblocks.0.attn.in_proj_weight",
        "logit_scale",
    }
    assert published_names <= set(weights)
    captions = {"visual.attn_pool_caption.query": torch.zeros(2, 3), "visual.ln_caption.bias": torch.zeros(2)}
    torch.save(weights | captions | {"text_decoder.ln_final.bias": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(BackboneError, match=r"not on the hub\): bring conch_byte_level_bpe_uncased\.json here"):
        load_backbone(published.CONCH, "mahmoodlab", weights_file=tmp_path).encode_text(["a"])
    conch_tokenizer(tmp_path)
    backbone = load_backbone(published.CONCH, "mahmoodlab", weights_file=tmp_path)
    assert backbone.open_clip_config["preprocess_cfg"]["mean"] == published.PREPARATIONS[published.CONCH]["mean"]
    images = torch.randn(2, 3, 32, 32, generator=generator)
    visual = {name.removeprefix("visual."): tensor for name, tensor in weights.items()}
    with torch.no_grad():
        assert_values(backbone.encode_images(images), conch_image(visual, backbone.model.visual.trunk, images))
    texts = {name.removeprefix("text."): tensor for name, tensor in weights.items()}
    for text in ("a tumor.", "An H&E image of stroma."):
        tokens = [int(token) for token in backbone.tokens([text])[0] if token]
        assert (tokens[0], tokens[-1]) == (1, 2)
        assert_values(backbone.encode_text([text])[0], conch_text(texts, tokens))


@pytest.mark.usefixtures("small_conch")
def test_conch_takes_prompts_and_other_weights(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    start = load_backbone(published.CONCH, None)
    save_file({name: t.contiguous() for name, t in start.model.state_dict().items()}, tmp_path / "model.safetensors")
    conch_tokenizer(tmp_path)
    backbone = load_backbone(published.CONCH, "mahmoodlab", weights_file=tmp_path)
    assert backbone.fingerprint == load_backbone(published.CONCH, "random", weights_file=tmp_path).fingerprint
    shape = shape_of(backbone)
    assert (shape.d_t, shape.d_v, shape.d_e, shape.context_length, backbone.d_pooled) == (24, 48, 16, 127, 16)
    assert (shape.mlp_width, shape.heads_v, shape.heads_t, shape.patch_tokens) == (192, 4, 4, None)
    images, no_prompts = torch.randn(2, 3, 32, 32), torch.zeros(1, 0, 48)
    features = backbone.encode_images(images)
    assert_values(backbone.encode_images_prompted(images, no_prompts), features)
    tower = backbone.vision_tower()
    assert_values(torch.nn.functional.normalize(tower.encode(tower.weights, images), dim=-1), features)
    words = backbone.embed_words("abc")
    prompts = backbone.class_prompts(["tumor", "stroma"], len(words))
    assert_values(backbone.encode_prompts(words, prompts), backbone.encode_text(["abc tumor.", "abc stroma."]))


def test_weights_of_one_s_own_are_prepared_as_the_published_ones_are(
    shaken: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
        "timm_model_name": "vit_tiny_patch16_224",
        "timm_model_pretrained": False,
        "timm_pool": "",
        "timm_proj": "linear",
        "image_size": 224,
    },
    "text_cfg": {
        "hf_model_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract",
        "hf_tokenizer_name": "microsoft/BiomedNLP-BiomedBERT-base-uncased-abstract",
        "hf_proj_type": "mlp",
        "hf_pooler_type": "cls_last_hidden_state_pooler",
        "context_length": 24,
    },
}
BERT = {"model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 60}


@pytest.mark.extended
def test_biomedclip_s_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository of the hub in a folder: open_clip_config.json, open_clip_pytorch_model.bin and a BERT tokenizer."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[transformers]'")
    import open_clip

    small = {BIOMEDCLIP["text_cfg"]["hf_model_name"]: BERT | {"num_hidden_layers": 2}}
    monkeypatch.setattr(published, "text_models", lambda: small)
    folder = tmp_path / "biomedclip"
    folder.mkdir()
    preprocess = {"mean": [0.481, 0.457, 0.408], "std": [0.268, 0.261, 0.275]}
    both = {"model_cfg": BIOMEDCLIP, "preprocess_cfg": preprocess}
    (folder / "open_clip_config.json").write_text(json.dumps(both))
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", "a", "chest", "x", "-", "ray", "of", "heart", "lung"]
    vocabulary = {word: number for number, word in enumerate(words)}
    transformers.BertTokenizerFast(vocab=vocabulary).save_pretrained(folder)
    with published.known_text_models():
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


def test_medsiglip_s_architecture_is_siglip_s_with_larger_images() -> None:
    """The sizes that google/medsiglip-448 publishes in its config.json."""
    import open_clip

    published.register()
    config, usual = (open_clip.get_model_config(name) for name in (published.MEDSIGLIP, "ViT-SO400M-14-SigLIP-378"))
    assert config["vision_cfg"] == usual["vision_cfg"] | {"image_size": 448}
    assert config["text_cfg"].pop("act_kwargs") == {"approximate": "tanh"}
    assert config["text_cfg"] == usual["text_cfg"]


def test_an_image_tower_gets_the_positions_of_its_configuration(small_siglip: Backbone) -> None:
    visual = small_siglip.model.visual
    visual.image_size = (48, 48)
    published.fit(small_siglip.model)
    assert visual.trunk.pos_embed.shape == (1, 36, 48)
    with torch.no_grad():
        assert visual(torch.zeros(1, 3, 48, 48)).shape == (1, 48)
