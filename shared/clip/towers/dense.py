"""Prompted text encoding in few large operations, for devices whose time goes into starting each of them.

A sequence holds the tokens before the context, the context, and the own tokens of several classes one behind the other.
A mask lets each row see the prefix and its own class up to itself, so that in a causal tower the rows are those of a
sequence for each class. As many such sequences as needed, all of one layout, are one tensor `(B, R, d)` that passes
open_clip's own blocks: about as many operations as open_clip's own pass, at any number of classes, on a third of its
positions or fewer. Classes of about the same length share a place in the layout, which is as wide as the longest.

Notation as in `text.py`; `B` sequences of `R` rows, of which the first `p` are the prefix.
"""

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from promptfed.shared.clip.towers.text import ClassPrompts, TextTower

ROWS = 256  # own rows of a sequence: linear layers then take ten times the time of attention
HELD_ROWS = 1 << 15  # whose activations are kept: with ViT-B/16 12 GB
ALIGNED = 16  # R is a multiple: attention would copy another mask in every block


@dataclass(frozen=True)
class _Layout:
    """What does not depend on contexts. ``places (C,)``: of each class's end token in B·R; ``mask (R, R)``: added."""

    key: tuple[torch.dtype, torch.device]
    lead: Tensor  # (start, d) embedded tokens before the context, with positions
    own: Tensor  # (B, R - p, d) embedded own tokens, with positions
    mask: Tensor
    places: Tensor


class DenseEncoder:
    """Encodes contexts in `tower`, which must pool the end token under a causal mask (`TextFlags.short`)."""

    def __init__(self, tower: TextTower) -> None:
        self._tower = tower
        self._cache: WeakKeyDictionary[ClassPrompts, dict[bool, _Layout]] = WeakKeyDictionary()

    def encode(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """Features `(N, C, d_e)`. context: `(N, 1 or C, m, d)`; deep: `(N, depth, m, d)` or None."""
        tower, n = self._tower, context.shape[0]
        layout = self._layout(prompts, alone=context.shape[1] > 1)
        b, m = layout.own.shape[0], prompts.context_length
        context = context + tower.position(prompts.start, prompts.start + m)
        parts = [part.expand(n, b, -1, -1) for part in (layout.lead, context, layout.own)]
        rows = torch.cat(parts, dim=2).flatten(0, 1)
        spare = rows.shape[0] * rows.shape[1] > HELD_ROWS
        rows = tower.run(rows, layout.mask, deep, prompts, few=True, spare=spare).reshape(n, -1, rows.shape[-1])
        return tower.project(rows.index_select(1, layout.places))

    def _layout(self, prompts: ClassPrompts, alone: bool) -> _Layout:
        """``alone``: each class has a sequence, because it has a context."""
        key, kept = (self._tower.dtype, self._tower.device), self._cache.setdefault(prompts, {})
        if alone not in kept or kept[alone].key != key:
            # No inference tensors, even if the caller is in inference mode: a later training step uses them.
            with torch.inference_mode(False), torch.no_grad():
                kept[alone] = self._made(key, prompts, alone)
        return kept[alone]

    def _made(self, key: tuple[torch.dtype, torch.device], prompts: ClassPrompts, alone: bool) -> _Layout:
        tower, prefix = self._tower, prompts.start + prompts.context_length
        sizes = prompts.end + 1 - prefix
        order = torch.arange(len(prompts)) if alone else sizes.argsort(descending=True, stable=True)
        count = len(prompts) if alone else -(-int(sizes.sum()) // ROWS)
        slots = torch.split(order, count)  # classes that have the same place, each in its own sequence
        widths = [int(sizes[slot].max()) for slot in slots]
        length = -(-(prefix + sum(widths)) // ALIGNED) * ALIGNED
        tokens = torch.zeros(2, count, length - prefix, dtype=torch.int64)  # ids and positions, and padding behind them
        owner = torch.full((length,), -1)
        places = torch.empty(len(prompts), dtype=torch.int64)
        at = 0
        for number, (slot, width) in enumerate(zip(slots, widths, strict=True)):
            tokens[0, : len(slot), at : at + width] = prompts.ids[slot, prefix : prefix + width]
            tokens[1, :, at : at + width] = torch.arange(prefix, prefix + width)
            owner[prefix + at : prefix + at + width] = number
            places[slot] = torch.arange(len(slot)) * length + prefix + at + sizes[slot] - 1
            at += width
        seen = (torch.arange(length) < prefix) | (owner == owner[:, None])
        mask = torch.zeros(length, length).masked_fill_(~seen.tril(), -torch.inf)
        dtype, device = key
        ids, positions = tokens.to(device)
        own_rows = tower.embed(ids) + tower.position(0, prompts.ids.shape[1])[positions]
        lead = tower.embed(prompts.ids[0, : prompts.start]) + tower.position(0, prompts.start)
        return _Layout(key, lead, own_rows, mask.to(device, dtype), places.to(device))
