"""The pytest fixtures of ``promptfed.testing``: name this module in ``pytest_plugins``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pytest

from promptfed.coordinator.engine.registry import Registry
from promptfed.library.result import Result
from promptfed.library.run import Methodlike, run
from promptfed.sdk.arguments import checked
from promptfed.testing.clients import CLASSES, WHOLE_SHAPE, Expected, ScriptedClient, drive
from promptfed.testing.coordinator import LocalCoordinator, local_coordinator

TINY_DATA = {
    "first": "symbols:neon?only=star,heart,crab&per_class=4&test_per_class=2",
    "second": "symbols:quickdraw?only=star,heart,crab&per_class=4&test_per_class=2",
}


@dataclass(frozen=True)
class EnrolledFederation:
    """A federation that has not started, and its scripted clients."""

    coordinator: LocalCoordinator
    federation: str
    clients: list[ScriptedClient]

    def finish(self) -> dict[str, Any]:
        """Start the federation, let the clients answer every task, and return the federation's last report."""
        self.coordinator.start(self.federation)
        drive(self.clients)
        finished: dict[str, Any] = self.coordinator.get(self.federation)
        return finished


class Enrol(Protocol):
    """The type of the fixture `enrolled`."""

    def __call__(self, *names: str, **changes: Any) -> EnrolledFederation: ...


class TinyFederation(Protocol):
    """The type of the fixture `tiny_federation`."""

    def __call__(self, method: Methodlike = ..., **changes: Any) -> Result: ...


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LocalCoordinator]:
    """A coordinator in this process, with its store in the test's temporary folder."""
    with local_coordinator(tmp_path / "coordinator") as running:
        yield running


@pytest.fixture
def enrolled(coordinator: LocalCoordinator) -> Enrol:
    """Create a federation with scripted clients: ``enrolled("a", "b", method={"name": "plan"}, rounds=3)``.

    The names default to two clients, each with a domain of its own; they take part in every method. The other arguments
    are keys of the federation's spec, whose class names default to three.
    """

    @checked
    def make(*names: str, **changes: Any) -> EnrolledFederation:
        federation = coordinator.create(**{"class_names": CLASSES} | changes)
        made = coordinator.registry.get(federation)
        fitting = {"class_names": made.spec.class_names or CLASSES, "backbone_shape": WHOLE_SHAPE}
        clients = []
        for name in names or ("first", "second"):
            domain = {"name": name, "description": f"a photo from {name} of a {{}}"}
            clients += coordinator.enrol(federation, name, domain=domain, **fitting)
            clients[-1].expected = partial(_expected, coordinator.registry, federation, name)
        return EnrolledFederation(coordinator, federation, clients)

    return make


def _expected(registry: Registry, id: str, client: str, phase: str) -> Expected:
    """What goes up in a phase by the method's own word."""
    federation, spec = registry.get(id), registry.get(id).spec
    phases = {one.name: one for round in (1, 2, spec.rounds) for one in federation.method.phases(round, spec.rounds)}
    return federation.method.expected_update(phases[phase], federation.clients[client], federation.context())


@pytest.fixture
def tiny_federation() -> TinyFederation:
    """Run a real federation to its end: ``tiny_federation("fedpgp", rounds=2)`` or ``tiny_federation(MyMethod)``.

    It has two clients with four training images for each of three classes. Arguments are those of `promptfed.run`;
    ``data`` replaces the images. One round takes about a second after the backbone is loaded.
    """

    def finish(method: Methodlike = "promptfl", **changes: Any) -> Result:
        options: dict[str, Any] = {"data": TINY_DATA, "rounds": 1, "progress": False} | changes
        return run(method, **options)

    return finish
