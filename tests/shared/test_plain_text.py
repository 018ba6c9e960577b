"""Text of others reads as text, wherever it is shown."""

from __future__ import annotations

import pytest

from promptfed.coordinator.reports.rounds import _cell
from promptfed.shared.plain_text import csv_cell, markdown, plain


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("größe 雲 é", "größe 雲 é"),
        ("\x1b[8mhidden", r"\x1b[8mhidden"),
        ("a\r\nb\tc\x00\x7f\x9b", r"a\x0d\x0ab\x09c\x00\x7f\x9b"),
        ("\u202egnp.exe \u2066x\u2069 \u200f", r"\u202egnp.exe \u2066x\u2069 \u200f"),
        ("zero\u200bwidth\ufeff\u2028", r"zero\u200bwidth\ufeff\u2028"),
        ("tag\U000e0041 lone\ud800", r"tag\U000e0041 lone\ud800"),
        ("👩\u200d🔬", "👩\u200d🔬"),  # one picture, joined
    ],
)
def test_what_a_terminal_obeys_or_hides_stands_as_its_code(given: str, shown: str) -> None:
    assert plain(given) == shown


def test_lines_that_are_kept() -> None:
    assert plain("a\nb\x1b", keep="\n") == "a\nb\\x1b"


@pytest.mark.parametrize("formula", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1"])
def test_no_cell_is_a_formula(formula: str) -> None:
    assert csv_cell(formula) == "'" + formula
    assert csv_cell("a" + formula) == "a" + formula


def test_markdown_holds_neither_markup_nor_html() -> None:
    shown = markdown("<img src=x onerror=alert(1)> [a](javascript:b) | `c` & *d*\nx")
    assert shown == r"&lt;img src=x onerror=alert(1)&gt; \[a\](javascript:b) \| \`c\` &amp; \*d\* x"


def test_the_metrics_file_has_no_formulas() -> None:
    assert [_cell(value) for value in ("=HYPERLINK(1)", -0.5, 3, None)] == ["'=HYPERLINK(1)", -0.5, 3, None]
