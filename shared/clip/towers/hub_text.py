"""Prompted text encoding in the text towers of transformers that open_clip wraps: BERT, RoBERTa, mT5 and NLLB.

Their attention is bidirectional: a token's row depends on all others, so the rows of a shared context cannot be
computed once for all classes, and no position before the end can be left out. Only padding after the longest text is.
Notation as in `text.py`.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from promptfed.shared.clip.towers.plain import is_a
from promptfed.shared.clip.towers.text import ClassPrompts, TextFlags, TextTower

DEFAULT_CONTEXT_LENGTH = 77  # that open_clip's tokenizers fill; the towers take more, or any number
# Where each kind of model keeps its blocks, by the model type of its configuration.
_BLOCKS = {
    "bert": "encoder.layer",
    "roberta": "encoder.layer",
    "xlm-roberta": "encoder.layer",
    "mt5": "block",
    "m2m_100": "layers",
}


class HubTextTower(TextTower):
    """A view of a text tower of transformers, an `HFTextEncoder` of open_clip, without its own weights."""

    def __init__(self, inner: Any, context_length: int = DEFAULT_CONTEXT_LENGTH) -> None:
        self._inner = self._holder = inner
        self._placed = WeakKeyDictionary()
        self.context_length = context_length
        kind = inner.config.model_type
        self.flags = TextFlags(None if kind in _BLOCKS else f"it is a {kind} of transformers", True, False)
        if self.flags.refusal is None:
            self.blocks = list(inner.transformer.get_submodule(_BLOCKS[kind]))

    @property
    def dense(self) -> bool:
        return False

    @property
    def width(self) -> int:
        return int(self.embedding.shape[1])

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.embedding.dtype
        return dtype

    @property
    def device(self) -> torch.device:
        device: torch.device = self.embedding.device
        return device

    @property
    def embedding(self) -> Tensor:
        weight: Tensor = self._words.weight
        return weight

    @property
    def _words(self) -> Any:
        return self._inner.transformer.get_input_embeddings()

    def embed(self, ids: Tensor) -> Tensor:
        """Token embeddings without positions, `(..., d)` for ids `(...)`."""
        self.require()
        rows: Tensor = self._words(ids.to(self.device))
        return rows

    def pooled_position(self, ids: Tensor) -> Tensor:
        """-1 for each row of ids: the tower pools the first row, or the mean of all."""
        self.require()
        return torch.full((ids.shape[0],), -1)

    def encode_plain(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """Features `(N, C, d_e)` of all positions. context: `(N, 1 or C, m, d)`; deep: `(N, depth, m, d)` or None."""
        return self._encode(context, deep, prompts, self.placed(prompts).ids)

    def encode_short(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts) -> Tensor:
        """As `encode_plain`, without the positions that are padding in all texts."""
        used = (prompts.ids != self._inner.config.pad_token_id).any(dim=0).nonzero()
        return self._encode(context, deep, prompts, self.placed(prompts).ids[:, : int(used.max()) + 1])

    def _encode(self, context: Tensor, deep: Tensor | None, prompts: ClassPrompts, ids: Tensor) -> Tensor:
        n, c = context.shape[0], len(prompts)
        start, stop = prompts.start, prompts.start + prompts.context_length
        with torch.inference_mode(False), torch.no_grad():
            constant = self.embed(ids).expand(n, *ids.shape, -1)
        placed = context.expand(n, c, stop - start, -1)
        rows = torch.cat([constant[:, :, :start], placed, constant[:, :, stop:]], dim=2).flatten(0, 1)
        mask = (ids != self._inner.config.pad_token_id).long().repeat(n, 1)
        with self._replacing(deep, start, stop):
            output = self._inner.transformer(inputs_embeds=rows, attention_mask=mask)
        features: Tensor = self._inner.proj(self._inner.pooler(output, mask))
        return features.reshape(n, c, -1)

    @contextmanager
    def _replacing(self, deep: Tensor | None, start: int, stop: int) -> Iterator[None]:
        """Replace the context's rows before blocks 1..depth in this thread's passes; other threads share the blocks."""
        owner = threading.get_ident()

        def hook_for(fresh: Tensor) -> Any:
            def replace(block: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
                if threading.get_ident() != owner:
                    return None
                rows = inputs[0]
                replaced = fresh.repeat_interleave(rows.shape[0] // fresh.shape[0], dim=0)
                return torch.cat([rows[:, :start], replaced, rows[:, stop:]], dim=1), *inputs[1:]

            return replace

        with ExitStack() as hooks:
            for number in range(0 if deep is None else deep.shape[1]):
                assert deep is not None
                handle = self.blocks[number + 1].register_forward_pre_hook(hook_for(deep[:, number]))
                hooks.callback(handle.remove)
            yield


def text_tower_of(model: Any, config: Mapping[str, Any]) -> TextTower:
    """The text tower of a `CLIP`, `CustomTextCLIP` or `CoCa` model of open_clip; config: its `text_cfg`."""
    inner = getattr(model, "text", None)
    if not is_a(inner, "hf_model", "HFTextEncoder"):
        return TextTower(model)
    return HubTextTower(inner, int(config.get("context_length", DEFAULT_CONTEXT_LENGTH)))
