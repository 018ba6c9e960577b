"""From class names to token ids with room for a context: `[SOS] ctx×m name . [EOT]`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from promptfed.shared.clip.errors import BackboneError

# A placeholder for context tokens in the ids. Its embedding is always overwritten, so any ordinary word is suitable.
PLACEHOLDER_WORD = "x"


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

    def class_ids(self, names: Sequence[str], context_length: int, suffix: str) -> tuple[torch.Tensor, int]:
        """Token ids `(C, L)` with placeholders, and the first context position."""
        placeholder = int(self.words(PLACEHOLDER_WORD)[0])
        texts = [name.replace("_", " ").strip() for name in names]
        for name, text in zip(names, texts, strict=True):
            if not text:
                raise BackboneError(f"The class name {name!r} is empty: give it a word.")
        if self._simple:
            rows = [self._simple_row(n, t + suffix, context_length) for n, t in zip(names, texts, strict=True)]
            return torch.stack([self._insert(*row, 1, context_length, placeholder) for row in rows]), 1
        ids = self._tokenizer([text + suffix for text in texts], context_length=self._length)
        start = 1 if int(ids[0, 0]) in self._special else 0  # a start token, or NLLB's language
        return torch.stack(
            [self._insert(n, row, start, context_length, placeholder) for n, row in zip(names, ids, strict=True)]
        ), start

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
    suffix: str,
    pooled_position: Callable[[torch.Tensor], torch.Tensor],
) -> ClassPrompts:
    """See `Backbone.class_prompts`; `pooled_position`: ids `(C, L)` -> positions `(C,)` that the tower pools."""
    if isinstance(class_names, str) or not class_names:
        raise BackboneError("No class names were given: pass a list with at least one name.")
    if context_length < 1:
        raise BackboneError(f"A context of {context_length} tokens was asked for: use at least 1.")
    ids, start = tokenizer.class_ids(class_names, context_length, suffix)
    end = pooled_position(ids)
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
