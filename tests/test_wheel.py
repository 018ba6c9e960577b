"""What is published: the source archive and the wheel, built, looked into and installed where no repository is."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from promptfed import __version__
from tests import ROOT
from tests.support.waiting import PATIENCE

BUILT_FROM = ("promptfed", "coordinator", "client_service", "shared", "requirements")


FILES = ("pyproject.toml", "setup.py", "README.md", "LICENSE")


LINKS = ("client_service", "coordinator", "shared")


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
    assert "would be ignored" not in done.stderr, "360 lines of warnings would hide what make dist says"
    return out / done.stdout.splitlines()[-1]


def copied(source: Path) -> Path:
    """A copy of the tree, since setuptools writes beside what it builds."""
    for name in BUILT_FROM:
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, source)
    return source


def without_links(source: Path) -> Path:
    """A copy as git makes it under core.symlinks=false: a text file in place of each link, holding its target."""
    copied(source)
    for name in LINKS:
        link = source / "promptfed" / name
        if link.is_symlink():
            link.unlink()
        link.write_text(f"../{name}")
    return source


def from_a_zip(source: Path) -> Path:
    """A copy that went through a zip archive, which stores neither links nor empty folders."""
    archive = source / "source.zip"
    tree = copied(source / "tree")
    with zipfile.ZipFile(archive, "w") as packed:
        for file in sorted(tree.rglob("*")):
            if file.is_file() and not file.is_symlink():
                packed.write(file, file.relative_to(tree))
    with zipfile.ZipFile(archive) as packed:
        packed.extractall(source / "unpacked")
    return source / "unpacked"


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_sdist", copied(tmp_path_factory.mktemp("source")), tmp_path_factory.mktemp("sdist"))


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


def package_files() -> set[str]:
    """Each file of the package by its name in the wheel, the three folders below promptfed/."""
    roots = {ROOT / "promptfed": "promptfed"} | {ROOT / name: f"promptfed/{name}" for name in LINKS}
    return {
        f"{prefix}/{(Path(folder) / name).relative_to(root)}"
        for root, prefix in roots.items()
        for folder, _, names in os.walk(root)  # which does not follow the links
        for name in names
        if Path(folder).name != "__pycache__"  # other test processes write there meanwhile
        and name not in LINKS
    }


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    """Each file of the tree once, the linked folders as real ones, no tests; all under one root."""
    tree = package_files()
    with zipfile.ZipFile(wheel) as archive:
        entries = archive.infolist()
    assert not any(stat.S_ISLNK(entry.external_attr >> 16) for entry in entries)
    names = {entry.filename for entry in entries}
    assert {name.partition("/")[0] for name in names} == {"promptfed", f"promptfed-{__version__}.dist-info"}
    assert {name for name in names if name.startswith("promptfed/")} == tree
    assert {Path(name).suffix for name in tree} >= {".py", ".yaml", ".safetensors", ".html", ".js", ".css", ".mako"}


@pytest.mark.parametrize("source", [without_links, from_a_zip], ids=lambda source: source.__name__)
def test_a_source_without_links_builds_same_wheel(source: Callable[[Path], Path], wheel: Path, tmp_path: Path) -> None:
    (out := tmp_path / "out").mkdir()
    (tree := tmp_path / "source").mkdir()
    with zipfile.ZipFile(build("build_wheel", source(tree), out)) as built, zipfile.ZipFile(wheel) as usual:
        expected = {entry.filename: entry.CRC for entry in usual.infolist()}
        assert {entry.filename: entry.CRC for entry in built.infolist()} == expected


def test_an_incomplete_source_builds_no_wheel(tmp_path: Path) -> None:
    (source := tmp_path / "source").mkdir()
    shutil.rmtree(without_links(source) / "shared")
    done = subprocess.run(
        [sys.executable, "-c", BUILD, "build_wheel", str(tmp_path)], cwd=source, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "shared/ holds no packages" in done.stderr


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


# `make dist`: the files of a release, their sums and its signature.


WHO = "release@promptfed"


BUILDERS = ("build", "twine", "cyclonedx_py")


def run_of_dist(*command: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **more)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "release"
    run_of_dist("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file, check=True)
    return file


@pytest.fixture(scope="module")
def release(key: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make dist` makes, without images."""
    for tool in ("make", "git", "ssh-keygen", "sha256sum"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    if missing := [name for name in BUILDERS if importlib.util.find_spec(name) is None]:
        pytest.skip(f"{', '.join(missing)}: pip install '.[build]'")
    if not (ROOT / ".git").exists():
        pytest.skip("a release is built from a checkout with its history")
    out = tmp_path_factory.mktemp("release") / "dist"
    # The environment is that of the tests, with all that is needed: nothing is installed.
    given = [
        "IMAGES=",
        f"DIST={out}",
        f"KEY={key}",
        f"BIN={os.path.relpath(Path(sys.executable).parent, ROOT)}",
    ]  # make splits a path at spaces
    done = run_of_dist("make", "-s", "-o", "build-tools", "dist", *given, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def verified(release: Path, key: Path) -> bool:
    """As CONTRIBUTING.md says: the sums are signed, and the files have these sums."""
    algorithm, public = key.with_suffix(".pub").read_text().split()[:2]
    (key.parent / "allowed_signers").write_text(f"{WHO} {algorithm} {public}\n")
    command = ["ssh-keygen", "-Y", "verify", "-f", key.parent / "allowed_signers", "-I", WHO, "-n", "promptfed"]
    with (release / "SHA256SUMS").open() as sums:
        signed = run_of_dist(*command, "-s", release / "SHA256SUMS.sig", stdin=sums)
    return signed.returncode == 0 and run_of_dist("sha256sum", "-c", "SHA256SUMS", cwd=release).returncode == 0


def test_a_release_has_archive_wheel_and_bills_of_materials(release: Path) -> None:
    built = {f"promptfed-{__version__}.tar.gz", f"promptfed-{__version__}-py3-none-any.whl"}
    bills = {f"{name}.cdx.json" for name in ("environment", "coordinator", "torch", "client", "serve")}
    assert {file.name for file in release.iterdir()} == built | bills | {"SHA256SUMS", "SHA256SUMS.sig"}
    summed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert summed == built | bills


def test_a_bill_of_materials_is_as_its_schema_asks(release: Path) -> None:
    """By another library than the one that wrote it, whose schemas they are."""
    schemas = resources.files("cyclonedx.schema._res")

    def schema(address: str) -> Any:
        name = address.rpartition("/")[2]
        return json.loads((schemas / name).read_text())

    for file in release.glob("*.cdx.json"):
        bill = json.loads(file.read_text())
        asked = jsonschema_rs.validator_for(schema(f"bom-{bill['specVersion']}.SNAPSHOT.schema.json"), retriever=schema)
        asked.validate(bill)
        locked = ROOT / "requirements" / "locked" / f"{file.name.partition('.')[0]}.txt"
        wanted = (
            re.findall(r"^([\w.-]+)==", locked.read_text(), re.M) if locked.exists() else ["torch", "cyclonedx-bom"]
        )
        assert {one["name"] for one in bill["components"]} >= set(wanted) != set(), file.name
        bill["components"][0]["type"] = "something else"
        assert not asked.is_valid(bill)


def test_the_signature_holds_for_these_files_only(release: Path, key: Path, tmp_path: Path) -> None:
    assert verified(release, key)
    copy = shutil.copytree(release, tmp_path / "copy")
    with (copy / "torch.cdx.json").open("a") as file:
        file.write(" ")
    assert not verified(copy, key)
    shutil.copy(release / "torch.cdx.json", copy)
    assert verified(copy, key)
    (copy / "SHA256SUMS").write_text((copy / "SHA256SUMS").read_text().upper())
    assert not verified(copy, key)
