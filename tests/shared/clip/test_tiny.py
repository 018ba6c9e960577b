"""The embedded backbone: an ordinary open_clip model, made reproducibly, that behaves as the others need it to."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import open_clip
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor
from torch.testing import assert_close

from benchmarks import backbone
from benchmarks.backbone import encode_short, learning_rate, loss_of, normalise, pretrain, save_weights
from promptfed.shared.clip.tiny import MODEL, register, weights_path
from promptfed.shared.data.classes import SYMBOLS
from promptfed.shared.data.digits import DIGIT_NAMES
from promptfed.shared.data.symbols import symbols_split
from promptfed.shared.seeds import generator
from tests import ROOT

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
    tokenizer = open_clip.get_tokenizer(MODEL)
    return F.normalize(model.encode_text(tokenizer([template.format(n) for n in names])), dim=-1)


@torch.no_grad()
def context_features(model: open_clip.CLIP, names: Sequence[str], context: Tensor) -> Tensor:
    """Unit features (C, d_e) of ``[SOS] context name . [EOT]``; context vectors (m, d_t) enter before positions."""
    tokenizer = open_clip.get_tokenizer(MODEL)
    m = len(context)
    tokens = tokenizer(["x " * m + n + "." for n in names])
    x = model.token_embedding(tokens)
    x[:, 1 : 1 + m] = context
    x = model.transformer(x + model.positional_embedding, attn_mask=model.attn_mask)
    x = model.ln_final(x)[torch.arange(len(tokens)), tokens.argmax(dim=-1)]
    return F.normalize(x @ model.text_projection, dim=-1)


def random_context(model: open_clip.CLIP, seed: int) -> Tensor:
    """A context (16, d_t) drawn from N(0, 0.02^2), as an untrained prompt is."""
    width = model.token_embedding.embedding_dim
    return torch.randn(CONTEXT_LENGTH, width, generator=generator(seed, "context")) * CONTEXT_STD


def accuracy(image: Tensor, text: Tensor, labels: Tensor) -> float:
    """Percent of images whose nearest text is their label's."""
    return 100.0 * (image @ text.T).argmax(1).eq(labels).float().mean().item()


@pytest.fixture(scope="module")
def model() -> open_clip.CLIP:
    register()
    return open_clip.create_model(MODEL, pretrained=str(weights_path())).eval().requires_grad_(False)


def test_register_twice_changes_nothing() -> None:
    register()
    before = open_clip.list_models()
    register()
    assert open_clip.list_models() == before
    assert MODEL in before


def test_it_is_an_ordinary_clip_with_three_different_widths(model: open_clip.CLIP) -> None:
    assert type(model) is open_clip.CLIP
    assert model.context_length == 32
    assert model.attn_mask is not None
    assert model.text_pool_type == "argmax"
    widths = model.token_embedding.embedding_dim, model.visual.conv1.out_channels, model.text_projection.shape[1]
    assert len(set(widths)) == 3


def test_weights_are_small_and_in_half_precision() -> None:
    assert weights_path().stat().st_size < 16e6
    with safe_open(weights_path(), "pt") as tensors:
        assert {tensors.get_slice(name).get_dtype() for name in tensors.keys()} == {"F16"}  # noqa: SIM118


def test_word_vectors_are_as_a_random_context_is(model: open_clip.CLIP) -> None:
    table = model.token_embedding.weight
    assert abs(float(table.mean())) < 1e-4
    assert abs(float(table.std()) - 0.02) < 1e-4


def test_template_and_random_context_agree(model: open_clip.CLIP) -> None:
    """Words before the name are read over: features under a random context stay close to the template's."""
    template = text_features(model, NAMES, "a photo of a {}.")
    context = context_features(model, NAMES, random_context(model, 7))
    assert accuracy(context, template, torch.arange(len(NAMES))) > 95


def test_context_features_of_word_vectors_are_those_of_the_words(model: open_clip.CLIP) -> None:
    ids = open_clip.get_tokenizer(MODEL).encode("a photo of a")
    context = model.token_embedding.weight[ids]
    assert_close(context_features(model, NAMES[:5], context), text_features(model, NAMES[:5], "a photo of a {}."))


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


