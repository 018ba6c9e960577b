"""A Docker engine as `runtime.containers` sees it through the SDK; it runs nothing and remembers everything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from docker.errors import APIError, ImageNotFound, NotFound


@dataclass
class FakeResource:
    """A container, network or volume. ``said`` is its log, ``code`` its exit code once it has ended."""

    engine: FakeEngine
    kind: str
    name: str
    labels: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    status: str = "created"
    code: int = 0
    said: bytes = b""
    starts: int = 0
    files: dict[str, bytes] = field(default_factory=dict)
    stuck: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        return {"State": {"Status": self.status, "ExitCode": self.code}}

    def reload(self) -> None:
        if self not in self.engine.things:
            raise NotFound(f"no such {self.kind}")

    def start(self) -> None:
        if self.engine.refuses_start is not None:
            raise self.engine.refuses_start
        self.status, self.starts = "running", self.starts + 1

    def die(self, code: int, said: bytes = b"") -> None:
        self.status, self.code, self.said = "exited", code, said

    def logs(self, tail: int | None = None) -> bytes:
        lines = self.said.splitlines()
        return b"\n".join(lines if tail is None else lines[-tail:])

    def put_archive(self, path: str, data: bytes) -> bool:
        self.files[path] = data
        return True

    def exec_run(self, command: list[str]) -> tuple[int, bytes]:
        assert command == ["cat", "/data/operator.token"]
        return 0, b"operator-secret\n"

    def remove(self, **options: Any) -> None:
        if self.stuck:
            raise APIError("conflict", explanation="it is in use")
        self.reload()
        self.engine.things.remove(self)
        self.engine.removed.append((self.kind, self.name, options))


class Collection:
    """``engine.containers``, ``.networks``, ``.volumes``."""

    def __init__(self, engine: FakeEngine, kind: str):
        self._engine, self._kind = engine, kind

    def create(self, *given: Any, labels: dict[str, str], name: str | None = None, **options: Any) -> FakeResource:
        if name is None:
            (name,), given = given, ()
        if given:
            options |= {"image": given[0], "command": given[1]}
        thing = FakeResource(self._engine, self._kind, name, labels, options)
        self._engine.things.append(thing)
        return thing

    def list(self, *, filters: dict[str, str], all: bool = False, ignore_removed: bool = False) -> list[FakeResource]:
        assert self._kind != "container" or (all and ignore_removed), "containers that have ended must be found too"
        key, _, value = filters["label"].partition("=")
        self._engine.things += self._engine.late.pop(self._kind, [])
        mine = [one for one in self._engine.things if one.kind == self._kind]
        return [one for one in mine if one.labels.get(key) == value]


class Images:
    """``engine.images``."""

    def __init__(self, present: set[str]):
        self._present = present

    def get(self, name: str) -> object:
        if name not in self._present:
            raise ImageNotFound(f"no such image: {name}")
        return object()


class FakeEngine:
    """All that was made stands in ``things``, all that was removed in ``removed``."""

    def __init__(self, images: tuple[str, ...] = ("promptfed-coordinator", "promptfed-client")):
        self.things: list[FakeResource] = []
        self.removed: list[tuple[str, str, dict[str, Any]]] = []
        self.refuses_start: Exception | None = None
        self.late: dict[str, list[FakeResource]] = {}  # by kind: what appears once somebody has looked
        self.containers = Collection(self, "container")
        self.networks = Collection(self, "network")
        self.volumes = Collection(self, "volume")
        self.images = Images(set(images))

    def ping(self) -> bool:
        return True

    def of(self, kind: str) -> Iterator[FakeResource]:
        return (one for one in self.things if one.kind == kind)

    def container(self, end: str) -> FakeResource:
        """The one container whose name ends so."""
        (found,) = (one for one in self.of("container") if one.name.endswith(end))
        return found
