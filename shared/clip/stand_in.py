"""A tokenizer that stands in for one that is not at hand: speed and memory do not depend on which tokens are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.clip.towers.tokens import PromptTokenizer

START = 1


class InventedTokens:
    """A token for each word, by its length, with the interface of open_clip's simple tokenizer."""

    sot_token_id = START

    def __init__(self, text: Any):
        inner = getattr(text.holder, "config", None)
        self._words = len(text.embedding)
        self.pad_token_id = 0 if inner is None else int(inner.pad_token_id)
        self.eot_token_id = self._words - 1 if text.end_token is None else text.end_token

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        return [3 + len(word) % (self._words - 5) for word in text.replace(".", " .").split()]

    def __call__(self, texts: Sequence[str], context_length: int) -> Tensor:
        """Token ids `(N, L)`."""
        ids = torch.full((len(texts), context_length), self.pad_token_id)
        for row, text in zip(ids, texts, strict=True):
            tokens = torch.tensor([START, *self.encode(text), self.eot_token_id])[:context_length]
            row[: len(tokens)] = tokens
        return ids


def stand_in(backbone: Backbone) -> str | None:
    """Give a backbone invented tokens if its tokenizer is not at hand, and say why it is not; None if it is."""
    if not backbone.has_text:
        return None
    try:
        backbone._tokenizer  # noqa: B018 (it is loaded)
    except BackboneError as error:
        backbone._tokenizer = PromptTokenizer(InventedTokens(backbone._text), backbone.context_length)
        return str(error)
    return None
