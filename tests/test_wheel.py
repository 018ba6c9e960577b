"""What is published: the source archive and the wheel, built, looked into and installed where no repository is."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.waiting import PATIENCE

BUILT_FROM = ("promptfed", "coordinator", "client_service", "shared", "requirements")
FILES = ("pyproject.toml", "README.md", "LICENSE")
SOMEBODY_ELSES = ("shared", "coordinator", "client_service", "experiments")
BUILD = "import sys; from setuptools import build_meta; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"
# Where each module of the package would come from, and who else finds modules.
FIND_ALL = """
import importlib.util, json, pkgutil, sys
import promptfed
names = [one.name for one in pkgutil.walk_packages(promptfed.__path__, "promptfed.")]
files = [importlib.util.find_spec(name).origin for name in names]
print(json.dumps({"files": files, "finders": [str(one) for one in sys.meta_path]}))
"""


def build(hook: str, source: Path, out: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, hook, str(out)], cwd=source, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0, done.stderr
    return out / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the tree, since setuptools writes beside what it builds."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("sdist")
    for name in BUILT_FROM:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    return build("build_sdist", source, out)


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, which therefore holds all that a build needs."""
    source, out = tmp_path_factory.mktemp("unpacked"), tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(source, filter="data")
    return build("build_wheel", source / sdist.name.removesuffix(".tar.gz"), out)


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment of the wheel and the dependencies of this one, whose editable install is not among them.

    A folder that a .pth file names is searched, but its own .pth files, the editable finder's too, are not read.
    """
    environment = tmp_path_factory.mktemp("installed") / "venv"
    venv.create(environment, symlinks=True)
    python = environment / "bin" / "python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "-q", wheel]
    subprocess.run(install, check=True, timeout=PATIENCE, env=os.environ | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"})
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A folder of somebody who has packages of the repository's short names."""
    for name in SOMEBODY_ELSES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('this is somebody else\\'s')\n")
    return tmp_path


def run(*command: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE)


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Each file of the tree once, the linked folders as real ones, no tests; all under one root."""
    tree = {
        str((Path(folder) / name).relative_to(ROOT))
        for folder, _, names in os.walk(ROOT / "promptfed", followlinks=True)
        for name in names
        if Path(folder).name != "__pycache__"  # where others of the tests' processes write meanwhile
    }
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert not any(stat.S_ISLNK(entry.external_attr >> 16) for entry in entries)
    names = {entry.filename for entry in entries}
    assert {name.partition("/")[0] for name in names} == {"promptfed", "promptfed-0.1.0.dist-info"}
    assert {name for name in names if name.startswith("promptfed/")} == tree
    assert {Path(name).suffix for name in tree} >= {".py", ".yaml", ".safetensors", ".html", ".js", ".css", ".mako"}


def test_all_code_comes_from_the_wheel(installed: Path, elsewhere: Path) -> None:
    done = run(installed / "bin" / "python", "-c", FIND_ALL, folder=elsewhere)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["files"]) > 150
    assert all(Path(file).is_relative_to(installed) for file in found["files"])
    assert not any("editable" in finder for finder in found["finders"])


def test_a_demo_runs_where_somebody_else_has_packages_of_these_names(installed: Path, elsewhere: Path) -> None:
    options = ["--data", "digits", "--method", "coop", "--rounds", "1", "--json"]
    done = run(installed / "bin" / "promptfed", "demo", *options, folder=elsewhere)
    assert done.returncode == 0, done.stderr
    assert (result := json.loads(done.stdout))["rounds"] == 1
    assert result["federated"]
