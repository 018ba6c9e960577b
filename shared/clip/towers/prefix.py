"""Prompted text encoding that computes the shared prefix `[SOS] ctx` once for all classes.

In a causal tower the rows of the prefix do not depend on the class, so all classes share their keys and values. The
tokens before the context do not depend on the context either, so their keys and values are constants of the backbone.
Only a class's own tokens up to the end token remain. They are packed without padding in one matrix `(N, m + T, d)`: the
context's rows, then those of all classes. Every linear layer is then one product; only attention processes one bucket
of equally long classes at a time. In the first block the queries, keys and values of the classes' own tokens are
constants; in the last block only the end tokens' rows are computed. The result is exact.

Notation as in `text.py`; `T` packed rows of all classes, `s` own tokens of a class, `P` prefix length, `H` heads of
width `h`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from promptfed.shared.clip.towers.text import KEYS_VALUES, QUERIES, ClassPrompts, TextTower, add_branches, project


@dataclass(frozen=True)
class ClassBucket:
    """`count` classes with `size` own tokens each, from own row `first` and class `rank` on."""

    first: int
    count: int
    size: int
    rank: int

    def of(self, packed: Tensor, dim: int) -> Tensor:
        """The bucket's part of packed own rows, with `dim` split in `(count, size)`."""
        return torch.unflatten(packed.narrow(dim, self.first, self.count * self.size), dim, (self.count, self.size))


@dataclass(frozen=True)
class Layout:
    """The query rows. `context`: include the context rows; `ends`: only the last own row of each class."""

    heads: int
    m: int
    buckets: tuple[ClassBucket, ...]
    context: bool
    ends: bool

    @property
    def widest(self) -> int:
        return max(bucket.size for bucket in self.buckets)

    def parts(self) -> Iterator[tuple[ClassBucket, slice, slice]]:
        """For each bucket, its rows among the query rows and among all rows."""
        skip = self.m if self.context else 0
        for bucket in self.buckets:
            rows = slice(self.m + bucket.first, self.m + bucket.first + bucket.count * bucket.size)
            if self.ends:
                yield bucket, slice(skip + bucket.rank, skip + bucket.rank + bucket.count), rows
            else:
                yield bucket, slice(skip + bucket.first, skip + bucket.first + bucket.count * bucket.size), rows


class PrefixAttention(torch.autograd.Function):
    """`apply(query_rows, key_value_rows, lead, layout)` -> attended rows `(N, query rows, d)`.

    query_rows: `(N, query rows, d)`; key_value_rows: `(N, m + T, 2d)`; lead: `(start, 2d)`, the constant keys and
    values of the tokens before the context. The first two receive gradients; second derivatives are not supported.
    """

    @staticmethod
    def forward(ctx: Any, query_rows: Tensor, key_value_rows: Tensor, lead: Tensor, layout: Layout) -> Tensor:
        query, (key, value) = _heads(query_rows, 1, layout)[0], _heads(key_value_rows, 2, layout)
        query = query * query.shape[-1] ** -0.5
        lead_key, lead_value = _heads(lead.expand(len(query), *lead.shape), 2, layout)
        prefix_key = torch.cat([lead_key, key[:, :, : layout.m]], dim=2)
        prefix_value = torch.cat([lead_value, value[:, :, : layout.m]], dim=2)
        p = prefix_key.shape[2]
        scores = query.new_full((*query.shape[:3], p + layout.widest), -torch.inf)
        scores[..., :p] = query @ prefix_key.mT
        if layout.context:
            _hide_later(scores[:, :, : layout.m, :p])
        for bucket, asking, rows in layout.parts():
            among = _split(query[:, :, asking], bucket) @ _split(key[:, :, rows], bucket).mT
            _hide_later(among)
            scores[:, :, asking, p : p + bucket.size] = among.flatten(2, 3)
        weights = scores.softmax(dim=-1)
        attended = weights[..., :p] @ prefix_value
        for bucket, asking, rows in layout.parts():
            own_weights = _split(weights[:, :, asking, p : p + bucket.size], bucket)
            attended[:, :, asking] += (own_weights @ _split(value[:, :, rows], bucket)).flatten(2, 3)
        ctx.layout, ctx.start = layout, lead.shape[0]
        ctx.save_for_backward(query, key, value, prefix_key, prefix_value, weights)
        return _merge(attended)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        query, key, value, prefix_key, prefix_value, weights = ctx.saved_tensors
        layout, p = ctx.layout, prefix_key.shape[2]
        gradient = _heads(gradient, 1, layout)[0]
        d_key_value = key.new_empty(2, *key.shape)
        d_key, d_value = d_key_value
        d_value[:, :, : layout.m] = (weights[..., :p].mT @ gradient)[:, :, ctx.start :]
        d_scores = torch.zeros_like(weights)
        d_scores[..., :p] = gradient @ prefix_value.mT
        for bucket, asking, rows in layout.parts():
            own_weights = _split(weights[:, :, asking, p : p + bucket.size], bucket)
            above = _split(gradient[:, :, asking], bucket)
            d_value[:, :, rows] = (own_weights.mT @ above).flatten(2, 3)
            d_scores[:, :, asking, p : p + bucket.size] = (above @ _split(value[:, :, rows], bucket).mT).flatten(2, 3)
        d_scores -= (d_scores * weights).sum(dim=-1, keepdim=True)
        d_scores *= weights
        d_query = d_scores[..., :p] @ prefix_key
        d_key[:, :, : layout.m] = (d_scores[..., :p].mT @ query)[:, :, ctx.start :]
        for bucket, asking, rows in layout.parts():
            d_own_weights = _split(d_scores[:, :, asking, p : p + bucket.size], bucket)
            d_query[:, :, asking] += (d_own_weights @ _split(key[:, :, rows], bucket)).flatten(2, 3)
            d_key[:, :, rows] = (d_own_weights.mT @ _split(query[:, :, asking], bucket)).flatten(2, 3)
        d_query *= query.shape[-1] ** -0.5
        return _merge(d_query), d_key_value.permute(1, 3, 0, 2, 4).flatten(2), None, None


