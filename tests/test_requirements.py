"""Each image installs some of the lists in requirements/: a service must need nothing that they do not bring."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from typer.testing import CliRunner

from promptfed import __version__
from promptfed.cli.main import app
from promptfed.shared.versions import VERSION
from tests import ROOT

# Imports everything of a service with the distributions in argv[2:] hidden, as if they were not installed.
SCRIPT = """
import importlib, importlib.abc, pkgutil, sys
service, hidden = sys.argv[1], set(sys.argv[2:])

class Hiding(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"{name} is not in the image", name=name)

sys.meta_path.insert(0, Hiding())
for package in (service, "promptfed.shared.methods"):
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        if not module.name.endswith(("__main__", "migrations.env")):
            importlib.import_module(module.name)
print("imported")
"""


def listed(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


LISTS = {
    "services": ("services",), "coordinator": ("services", "coordinator"), "torch": ("services", "torch"),
    "client": ("services", "torch", "client"), "serve": ("services", "torch", "client", "command"),
}  # fmt: skip


"""What each lock, and each stage of the Dockerfile that uses it, has of the lists."""


def installed(lock: str) -> list[Requirement]:
    """What the lists of a lock name, and the extras of the coordinator's image."""
    extras = [Requirement("psycopg[binary]"), Requirement("obstore")] if lock == "coordinator" else []
    return [one for name in LISTS[lock] for one in listed(name)] + extras


def needed(requirements: list[Requirement]) -> set[str]:
    """Distributions that an installation of ``requirements`` brings here."""
    found: set[str] = set()
    waiting = [(one, extra) for one in requirements for extra in (*one.extras, "")]
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        marker = requirement.marker
        if marker is not None and not marker.evaluate({"extra": extra}):
            continue
        found.add(name)
        try:
            more = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue  # of another platform
        for text in more:
            one = Requirement(text)
            if canonicalize_name(one.name) not in found:
                waiting += [(one, inner) for inner in (*requirement.extras, "")]
    return found


def modules_besides(distributions: set[str]) -> set[str]:
    """Top-level modules that only other distributions bring."""
    brought = importlib.metadata.packages_distributions()
    return {
        module
        for module, bringers in brought.items()
        if not {canonicalize_name(one) for one in bringers} & (distributions | {"promptfed"})
    }


@pytest.mark.extended
@pytest.mark.parametrize(("service", "absent"), [
    ("coordinator", {"torch", "open_clip", "torchvision", "sklearn", "matplotlib", "PIL", "httpx", "typer", "docker"}),
    ("client_service", {"sqlalchemy", "alembic", "typer", "docker"}),
])  # fmt: skip
def test_a_service_imports_with_what_its_image_installs(service: str, absent: set[str]) -> None:
    image = needed(installed("coordinator" if service == "coordinator" else "client"))
    hidden = modules_besides(image)
    assert absent <= hidden, "the image installs more than it should"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"promptfed.{service}", *sorted(hidden)], capture_output=True, text=True
    )
    assert done.stdout == "imported\n", done.stderr


@pytest.mark.extended
def test_the_command_imports_from_what_its_image_copies(tmp_path: Path) -> None:
    for line in re.findall(r"^COPY (\S+) (promptfed/\S*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE):
        source, target = ROOT / line[0], tmp_path / line[1]
        target.parent.mkdir(exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, dirs_exist_ok=True)
        else:
            target.mkdir(exist_ok=True)
            shutil.copy(source, target)
    # An editable installation finds what is missing here.
    code = "import sys; sys.meta_path = [one for one in sys.meta_path if 'editable' not in one.__module__]"
    code = f"{code}; import promptfed, promptfed.cli.main; print(*promptfed.__path__)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split()[:1] == [str(tmp_path / "promptfed")], done.stderr


def test_the_constraints_fix_every_version_that_the_tests_run_with() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {canonicalize_name(line.partition("==")[0]) for line in lines if not line.startswith("#")}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    lists = [one for part in (ROOT / "requirements").glob("*.txt") for one in listed(part.stem)]
    assert needed([*lists, *(Requirement(text) for text in extras["test"])]) <= fixed


def test_the_lists_name_nothing_twice() -> None:
    names = [
        canonicalize_name(one.name)
        for part in sorted((ROOT / "requirements").glob("*.txt"))
        for one in listed(part.stem)
    ]
    assert sorted(names) == sorted(set(names))


def locked(image: str) -> dict[str, tuple[str, int]]:
    """Version and number of hashes of each distribution that an image installs."""
    text = (ROOT / "requirements" / "locked" / f"{image}.txt").read_text().replace("\\\n", " ")
    found: dict[str, tuple[str, int]] = {}
    for line in text.splitlines():
        one = Requirement(line.partition(" --hash")[0].strip())
        found[canonicalize_name(one.name)] = (str(one.specifier).removeprefix("=="), line.count("--hash=sha256:"))
    return found


@pytest.mark.parametrize("image", LISTS)
def test_the_images_install_files_whose_hashes_are_known(image: str) -> None:
    found = locked(image)
    assert needed(installed(image)) <= set(found), "make lock"
    assert min(hashes for _, hashes in found.values()) >= 1
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    fixed = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    differing = {name for name, (version, _) in found.items() if fixed.get(name, version) != version}
    assert differing == set(), "make lock"
    used = (ROOT / "Dockerfile").read_text()
    assert f"install-locked {image} " in used
    assert "pip install --require-hashes" in used


# One version: what the package, the manifests, the changelog and the command say.


def test_the_manifests_name_the_images_of_this_version() -> None:
    text = "".join(path.read_text() for path in sorted((ROOT / "deploy").rglob("*.yaml")))
    tags = re.findall(r'newTag: "(.+)"|image: promptfed-\w+:(.+)', text)
    assert {tag for pair in tags for tag in pair if tag} == {__version__}


def test_the_changelog_knows_this_version() -> None:
    assert re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)[0] == __version__


def test_the_command_names_version_commit_and_protocol() -> None:
    shown = CliRunner().invoke(app, ["--version"]).stdout
    assert re.fullmatch(rf"promptfed {re.escape(__version__)}( \([\w-]+\))?, protocol {VERSION}\n", shown)
    if not (ROOT / ".git").exists():
        pytest.skip("a source tree without history knows no commit")
    asked = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert f"({commit[:12]}" in shown
