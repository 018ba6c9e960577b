"""Prompted text encoding that computes the shared prefix `[SOS] ctx` once for all classes.

In a causal tower the rows of the prefix do not depend on the class, so their keys and values serve every class; the
tokens before the context do not even depend on the context, so theirs are constants of the backbone. What is left per
class are its own tokens up to the end token. They stand packed one after the other, without padding, in one matrix
`(N, m + T, d)`: the context's rows, then those of all classes, so that every linear layer is one product; only
attention looks at one bucket of equally long classes at a time. In the first block the queries, keys and values of
the classes' own tokens are constants, and in the last one only the end token's row goes on. All of it is exact.

Notation as in `text.py`; `T` packed rows of all classes, `s` own tokens of a class, `P` prefix length, `H` heads of
width `h`.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from shared.clip.text import TextTower, restore_order
from shared.clip.tokens import ClassPrompts


@dataclass(frozen=True)
class _Bucket:
    """`count` classes with `size` own tokens each, from row `first` of the packed class rows on."""

    first: int
    count: int
    size: int
    rank: int  # of its first class among all classes

    def of(self, packed: Tensor, dim: int) -> Tensor:
        """The bucket's part of packed rows, with `dim` split in `(count, size)`."""
        return torch.unflatten(packed.narrow(dim, self.first, self.count * self.size), dim, (self.count, self.size))


@dataclass(frozen=True)
class _Constants:
    """What depends on neither context nor deep prompts, for one set of class names."""

    key: tuple[torch.dtype, torch.device]
    buckets: tuple[_Bucket, ...]
    order: list[int]
    rows: Tensor  # (T, d) embedded own tokens with positions
    qkv: Tensor  # (T, 3d) their queries, keys and values in the first block
    lead: list[Tensor]  # per block (start, 2d): keys and values of the tokens before the context

    def end_rows(self, packed: Tensor) -> Tensor:
        """`(N, T, ...)` packed rows -> `(N, C, ...)` those of the end tokens."""
        return torch.cat([bucket.of(packed, 1)[:, :, -1] for bucket in self.buckets], dim=1)


