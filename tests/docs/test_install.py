"""Documents, page and errors say one way to install: the wheel that `make dist` builds, by its whole name."""

from __future__ import annotations

import re
import tomllib

from promptfed import __version__
from promptfed.shared import get_extra
from tests import ROOT

FOLDERS = ("promptfed", "coordinator", "client_service", "shared", "docs", "deploy", "examples")
ENDINGS = {".py", ".md", ".js", ".html", ".yaml", ".toml", ".service", ".sh", ".ipynb"}
UNPUBLISHED = re.compile(r"""pip (?:install|download) (?:-\S+ )*['"]?promptfed(?!-[\w.]+-py3-none-any\.whl)""")
PAGE = (ROOT / "docs" / "guides" / "install.md").read_text()


def test_nothing_tells_to_install_what_is_not_published() -> None:
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    texts = {path: path.read_text() for path in (*files, *ROOT.glob("*.md"), ROOT / "Makefile")}
    assert len(texts) > 300
    texts[ROOT / "docs" / "guides" / "install.md"] = PAGE.partition("## Extras")[
        2
    ]  # its head says that it finds nothing
    assert {path: found for path, text in texts.items() if (found := UNPUBLISHED.findall(text))} == {}


def test_a_line_that_finds_nothing_is_found() -> None:
    for line in ("pip install promptfed", "/opt/bin/pip install 'promptfed[s3]'", "pip install -q promptfed-*.whl"):
        assert UNPUBLISHED.search(line)
    for line in (get_extra("s3"), f"pip install build/dist/promptfed-{__version__}-py3-none-any.whl"):
        assert not UNPUBLISHED.search(line)


def test_the_table_has_each_extra_and_the_wheel_of_today() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = re.findall(r"^\| `(\w+)` \|.*\| \d+ \|$", PAGE, re.MULTILINE)
    assert sorted(table) == sorted(set(extras) - {"build", "docs", "test"})  # which the repository's work needs
    pages = "".join(path.read_text() for path in (ROOT / "docs").rglob("*.md"))
    assert set(re.findall(r"promptfed-([\w.]+)-py3", pages)) == {__version__}