def test_digits_are_known_but_not_well(model: open_clip.CLIP) -> None:
    text = text_features(model, DIGIT_NAMES, "a photo of the digit {}.")
    pixels, target = corpus_digits()
    found = accuracy(image_features(model, pixels), text, target)
    assert 40 < found < 90


def corpus_digits() -> tuple[torch.Tensor, torch.Tensor]:
    from promptfed.shared.data.digits import digit_images

    pixels, target = digit_images()
    return torch.from_numpy(pixels[:400])[:, None].expand(-1, 3, -1, -1), torch.from_numpy(target[:400])


# the corpus


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    recipe = backbone.Recipe()
    first, again = (backbone.make_batch(0, 900, 12, recipe) for _ in range(2))
    other = backbone.make_batch(0, 901, 12, recipe)
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.tokens, again.tokens)
    assert torch.equal(first.target, again.target)
    assert not torch.equal(first.images, other.images)


def test_each_image_is_told_by_its_caption() -> None:
    batch = backbone.make_batch(0, 2000, 32, backbone.Recipe())
    assert batch.target.diagonal().eq(1).all()
    assert batch.target.sum() < 32 * 4


def test_words_before_the_name_grow_to_a_context() -> None:
    recipe = backbone.Recipe()
    assert recipe.longest_prefix(0) == recipe.longest_prefix(recipe.short_steps) == 0
    assert recipe.longest_prefix(10_000) == backbone.LONGEST_PREFIX == 16
    short = backbone.make_batch(0, 0, 64, recipe).tokens
    long = backbone.make_batch(0, 5000, 64, recipe).tokens
    assert short.shape[1] < 16 < long.shape[1] <= 32


def test_first_steps_are_easy() -> None:
    recipe = backbone.Recipe()
    assert recipe.opening(recipe.easy_steps) == 0
    assert recipe.opening(recipe.easy_steps + recipe.opening_steps) == 1


# pre-training


def arguments(**changes: object) -> argparse.Namespace:
    return argparse.Namespace(**({"seed": 0, "steps": 2, "batch": 6, "lr": 1e-3} | changes))


def test_pretraining_is_reproducible(tmp_path: Path) -> None:
    recipe = backbone.Recipe()
    for name in ("a", "b"):
        save_weights(pretrain(arguments(), recipe), tmp_path / name)
    save_weights(pretrain(arguments(seed=1), recipe), tmp_path / "c")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


def test_pretraining_leaves_the_word_vectors_alone() -> None:
    short, longer = (pretrain(arguments(steps=n), backbone.Recipe()) for n in (1, 3))
    assert torch.equal(short.token_embedding.weight, longer.token_embedding.weight)
    assert not torch.equal(short.text_projection, longer.text_projection)


def test_short_text_is_the_whole_text(model: open_clip.CLIP) -> None:
    tokens = open_clip.get_tokenizer(MODEL)(["a photo of a sun.", "an urn"])
    length = int((tokens != 0).sum(1).max())
    assert_close(encode_short(model, tokens[:, :length]), model.encode_text(tokens))


def test_a_batch_s_other_true_captions_are_not_held_against_it(model: open_clip.CLIP) -> None:
    batch = backbone.make_batch(3, 2000, 16, backbone.Recipe())
    twice = backbone.Batch(torch.cat([batch.images] * 2), torch.cat([batch.tokens] * 2), batch.target.repeat(2, 2))
    image_loss = loss_of(model, batch)
    # Every caption stands there twice, so each of the two equally right ones can have half at best: log 2 more.
    assert_close(loss_of(model, twice), image_loss + torch.log(torch.tensor(2.0)), atol=1e-4, rtol=1e-4)


def test_learning_rate_warms_up_and_falls() -> None:
    rates = [learning_rate(step, 200, 1.0) for step in range(200)]
    assert rates.index(max(rates)) in range(29, 32)
    assert rates[0] < 0.05
    assert 0.01 <= rates[-1] < 0.02
