"""The guides' shell blocks run as those of tutorials do, in a file of their own, so that two processes run them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.test_tutorials import PAGES, expect_it_runs
from tests.docs.test_tutorials import commands as commands


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("guides/")])
def test_the_shell_blocks_of_a_guide_run_in_order(name: str, tmp_path: Path, commands: Path) -> None:
    expect_it_runs(name, tmp_path, commands)
