"""The README's federation by curl is run as it stands there; only the port is another."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests import ROOT
from tests.support.ports import free_port
from tests.support.waiting import PATIENCE

MARK = "<!-- tested: tests/docs/test_readme.py runs this block -->\n```bash\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="tests with curl: apt-get install curl")
def test_the_federation_by_curl(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count(MARK) == 1
    script = text.split(MARK)[1].split("```")[0].replace("8080", str(free_port()))
    # A failing line must end the script, and what it started must end with it.
    guard = "set -euo pipefail\ntrap 'kill $(jobs -p) 2>/dev/null; wait' EXIT\n"
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", guard + script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    logs = "\n".join(f"== {log.name}\n{log.read_text()[-2000:]}" for log in sorted((tmp_path / "run").glob("*.log")))
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}\n{logs}"
    prompts = load_file(tmp_path / "run" / "prompts.safetensors")
    assert set(prompts) == {"context"}
    assert prompts["context"].shape[0] == 16
    csv = [line for line in done.stdout.splitlines() if re.search(r"accuracy", line)]
    assert csv, f"no accuracies in the metrics:\n{done.stdout}"
    assert {"painting", "quickdraw", "referee"} <= set(re.findall(r"painting|quickdraw|referee", done.stdout))


def test_the_readme_names_only_files_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    linked = re.findall(r"\]\((?!http)([^)#]+)\)", text)
    assert linked
    assert [name for name in linked if not (ROOT / name).exists()] == []
