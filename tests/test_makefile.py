"""Set-up by uv or pip: what pip's settings say about where packages are holds for both."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests import ROOT
from tests.support.waiting import PATIENCE

PYTHON = """#!/bin/sh
case "$*" in
  *"config list"*) cat "$(dirname "$0")/settings";;
  *"import promptfed"*) [ -z "$PYTHONDONTWRITEBYTECODE" ] || echo "what is compiled is not kept";;
  *) echo "pip ${*#*--disable-pip-version-check }";;
esac
"""
UV = """#!/bin/sh
for name in UV_DEFAULT_INDEX UV_INDEX UV_FIND_LINKS SSL_CERT_FILE; do eval "echo $name=\\$$name"; done
exit ${UV_FAILS:-0}
"""
BY_PIP = ["uv did not do it: pip takes over", "pip install -q -c constraints.txt -e .[test]"]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def set_up(folder: Path, settings: str, **environment: str) -> list[str]:
    """What `make setup` prints in the place of installing; ``settings`` is what `pip config list` says."""
    bin = folder / "venv" / "bin"
    bin.mkdir(parents=True)
    (bin / "settings").write_text(settings)
    for name, text in (("python", PYTHON), ("uv", UV)):
        (bin / name).write_text(text)
        (bin / name).chmod(0o755)
    here = {"PYTHONDONTWRITEBYTECODE": "1"} | environment
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_", "SSL_", "MAKE"))}
    command = ["make", "-s", "setup", "PYTHON=true", f"VENV={folder / 'venv'}"]
    done = subprocess.run(command, cwd=ROOT, env=kept | here, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_uv_looks_where_pip_would(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name).mkdir()
    settings = f"""\
:env:.find-links='{tmp_path}/a {tmp_path}/none file://{tmp_path}/b file://{tmp_path}/none https://wheels.test/x ~/c'
global.cert='/certs.pem'
global.extra-index-url='https://one.test/simple\\nhttps://two.test/simple'
global.find-links='/elsewhere'
global.index-url='https://everybody.test/simple'
install.index-url='https://index.test/simple'
"""
    assert set_up(tmp_path, settings, HOME=str(tmp_path)) == [
        "installing promptfed[test]", "pip install -q -c constraints.txt uv",
        "UV_DEFAULT_INDEX=https://index.test/simple", "UV_INDEX=https://one.test/simple https://two.test/simple",
        f"UV_FIND_LINKS={tmp_path}/a,file://{tmp_path}/b,https://wheels.test/x,{tmp_path}/c",
        "SSL_CERT_FILE=/certs.pem",
    ]  # fmt: skip


def test_without_settings_uv_has_none(tmp_path: Path) -> None:
    found = set_up(tmp_path, "")
    assert found[2:] == ["UV_DEFAULT_INDEX=", "UV_INDEX=", "UV_FIND_LINKS=", "SSL_CERT_FILE="]


@pytest.mark.parametrize("setting", ["global.no-index='1'", ":env:.trusted-host='index.test'"])
def test_pip_does_what_is_not_handed_on(tmp_path: Path, setting: str) -> None:
    assert set_up(tmp_path, setting) == ["installing promptfed[test]", *BY_PIP]


def test_pip_takes_over_where_uv_fails(tmp_path: Path) -> None:
    assert set_up(tmp_path, "", UV_FAILS="2")[-2:] == BY_PIP


@pytest.mark.parametrize(
    ("changelog", "key", "dirty", "says"),
    [
        ("## 0.4.0 (2026-12-01)\n", "", False, "a release is signed"),
        ("## 0.4.0 (2026-12-01)\n", "key", True, "changes that are not committed"),
        ("## 0.4.0 (unreleased)\n", "key", False, "CHANGELOG.md has no line '## 0.4.0 (YEAR-MONTH-DAY)'"),
        ("## 0.4.0 (2026-12-01)\n", "key", False, "cyclonedx"),  # what is asked first is there: building begins
    ],
)
def test_a_release_ends_at_what_it_lacks(tmp_path: Path, changelog: str, key: str, dirty: bool, says: str) -> None:
    shutil.copy(ROOT / "Makefile", tmp_path)
    files = {"CHANGELOG.md": changelog, "pyproject.toml": "", "constraints.txt": "", ".gitignore": ".venv\nbuild\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for command in (("init", "-q"), ("add", "."), ("commit", "-qm", "all")):
        subprocess.run([*git, *command], check=True)
    if dirty:
        (tmp_path / "more").write_text("")
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").write_text("#!/bin/sh\necho 0.4.0\n")
    (tmp_path / ".venv" / "bin" / "python").chmod(0o755)
    (tmp_path / ".venv" / ".ready").touch()
    done = subprocess.run(
        ["make", "release", f"KEY={key}"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
