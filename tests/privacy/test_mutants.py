"""Every mutant is killed: in a copy of the code with just that defect, its test fails."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.privacy.code_mutants import MUTANTS, Mutant

COPIED = ("coordinator", "client_service", "shared", "promptfed", "tests", "benchmarks")
FAILED, NOTHING_RAN = 1, 5


def _linked(source: str, place: str) -> None:
    """A link, where the disk is the same one."""
    try:
        os.link(source, place)
    except OSError:
        shutil.copy2(source, place)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_the_place_is_there_once(mutant: Mutant) -> None:
    assert (ROOT / mutant.file).read_text().count(mutant.old) == 1, mutant.file
    assert (ROOT / mutant.test).exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda one: one.name)
def test_its_test_fails(mutant: Mutant, tmp_path: Path) -> None:
    for name in COPIED:
        ignored = shutil.ignore_patterns("__pycache__", "code_mutants.py", "test_mutants.py")
        shutil.copytree(ROOT / name, tmp_path / name, symlinks=True, ignore=ignored, copy_function=_linked)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    changed = tmp_path / mutant.file
    text = changed.read_text().replace(mutant.old, mutant.new)
    changed.unlink()  # of the link; the repository's file stays
    changed.write_text(text)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", mutant.test, "-k", mutant.named]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert run.returncode == FAILED, f"{run.returncode}: {mutant.named} saw nothing\n{run.stdout[-3000:]}"
    assert "error during collection" not in run.stdout
