"""Every module has its imports, its constants and its definitions in this order."""

import ast
from pathlib import Path

import pytest

from promptfed import shared

ROOT = Path(shared.__file__).resolve().parent.parent
FOLDERS = [
    folder
    for folder in ("coordinator", "client_service", "shared", "promptfed", "benchmarks")
    if (ROOT / folder).is_dir()
]


def late(source: str) -> list[str]:
    """The names of constants and imports that stand below a definition although they need none."""
    defined: set[str] = set()
    found = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif defined and isinstance(node, ast.Assign | ast.AnnAssign | ast.Import | ast.ImportFrom):
            names = {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
            if names & defined:
                defined |= names
            else:
                found.append(ast.unparse(node).splitlines()[0])
    return found


def test_a_module_has_its_constants_above_its_definitions() -> None:
    modules = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    assert len(modules) > 200
    assert {str(path): found for path in sorted(modules) if (found := late(path.read_text()))} == {}


@pytest.mark.parametrize(("source", "names"), [
    ("import a\nB = 1\ndef c(): ...", []), ("def c(): ...\nB = 1", ["B = 1"]),
    ("class C: ...\nimport a", ["import a"]), ("def c(): ...\nB = c()\nD = [B]", []),
])  # fmt: skip
def test_what_needs_a_definition_may_stand_below_it(source: str, names: list[str]) -> None:
    assert late(source) == names
