"""One version: what the package, the manifests, the changelog and the command say."""

from __future__ import annotations

import re
import subprocess

import pytest
from typer.testing import CliRunner

from promptfed import __version__
from promptfed.cli.main import app
from promptfed.shared.spec.section import VERSION
from tests import ROOT


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
