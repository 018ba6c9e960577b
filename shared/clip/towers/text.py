"""Prompted text encoding in an open_clip text tower: the supported paths, and the plain and the short path.

Notation: `N` contexts in a batch, `C` classes, `m` context tokens, `L` text positions, `d` = d_t the tower's width.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers.plain import is_a
from promptfed.shared.tensors.transfer import sent_to

# A placeholder for context tokens in the ids. Its embedding is always overwritten, so any ordinary word is suitable.
PLACEHOLDER_WORD = "x"
QUERIES, KEYS_VALUES, ALL = slice(0, 1), slice(1, 3), slice(0, 3)  # parts of a block's input projection
Path = Literal["auto", "dense", "prefix", "short", "plain"]
Result = TypeVar("Result")


@dataclass(frozen=True, eq=False)
class ClassPrompts:
    """Tokenised class names of one backbone, with `context_length` free positions in front of each name.

    ids: token ids `(C, L)` with placeholders at the context positions. start: first context position; tokens before it,
    such as `[SOS]`, are the same for all classes. end: the position `(C,)` whose output is the text feature, or -1 if
    the tower pools a fixed position. buckets: classes of equal `end`, as `(end, class indices)` in ascending order of
    `end`.
    """

    names: tuple[str, ...]
    context_length: int
    start: int
    ids: torch.Tensor
    end: torch.Tensor
    buckets: tuple[tuple[int, tuple[int, ...]], ...]

    def __len__(self) -> int:
        return len(self.names)


class PromptTokenizer:
    """An open_clip tokenizer that refuses long texts instead of truncating them, and makes room for contexts.

    `length` is the number of text positions of the tower.
    """

    def __init__(self, tokenizer: Any, length: int) -> None:
        self._tokenizer = tokenizer
        self._length = length
        self._simple = not hasattr(tokenizer, "tokenizer")  # open_clip wraps the tokenizers of transformers
        if self._simple:
            self._pad = int(getattr(tokenizer, "pad_token_id", 0))
            self._lead = int(tokenizer.sot_token_id)
        else:
            inner = tokenizer.tokenizer
            self._pad = int(inner.pad_token_id)
            self._special = frozenset(int(i) for i in inner.all_special_ids) | {self._pad}

    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Token ids `(N, L)`. BackboneError for a text that does not fit into the tower's positions."""
        if not texts:
            return torch.zeros(0, self._length, dtype=torch.long)
        if self._simple:
            for text in texts:
                needed = len(self._tokenizer.encode(text)) + 2
                if needed > self._length:
                    raise BackboneError(
                        f"The text {text!r} needs {needed} tokens, the backbone takes {self._length}: shorten it."
                    )
        ids: torch.Tensor = self._tokenizer(list(texts), context_length=self._length)
        return ids

    def words(self, words: str) -> torch.Tensor:
        """Token ids `(k,)` of words without special tokens. BackboneError if there are none."""
        if self._simple:
            ids = [int(i) for i in self._tokenizer.encode(words)]
        else:
            ids = [int(i) for i in self.texts([words])[0] if int(i) not in self._special]
        if not ids:
            raise BackboneError(f"The words {words!r} have no token: give at least one word.")
        return torch.tensor(ids)

    def class_ids(self, names: Sequence[str], context_length: int) -> tuple[torch.Tensor, int]:
        """Token ids `(C, L)` with placeholders, and the first context position."""
        placeholder = int(self.words(PLACEHOLDER_WORD)[0])
        texts = [name.replace("_", " ").strip() for name in names]
        for name, text in zip(names, texts, strict=True):
            if not text:
                raise BackboneError(f"The class name {name!r} is empty: give it a word.")
        if self._simple:
            rows = [self._simple_row(n, f"{t}.", context_length) for n, t in zip(names, texts, strict=True)]
            return torch.stack([self._insert(*row, 1, context_length, placeholder) for row in rows]), 1
        ids = self._tokenizer([f"{text}." for text in texts], context_length=self._length)
        start = 1 if int(ids[0, 0]) in self._special else 0  # a start token, or NLLB's language
        return torch.stack(
            [self._insert(n, row, start, context_length, placeholder) for n, row in zip(names, ids, strict=True)]
        ), start

    def template_ids(self, texts: Sequence[str], words: str, most: int) -> tuple[torch.Tensor, int, int]:
        """Token ids `(C, L)` of whole texts that begin with `words`, and where their last tokens, at most `most`, are.

        Returns ids, the position of the first of these tokens, and how many there are: 0 if all texts share none.
        """
        ids, word_ids = self.texts(texts), self.words(words) if words.strip() else torch.zeros(0, dtype=torch.long)
        lead = 1 if self._simple or int(ids[0, 0]) in self._special else 0
        word_ids = word_ids[: ids.shape[1] - lead]
        same = (ids[:, lead : lead + len(word_ids)] == word_ids).all(dim=0).long().cumprod(dim=0)
        shared = int(same.sum())
        return ids, lead + max(0, shared - most), min(shared, most)

    def _simple_row(self, name: str, text: str, context_length: int) -> tuple[str, torch.Tensor]:
        tokens = [int(i) for i in self._tokenizer.encode(text)]
        if len(tokens) + 2 + context_length > self._length:
            raise self._too_long(name, len(tokens) + 2, context_length)
        row = torch.full((self._length,), self._pad)
        row[: len(tokens) + 2] = torch.tensor([self._lead, *tokens, int(self._tokenizer.eot_token_id)])
        return name, row

    def _insert(self, name: str, row: torch.Tensor, start: int, count: int, placeholder: int) -> torch.Tensor:
        """Insert `count` tokens at `start` in place of padding at the end, which a class token may follow."""
        last = self._length
        while last and int(row[last - 1]) != self._pad:
            last -= 1
        run = 0
        while run < last and int(row[last - 1 - run]) == self._pad:
            run += 1
        if run < count:
            raise self._too_long(name, self._length - run, count)
        filler = torch.full((count,), placeholder)
        return torch.cat([row[:start], filler, row[start : last - count], row[last:]])

    def _too_long(self, name: str, needed: int, context_length: int) -> BackboneError:
        return BackboneError(
            f"The class name {name!r} needs {needed} tokens and the context {context_length}, but the backbone takes "
            f"{self._length}: shorten the name or the context."
        )


