"""``promptfed.testing``: the tutorial that shows it, and what the fixtures promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from promptfed.shared.methods import METHODS
from promptfed.testing import drive, local_coordinator
from promptfed.testing.plugin import Enrol
from tests import ROOT
from tests.support.waiting import PATIENCE

pytest_plugins = ["promptfed.testing.plugin"]
TUTORIAL = ROOT / "docs" / "tutorials" / "test-with-pytest.md"


def test_the_tutorial_runs_as_it_stands(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", TUTORIAL.read_text(), flags=re.DOTALL)
    assert [name for name, _ in blocks] == ["conftest.py", "test_federation.py", "test_method.py"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", "/dev/null", "--rootdir", "."]
    done = subprocess.run([*command, "."], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout


def test_scripted_updates_are_the_same_in_each_run(tmp_path: Path) -> None:
    hashes = []
    for folder in (tmp_path / "one", tmp_path / "two"):
        with local_coordinator(folder) as coordinator:
            federation = coordinator.create(rounds=1)
            clients = coordinator.enrol(federation, "a", "b")
            coordinator.start(federation)
            drive(clients)
            hashes.append(coordinator.get(f"{federation}/rounds")["rounds"][-1]["state_hash"])
    assert hashes[0] == hashes[1] is not None


def test_a_stopped_coordinator_answers_nothing_and_its_store_goes_on(tmp_path: Path) -> None:
    with local_coordinator(tmp_path) as coordinator:
        federation = coordinator.create()
    with pytest.raises(httpx.HTTPError):
        coordinator.get(federation)
    with local_coordinator(tmp_path) as again:
        assert again.get(federation)["state"] == "enrolling"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_enrolled_clients_take_part_in_every_method(enrolled: Enrol, method: str) -> None:
    federation = enrolled("a", "b", method={"name": method}, rounds=3)
    assert federation.finish()["state"] == "finished"


def test_enrolled_clients_have_the_spec_s_classes(enrolled: Enrol) -> None:
    for names in (["cat", "dog"], None):
        federation = enrolled(method={"name": "promptfl", "m": 2}, class_names=names, name=f"of-{names is None}")
        assert federation.finish()["state"] == "finished"


def test_a_call_with_another_status_fails_with_the_answer(enrolled: Enrol) -> None:
    federation = enrolled()
    with pytest.raises(AssertionError, match="nothing-of-this-name"):
        federation.coordinator.get("nothing-of-this-name")
