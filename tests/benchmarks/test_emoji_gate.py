"""The gate's bars: what passes, what does not, and a run of the command on the embedded styles."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.backbones.emoji.gate import failures
from benchmarks.backbones.emoji.pretrain import started
from benchmarks.backbones.training import save_weights
from promptfed.shared.clip.emoji import FROM_TINY
from promptfed.shared.data.emoji.source import FOLDER

PASSED: dict[str, Any] = {
    "common": {"flat": 80.0, "noto": 75.0},
    "rare": {"contrast": 40.0, "notomono": 50.0, "e1mono": 65.0, "streamline": 70.0},
    "unread": {"openmono": 45.0},
    "map": {"gain": 3.0},
}


def test_each_bar_that_is_not_met_is_told() -> None:
    assert failures(PASSED) == []
    low = {**PASSED, "common": {"flat": 74.0}, "unread": {}, "map": {"gain": 2.9}}
    assert [line.split()[0] for line in failures(low)] == ["flat", "3", "a"]


@pytest.mark.slow
def test_the_command_measures_every_style_and_leaves_json(tmp_path: Path) -> None:
    save_weights(started(0), tmp_path / "weights.safetensors", FROM_TINY)
    options = ["--data", str(FOLDER), "--weights", str(tmp_path / "weights.safetensors")]
    command = [sys.executable, "-m", "benchmarks.backbones.emoji.gate", *options, "--out", str(tmp_path / "gate.json")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr  # the tiny backbone has never seen an emoji
    assert "not met: flat" in done.stdout
    figures = json.loads((tmp_path / "gate.json").read_text())
    assert set(figures["common"]) == {"flat", "three", "noto", "notov1"}
    assert set(figures["rare"]) == {"contrast", "notomono"}
    assert set(figures["unread"]) == {"fxemoji"}
    assert all(2 < value < 45 for group in ("common", "rare") for value in figures[group].values())
    assert set(figures["map"]["before"]) == set(figures["map"]["after"]) == {"contrast", "notomono", "fxemoji"}
