"""Every way of encoding prompted texts against open_clip's own forward pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from promptfed.shared.clip import BackboneError
from promptfed.shared.clip.towers import dense, text
from promptfed.shared.clip.towers.prefix import ClassBucket, Layout, PrefixAttention
from promptfed.shared.clip.towers.text import PromptTokenizer
from tests.shared.clip.conftest import (
    CLASS_NAMES,
    PLAIN_ONLY_MODELS,
    PREFIX_MODELS,
    SHORT_MODELS,
    noise,
    prompts_hooked_in,
    value_and_gradients,
)
from tests.support.equality import assert_gradients, assert_values

M = 4


PATHS = [
    *((name, path) for name in PREFIX_MODELS for path in ("dense", "prefix", "short", "plain")),
    *((name, path) for name in ("small-qknorm",) for path in ("dense", "short", "plain")),
    *((name, "plain") for name in PLAIN_ONLY_MODELS),
]
ONE_OF_EACH_PATH = [*(("small-vit", path) for path in ("dense", "prefix", "short", "plain")), ("small-coca", "plain")]


def literal(backbone: Any, context: Any, prompts: Any, deep: Any = None) -> Any:
    """`(C, d_e)` for one context `(m, d)` or one per class `(C, m, d)`."""
    holder = getattr(backbone.model, "text", None) or backbone.model
    blocks = holder.transformer.resblocks
    with prompts_hooked_in(holder.token_embedding, blocks, prompts.start, context, deep):
        return F.normalize(backbone.model.encode_text(prompts.ids, normalize=False), dim=-1)


@pytest.mark.parametrize(("name", "path"), PATHS)
def test_shallow_context_equals_open_clip(small: Any, name: Any, path: Any) -> None:
    backbone = small(name)
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    context = noise(M, backbone.d_t, scale=0.5)
    found, (gradient,) = value_and_gradients(lambda c: backbone.encode_prompts(c, prompts, path=path), context)
    wanted, (wanted_gradient,) = value_and_gradients(lambda c: literal(backbone, c, prompts), context)
    assert found.shape == (len(CLASS_NAMES), backbone.d_e)
    assert_values(found, wanted)
    assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize(("depth", "dtype"), [(1, torch.float32), (2, torch.float64)])
@pytest.mark.parametrize(("name", "path"), PATHS)
def test_deep_context_equals_open_clip(small: Any, name: Any, path: Any, dtype: Any, depth: Any) -> None:
    backbone = small(name, dtype)
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    context = noise(M, backbone.d_t, scale=0.5, dtype=dtype)
    deep = noise(depth, M, backbone.d_t, seed=1, scale=0.5, dtype=dtype)
    found, gradients = value_and_gradients(
        lambda c, d: backbone.encode_prompts(c, prompts, deep=d, path=path), context, deep
    )
    wanted, wanted_gradients = value_and_gradients(lambda c, d: literal(backbone, c, prompts, d), context, deep)
    assert_values(found, wanted)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize("shared_deep", [True, False])
@pytest.mark.parametrize(("name", "path"), ONE_OF_EACH_PATH)
def test_a_batch_of_contexts_equals_one_by_one(small: Any, name: Any, path: Any, shared_deep: Any) -> Any:
    backbone = small(name)
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    contexts = noise(2, 3, M, backbone.d_t, scale=0.5)
    deep = noise(*(() if shared_deep else (2, 3)), 1, M, backbone.d_t, seed=1, scale=0.5)

    def one_by_one(c: Any, d: Any) -> Any:
        rows = [literal(backbone, c[i, j], prompts, d if shared_deep else d[i, j]) for i in range(2) for j in range(3)]
        return torch.stack(rows).reshape(2, 3, len(prompts), -1)

    found, gradients = value_and_gradients(
        lambda c, d: backbone.encode_prompts(c, prompts, deep=d, path=path), contexts, deep
    )
    wanted, wanted_gradients = value_and_gradients(one_by_one, contexts, deep)
    assert_values(found, wanted)
    for gradient, wanted_gradient in zip(gradients, wanted_gradients, strict=True):
        assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize(
    ("name", "path"), [("small-vit", "dense"), ("small-vit", "short"), ("small-vit", "plain"), ("small-coca", "auto")]
)
def test_a_context_per_class_equals_open_clip(small: Any, name: Any, path: Any) -> None:
    backbone = small(name)
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    contexts = noise(2, len(prompts), M, backbone.d_t, scale=0.5)
    found, (gradient,) = value_and_gradients(
        lambda c: backbone.encode_prompts(c, prompts, path=path, per_class=True), contexts
    )
    wanted, (wanted_gradient,) = value_and_gradients(
        lambda c: torch.stack([literal(backbone, one, prompts) for one in c]), contexts
    )
    assert_values(found, wanted)
    assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize("rows", [1, 7, 16])
def test_classes_in_many_sequences_have_equal_features(small: Any, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    monkeypatch.setattr(dense, "ROWS", rows)
    backbone = small("small-vit")
    prompts = backbone.class_prompts([*CLASS_NAMES, "cat", "red panda", "old white dog"], M)
    leaves = noise(3, M, backbone.d_t, scale=0.5), noise(1, M, backbone.d_t, seed=1, scale=0.5)
    found, wanted = (
        value_and_gradients(lambda c, d, path=path: backbone.encode_prompts(c, prompts, deep=d, path=path), *leaves)
        for path in ("dense", "plain")
    )
    assert_values(found[0], wanted[0])
    for gradient, wanted_gradient in zip(found[1], wanted[1], strict=True):
        assert_gradients(gradient, wanted_gradient)


@pytest.mark.parametrize("held", [1, 1 << 20])
def test_a_dense_pass_with_little_room_is_the_same(small: Any, monkeypatch: pytest.MonkeyPatch, held: int) -> None:
    backbone = small("small-vit")
    prompts, context = backbone.class_prompts(CLASS_NAMES, M), noise(M, backbone.d_t, scale=0.5)
    wanted = value_and_gradients(lambda c: backbone.encode_prompts(c, prompts, path="dense"), context)
    monkeypatch.setattr(dense, "HELD_ROWS", held)
    again: list[object] = []
    monkeypatch.setattr(
        text, "checkpoint", lambda *given, **options: again.append(given) or checkpoint(*given, **options)
    )
    found = value_and_gradients(lambda c: backbone.encode_prompts(c, prompts, path="dense"), context)
    assert len(again) == (backbone.text_layers if held == 1 else 0)
    assert torch.equal(found[0], wanted[0])
    assert torch.equal(found[1][0], wanted[1][0])


def test_a_dense_pass_is_the_same_graph_for_every_context(small: Any) -> None:
    backbone = small("small-vit")
    prompts = backbone.class_prompts(CLASS_NAMES, M)

    def with_gradient(context: torch.Tensor) -> Any:
        features = backbone.encode_prompts(context, prompts, path="dense")
        return features, torch.autograd.grad(features[..., 0].sum(), context)

    with_gradient(noise(2, M, backbone.d_t).requires_grad_())  # makes what is constant
    first, other = (
        make_fx(with_gradient)(noise(2, M, backbone.d_t, seed=seed).requires_grad_()).code for seed in (0, 1)
    )
    assert first == other
    assert "_local_scalar_dense" not in first
    assert "device_put" not in first


@pytest.mark.parametrize("name", dict(PATHS))
def test_a_context_of_words_is_that_text(small: Any, name: Any) -> None:
    backbone = small(name)
    prompts = backbone.class_prompts(CLASS_NAMES, 4)
    found = backbone.encode_prompts(backbone.embed_words("a photo of a"), prompts)
    wanted = backbone.encode_text([f"a photo of a {name.replace('_', ' ')}." for name in CLASS_NAMES])
    assert_values(found, wanted)


@pytest.mark.parametrize("path", ["dense", "prefix", "short", "plain"])
def test_a_tower_of_one_block(small: Any, path: Any) -> None:
    backbone = small("small-one-block")
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    context = noise(M, backbone.d_t, scale=0.5)
    found, (gradient,) = value_and_gradients(lambda c: backbone.encode_prompts(c, prompts, path=path), context)
    wanted, (wanted_gradient,) = value_and_gradients(lambda c: literal(backbone, c, prompts), context)
    assert_values(found, wanted)
    assert_gradients(gradient, wanted_gradient)
    with pytest.raises(BackboneError, match="Deep prompts"):
        backbone.encode_prompts(context, prompts, deep=noise(1, M, backbone.d_t), path=path)


@pytest.mark.parametrize("name", PREFIX_MODELS)
def test_one_class_and_one_context_token(small: Any, name: Any) -> None:
    backbone = small(name)
    prompts = backbone.class_prompts(["dog"], 1)
    context = noise(1, backbone.d_t)
    assert_values(backbone.encode_prompts(context, prompts, path="prefix"), literal(backbone, context, prompts))


def test_auto_takes_the_fastest_possible_path(small: Any) -> None:
    for name in [*SHORT_MODELS, *PLAIN_ONLY_MODELS]:
        backbone = small(name)
        prompts = backbone.class_prompts(CLASS_NAMES, M)
        context = noise(M, backbone.d_t)
        kind = "prefix" if name in PREFIX_MODELS else "short" if name in SHORT_MODELS else "plain"
        assert (backbone.supports.text_prefix, backbone.supports.text_short) == (
            kind == "prefix",
            kind in ("prefix", "short"),
        )
        assert torch.equal(
            backbone.encode_prompts(context, prompts), backbone.encode_prompts(context, prompts, path=kind)
        )


IMPOSSIBLE = [
    ("small-qknorm", "prefix"), ("small-coca", "short"), ("small-coca", "dense"), ("small-bidirectional", "prefix"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "path"), IMPOSSIBLE)
def test_an_impossible_path_is_refused(small: Any, name: Any, path: Any) -> None:
    backbone = small(name)
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    with pytest.raises(BackboneError, match=rf"'{path}' is not possible \(not with the flags of {name}\)"):
        backbone.encode_prompts(noise(M, backbone.d_t), prompts, path=path)
    with pytest.raises(BackboneError, match=r"'prefix' is not possible \(a context per class has no shared prefix\)"):
        backbone.encode_prompts(noise(len(CLASS_NAMES), M, backbone.d_t), prompts, path="prefix", per_class=True)


def test_no_weight_gets_a_gradient(small: Any) -> None:
    backbone = small("small-vit")
    context = noise(M, backbone.d_t).requires_grad_()
    backbone.encode_prompts(context, backbone.class_prompts(CLASS_NAMES, M)).sum().backward()
    assert context.grad is not None
    assert not any(weight.requires_grad for weight in backbone.model.parameters())
    assert all(weight.grad is None for weight in backbone.model.parameters())


def test_training_after_prediction_in_inference_mode(small: Any) -> None:
    backbone = small("small-vit")
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    context = noise(M, backbone.d_t)
    with torch.inference_mode():
        predicted = backbone.encode_prompts(context, prompts)
    trained = backbone.encode_prompts(context.requires_grad_(), prompts)
    trained.sum().backward()
    assert torch.equal(predicted, trained.detach())


def test_unnormalised_features(small: Any) -> None:
    backbone = small("small-vit")
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    context = noise(M, backbone.d_t)
    raw = backbone.encode_prompts(context, prompts, normalize=False)
    assert_values(F.normalize(raw, dim=-1), backbone.encode_prompts(context, prompts))


BAD_NAMES = [
    ([], "No class names"),
    ("dog", "No class names"),
    (["dog", "_"], "class name '_' is empty"),
    (["dog", "word " * 30], "class name 'word .* needs 33 tokens and the context 4, but the backbone takes 24"),
]


@pytest.mark.parametrize(("names", "message"), BAD_NAMES)
def test_bad_class_names_are_named(small: Any, names: Any, message: Any) -> None:
    with pytest.raises(BackboneError, match=message):
        small("small-vit").class_prompts(names, M)


def test_the_longest_name_that_fits(small: Any) -> None:
    backbone = small("small-vit")
    name = " ".join(["dog"] * 17)  # 1 + 4 + 17 + "." + [EOT] = 24
    prompts = backbone.class_prompts([name], M)
    context = noise(M, backbone.d_t)
    assert_values(backbone.encode_prompts(context, prompts), literal(backbone, context, prompts))
    with pytest.raises(BackboneError, match="shorten the name"):
        backbone.class_prompts([name + " dog"], M)


MISFITS = [
    ((3, 48), None, "context of shape"),
    ((4, 40), None, "context of shape"),
    ((4, 48), (3, 4, 48), "Deep prompts of shape"),
    ((4, 48), (4, 48), "Deep prompts of shape"),
    ((2, 4, 48), (3, 1, 4, 48), "Deep prompts of shape"),
]


@pytest.mark.parametrize(("context", "deep", "message"), MISFITS)
def test_prompts_that_do_not_fit(small: Any, context: Any, deep: Any, message: Any) -> None:
    backbone = small("small-vit")
    prompts = backbone.class_prompts(CLASS_NAMES, M)
    with pytest.raises(BackboneError, match=message):
        backbone.encode_prompts(noise(*context), prompts, deep=None if deep is None else noise(*deep))


def test_long_and_empty_texts(small: Any) -> None:
    backbone = small("small-vit")
    with pytest.raises(BackboneError, match="needs 32 tokens, the backbone takes 24"):
        backbone.encode_text(["dog " * 30])
    with pytest.raises(BackboneError, match="no token"):
        backbone.embed_words("  ")
    assert backbone.encode_text([]).shape == (0, backbone.d_e)
    assert backbone.embed_words("a photo of a").shape == (4, backbone.d_t)


@pytest.mark.parametrize("context_asks", [True, False])
@pytest.mark.parametrize("ends", [True, False])
def test_the_written_out_gradient_of_attention(context_asks: Any, ends: Any) -> None:
    buckets = (ClassBucket(0, 2, 1, 0), ClassBucket(2, 1, 3, 2))  # two classes of one token, one of three
    layout = Layout(heads=2, m=2, buckets=buckets, context=context_asks, ends=ends)
    asking = 2 * context_asks + (3 if ends else 5)
    query = noise(2, asking, 4, dtype=torch.float64).requires_grad_()
    key_value = noise(2, 7, 8, seed=1, dtype=torch.float64).requires_grad_()
    lead = noise(1, 8, seed=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda q, kv: PrefixAttention.apply(q, kv, lead, layout), (query, key_value))


def test_prompts_encoded_again_without_gradient_are_the_same_tensor_until_they_change(small: Any) -> None:
    backbone = small("small-vit")
    prompts = backbone.class_prompts(["sun", "cloud"], 3)
    assert backbone.class_prompts(("sun", "cloud"), 3) is prompts
    context = noise(3, backbone.d_t)
    with torch.no_grad():
        first = backbone.encode_prompts(context, prompts)
        assert backbone.encode_prompts(context.clone(), prompts) is first
        assert not torch.equal(backbone.encode_prompts(context + 0.1, prompts), first)
        assert not torch.equal(backbone.encode_prompts(context, prompts, normalize=False), first)
        other = backbone.class_prompts(["sun", "moon"], 3)
        assert not torch.equal(backbone.encode_prompts(context, other), first)
    learned = context.requires_grad_()
    assert backbone.encode_prompts(learned, prompts).requires_grad
    with torch.no_grad():
        first.mul_(2)
        with pytest.raises(RuntimeError, match="changed in place"):
            backbone.encode_prompts(context, prompts)


# Room for a context in the token ids of tokenizers that are not open_clip's own.


PAD, BOS, EOS, CLS = 0, 1, 2, 3


class WrappedTokenizer:
    """As open_clip wraps those of transformers: an id per letter, a begin, an end, a class token at the very end."""

    def __init__(self, begin: bool, class_token: bool) -> None:
        self._begin, self._class = begin, class_token
        self.tokenizer = SimpleNamespace(
            pad_token_id=PAD, bos_token_id=BOS if begin else None, cls_token_id=None,
            all_special_ids=[PAD, BOS, EOS, CLS],
        )  # fmt: skip

    def __call__(self, texts: Any, context_length: Any) -> Any:
        rows = []
        for words in texts:
            ids = [BOS] * self._begin + [ord(letter) for letter in words] + [EOS]
            ids = (ids + [PAD] * context_length)[: context_length - self._class] + [CLS] * self._class
            rows.append(torch.tensor(ids))
        return torch.stack(rows)


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("class_token", [False, True])
def test_a_context_takes_the_place_of_padding(begin: Any, class_token: Any) -> None:
    tokenizer = PromptTokenizer(WrappedTokenizer(begin, class_token), 12)
    ids, start = tokenizer.class_ids(["ab", "abc"], 3)
    head, tail = [BOS] * begin, [CLS] * class_token
    for row, word in zip(ids.tolist(), ("ab", "abc"), strict=True):
        body = [*head, ord("x"), ord("x"), ord("x"), *(ord(letter) for letter in word), ord("."), EOS]
        assert row == body + [PAD] * (12 - len(body) - len(tail)) + tail
    assert start == len(head)


def test_words_are_without_special_tokens() -> None:
    tokenizer = PromptTokenizer(WrappedTokenizer(True, True), 12)
    assert tokenizer.words("abc").tolist() == [ord("a"), ord("b"), ord("c")]


def test_a_name_that_leaves_no_room_is_named() -> None:
    tokenizer = PromptTokenizer(WrappedTokenizer(True, False), 12)
    with pytest.raises(BackboneError, match="class name 'abcdefg' needs 10 tokens and the context 3"):
        tokenizer.class_ids(["ab", "abcdefg"], 3)


class Letters:
    """An open_clip tokenizer of its own kind: a token for each letter, begun by 1 and ended by 2."""

    sot_token_id, eot_token_id, pad_token_id = 1, 2, 0

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text if letter != " "]

    def __call__(self, texts: list[str], context_length: int) -> torch.Tensor:
        rows = [[1, *self.encode(text), 2] for text in texts]
        return torch.tensor([row + [0] * (context_length - len(row)) for row in rows])


def test_a_name_fills_the_positions_beside_its_context_and_one_more_is_refused() -> None:
    tokenizer = PromptTokenizer(Letters(), 8)
    ids, start = tokenizer.class_ids(["ab", "c"], 3)  # with a full stop, a beginning and an end: 5 of 8
    assert (ids[0].tolist(), start) == ([1, 120, 120, 120, 97, 98, 46, 2], 1)
    assert tokenizer.texts(["abcdef"]).shape == (1, 8)
    with pytest.raises(BackboneError, match="'ab' needs 5 tokens and the context 4, but the backbone takes 8"):
        tokenizer.class_ids(["ab"], 4)
    with pytest.raises(BackboneError, match="needs 9 tokens, the backbone takes 8"):
        tokenizer.texts(["abcdefg"])


@pytest.mark.parametrize(
    ("texts", "most", "found"),
    [
        (("abc", "abd"), 4, (1, 2)),
        (("abc", "axd"), 4, (1, 1)),  # what is only some texts' is nobody's
        (("abc", "xbd"), 4, (1, 0)),
        (("abc", "abd"), 1, (2, 1)),
        (("abc",), 2, (1, 2)),
    ],
)
def test_the_words_that_all_texts_share_are_found(texts: Any, most: int, found: tuple[int, int]) -> None:
    assert PromptTokenizer(Letters(), 8).template_ids(texts, "ab", most)[1:] == found
