"""CONTRIBUTING is followed in a copy of the tree: its method, route, training field and command are there and work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests import ROOT
from tests.docs.test_tutorials import blocks
from tests.support.waiting import PATIENCE

FOLDERS = ("promptfed", "shared", "coordinator", "client_service", "tests", "benchmarks")
USED = """
import promptfed
from promptfed.shared.methods import resolve_spec
from promptfed.shared.spec.section import VERSION
from promptfed.testing import local_coordinator

spec = {"name": "x", "method": {"name": "promptfl_sparse"}, "label_smoothing": 0.1}
assert resolve_spec(spec).label_smoothing == 0.1
data = ["digits?shots=2&partition=iid&clients=20&client=0"]
promptfed.run({"name": "promptfl_sparse", "weight": 0.1}, data, rounds=1, label_smoothing=0.1)
with local_coordinator("store") as coordinator:
    assert coordinator.get("/v1/version") == {"protocol": VERSION}
"""


def put(path: Path, text: str, before: str = "") -> None:
    """Write ``text`` into a file, above its first line that begins with ``before``; by default behind all."""
    written = path.read_text()
    at = written.index(f"\n{before}") + 1 if before else len(written)
    path.write_text(written[:at] + text + written[at:])


def test_what_contributing_adds_works(tmp_path: Path) -> None:
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    method, model, route, field, term, changed, command = blocks(ROOT / "CONTRIBUTING.md", "python")
    (tmp_path / "shared" / "methods" / "promptfl_sparse.py").write_text(method)
    (tmp_path / "promptfed" / "cli" / "commands" / "versions.py").write_text(command)
    put(tmp_path / "shared" / "api" / "api_schemas.py", f"\n\n{model}")
    imports = (
        "from promptfed.shared.api.api_schemas import Version\nfrom promptfed.shared.spec.section import VERSION\n"
    )
    put(tmp_path / "coordinator" / "resources" / "public.py", imports, "from promptfed")
    put(tmp_path / "coordinator" / "resources" / "public.py", f"\n\n{route}")
    put(tmp_path / "shared" / "spec" / "spec.py", f"    {field}", "    compression: ")
    put(tmp_path / "shared" / "spec" / "training_terms.py", f"    {term}", "    privacy: ")
    put(tmp_path / "tests" / "client_service" / "test_training_terms.py", f"    {changed}", '    "method": ')
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True,
            timeout=PATIENCE,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "open_clip_torch" in run("-m", "promptfed", "versions")
    run("-c", USED)
    terms = "tests/client_service/test_training_terms.py"
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", terms, "-k", "no_changed_field")