def make_class_prompts(
    tokenizer: PromptTokenizer,
    class_names: Sequence[str],
    context_length: int,
    pooled_position: Callable[[torch.Tensor], torch.Tensor],
) -> ClassPrompts:
    """See `Backbone.class_prompts`; `pooled_position`: ids `(C, L)` -> positions `(C,)` that the tower pools."""
    if isinstance(class_names, str) or not class_names:
        raise BackboneError("No class names were given: pass a list with at least one name.")
    if context_length < 1:
        raise BackboneError(f"A context of {context_length} tokens was asked for: use at least 1.")
    ids, start = tokenizer.class_ids(class_names, context_length)
    return prompts_of(class_names, ids, start, context_length, pooled_position(ids))


def prompts_of(
    class_names: Sequence[str], ids: torch.Tensor, start: int, context_length: int, end: torch.Tensor
) -> ClassPrompts:
    """The prompts of token ids `(C, L)` with their pooled positions `(C,)`."""
    buckets: dict[int, list[int]] = {}
    for index, position in enumerate(end.tolist()):
        buckets.setdefault(position, []).append(index)
    return ClassPrompts(
        names=tuple(class_names),
        context_length=context_length,
        start=start,
        ids=ids,
        end=end,
        buckets=tuple((position, tuple(buckets[position])) for position in sorted(buckets)),
    )


