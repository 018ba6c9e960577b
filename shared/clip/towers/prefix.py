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

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from promptfed.shared.clip.towers.blocks import KEYS_VALUES, QUERIES, add_branches, project
from promptfed.shared.clip.towers.prefix_attention import ClassBucket, Layout, PrefixAttention
from promptfed.shared.clip.towers.text import TextTower
from promptfed.shared.clip.towers.tokens import ClassPrompts


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
