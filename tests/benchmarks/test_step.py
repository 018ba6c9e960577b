"""The benchmark of a training step runs and asserts equality, chunked and whole."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests import ROOT


@pytest.mark.slow
def test_the_benchmark_of_a_step(tmp_path: Any) -> None:
    command = [sys.executable, "-m", "benchmarks.step", "--model", "promptfed-tiny", "--no-tiny", "--repeats", "1"]
    command += ["--classes", "10", "130", "--fast-repeats", "1", "--batch", "4", "--json", str(tmp_path / "step.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "| promptfed-tiny | 130 |" in done.stdout
    report = json.loads((tmp_path / "step.json").read_text())
    assert [result["classes"] for result in report["results"]] == [10, 130]
    for result in report["results"]:
        assert set(result["seconds"]) == {"plain", "cached", "short", "prefix"}
        assert 0 < result["largest_deviation"]["gradient_relative"] <= 1e-4
    assert report["provenance"]["threads"] == 1
