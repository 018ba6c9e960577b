"""Whole commands, with the processes that they start, without standard streams."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptfed.shared.service.reasons import Exit
from tests.shared.service.test_streams import WAYS, ended

RUN = """
name: x
method: {name: promptfl}
rounds: 1
clients: [{data: "digits?shots=2"}]
"""


@pytest.mark.parametrize(("command", "left", "way"), [
    (("simulate", "run.yaml", "--out", "out"), "out/result.json", WAYS["nothing at all"]),
    (("launch", "run.yaml", "--keep", "out"), "out/coordinator.log", WAYS["nothing at all"]),
    (("launch", "run.yaml", "--keep", "out"), "out/coordinator.log", "2>&1 | true"),
])  # fmt: skip
def test_a_command_does_all_its_work(command: tuple[str, ...], left: str, way: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(RUN)
    assert ended("promptfed", *command, way=way, cwd=tmp_path) == (Exit.OK, "")
    assert (tmp_path / left).is_file()
