"""CONTRIBUTING is followed in a copy of the tree: what each step adds goes where it says, and its commands succeed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent, indent

import pytest

from tests import ROOT
from tests.docs.test_tutorials import BLOCK, NOT_RUN
from tests.docs.warm_commands import warm_commands
from tests.support.waiting import PATIENCE

COPIED = ("promptfed", "shared", "coordinator", "client_service", "tests", "benchmarks", "docs", "README.md")
WALKS = re.findall(r"^## (Add .*?)\n(.*?)(?=^## )", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL | re.MULTILINE)
PLACE = re.compile(r"`([\w./-]+\.\w+)`(?:, (at the end|above `([^`]+)`))?")
PROGRAMS = {".venv/bin/python": (), ".venv/bin/promptfed": ("-m", "promptfed")}
"""What the interpreter is given for each."""
HALF_WRITTEN = shutil.ignore_patterns(
    "*.pyc.*"
)  # by other processes; compiled modules are copied with the times of their files
USED = {
    "Add a method": 'promptfed.run({"name": "promptfl_sparse", "weight": 0.1}, data, rounds=1)',
    "Add a training field": 'assert promptfed.run("promptfl", data, rounds=1, label_smoothing=0.1).mean() > 0',
    "Add a route": """
from promptfed.shared.versions import VERSION
from promptfed.testing import local_coordinator
with local_coordinator("store") as coordinator:
    assert coordinator.get("/v1/version") == {"protocol": VERSION}
""",
    "Add a source of data": 'assert promptfed.run("promptfl", {"a": "stripes?per_class=4"}, rounds=1).mean() > 0',
    "Add a command": "import promptfed.cli.commands.versions",
}
"""What somebody who has followed the steps may then write."""


def put(tree: Path, said: str, block: str) -> None:
    """Put a block where the text before it says: in a new file, at the end of one, or above a line of it."""
    places = PLACE.findall(" ".join(said.split()))
    name, where, anchor = next((one for one in reversed(places) if one[1]), places[-1])
    file = tree / name
    if not where:
        assert not file.exists(), f"{name} is there: say where in it"
        file.write_text(block)
        return
    imports, code = re.fullmatch(r"((?:from [^\n]+\n)*)\n*(.*)", block, re.DOTALL).groups()
    lines = file.read_text().splitlines(keepends=True)
    if anchor:
        at, line = next((n, one) for n, one in enumerate(lines) if one.lstrip().replace("`", "").startswith(anchor))
        space = line[: len(line) - len(line.lstrip())]
        lines.insert(at, indent(code, space) + "\n\n" * code.startswith("def "))
    else:
        lines.append(f"\n\n{code}")
    if imports:
        lines.insert(next(n for n, one in enumerate(lines) if one.startswith("from promptfed")), imports)
    file.write_text("".join(lines))


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An interpreter that has torch loaded."""
    with warm_commands(tmp_path_factory.mktemp("bin"), "python") as folder:
        yield folder / "python"


@pytest.mark.parametrize(("title", "walk"), WALKS, ids=[title for title, _ in WALKS])
def test_who_follows_it_arrives(title: str, walk: str, tmp_path: Path, python: Path) -> None:
    for name in COPIED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        options = {"symlinks": True, "ignore": HALF_WRITTEN} if (ROOT / name).is_dir() else {}
        copy(ROOT / name, tmp_path / name, **options)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    def run(program: str, *arguments: str) -> None:
        whole = [python, *PROGRAMS[program], *arguments]
        done = subprocess.run(whole, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, f"{' '.join(arguments)}\n{done.stdout}{done.stderr}"

    read, commands = 0, 0
    for found in BLOCK.finditer(walk):
        comment, _, language, block = found.groups()
        assert NOT_RUN not in (comment or "")
        if language == "bash":
            for line in dedent(block).splitlines():
                run(*shlex.split(line))
                commands += 1
        else:
            put(tmp_path, walk[read : found.start()], dedent(block))
        read = found.end()
    assert commands
    run(
        ".venv/bin/python",
        "-c",
        f'import promptfed\ndata = ["symbols:chalk?topic=weather&per_class=2&test_per_class=1"]\n{USED[title]}',
    )


def test_every_walk_is_in_the_table_and_followed() -> None:
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where to begin")[2].partition("\n## ")[0]
    assert re.findall(r"#(add-[a-z-]+)", table) == [title.lower().replace(" ", "-") for title, _ in WALKS]
    assert {title for title, _ in WALKS} == set(USED)
