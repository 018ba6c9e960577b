"""Wheels of releases, built from git and unpacked, and processes that run them."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ROOT
from tests.support.client_processes import wait_for
from tests.support.waiting import PATIENCE
from tests.test_wheel import build, copied

COMMITS: dict[str, str] = tomllib.loads((Path(__file__).parent / "releases.toml").read_text())
CURRENT = "current"
RELEASES = (*COMMITS, CURRENT)


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, timeout=PATIENCE)


def unpacked(release: str, folder: Path) -> Path:
    """The folder with the unpacked wheel of a release; of the current one, of the files as they are here."""
    source, out = folder / "source", folder / "wheel"
    for made in (source, out):
        made.mkdir(parents=True)
    if release == CURRENT:
        copied(source)
    else:
        commit = COMMITS[release]
        if git("cat-file", "-e", f"{commit}^{{commit}}").returncode != 0:
            pytest.skip(f"there is no history here from which to build release {release}")
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit).stdout)) as archive:
            archive.extractall(source, filter="data")
    with zipfile.ZipFile(build("build_wheel", source, out)) as built:
        built.extractall(folder / "installed")
    return folder / "installed"


class Process:
    """A service of a release. Dependencies are those of this environment; promptfed is the wheel's."""

    def __init__(self, module: str, folder: Path, *arguments: str):
        self.module, self.folder, self.arguments = module, folder, arguments
        folder.mkdir(parents=True, exist_ok=True)

    def start(self, installed: Path) -> None:
        """Start it, as of the release in ``installed``."""
        environment = os.environ | {"PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                env=environment,
            )

    def stop(self) -> None:
        """End it as an operator does."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(PATIENCE)

    def log(self) -> str:
        return (self.folder / "log").read_text()


class Coordinator(Process):
    """A coordinator that keeps its port and its data when another release takes over."""

    def __init__(self, folder: Path, port: int):
        super().__init__("promptfed.coordinator", folder, f"--data-dir={folder / 'data'}", f"--port={port}")
        self.url = f"http://127.0.0.1:{port}"

    def start(self, installed: Path) -> None:
        """Start it, and wait until it answers."""
        super().start(installed)
        wait_for(lambda: self.process.poll() is not None or self.answers(), PATIENCE, 0.1)
        assert self.process.poll() is None, self.log()

    def answers(self) -> bool:
        try:
            return httpx.get(self.url + "/healthz", trust_env=False, timeout=5).is_success
        except httpx.HTTPError:
            return False

    def call(self, verb: str, path: str, **request: Any) -> Any:
        token = (self.folder / "data" / "operator.token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        answer = httpx.request(verb, self.url + path, headers=headers, trust_env=False, timeout=PATIENCE, **request)
        assert answer.is_success, answer.text
        return answer.json()