@dataclass(frozen=True)
class LowRank:
    """Changes of rank r to one block's attention: W + scale·B·A for query, key and value.

    ``a (3, r, d)``, ``b (3, d, r)``. With ``dropout`` each matrix has its own mask, drawn from ``draws``.
    """

    a: Tensor
    b: Tensor
    scale: float
    dropout: float = 0.0
    draws: Generator | None = None

    def branch(self, index: int, rows: Tensor) -> Tensor:
        """`scale·drop(x)·Aᵀ·Bᵀ` of matrix ``index`` for rows `(..., d)`."""
        if self.dropout:
            kept = sent_to(torch.rand(rows.shape, generator=self.draws), rows.device) >= self.dropout
            rows = rows * kept / (1 - self.dropout)
        return F.linear(F.linear(rows, self.a[index].to(rows.dtype)), self.b[index].to(rows.dtype)) * self.scale

    def change(self) -> Tensor:
        """`(3, d, d)` scale·B·A, which can be added to the weights if there is no dropout."""
        return self.scale * (self.b @ self.a)


def is_standard_block(block: Any) -> bool:
    """Whether a block is open_clip's default block, which the functions below require."""
    return is_a(block, "transformer", "ResidualAttentionBlock") and _is_standard_attention(block.attn)


def _is_standard_attention(attention: nn.MultiheadAttention) -> bool:
    return (
        attention.in_proj_weight is not None
        and attention.bias_k is None
        and not attention.add_zero_attn
        and attention.batch_first
        and attention.dropout == 0.0
    )


def project(block: Any, normed: Tensor, parts: slice = ALL) -> Tensor:
    """Queries (0), keys (1) and values (2) of normed rows, as in parts: `(..., d)` -> `(..., len(parts) * d)`."""
    weight, bias = block.attn.in_proj_weight, block.attn.in_proj_bias
    if parts != ALL:  # the gradient of a slice would be a copy
        d = normed.shape[-1]
        rows = slice(parts.start * d, parts.stop * d)
        weight, bias = weight[rows], None if bias is None else bias[rows]
    return F.linear(normed, weight, bias)


def add_branches(block: Any, rows: Tensor, attended: Tensor) -> Tensor:
    """The part of the block after attention, `(..., d)`: output projection, then the MLP."""
    rows = rows + block.ls_1(block.attn.out_proj(attended))
    result: Tensor = rows + block.ls_2(block.mlp(_normed(block.ln_2, rows)))
    return result


def run_block(
    block: Any,
    rows: Tensor,
    attn_mask: Tensor | None = None,
    *,
    causal: bool = False,
    first_only: bool = False,
    low_rank: LowRank | None = None,
) -> Tensor:
    """The block itself on rows `(B, S, d)`, in fewer operations: torch's attention moves the batch to the middle.

    ``first_only``: the output for row 0 only, `(B, 1, d)`.
    """
    normed = _normed(block.ln_1, rows)
    asking, kept = (normed[:, :1], rows[:, :1]) if first_only else (normed, rows)
    if first_only:
        parts = [project(block, asking, QUERIES), *project(block, normed, KEYS_VALUES).chunk(2, dim=-1)]
    else:
        parts = list(project(block, normed).chunk(3, dim=-1))
    if low_rank is not None:
        inputs = enumerate(zip(parts, (asking, normed, normed), strict=True))
        parts = [part + low_rank.branch(index, own) for index, (part, own) in inputs]
    query, key, value = (_heads(part, block.attn.num_heads) for part in parts)
    attended = F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, is_causal=causal)
    return add_branches(block, kept, attended.transpose(1, 2).flatten(2))


def _normed(norm: Any, rows: Tensor) -> Tensor:
    """Half precision in float32: under autocast on a CPU a norm would sum its gradients in it."""
    half = rows.dtype in (torch.float16, torch.bfloat16)
    result: Tensor = norm(rows.float()).to(rows.dtype) if half else norm(rows)
    return result