def _heads(rows: Tensor, parts: int, layout: Layout) -> Tensor:
    """`(N, R, parts * H * h)` -> `(parts, N, H, R, h)`, contiguous."""
    return torch.unflatten(rows, -1, (parts, layout.heads, -1)).permute(2, 0, 3, 1, 4).contiguous()


def _merge(rows: Tensor) -> Tensor:
    """`(N, H, R, h)` -> `(N, R, d)`."""
    return rows.transpose(1, 2).flatten(2)


def _split(rows: Tensor, bucket: ClassBucket) -> Tensor:
    """`(N, H, count * k, x)` -> `(N, H, count, k, x)`: all own rows of each class, or only its end row."""
    return torch.unflatten(rows, 2, (bucket.count, -1))


def _hide_later(scores: Tensor) -> None:
    """Apply a causal mask `(..., queries, keys)` in place: the last query sees all keys, each earlier one fewer."""
    queries, keys = scores.shape[-2:]
    if queries > 1:
        hidden = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        scores.masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True)
class _Constants:
    """Values for one set of class names that depend on neither context nor deep prompts."""

    key: tuple[torch.dtype, torch.device]
    buckets: tuple[ClassBucket, ...]
    places: Tensor  # (C,) of each class in the order of the buckets
    rows: Tensor  # (T, d) embedded own tokens with positions
    qkv: Tensor  # (T, 3d) their queries, keys and values in the first block
    lead: list[Tensor]  # per block (start, 2d): keys and values of the tokens before the context

    def end_rows(self, packed: Tensor) -> Tensor:
        """Packed rows `(N, T, ...)` -> rows of the end tokens `(N, C, ...)`."""
        return torch.cat([bucket.of(packed, 1)[:, :, -1] for bucket in self.buckets], dim=1)


