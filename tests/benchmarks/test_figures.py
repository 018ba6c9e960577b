"""The size of the code base, counted."""

from __future__ import annotations

import pytest

from benchmarks.figures import code_lines, script_lines


@pytest.mark.parametrize(("text", "count"), [
    ("", 0), ("a();\n\n// of it\n  // more\nb(); // behind\n", 2), ("/* a\n b */\nc {}\n", 1),
    ("/** a */\nc();\n", 1), ("  /* a */\n", 0), ("c { /* in it */ }", 1), ("u('/*');\nv();\nw('*/');", 3),
])  # fmt: skip
def test_lines_of_scripts_are_neither_empty_nor_comment(text: str, count: int) -> None:
    assert script_lines(text) == count


def test_docstrings_and_comments_are_no_code() -> None:
    assert code_lines('"""A."""\n\nimport a\n\n\ndef b():\n    """C."""\n    # d\n    return """e\nf"""\n') == 4
