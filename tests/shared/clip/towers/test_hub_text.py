"""A text tower of transformers from a folder, as BiomedCLIP is published, from its tokenizer to its features."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from promptfed.shared.clip import Backbone, BackboneError, load_backbone, shape_of
from promptfed.shared.clip.errors import BackboneError as LoadError
from tests.shared.clip.conftest import noise
from tests.support.equality import assert_gradients, assert_values

pytestmark = pytest.mark.extended

NAMES = ["red fox", "sun", "one big red_fox dog"]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"a photo of . x one big red fox dog sun cat".split()]  # noqa: SIM905


BERT = {
    "model_type": "bert", "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "num_hidden_layers": 3,
    "vocab_size": len(WORDS), "max_position_embeddings": 40, "pad_token_id": 0,
}  # fmt: skip


MODEL = {
    "embed_dim": 24,
    "vision_cfg": {"image_size": 32, "layers": 2, "width": 64, "head_width": 16, "patch_size": 8},
    "text_cfg": {"hf_proj_type": "mlp", "hf_pooler_type": "cls_last_hidden_state_pooler", "context_length": 24},
    "custom_text": True,
}


def word_pieces(folder: Path) -> None:
    """Write BERT's kind of tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: Any) -> Backbone:
    pytest.importorskip("transformers", reason="text towers of transformers: pip install '.[transformers]'")
    import open_clip

    text: Path = tmp_path_factory.mktemp("bert")
    (text / "config.json").write_text(json.dumps(BERT))
    folder: Path = tmp_path_factory.mktemp("clip")
    word_pieces(folder)  # open_clip looks there, whatever the configuration names
    named = {"hf_model_name": str(text), "hf_tokenizer_name": str(text)}
    config = MODEL | {"text_cfg": MODEL["text_cfg"] | named}
    preprocess = {"mean": [0.5] * 3, "std": [0.5] * 3}
    (folder / "open_clip_config.json").write_text(json.dumps({"model_cfg": config, "preprocess_cfg": preprocess}))
    torch.manual_seed(0)
    model = open_clip.create_model(f"local-dir:{folder}", load_weights=False, pretrained_text=False)
    save_file(model.state_dict(), folder / "open_clip_model.safetensors")
    return load_backbone(f"local-dir:{folder}", None, allow_unregistered=True)


def test_it_takes_prompts_and_says_its_sizes(backbone: Backbone) -> None:
    shape = shape_of(backbone)
    assert (shape.d_t, shape.d_e, shape.text_layers, shape.context_length) == (32, 24, 3, 24)
    assert shape.heads_t is None  # its weights cannot be trained
    assert (backbone.supports.text_short, backbone.supports.text_prefix) == (True, False)


def test_words_of_a_template_are_the_prompt_of_the_same_words(backbone: Backbone) -> None:
    prompts = backbone.class_prompts(NAMES, 3)
    assert prompts.start == 1
    context = backbone.embed_words("a photo of")
    assert context.shape == (3, 32)
    wanted = backbone.encode_text([f"a photo of {name.replace('_', ' ')}." for name in NAMES])
    assert_values(backbone.encode_prompts(context, prompts), wanted)
    assert_values(backbone.encode_prompts(context, prompts, path="plain"), wanted)


def test_without_padding_the_gradients_are_the_same(backbone: Backbone) -> None:
    prompts = backbone.class_prompts(NAMES, 3)
    leaves = [(noise(3, 32), noise(2, 3, 32, seed=1)) for _ in range(2)]
    found = []
    for path, (context, deep) in zip(("short", "plain"), leaves, strict=True):
        context.requires_grad_()
        deep.requires_grad_()
        features = backbone.encode_prompts(context, prompts, deep=deep, path=path)
        loss = (features * noise(*features.shape, seed=2)).sum()
        found.append((features, *torch.autograd.grad(loss, (context, deep))))
    assert_values(found[0][0], found[1][0])
    assert_gradients(found[0][1], found[1][1])
    assert_gradients(found[0][2], found[1][2])


def test_threads_with_deep_prompts_do_not_meet(backbone: Backbone) -> None:
    """Deep prompts enter through the blocks, which all threads share."""
    prompts = backbone.class_prompts(NAMES, 3)
    deep = [None, *(noise(2, 3, 32, seed=seed) for seed in range(3))]
    context = noise(3, 32).requires_grad_()  # with gradients nothing is cached
    alone = [backbone.encode_prompts(context, prompts, deep=own) for own in deep]
    wrong: list[int] = []

    def run(index: int) -> None:
        for _ in range(30):
            if not torch.equal(backbone.encode_prompts(context, prompts, deep=deep[index]), alone[index]):
                wrong.append(index)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(deep))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_too_long_a_name_and_an_impossible_path_are_refused(backbone: Backbone) -> None:
    with pytest.raises(BackboneError, match="shorten the name or the context"):
        backbone.class_prompts(["red " * 30], 4)
    prompts = backbone.class_prompts(NAMES, 3)
    with pytest.raises(BackboneError, match="'prefix' is not possible"):
        backbone.encode_prompts(noise(3, 32), prompts, path="prefix")


def test_without_transformers_the_extra_is_named(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LoadError, match=r"promptfed\[transformers\]"):
        load_backbone("roberta-ViT-B-32", None)


# `precision: bf16` for the frozen towers: half the memory, features near those of fp32, gradients.


NAMES_HALF_PRECISION = ("sun", "chess knight", "umbrella")


def weights_bytes(backbone: Backbone) -> int:
    """Of both towers but for the word table, which open_clip keeps in float32, and CoCa's decoder of captions."""
    table = backbone._text.embedding.data_ptr()
    return sum(
        weight.numel() * weight.element_size()
        for name, weight in backbone.model.named_parameters()
        if weight.data_ptr() != table and not name.startswith("text_decoder")
    )


@pytest.mark.parametrize("model", ["promptfed-tiny", "small-vit", "small-quick", "small-coca"])
def test_frozen_towers_in_half_precision(model: str) -> None:
    whole, half = (load_backbone(model, "random", precision=precision) for precision in ("fp32", "bf16"))
    assert weights_bytes(half) < 0.6 * weights_bytes(whole)
    images = torch.randn(2, 3, *whole.image_size, generator=torch.Generator().manual_seed(1))
    features = [backbone.encode_images(images) for backbone in (whole, half)]
    assert features[1].dtype == torch.float32
    assert float(F.cosine_similarity(*features).min()) > 0.99
    context = torch.randn(2, whole.d_t, generator=torch.Generator().manual_seed(2)) * 0.2
    slopes = []
    for backbone in (whole, half):
        leaf = context.clone().requires_grad_()
        texts = backbone.encode_prompts(leaf, backbone.class_prompts(NAMES_HALF_PRECISION, 2))
        (texts * texts.detach().roll(1, 0)).sum().backward()
        assert leaf.grad is not None
        slopes.append(leaf.grad)
        features.append(texts.detach())
    assert float(F.cosine_similarity(*features[2:]).min()) > 0.99
    assert float(F.cosine_similarity(slopes[0].flatten(), slopes[1].flatten(), dim=0)) > 0.9
    if not whole.supports.visual_prompts:
        return
    prompts = torch.randn(1, 2, whole.d_v, generator=torch.Generator().manual_seed(3)).requires_grad_()
    half.encode_images_prompted(images, prompts).sum().backward()
    assert prompts.grad is not None
    assert bool(torch.isfinite(prompts.grad).all())