def _heads(rows: Tensor, heads: int) -> Tensor:
    """`(B, R, d)` -> `(B, heads, R, d / heads)`."""
    batch, count, width = rows.shape
    return rows.reshape(batch, count, heads, width // heads).transpose(1, 2)


@dataclass(frozen=True)
class TextFlags:
    """The paths that the tower supports. `refusal`: why prompts are impossible (None: they are possible)."""

    refusal: str | None
    short: bool  # only the pooled row is read and the mask is causal: rows after it need not be computed
    prefix: bool  # and the blocks are open_clip's standard blocks, whose keys and values `prefix.py` can share


@dataclass(frozen=True)
class Placed:
    """What a pass reads of class prompts, on the tower's device: copying it in every step would wait for a GPU.

    buckets: of classes of equal length, the pooled position and the classes' indices. places: of each class in the
    order of the buckets.
    """

    ids: Tensor
    buckets: tuple[tuple[int, Tensor], ...]
    places: Tensor

    @classmethod
    def on(cls, device: torch.device, prompts: ClassPrompts) -> Placed:
        buckets = tuple((end, torch.tensor(members, device=device)) for end, members in prompts.buckets)
        order = torch.cat([members for _, members in buckets])
        return cls(prompts.ids.to(device), buckets, order.argsort())


@dataclass(frozen=True)
class Texts:
    """Whole texts before the first block: `(C, S, d)`, what is added to scores, and the rows `(C,)` that are pooled."""

    rows: Tensor
    mask: Tensor | None
    ends: Tensor


class TextTower:
    """A view of the text tower of a `CLIP`, `CustomTextCLIP` or `CoCa` model of open_clip, without its own weights."""

    spare_memory = False
    """Whether activations within blocks are not kept for the backward pass."""

    def __init__(self, model: Any) -> None:
        self.context_length = int(getattr(model, "context_length", 0))
        # CLIP has the parts of its tower as attributes; the other classes have a TextTransformer under `.text`.
        self._inner: Any = getattr(model, "text", None)
        self._holder: Any = model if self._inner is None else self._inner
        self.flags = _flags(self._holder, self._inner)
        self._placed: WeakKeyDictionary[ClassPrompts, Placed] = WeakKeyDictionary()
        if self.flags.refusal is None:
            self.blocks: list[Any] = list(self._holder.transformer.resblocks)

    @property
    def dense(self) -> bool:
        """Whether a causal mask lets classes stand one behind the other in a sequence (`dense.py`)."""
        return self.flags.short

    @property
    def holder(self) -> Any:
        """The module that holds the tower's parts."""
        return self._holder

    @property
    def width(self) -> int:
        """d_t."""
        if self.flags.refusal is None:
            return int(self._holder.positional_embedding.shape[1])
        config = getattr(self._holder, "config", None)
        return int(getattr(config, "hidden_size", 0) or getattr(config, "d_model", 0))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the blocks compute."""
        dtype: torch.dtype = self._holder.transformer.get_cast_dtype()
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self._holder.token_embedding.weight.device
        return device

    def require(self) -> None:
        """Raise BackboneError if the tower cannot take prompts."""
        if self.flags.refusal is not None:
            raise BackboneError(f"This backbone's text tower takes no prompts: {self.flags.refusal}.")

    @property
    def embedding(self) -> Tensor:
        """Token embeddings `(V, d)`."""
        weight: Tensor = self._holder.token_embedding.weight
        return weight

    @property
    def pool_type(self) -> str:
        """Which row is pooled: argmax (the largest token), eos, first or last."""
        return _pool_type(self._holder, self._inner)

    def placed(self, prompts: ClassPrompts) -> Placed:
        """The prompts on the tower's device."""
        held = self._placed.get(prompts)
        if held is None or held.ids.device != self.device:
            with torch.inference_mode(False):
                held = self._placed[prompts] = Placed.on(self.device, prompts)
        return held

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings without positions, `(..., d)` for ids `(...)`."""
        self.require()
        rows: Tensor = self._holder.token_embedding(ids.to(self.device)).to(self.dtype)
        return rows

    def position(self, start: int, stop: int) -> Tensor:
        """Positional embeddings `(stop - start, d)`."""
        rows: Tensor = self._holder.positional_embedding[start:stop].to(self.dtype)
        return rows

    def pooled_position(self, ids: Tensor) -> Tensor:
        """The position `(C,)` that the tower pools for each row of ids; -1 if it does not depend on the ids."""
        self.require()
        kind = self.pool_type
        if kind == "argmax" and not _has_class_token(self._inner):
            return ids.argmax(dim=-1)
        if kind == "eos" and not _has_class_token(self._inner):
            is_end = ids == _eos_id(self._holder, self._inner)
            if not bool(is_end.any(dim=-1).all()):
                raise BackboneError("The tokenizer's end token is not the one that the text tower pools.")
            return is_end.int().argmax(dim=-1)
        return torch.full((ids.shape[0],), -1)

    def project(self, rows: Tensor) -> Tensor:
        """Pooled rows `(..., d)` -> `ln_final` -> text projection `(..., d_e)`."""
        rows = self._holder.ln_final(rows)
        projection = self._holder.text_projection
        if projection is None:
            return rows
        projected: Tensor = projection(rows) if isinstance(projection, nn.Module) else rows @ projection
        return projected

    def encode_plain(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """Features `(N, C, d_e)`: all positions of all classes through open_clip's blocks.

        context: `(N, 1 or C, m, d)`; deep: `(N, depth, m, d)` or None.
        """
        ids = self.placed(prompts).ids
        rows, mask = self.constant_rows(ids)
        n, c = context.shape[0], len(prompts)
        if mask is not None and mask.ndim == 3:  # (C * heads, L, L), with the padding of each class
            mask = mask.repeat(n, 1, 1)
        rows = self.run(self._with_context(rows, context, prompts), mask, deep, prompts)
        return self._pool(rows, ids.repeat(n, 1)).reshape(n, c, -1)

    def encode_short(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """As `encode_plain`, but computes each bucket of equally long classes only up to its pooled position."""
        placed = self.placed(prompts)
        rows, mask = self.constant_rows(placed.ids)
        n = context.shape[0]
        features: list[Tensor] = []
        for end, index in placed.buckets:
            part = rows[index, : end + 1]
            vectors = context if context.shape[1] == 1 else context[:, index]
            out = self.run(self._with_context(part, vectors, prompts), mask[: end + 1, : end + 1], deep, prompts)
            features.append(self.project(out[:, -1]).reshape(n, len(index), -1))
        return torch.cat(features, dim=1).index_select(1, placed.places)

    def constant_rows(self, ids: Tensor) -> tuple[Tensor, Any]:
        """Embedded ids with positions `(C, L, d)`, with a class token at the end if the tower has one, and the mask."""
        with torch.inference_mode(False), torch.no_grad():
            if self._inner is None:
                rows = self.embed(ids) + self._holder.positional_embedding.to(self.dtype)
                return rows, self._holder.attn_mask
            rows, mask = self._inner._embeds(ids)
            return rows, mask

    def texts(self, ids: Tensor) -> Texts:
        """Whole texts of token ids `(C, L)`, up to the longest one's end where nothing behind it matters."""
        rows, mask = self.constant_rows(ids)
        ends = self.pooled_position(ids).to(rows.device)
        if self.pool_type == "first" and not _has_class_token(self._inner):
            ends = torch.zeros_like(ends)
        if self.flags.short:
            return Texts(rows[:, : int(ends.max()) + 1].contiguous(), None, ends)
        if mask is not None and mask.ndim == 3:  # (C * heads, L, L)
            mask = mask.unflatten(0, (len(ids), -1))
        return Texts(rows, mask, ends)

    def encode_texts(self, texts: Texts, low_rank: Mapping[int, LowRank] | None = None) -> Tensor:
        """Features `(C, d_e)`, not normalised, with changes of the standard blocks by number."""
        rows = texts.rows
        for number, block in enumerate(self.blocks):
            low = (low_rank or {}).get(number)
            rows = run_block(block, rows, texts.mask, causal=self.flags.short, low_rank=low)
        return self.project(rows[torch.arange(len(rows), device=rows.device), texts.ends])

    def _with_context(self, rows: Tensor, context: Tensor, prompts: ClassPrompts) -> Tensor:
        """Constant rows with the context at its positions, `(N * C, L, d)`."""
        n, c, start = context.shape[0], rows.shape[0], prompts.start
        stop = start + prompts.context_length
        rows = rows.expand(n, *rows.shape)
        placed = (context + self.position(start, stop)).expand(n, c, stop - start, -1)
        return torch.cat([rows[:, :, :start], placed, rows[:, :, stop:]], dim=2).flatten(0, 1)

    def run(
        self,
        rows: Tensor,
        mask: Any,
        deep: Tensor | None,
        prompts: ClassPrompts,
        *,
        few: bool = False,
        spare: bool = False,
    ) -> Tensor:
        """Run rows `(N * C, L, d)` through all blocks; `deep` replaces the context's rows before blocks 1..depth.

        ``few``: in few operations. ``spare``: keep no activations within blocks, as with `spare_memory`.
        """
        start, stop = prompts.start, prompts.start + prompts.context_length
        depth = 0 if deep is None else deep.shape[1]
        for number, block in enumerate(self.blocks):
            if deep is not None and 1 <= number <= depth:
                fresh = deep[:, number - 1 : number].expand(-1, rows.shape[0] // deep.shape[0], -1, -1).flatten(0, 1)
                rows = torch.cat([rows[:, :start], fresh, rows[:, stop:]], dim=1)
            step = partial(run_block, block) if few and self.flags.prefix else block
            rows = self.sparing(partial(step, attn_mask=mask), rows, spare=spare)
        return rows

    def sparing(self, step: Callable[..., Result], *given: Any, spare: bool = False) -> Result:
        """``step(*given)``; with ``spare`` its activations are computed again in the backward pass."""
        if not (spare or self.spare_memory) or not torch.is_grad_enabled():
            return step(*given)
        result: Result = checkpoint(step, *given, use_reentrant=False, preserve_rng_state=False)  # no tower draws
        return result

    def _pool(self, rows: Tensor, ids: Tensor) -> Tensor:
        kind = self.pool_type
        if _has_class_token(self._inner) or kind == "last":
            return self.project(rows[:, -1])
        if kind == "first":
            return self.project(rows[:, 0])
        end = self.pooled_position(ids)
        return self.project(rows[torch.arange(rows.shape[0], device=rows.device), end])


def _flags(holder: Any, inner: Any) -> TextFlags:
    if inner is not None and not is_a(inner, "transformer", "TextTransformer"):
        return TextFlags(f"it is a {type(inner).__name__}, not a text transformer of open_clip", False, False)
    if not holder.transformer.batch_first:
        return TextFlags("it is not batch-first", False, False)
    kind = _pool_type(holder, inner)
    if kind not in ("argmax", "eos", "first", "last"):
        return TextFlags(f"it pools by {kind!r}", False, False)
    short = (
        holder.attn_mask is not None
        and kind in ("argmax", "eos")
        and not _has_class_token(inner)
        and not getattr(inner, "use_pad_mask", False)
    )
    blocks = holder.transformer.resblocks
    return TextFlags(None, short, short and all(is_standard_block(block) for block in blocks))


def _pool_type(holder: Any, inner: Any) -> str:
    return str(holder.text_pool_type if inner is None else inner.pool_type)


def _eos_id(holder: Any, inner: Any) -> int:
    return int(holder.text_eos_id if inner is None else inner.eos_id)


def _has_class_token(inner: Any) -> bool:
    return inner is not None and inner.cls_emb is not None


def tracing() -> bool:
    """Whether a graph is being traced, which knows no tensor's content and holds no derivative written by hand."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]
