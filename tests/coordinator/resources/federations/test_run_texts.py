"""Texts of run files that no reader of YAML or JSON expects: each is refused in one sentence."""

from __future__ import annotations

import pytest

from promptfed.coordinator import problems
from promptfed.coordinator.resources.federations.operations import read_run

DEEP = "name: eyes\nmethod: " + 300 * "[" + 300 * "]"


@pytest.mark.parametrize(
    "text",
    [
        "rounds: 1:20.5\nname: 9" + 400 * "9" + ":0.5", '{"name": "\\ud800"}', DEEP, "name: eyes\n1: a\n'1': b",
        '{"name": ' + 300 * "[" + 300 * "]" + "}",
    ],
)  # fmt: skip
def test_what_cannot_be_a_run_file_is_refused(text: str) -> None:
    with pytest.raises(problems.InvalidSpec):
        read_run(text)


def test_a_run_file_may_be_nested() -> None:
    assert read_run("name: eyes\nmethod: {name: promptfl, a: [[[[1]]]]}")["name"] == "eyes"
