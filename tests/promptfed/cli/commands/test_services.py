"""`promptfed join`."""

from __future__ import annotations

import io
import sys

import pytest

from promptfed.cli.commands.services import _text_of


def test_the_line_above_a_pasted_invitation_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("promptfed join - --data folder:/images\nTEXT\ny\n"))
    assert _text_of("-") == "TEXT\n"
    assert sys.stdin.readline() == "y\n", "the answer to what the owner is then asked"
    assert _text_of("-") == "", "at the end of the input"
