"""The pages: every link leads somewhere, tables from the code are fresh and whole, and all of it builds."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from promptfed.coordinator.problems import Refusal
from promptfed.shared.data.schemes import SCHEMES
from promptfed.shared.methods import METHODS
from promptfed.shared.service.reasons import Exit
from tests import ROOT
from tests.support.waiting import PATIENCE

DOCS = ROOT / "docs"


PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


PICTURE = re.compile(r"!\[[^\]]*\]\(([^)\s]+)\)")


FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


SEEDS = ("fedpgp", "fedtpg", "plan", "pfedpg", "fast_pt")


OTHERS = (
    "promptfolio", "promptfl_per", "fedotp", "pfedmoap", "promptfl_amp", "pfedprompt", "diprompt", "fedpr", "fedapt",
    "fedtaskres", "fedclipadapter", "fedlp",
)  # fmt: skip


def load(name: str) -> ModuleType:
    """A module of docs/, which is no package."""
    found = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@cache
def anchors(page: Path) -> set[str]:
    """Headings as links name them."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def broken(page: Path) -> list[str]:
    """Links of a page that lead nowhere."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = []
    for link in LINK.findall(text) + PICTURE.findall(text):
        if link.startswith(("http://", "https://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    assert broken(page) == []


FOLDERS = "benchmarks|client_service|coordinator|deploy|docs|examples|promptfed|requirements|shared|tests"


NAMED = re.compile(rf"(?<![\w/.-])((?:{FOLDERS})/[\w./*-]*\w)")


WRITTEN_BY_READERS = {
    "docs/results/gpu.jsonl", "promptfed/cli/commands/versions.py", "shared/data/stripes.py",
    "shared/methods/promptfl_sparse.py", "tests/shared/methods/test_promptfl_sparse.py",
}  # fmt: skip


@pytest.mark.parametrize(
    "page",
    [*PAGES, *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY", "CHANGELOG"))],
    ids=lambda page: page.name,
)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    named = set(NAMED.findall(page.read_text())) - WRITTEN_BY_READERS
    assert {name for name in named if not any(ROOT.glob(name))} == set()


def torn(text: str) -> list[str]:
    """Rows behind an empty line that are no head of a table: Markdown shows them as text."""
    lines = FENCE.sub("", text).splitlines()
    heads = [number - 1 for number, line in enumerate(lines) if re.fullmatch(r"\|[\s:|-]+\|", line)]
    rows = [
        number for number, line in enumerate(lines) if line.startswith("|") and not lines[number - 1].startswith("|")
    ]
    return [lines[number] for number in rows if number not in heads]


def test_no_table_is_torn() -> None:
    assert torn("\n| a |\n|---|\n| b |\n\n| c |\n") == ["| c |"]
    assert {page: found for page in PAGES if (found := torn(page.read_text()))} == {}


def test_the_page_of_the_spec_is_what_the_code_says() -> None:
    assert not load("generate").stale(), "run python docs/generate.py"


def test_the_readme_is_short_and_lists_each_method_once() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    listed = text.partition("## Methods\n")[2].partition("\n## ")[0]
    assert sorted(re.findall(r"`(\w+)`", listed.replace("`promptfed methods`", ""))) == sorted(METHODS)


@pytest.mark.parametrize("method", SEEDS)
def test_each_seed_has_a_page_with_everything(method: str) -> None:
    text = (DOCS / "reference" / "methods" / f"{method}.md").read_text()
    for heading in ("## Equations", "## When to use it"):
        assert heading in text
    assert "Eq. " in text
    assert text.count("$$") >= 2


@pytest.mark.parametrize("method", OTHERS)
def test_each_other_papers_method_has_a_section_with_everything(method: str) -> None:
    _, found, rest = (DOCS / "reference" / "methods" / "others.md").read_text().partition(f"\n## {method}\n")
    assert found
    text = rest.partition("\n## ")[0]
    assert "**When to use it.**" in text
    assert "Eq. " in text
    assert text.count("$$") >= 2


def test_every_page_is_in_the_navigation() -> None:
    """By name, or by a pattern for pages that come later."""
    from fnmatch import fnmatch

    listed = [line for block in re.findall(r"```\{toctree\}(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
              for line in block.splitlines() if line and not line.startswith(":")]  # fmt: skip
    names = {str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")} - {"index"}
    assert {name for name in names if not any(fnmatch(name, pattern) for pattern in listed)} == set()


@pytest.mark.slow
def test_the_documentation_builds_without_a_warning(tmp_path: Path) -> None:
    for module in ("sphinx", "myst_parser", "furo"):
        pytest.importorskip(module, reason="the documentation's build: make test-all")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert "FedPGP" in (tmp_path / "reference" / "methods" / "fedpgp.html").read_text()
    reference = (tmp_path / "reference" / "api.html").read_text()
    assert "promptfed.library.run.run" in reference
    assert "class_weights" in reference


# The messages of the troubleshooting page are those of the code.


PAGE = ROOT / "docs" / "guides" / "troubleshooting.md"


FOLDERS_MESSAGES = (
    "client_service", "coordinator", "promptfed/cli", "promptfed/runtime", "promptfed/sdk", "promptfed/export",
)  # fmt: skip


SHORTEST = 8  # letters of a piece between two "..."; shorter ones prove nothing


def quoted(text: str) -> set[str]:
    """What stands in code quotes in the first column of the tables."""
    return {part for row in re.findall(r"^\| ([^|]+) \|", text, re.MULTILINE) for part in re.findall(r"`([^`]+)`", row)}


def strings() -> str:
    """All source text, with strings that are written in several parts joined."""
    texts = [
        path.read_text(encoding="utf-8")
        for folder in (*FOLDERS_MESSAGES, "shared", "promptfed/experiments")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return re.sub(r'"\s*\n\s*f?"', "", "\n".join([*texts, *kinds(Refusal)]))


def kinds(parent: type[Refusal]) -> Iterator[str]:
    """The kinds of all refusals, which their classes name."""
    for each in parent.__subclasses__():
        yield each.kind
        yield from kinds(each)


def pieces(message: str) -> list[str]:
    return [piece.strip() for piece in message.split("...") if len(piece.strip()) >= SHORTEST]


def missing(page: str, source: str) -> list[str]:
    return sorted(message for message in quoted(page) if not all(piece in source for piece in pieces(message)))


def test_every_message_is_one_of_the_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert sum(len(pieces(message)) for message in quoted(page)) > 50
    assert missing(page, strings()) == []


REFERENCE = ROOT / "docs" / "reference"


def test_the_page_has_every_exit_code() -> None:
    text = (REFERENCE / "exit-codes.md").read_text()
    assert re.findall(r"^\| (\d+) \| `(\w+)` \|", text, re.MULTILINE) == [
        (str(int(one)), one.name.lower()) for one in Exit
    ]


def test_every_option_of_a_data_uri_is_on_its_page_and_none_besides() -> None:
    text = (DOCS / "reference" / "data-uris.md").read_text()
    told = {name for span in re.findall(r"`([^`]*)`", text) for name in re.findall(r"(?:^|[?&])([a-z_]+)=", span)}
    accepted = set[str]().union(*(scheme.options.own() for scheme in SCHEMES.values()))
    assert len(accepted) > 30
    assert told - {"domains"} == accepted  # a keyword of promptfed.run
