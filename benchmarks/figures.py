"""The figures of the code base: ``make figures``. Size, limits on functions and modules, entries, documents."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_FUNCTION, MOST_MODULE, MOST_PARAMETERS = 50, 400, 12
ENTRIES = {"client_service": 15, "shared": 18, "promptfed/experiments": 8}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def tracked(*patterns: str) -> list[Path]:
    """The tracked files of the checkout, without links."""
    listed = subprocess.run(  # noqa: S603
        ["git", "ls-files", "-z", *patterns],  # noqa: S607
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\0")
    paths = [ROOT / name for name in listed if name]
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def code_lines(text: str) -> int:
    """Lines that hold code: no blank lines, comments or docstrings; imports count."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstring_lines(ast.parse(text)))


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def parameters(function: Function) -> int:
    """Parameters that a caller can give, ``self`` and ``cls`` left out."""
    given = function.args
    names = [argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def prose_words(text: str) -> int:
    """Words outside of tables and comments; code blocks count."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("|")]
    return sum(len(re.findall(r"\S+", line)) for line in lines)


def _python() -> None:
    product = [path for path in tracked("*.py") if path.relative_to(ROOT).parts[0] not in ("tests", "docs")]
    counted = {path: code_lines(path.read_text()) for path in product}
    print(f"lines of code outside tests: {sum(counted.values()):,} in {len(counted)} modules")
    for folder in ("coordinator", "client_service", "shared", "promptfed", "benchmarks"):
        own = sum(count for path, count in counted.items() if path.is_relative_to(ROOT / folder))
        print(f"  {folder}: {own:,}")
    tests = sum(code_lines(path.read_text()) for path in tracked("tests/*.py"))
    print(f"lines of code in tests: {tests:,}")
    long_modules = [path for path in product if len(path.read_text().splitlines()) > MOST_MODULE]
    long_functions, many = [], []
    for path in product:
        for function in functions(ast.parse(path.read_text())):
            where = f"{path.relative_to(ROOT)}:{function.lineno} {function.name}"
            if (function.end_lineno or function.lineno) - function.lineno + 1 > MOST_FUNCTION:
                long_functions.append(where)
            if parameters(function) > MOST_PARAMETERS:
                many.append(f"{where} ({parameters(function)})")
    _listed(f"modules over {MOST_MODULE} lines", [str(path.relative_to(ROOT)) for path in long_modules])
    _listed(f"functions over {MOST_FUNCTION} lines", long_functions)
    _listed(f"parameter lists over {MOST_PARAMETERS}", many)


def _listed(title: str, lines: list[str]) -> None:
    print(f"{title}: {len(lines)}")
    for line in lines:
        print(f"  {line}")


def _entries() -> None:
    for folder, most in ENTRIES.items():
        names = {path.relative_to(ROOT / folder).parts[0] for path in tracked(f"{folder}/*")}
        print(f"entries in {folder}/: {len(names)} (at most {most})")


def _documents() -> None:
    pages = {path: prose_words(path.read_text()) for path in tracked("*.md")}
    print(f"words in Markdown outside tables: {sum(pages.values()):,}")
    for folder in ("docs/tutorials", "docs/guides", "docs/reference", "docs/explanation", "docs/results"):
        print(f"  {folder}: {sum(n for path, n in pages.items() if path.is_relative_to(ROOT / folder)):,}")
    print(f"lines of README.md: {len((ROOT / 'README.md').read_text().splitlines())}")


def main() -> None:
    """Print all figures."""
    _python()
    _entries()
    _documents()


if __name__ == "__main__":
    main()
