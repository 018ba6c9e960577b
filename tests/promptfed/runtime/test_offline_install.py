"""The installer in a bundle: what it refuses before anything is installed."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed import __version__
from promptfed.cli.main import app
from promptfed.runtime import offline_install
from promptfed.runtime.bundle import installed_versions
from promptfed.runtime.offline_install import ABOUT, LISTED, SUMS, check, this_machine
from promptfed.sdk.errors import Exit

WHEEL = f"promptfed-{__version__}-py3-none-any.whl"


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle that holds next to nothing."""
    folder = tmp_path / "bundle"
    (folder / "wheels").mkdir(parents=True)
    (folder / "wheels" / WHEEL).write_bytes(b"a wheel")
    (folder / LISTED).write_text("promptfed==1 --hash=sha256:00\n")
    (folder / ABOUT).write_text(json.dumps({"machine": "Plan9 vax, Python 3.11"}))
    shutil.copy(offline_install.__file__, folder / "install.py")
    write_sums(folder)
    return folder


def write_sums(folder: Path) -> None:
    files = sorted(file for file in folder.rglob("*") if file.is_file() and file.name != SUMS)
    sums = [(hashlib.sha256(file.read_bytes()).hexdigest(), file.relative_to(folder)) for file in files]
    (folder / SUMS).write_text("".join(f"{digest}  {name}\n" for digest, name in sums))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / "wheels" / WHEEL).write_bytes(b"a whee1"), f"wheels/{WHEEL} is not the file"),
        (lambda folder: (folder / "wheels" / WHEEL).unlink(), f"wheels/{WHEEL} is missing"),
        (lambda folder: (folder / "wheels" / "a.whl").touch(), "wheels/a.whl is not part of the bundle"),
        (lambda folder: (folder / LISTED).write_text("promptfed\n"), "requirements.txt is not the file"),
    ],
)
def test_another_file_than_was_packed_is_refused(
    change: Callable[[Path], object], words: str, bundle: Path, tmp_path: Path
) -> None:
    check(bundle)
    change(bundle)
    with pytest.raises(ValueError, match=words):
        check(bundle)
    command = [sys.executable, bundle / "install.py", tmp_path / "environment"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert words in done.stderr
    assert not (tmp_path / "environment").exists()


def test_a_bundle_for_another_machine_is_refused(bundle: Path, tmp_path: Path) -> None:
    command = [sys.executable, bundle / "install.py", tmp_path / "environment"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    told = f"this bundle is for Plan9 vax, Python 3.11, and this is {this_machine()}: nothing was installed\n"
    assert done.stderr == told
    assert not (tmp_path / "environment").exists()


def test_what_only_a_left_out_package_needs_is_left_out() -> None:
    whole, rest = installed_versions(set()), installed_versions({"Torch"})
    assert "torch" in whole
    assert {"fastapi", "open-clip-torch", "torchvision", "httpx"} <= set(rest) < set(whole) - {"torch"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--wheel", "none.whl"], "there is no file none.whl"),
        (["--wheel", "other-1.0-py3-none-any.whl"], f"is not the wheel of promptfed {__version__}"),
        (["--wheel", "promptfed-0.1.0-py3-none-any.whl"], f"is not the wheel of promptfed {__version__}"),
        (["--wheel", WHEEL, "--backbone", "ViT-B-32", "openai"], "give both"),
        (["--wheel", WHEEL, "--out", WHEEL], "exists: move it away"),
    ],
)
def test_what_cannot_be_packed_is_refused(
    options: list[str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (WHEEL, "other-1.0-py3-none-any.whl", "promptfed-0.1.0-py3-none-any.whl"):
        (tmp_path / name).touch()
    done = CliRunner().invoke(app, ["bundle", *options])
    assert done.exit_code == Exit.BAD_INPUT
    assert words in " ".join(done.stderr.split())
    assert not (tmp_path / "promptfed-offline.tar").exists()


def test_a_wheel_that_pip_does_not_find_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    (tmp_path / WHEEL).touch()
    done = CliRunner().invoke(app, ["bundle", "--wheel", str(tmp_path / WHEEL), "--out", str(tmp_path / "out.tar")])
    assert done.exit_code == Exit.BAD_INPUT
    told = " ".join(done.stderr.split())
    assert "pip did not find all wheels: No matching distribution found for absl-py==" in told
    assert not (tmp_path / "out.tar").exists()