class PrefixEncoder:
    """Encodes contexts with a shared prefix in `tower`, which must support it (`TextFlags.prefix`)."""

    def __init__(self, tower: TextTower) -> None:
        self._tower = tower
        self._cache: WeakKeyDictionary[ClassPrompts, _Constants] = WeakKeyDictionary()

    def encode(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """Features `(N, C, d_e)` for context `(N, m, d)` and deep `(N, depth, m, d)` or None."""
        tower, constants = self._tower, self._constants(prompts)
        context = context + tower.position(prompts.start, prompts.start + prompts.context_length)
        own = constants.rows.expand(context.shape[0], -1, -1)  # (N, T, d)
        depth, final = 0 if deep is None else deep.shape[1], len(tower.blocks) - 1
        for number, block in enumerate(tower.blocks):
            if deep is not None and 1 <= number <= depth:
                context = deep[:, number - 1]
            # The context's rows are dropped where nothing reads them: in the last block, and before new deep rows.
            goes_on = number != final and number >= depth
            layout = Layout(block.attn.num_heads, prompts.context_length, constants.buckets, goes_on, number == final)
            context, own = tower.sparing(_block, block, number, layout, context, own, constants)
        return tower.project(own).index_select(1, constants.places)

    def _constants(self, prompts: ClassPrompts) -> _Constants:
        key = (self._tower.dtype, self._tower.device)
        held = self._cache.get(prompts)
        if held is None or held.key != key:
            # No inference tensors, even if the caller is in inference mode: a later training step uses them.
            with torch.inference_mode(False), torch.no_grad():
                held = self._cache[prompts] = self._make_constants(key, prompts)
        return held

    def _make_constants(self, key: tuple[torch.dtype, torch.device], prompts: ClassPrompts) -> _Constants:
        tower, block = self._tower, self._tower.blocks[0]
        first_own = prompts.start + prompts.context_length
        buckets: list[ClassBucket] = []
        rows: list[Tensor] = []
        total = classes = 0
        for end, members in prompts.buckets:
            size = end + 1 - first_own
            buckets.append(ClassBucket(total, len(members), size, classes))
            classes += len(members)
            total += len(members) * size
            own = tower.embed(prompts.ids[list(members), first_own : end + 1]) + tower.position(first_own, end + 1)
            rows.append(own.flatten(0, 1))
        packed = torch.cat(rows)
        qkv = project(block, block.ln_1(packed))
        lead = tower.embed(prompts.ids[:1, : prompts.start]) + tower.position(0, prompts.start)
        places = tower.placed(prompts).places
        return _Constants(key, tuple(buckets), places, packed, qkv, self._lead_keys_values(lead))

    def _lead_keys_values(self, lead: Tensor) -> list[Tensor]:
        """Keys and values per block `(start, 2d)`; lead: `(1, start, d)`, which sees only itself."""
        keys_values = []
        size = lead.shape[1]
        mask = torch.full((size, size), -torch.inf, dtype=lead.dtype, device=lead.device).triu(1)
        for block in self._tower.blocks:
            keys_values.append(project(block, block.ln_1(lead[0]), KEYS_VALUES))
            if size:
                lead = block(lead, attn_mask=mask)
        return keys_values


def _block(
    block: Any, number: int, layout: Layout, context: Tensor, own: Tensor, constants: _Constants
) -> tuple[Tensor, Tensor]:
    """The rows of the context and the classes' own tokens after block `number`."""
    query, key_value = _queries_keys_values(block, number, layout, context, own, constants)
    attended: Tensor = PrefixAttention.apply(query, key_value, constants.lead[number], layout)
    if not layout.context:
        return context, add_branches(block, constants.end_rows(own) if layout.ends else own, attended)
    rows = add_branches(block, torch.cat([context, own], dim=1), attended)
    context, own = torch.split(rows, [layout.m, own.shape[1]], dim=1)
    return context, own


def _queries_keys_values(
    block: Any, number: int, layout: Layout, context: Tensor, own: Tensor, constants: _Constants
) -> tuple[Tensor, Tensor]:
    """Queries `(N, asking rows, d)` and keys with values `(N, m + T, 2d)` of block `number`."""
    n, m, d = context.shape
    if number == 0:
        rows = torch.cat([project(block, block.ln_1(context)), constants.qkv.expand(n, -1, -1)], dim=1)
    elif layout.ends:
        normed = block.ln_1(torch.cat([context, own], dim=1))
        return project(block, constants.end_rows(normed[:, m:]), QUERIES), project(block, normed, KEYS_VALUES)
    else:
        rows = project(block, block.ln_1(torch.cat([context, own], dim=1)))
    query, key_value = torch.split(rows, [d, 2 * d], dim=-1)
    if not layout.context:
        query = constants.end_rows(query[:, m:]) if layout.ends else query[:, m:]
    return query, key_value
