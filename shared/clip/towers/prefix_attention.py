"""Attention of packed class tokens to a prefix that all classes share, with its gradient written out.

Rows are `(N, R, d)`: first the `m` context rows, then the `T` own rows of all classes (see `prefix.py`). A context row
sees the prefix up to itself; an own row sees the whole prefix and the own rows of its class up to itself. The scores
`(N, H, rows, P + widest)` have the prefix in their first `P` columns and the own tokens in the others, so that one
softmax is enough; one product with the prefix serves all classes. The gradient is written out because autograd would
record dozens of small operations per block, an eighth of the time of a training step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


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
            own = _split(weights[:, :, asking, p : p + bucket.size], bucket)
            attended[:, :, asking] += (own @ _split(value[:, :, rows], bucket)).flatten(2, 3)
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
            own = _split(weights[:, :, asking, p : p + bucket.size], bucket)
            above = _split(gradient[:, :, asking], bucket)
            d_value[:, :, rows] = (own.mT @ above).flatten(2, 3)
            d_scores[:, :, asking, p : p + bucket.size] = (above @ _split(value[:, :, rows], bucket).mT).flatten(2, 3)
        d_scores -= (d_scores * weights).sum(dim=-1, keepdim=True)
        d_scores *= weights
        d_query = d_scores[..., :p] @ prefix_key
        d_key[:, :, : layout.m] = (d_scores[..., :p].mT @ query)[:, :, ctx.start :]
        for bucket, asking, rows in layout.parts():
            own = _split(d_scores[:, :, asking, p : p + bucket.size], bucket)
            d_query[:, :, asking] += (own @ _split(key[:, :, rows], bucket)).flatten(2, 3)
            d_key[:, :, rows] = (own.mT @ _split(query[:, :, asking], bucket)).flatten(2, 3)
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
