"""Prompted text encoding in an open_clip text tower: the supported paths, and the plain and the short path.

Notation: `N` contexts in a batch, `C` classes, `m` context tokens, `L` text positions, `d` = d_t the tower's width.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers.blocks import LowRank, is_standard_block, run_block
from promptfed.shared.clip.towers.tokens import ClassPrompts

Path = Literal["auto", "dense", "prefix", "short", "plain"]
Result = TypeVar("Result")


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
    def on(cls, device: torch.device, prompts: ClassPrompts) -> "Placed":
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
            own = context if context.shape[1] == 1 else context[:, index]
            out = self.run(self._with_context(part, own, prompts), mask[: end + 1, : end + 1], deep, prompts)
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
    from open_clip.transformer import TextTransformer

    if inner is not None and not isinstance(inner, TextTransformer):
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
