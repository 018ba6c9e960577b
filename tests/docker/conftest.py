"""A real Docker engine with Compose: projects that are taken down again; skipped, with the reason, without one."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import ROOT
from tests.support.ports import free_port


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder need an engine and minutes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.docker)
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1800))


def docker(*arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """Run ``docker`` and return what came of it."""
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=1500, **more)


def wait_for(what: str, condition: Callable[[], Any], seconds: float = 300.0) -> Any:
    """What ``condition`` answers once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds:.0f} s"
        time.sleep(0.1)
    return found


@dataclass
class Project:
    """A compose project of this repository under a name and a port of its own."""

    name: str = field(default_factory=lambda: f"promptfed-test-{secrets.token_hex(3)}")
    port: int = field(default_factory=free_port)
    files: list[Path] = field(default_factory=lambda: [ROOT / "docker-compose.yml"])

    def compose(self, *arguments: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run ``docker compose``."""
        files = [part for file in self.files for part in ("-f", str(file))]
        environment = os.environ | {"PROMPTFED_PORT": str(self.port)} | variables
        command = ["compose", "-p", self.name, "--project-directory", str(ROOT), *files, *arguments]
        done = docker(*command, env=environment)
        assert done.returncode == 0 or not check, f"{' '.join(arguments)}:\n{done.stdout}\n{done.stderr}"
        return done

    def containers(self) -> dict[str, dict[str, Any]]:
        """What the engine knows of each service's container."""
        ids = self.compose("ps", "--all", "--quiet").stdout.split()
        found = json.loads(docker("inspect", *ids).stdout) if ids else []
        return {one["Config"]["Labels"]["com.docker.compose.service"]: one for one in found}

    def operator(self) -> httpx.Client:
        """The API with the operator token, as docs/guides/containers.md takes it."""
        token = self.compose("exec", "-T", "coordinator", "cat", "/data/operator.token").stdout.strip()
        headers = {"Authorization": f"Bearer {token}"}
        return httpx.Client(base_url=f"http://127.0.0.1:{self.port}", headers=headers, timeout=30)


@pytest.fixture(scope="session")
def engine() -> None:
    """Skip where no engine answers, or Compose is not there."""
    for arguments in (["version", "--format", "{{.Server.Version}}"], ["compose", "version"]):
        try:
            done = docker(*arguments)
        except OSError as error:
            pytest.skip(f"tests of the images: they need a Docker engine with Compose; {error}")
        if done.returncode != 0:
            pytest.skip(f"tests of the images: `docker {' '.join(arguments)}` failed; {' '.join(done.stderr.split())}")


@pytest.fixture(scope="session")
def images(engine: None) -> None:
    """Both images, of this very tree."""
    Project().compose("build")


@pytest.fixture(scope="module")
def projects(images: None) -> Iterator[Callable[[], Project]]:
    """Makes projects; at the end they are taken down with their volumes."""
    made: list[Project] = []

    def make(*more: Path) -> Project:
        project = Project()
        project.files += more
        made.append(project)
        return project

    yield make
    for project in made:
        project.compose("down", "--volumes", "--timeout", "3")
