"""`make dist`: the files of a release, their sums and its signature."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from promptfed import __version__
from promptfed.shared.spec.section import VERSION
from tests import ROOT
from tests.support.waiting import PATIENCE

WHO = "release@promptfed"
BUILDERS = ("build", "twine", "cyclonedx_py")


def run(*command: str | Path, **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, **more)


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("key") / "release"
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", file, check=True)
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
    given = ["IMAGES=", f"DIST={out}", f"KEY={key}", f"BIN={Path(sys.executable).parent}"]
    done = run("make", "-s", "-o", "build-tools", "dist", *given, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def verified(release: Path, key: Path) -> bool:
    """As CONTRIBUTING.md says: the sums are signed, and the files have these sums."""
    algorithm, public = key.with_suffix(".pub").read_text().split()[:2]
    (key.parent / "allowed_signers").write_text(f"{WHO} {algorithm} {public}\n")
    command = ["ssh-keygen", "-Y", "verify", "-f", key.parent / "allowed_signers", "-I", WHO, "-n", "promptfed"]
    with (release / "SHA256SUMS").open() as sums:
        signed = run(*command, "-s", release / "SHA256SUMS.sig", stdin=sums)
    return signed.returncode == 0 and run("sha256sum", "-c", "SHA256SUMS", cwd=release).returncode == 0


def test_a_release_has_archive_wheel_and_bills_of_materials(release: Path) -> None:
    built = {f"promptfed-{__version__}.tar.gz", f"promptfed-{__version__}-py3-none-any.whl"}
    bills = {f"{name}.cdx.json" for name in ("environment", "coordinator", "torch", "client", "serve")}
    assert {file.name for file in release.iterdir()} == built | bills | {"SHA256SUMS", "SHA256SUMS.sig"}
    summed = {line.split()[1] for line in (release / "SHA256SUMS").read_text().splitlines()}
    assert summed == built | bills


def test_its_wheel_names_version_commit_and_protocol(release: Path, tmp_path: Path) -> None:
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    commit = run(*asked, check=True).stdout.strip()
    [wheel] = release.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    shown = run(
        sys.executable, "-m", "promptfed", "--version",
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert shown.stdout == f"promptfed {__version__} ({commit}), protocol {VERSION}\n", shown.stderr


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
