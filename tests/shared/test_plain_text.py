"""Texts of others made harmless, and numbers in words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from promptfed.shared import plain_text as texts

ALIKE = ["hot dog", "Hot_dog", "hotdog", "cat", "c\u0430t", "dog"]
SIX = ["aaaa", "bbbb", "cccc", "dddd", "eeee", "ffff"]
FIVE, KNOWN = ", ".join(f"{name!r} to {name + '1'!r}" for name in SIX[:5]), ", ".join(map(repr, SIX))
ALIKE_FIVE = "; ".join(f"{name.upper()!r} and {name!r}" for name in SIX[:5])
CATS = ", ".join(["'cat'"] * 20)


@pytest.mark.parametrize(("made", "given", "shown"), [
    (texts.plain, ("a\x1b\u202e\U000e0001\xff",), "a\\x1b\\u202e\\U000e0001\xff"),
    (texts.plain, ("a\nb\tc", "\n"), "a\nb\\x09c"), (texts.plain, ("a\u200db",), "a\u200db"),
    (texts.size, (0,), "0 B"), (texts.size, (999,), "999 B"), (texts.size, (1000,), "1.0 kB"),
    (texts.size, (999_940,), "999.9 kB"), (texts.size, (1_500_000,), "1.5 MB"),
    (texts.size, (2_000_000_000_000,), "2000.0 GB"), (texts.counted, (1, "class", "classes"), "1 class"),
    (texts.counted, (1200, "class", "classes"), "1,200 classes"), (texts.counted, (0, "image"), "0 images"),
    (texts.shortened, ("abc", 3), "a, b, c"), (texts.shortened, ("abcde", 3, "; "), "a; b; c; and 2 more"),
    (texts.percent, (None,), "-"), (texts.percent, (0.12345,), "12.3 %"), (texts.with_interval, (0.5, None), "50.0 %"),
    (texts.with_interval, (0.5, (0.25, 0.75)), "50.0 % [25.0, 75.0]"), (texts.scale_text, ((0, 4095),), "12 bits"),
    (texts.scale_text, ((0, 1),), "0 to 1"), (texts.scale_text, ((0, 3),), "2 bits"),
    (texts.scale_text, ((0, 4094),), "0 to 4094"), (texts.scale_text, ((-1, 4095),), "-1 to 4095"),
    (texts.scale_text, ((0, 1.5),), "0 to 1.5"), (texts.listed, ("a, b ,c",), ["a", "b", "c"]),
    (texts.csv_cell, ("=1",), "'=1"), (texts.csv_cell, ("a=1\n",), "a=1\n"), (texts.markdown_code, ("a  b",), "`a b`"),
    (texts.markdown_code, ("a``b`",), "``` a``b` ```"), (texts.markdown_cell, ("a|b_c\n<d>",), "a\\|b_c &lt;d&gt;"),
    (texts.markdown, ("a_b",), "a\\_b"), (texts.quoted, (["a", "A", "b"],), ["'a'", "'A'", "'b'"]),
    (texts.quoted, (["\u0430", "b"], ["a"]), ["'\u0430' (spelt '\\u0430')", "'b'"]),
    (texts.look_alikes, (ALIKE,), [("Hot_dog", "hot dog", "hotdog"), ("cat", "c\u0430t")]),
    (texts.alike_text, (["a", "A", "b"],), "'A' and 'a'"), (texts.likeness, (["a"], ["b"]), ""),
    (texts.likeness, (["a"], ["A", "b", "B"]), " (these look alike: 'A' and 'a')"),
    (texts.beside_known, (["bird"], ["birds", "cat"]), "; nearest: 'birds' to 'bird'; known: 'birds', 'cat'"),
    (texts.beside_known, (["x"], ["cat"] * 21), f"; known: {CATS}, and 1 more"),
    (texts.seen, ("\uff21\u200bB",), "ab"), (texts._code, ("\xff",), "\\xff"), (texts._code, ("\u0100",), "\\u0100"),
    (texts._code, ("\uffff",), "\\uffff"), (texts._code, ("\U00010000",), "\\U00010000"),
    (texts.markdown, ('"it\'s"',), '"it\'s"'),
    (texts.merged, (["a b", "c", "a_b", "c"], lambda name: name.replace("_", " ")), [
        "'a b' and 'a_b' would become one, 'a b'; rename all but one, or merge what is one"
    ]),
    (texts.beside_known, ([f"{name}1" for name in SIX], SIX), f"; nearest: {FIVE}; known: {KNOWN}"),
    (texts.likeness, ([name.upper() for name in SIX], SIX), f" (these look alike: {ALIKE_FIVE})"),
])  # fmt: skip
def test_a_text_is_shown(made: Callable[..., Any], given: tuple[Any, ...], shown: Any) -> None:
    assert made(*given) == shown


@pytest.mark.parametrize(("text", "fault"), [
    ("a b", ""), ("\u00e9\u200d", ""), ("a\nb", "has \\x0a, which would"), ("a\u202eb", "has \\u202e"),
    ("\u00e9\u2028", "has \\u2028"), ("\u00e9\ud800", "is not UTF-8"), ("a\x7f", "has \\x7f"), ("a\ue000", ""),
])  # fmt: skip
def test_a_text_that_moves_a_cursor_is_refused(text: str, fault: str) -> None:
    if fault:
        with pytest.raises(ValueError, match=re.escape(fault)):
            texts.expect_visible(text)
    else:
        assert texts.expect_visible(text) == text


def test_an_empty_name_of_a_list_is_refused() -> None:
    for text in ("", "a,", "a, ,b"):
        with pytest.raises(ValueError, match="has an empty name; write names separated by one comma"):
            texts.listed(text)