class PrefixEncoder:
    """Encodes contexts with a shared prefix in `tower`, which must allow it (`TextFlags.prefix`)."""

    def __init__(self, tower: TextTower) -> None:
        self._tower = tower
        self._cache: WeakKeyDictionary[ClassPrompts, _Constants] = WeakKeyDictionary()

    def encode(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """`(N, C, d_e)` for context `(N, m, d)` and deep `(N, depth, m, d)` or None."""
        tower, constants = self._tower, self._constants(prompts)
        start, m = prompts.start, prompts.context_length
        context = context + tower.position(start, start + m)
        own = constants.rows.expand(context.shape[0], -1, -1)  # (N, T, d)
        depth, final = 0 if deep is None else deep.shape[1], len(tower.blocks) - 1
        for number, block in enumerate(tower.blocks):
            if deep is not None and 1 <= number <= depth:
                context = deep[:, number - 1]
            attention = _attention(block, number, number == final, context, own, constants)
            attended = [attention.of_classes(bucket) for bucket in constants.buckets]
            if number == final:
                own = constants.end_rows(own)
            if number == final or number < depth:  # the context's rows end here: nothing reads them any more
                own = _add_branches(block, own, torch.cat(attended, dim=1))
            else:
                rows = torch.cat([context, own], dim=1)
                rows = _add_branches(block, rows, torch.cat([attention.of_context(), *attended], dim=1))
                context, own = torch.split(rows, [m, own.shape[1]], dim=1)
        return restore_order(tower.project(own), constants.order)

    def _constants(self, prompts: ClassPrompts) -> _Constants:
        key = (self._tower.dtype, self._tower.device)
        held = self._cache.get(prompts)
        if held is None or held.key != key:
            # Ordinary tensors even if the caller is in inference mode: a later training step uses them too.
            with torch.inference_mode(False), torch.no_grad():
                held = self._cache[prompts] = self._make_constants(key, prompts)
        return held

    def _make_constants(self, key: tuple[torch.dtype, torch.device], prompts: ClassPrompts) -> _Constants:
        tower, block = self._tower, self._tower.blocks[0]
        first_own = prompts.start + prompts.context_length
        buckets: list[_Bucket] = []
        order: list[int] = []
        rows: list[Tensor] = []
        total = 0
        for end, members in prompts.buckets:
            size = end + 1 - first_own
            buckets.append(_Bucket(total, len(members), size, len(order)))
            order.extend(members)
            total += len(members) * size
            own = tower.embed(prompts.ids[list(members), first_own : end + 1]) + tower.position(first_own, end + 1)
            rows.append(own.flatten(0, 1))
        packed = torch.cat(rows)
        qkv = F.linear(block.ln_1(packed), block.attn.in_proj_weight, block.attn.in_proj_bias)
        lead = tower.embed(prompts.ids[:1, : prompts.start]) + tower.position(0, prompts.start)
        return _Constants(key, tuple(buckets), order, packed, qkv, self._lead_keys_values(lead))

    def _lead_keys_values(self, lead: Tensor) -> list[Tensor]:
        """Per block `(start, 2d)`; lead: `(1, start, d)`, which sees only itself."""
        found = []
        size, d = lead.shape[1], lead.shape[2]
        mask = torch.full((size, size), -torch.inf, dtype=lead.dtype, device=lead.device).triu(1)
        for block in self._tower.blocks:
            bias = block.attn.in_proj_bias
            found.append(
                F.linear(block.ln_1(lead[0]), block.attn.in_proj_weight[d:], None if bias is None else bias[d:])
            )
            if size:
                lead = block(lead, attn_mask=mask)
        return found


@dataclass(frozen=True)
class _Attention:
    """Queries, keys and values of one block, each `(N, H, rows, h)`; queries are scaled by 1/√h."""

    own_query: Tensor  # (N, H, T, h), or of the end rows alone: (N, H, C, h)
    own_key: Tensor
    own_value: Tensor
    context_query: Tensor | None
    prefix_key: Tensor
    prefix_value: Tensor
    ends_only: bool

    def of_context(self) -> Tensor:
        """`(N, m, d)`: every context token sees the tokens before the context, the context before it, and itself."""
        assert self.context_query is not None
        m, p = self.context_query.shape[2], self.prefix_key.shape[2]
        scores = self.context_query @ self.prefix_key.mT + _causal(m, p, self.own_query)
        return _merge_heads(scores.softmax(dim=-1) @ self.prefix_value)

    def of_classes(self, bucket: _Bucket) -> Tensor:
        """`(N, count * size, d)`, or `(N, count, d)` of the end rows: own tokens see the prefix and own tokens."""
        key, value = bucket.of(self.own_key, 2), bucket.of(self.own_value, 2)  # (N, H, count, s, h)
        if self.ends_only:
            query = self.own_query.narrow(2, bucket.rank, bucket.count).unsqueeze(3)  # (N, H, count, 1, h)
        else:
            query = bucket.of(self.own_query, 2)
        p = self.prefix_key.shape[2]
        # One product for the prefix, whose keys are the same for all classes; small ones among own tokens.
        shared = torch.unflatten(query.flatten(2, 3) @ self.prefix_key.mT, 2, query.shape[2:4])
        among = query @ key.mT
        if not self.ends_only:
            among = among + _causal(bucket.size, bucket.size, among)
        weights = torch.cat([shared, among], dim=-1).softmax(dim=-1)
        from_prefix = weights[..., :p].flatten(2, 3) @ self.prefix_value
        return _merge_heads(from_prefix + (weights[..., p:] @ value).flatten(2, 3))


def _attention(block: Any, number: int, final: bool, context: Tensor, own: Tensor, constants: _Constants) -> _Attention:
    """Projections of block `number` for the rows that need them. context: `(N, m, d)`, own: `(N, T, d)`."""
    weight, bias, heads = block.attn.in_proj_weight, block.attn.in_proj_bias, block.attn.num_heads
    n, m, d = context.shape
    if number == 0:
        context_part = F.linear(block.ln_1(context), weight, bias)
        own_part = constants.qkv.expand(n, -1, -1)
        query = constants.end_rows(own_part[..., :d]) if final else own_part[..., :d]
    elif final:
        normed = block.ln_1(torch.cat([context, own], dim=1))
        query = F.linear(constants.end_rows(normed[:, m:]), weight[:d], None if bias is None else bias[:d])
        both = F.linear(normed, weight[d:], None if bias is None else bias[d:])
        context_part, own_part = torch.split(both, [m, own.shape[1]], dim=1)
    else:
        both = F.linear(block.ln_1(torch.cat([context, own], dim=1)), weight, bias)
        context_part, own_part = torch.split(both, [m, own.shape[1]], dim=1)
        query = own_part[..., :d]
    prefix = torch.cat([constants.lead[number].expand(n, -1, -1), context_part[..., -2 * d :]], dim=1)
    prefix_key, prefix_value = _split_heads(prefix, 2, heads)
    own_key, own_value = _split_heads(own_part[..., -2 * d :], 2, heads)
    scale = (d // heads) ** -0.5
    return _Attention(
        own_query=_split_heads(query * scale, 1, heads)[0],
        own_key=own_key,
        own_value=own_value,
        context_query=None if final else _split_heads(context_part[..., :d] * scale, 1, heads)[0],
        prefix_key=prefix_key,
        prefix_value=prefix_value,
        ends_only=final,
    )


def _add_branches(block: Any, rows: Tensor, attended: Tensor) -> Tensor:
    """The residual block after its attention: output projection, then the perceptron."""
    rows = rows + block.ls_1(block.attn.out_proj(attended))
    result: Tensor = rows + block.ls_2(block.mlp(block.ln_2(rows)))
    return result


def _split_heads(rows: Tensor, parts: int, heads: int) -> tuple[Tensor, ...]:
    """`(N, R, parts * H * h)` -> `parts` views `(N, H, R, h)`."""
    return torch.unflatten(rows, -1, (parts, heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)


def _merge_heads(rows: Tensor) -> Tensor:
    """`(N, H, R, h)` -> `(N, R, d)`."""
    return rows.transpose(1, 2).flatten(2)


def _causal(queries: int, keys: int, like: Tensor) -> Tensor:
    """Additive mask `(queries, keys)`: the last query sees all keys, each one before it one key less."""
    mask = torch.full((queries, keys), -torch.inf, dtype=like.dtype, device=like.device)
    return mask.triu(keys - queries + 1)
