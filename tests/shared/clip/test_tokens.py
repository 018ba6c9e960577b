"""Room for a context in the token ids of tokenizers that are not open_clip's own."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from promptfed.shared.clip import BackboneError
from promptfed.shared.clip.towers.text import PromptTokenizer

PAD, BOS, EOS, CLS = 0, 1, 2, 3


class WrappedTokenizer:
    """As open_clip wraps those of transformers: an id per letter, a begin, an end, a class token at the very end."""

    def __init__(self, begin: bool, class_token: bool) -> None:
        self._begin, self._class = begin, class_token
        self.tokenizer = SimpleNamespace(
            pad_token_id=PAD,
            bos_token_id=BOS if begin else None,
            cls_token_id=None,
            all_special_ids=[PAD, BOS, EOS, CLS],
        )

    def __call__(self, texts: Any, context_length: Any) -> Any:
        rows = []
        for text in texts:
            ids = [BOS] * self._begin + [ord(letter) for letter in text] + [EOS]
            ids = (ids + [PAD] * context_length)[: context_length - self._class] + [CLS] * self._class
            rows.append(torch.tensor(ids))
        return torch.stack(rows)


@pytest.mark.parametrize("begin", [False, True])
@pytest.mark.parametrize("class_token", [False, True])
def test_a_context_takes_the_place_of_padding(begin: Any, class_token: Any) -> None:
    tokenizer = PromptTokenizer(WrappedTokenizer(begin, class_token), 12)
    ids, start = tokenizer.class_ids(["ab", "abc"], 3, ".")
    head, tail = [BOS] * begin, [CLS] * class_token
    for row, word in zip(ids.tolist(), ("ab", "abc"), strict=True):
        body = [*head, ord("x"), ord("x"), ord("x"), *(ord(letter) for letter in word), ord("."), EOS]
        assert row == body + [PAD] * (12 - len(body) - len(tail)) + tail
    assert start == len(head)


def test_words_are_without_special_tokens() -> None:
    tokenizer = PromptTokenizer(WrappedTokenizer(True, True), 12)
    assert tokenizer.words("abc").tolist() == [ord("a"), ord("b"), ord("c")]


def test_a_name_that_leaves_no_room_is_named() -> None:
    tokenizer = PromptTokenizer(WrappedTokenizer(True, False), 12)
    with pytest.raises(BackboneError, match="class name 'abcdefg' needs 10 tokens and the context 3"):
        tokenizer.class_ids(["ab", "abcdefg"], 3, ".")
