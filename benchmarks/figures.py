"""The size of the code base and of its documents: ``make figures``."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


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


def script_lines(text: str) -> int:
    """Lines of JavaScript or CSS that are neither empty nor comment."""
    lines = re.sub(r"^\s*/\*.*?\*/", "", text, flags=re.DOTALL | re.MULTILINE).splitlines()
    return sum(bool(line.strip()) and not line.lstrip().startswith("//") for line in lines)


def words(text: str, tables: bool = True) -> int:
    """Words outside of comments, with or without tables; code blocks count."""
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    lines = [line for line in text.splitlines() if tables or not line.lstrip().startswith("|")]
    return sum(len(re.findall(r"\S+", line)) for line in lines)


def main() -> None:
    """Print the totals."""
    counted = {path: code_lines(path.read_text()) for path in tracked("*.py")}
    tests = {path: count for path, count in counted.items() if path.is_relative_to(ROOT / "tests")}
    product = {path: count for path, count in counted.items() if path not in tests}
    print(f"lines of code outside tests: {sum(product.values()):,} in {len(product)} modules")
    print(f"lines of code in tests: {sum(tests.values()):,} in {len(tests)} modules")
    scripts = [path.read_text() for path in tracked("*.js", "*.css") if path.name != "chart.umd.min.js"]  # not ours
    print(f"lines of JavaScript and CSS: {sum(map(script_lines, scripts)):,} in {len(scripts)} files")
    pages = [path.read_text() for path in tracked("*.md")]
    print(f"words in Markdown outside tables: {sum(words(page, tables=False) for page in pages):,}")
    print(f"words in Markdown with tables: {sum(words(page) for page in pages):,}")


if __name__ == "__main__":
    main()
