"""Containers of a launch: what the engine is asked for, what is found by label and removed, one line for refusals.

`FakeEngine` is a Docker engine as `runtime.containers` sees it through the SDK: it runs nothing, and remembers all.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import docker
import pytest
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from promptfed.runtime import containers
from promptfed.runtime.containers import Containers, federation_in_containers, with_absolute_paths
from promptfed.runtime.processes import MAX_RESTARTS, ProcessFailed, Site
from promptfed.sdk.client import Request
from promptfed.shared.errors import PromptfedError


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


class Answering:
    """A coordinator that is ready at once."""

    def __init__(self, url: str, token: str, **_: Any):
        self.url, self.token = url, token
        self.asked: list[str] = []

    def __enter__(self) -> Answering:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def close(self) -> None:
        pass

    def send(self, request: Request[Any]) -> None:
        self.asked.append(request.path)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine()
    monkeypatch.setattr(docker, "from_env", lambda: made)
    monkeypatch.setattr(containers, "Coordinator", Answering)
    return made


def mounts(thing: FakeResource) -> dict[str, tuple[str, str, bool]]:
    return {one["Target"]: (one["Type"], one["Source"], one["ReadOnly"]) for one in thing.options["mounts"]}


def test_what_the_engine_is_asked_for(engine: FakeEngine) -> None:
    with federation_in_containers(engine, 0, None) as federation:
        federation.start_client("fed-1", Site("eyes", "symbols:neon", tests={"new": "digits"}), None)
        coordinator, client = engine.container("-coordinator"), engine.container("-client-eyes")
        made = list(engine.things)
    for one in (coordinator, client):
        assert one.starts == 1
        assert one.options["read_only"] is True
        assert one.options["cap_drop"] == ["ALL"]
        assert one.options["security_opt"] == ["no-new-privileges:true"]
        assert "environment" not in one.options, "a token could stand in it"
        assert "user" not in one.options, "the images' own user must not be overridden"
    assert (coordinator.options["image"], client.options["image"]) == ("promptfed-coordinator", "promptfed-client")
    address, port = coordinator.options["ports"]["8080/tcp"]
    assert address == "127.0.0.1"
    assert federation.api.url == f"http://127.0.0.1:{port}"
    assert f"--coordinator=http://{coordinator.name}:8080" in client.options["command"]
    assert {"--federation=fed-1", "--device=cpu", "--data=symbols:neon", "--test=new=digits"} <= set(
        client.options["command"]
    )
    join = mounts(coordinator)["/join"][1]
    assert mounts(coordinator)["/join"] == ("volume", join, False)
    assert mounts(client)["/join"] == ("volume", join, True)
    assert mounts(client)["/state"] != mounts(coordinator)["/data"]
    (network,) = (one for one in made if one.kind == "network")
    assert {one.options["network"] for one in (coordinator, client)} == {network.name}
    assert len({tuple(one.labels.items()) for one in made}) == 1
    assert engine.things == []


def test_the_token_goes_into_a_volume_for_the_images_user_alone(engine: FakeEngine) -> None:
    with federation_in_containers(engine, 0, None) as federation:
        federation.hand_out("enrol-me")
        coordinator = engine.container("-coordinator")
    with tarfile.open(fileobj=io.BytesIO(coordinator.files["/join"])) as archive:
        (entry,) = archive.getmembers()
        assert (entry.name, oct(entry.mode), entry.uid) == ("enrolment.token", "0o600", 10001)
        assert archive.extractfile(entry).read() == b"enrol-me\n"
    assert federation.api.token == "operator-secret"


def test_only_what_carries_the_label_is_removed(engine: FakeEngine) -> None:
    theirs = [
        engine.containers.create("redis", [], name="promptfed-of-somebody", labels={"promptfed.launch": "another"}),
        engine.networks.create("promptfed-network", labels={}),
        engine.volumes.create("promptfed-data", labels={"com.example": "x"}),
    ]
    with pytest.raises(KeyboardInterrupt), federation_in_containers(engine, 0, None) as federation:
        federation.start_client("fed-1", Site("eyes", "symbols:neon"), None)
        engine.container("-client-eyes").die(0)
        raise KeyboardInterrupt
    assert engine.things == theirs
    kinds = [kind for kind, _, _ in engine.removed]
    assert kinds == ["container"] * 2 + ["network"] + ["volume"] * 3, "a network goes once nothing is on it"


@pytest.mark.parametrize(("refusal", "said"), [
    ("driver failed:\n port is already allocated",
     r"^the Docker engine refuses: driver failed: port is already allocated$"),
    ('could not select device driver "" with capabilities: [[gpu]]', r"has no GPUs to give.*--gpus none"),
])  # fmt: skip
def test_a_failed_start_is_one_line_and_leaves_nothing_behind(engine: FakeEngine, refusal: str, said: str) -> None:
    engine.refuses_start = APIError("500", explanation=refusal)
    with pytest.raises(PromptfedError, match=said), federation_in_containers(engine, 8080, None):
        pass
    assert engine.things == []
    assert engine.removed


def test_what_an_interrupted_request_made_is_removed_too(engine: FakeEngine) -> None:
    with Containers(engine) as made:
        made.volume("state")
        engine.late["volume"] = [FakeResource(engine, "container", "late", made.labels)]
    assert engine.things == []
    assert [name for _, name, _ in engine.removed] == [f"promptfed-{made.id}-state", "late"]


def test_what_cannot_be_removed_is_named(engine: FakeEngine) -> None:
    with (
        pytest.raises(PromptfedError, match=r"could not remove promptfed-.*-join \(it is in use\)"),
        federation_in_containers(engine, 0, None),
    ):
        next(one for one in engine.of("volume") if one.name.endswith("-join")).stuck = True
    assert [one.name.rsplit("-", 1)[1] for one in engine.things] == ["join"]


def test_what_dies_is_started_again_three_times(engine: FakeEngine) -> None:
    with federation_in_containers(engine, 0, None) as federation:
        federation.start_client("fed-1", Site("eyes", "symbols:neon"), None)
        client = engine.container("-client-eyes")
        for count in range(1, MAX_RESTARTS + 1):
            client.die(137)
            assert federation.watch() == ["client-eyes"]
            assert client.starts == count + 1
            assert federation.watch() == []
        client.die(137, b"one\ntwo")
        with pytest.raises(ProcessFailed, match="client-eyes ended with 137 for the 4th time; its log ends:\none\ntwo"):
            federation.watch()


def test_what_says_why_it_ends_is_not_started_again(engine: FakeEngine) -> None:
    with federation_in_containers(engine, 0, None) as federation:
        federation.start_client("fed-1", Site("ears", "symbols:noen"), None)
        client = engine.container("-client-ears")
        client.die(3, b"starting\n10:00:00 ERROR there is no domain noen")
        with pytest.raises(ProcessFailed, match=r"^client-ears ended with 3: 10:00:00 ERROR there is no domain noen$"):
            federation.watch()
        assert client.starts == 1
        client.die(0)
        assert federation.watch() == []


def test_gpus_are_asked_for_by_id(engine: FakeEngine) -> None:
    with federation_in_containers(engine, 0, None) as federation:
        federation.start_client("fed-1", Site("eyes", "symbols:neon"), "GPU-1234")
        client = engine.container("-client-eyes")
        (request,) = client.options["device_requests"]
        assert request["DeviceIDs"] == ["GPU-1234"]
        assert request["Capabilities"] == [["gpu"]]
        assert "--device=cuda" in client.options["command"]
        engine.refuses_start = APIError("500", explanation='could not select device driver "" with capabilities')
        with pytest.raises(APIError):
            federation.start_client("fed-1", Site("ears", "symbols:neon"), "GPU-1234")


def test_logs_are_kept_where_a_folder_is_given(engine: FakeEngine, tmp_path: Path) -> None:
    with federation_in_containers(engine, 0, tmp_path):
        engine.container("-coordinator").said = b"listening"
    assert (tmp_path / "coordinator.log").read_bytes() == b"listening"


def test_folders_of_images_are_mounted_where_they_are(engine: FakeEngine, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "pets").mkdir()
    (tmp_path / "labels.csv").write_text("path,label\n")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a b").mkdir()
    tests = {"new": f"csv:{tmp_path}/labels.csv", "sets": "torchvision:Flowers102?root=a%20b&shots=4"}
    site = Site("eyes", "folder:pets?domain=cat", tests=tests)
    found, folders = with_absolute_paths(site)
    assert found.data == f"folder:{tmp_path}/pets?domain=cat"
    assert found.tests == tests | {"sets": f"torchvision:Flowers102?root={tmp_path}/a+b&shots=4"}
    assert folders == (str(tmp_path), f"{tmp_path}/a b", f"{tmp_path}/pets")
    with federation_in_containers(engine, 0, None) as federation:
        federation.start_client("fed-1", site, None)
        client = engine.container("-client-eyes")
        assert mounts(client)[f"{tmp_path}/pets"] == ("bind", f"{tmp_path}/pets", True)
        assert f"--data=folder:{tmp_path}/pets?domain=cat" in client.options["command"]
        with pytest.raises(PromptfedError, match=r"client ears: folder:dogs: there is no .*/dogs"):
            federation.start_client("fed-1", Site("ears", "folder:dogs"), None)
    assert with_absolute_paths(Site("a", "symbols:neon")) == (Site("a", "symbols:neon"), ())


def test_no_image(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "from_env", lambda: FakeEngine(("promptfed-coordinator",)))
    with pytest.raises(PromptfedError, match="there is no image promptfed-client: run `docker compose build`"):
        containers.open_engine()


def test_an_engine_that_goes_away(engine: FakeEngine) -> None:
    with (
        pytest.raises(PromptfedError, match="the Docker engine refuses: gone"),
        federation_in_containers(engine, 0, None),
    ):
        raise DockerException("gone")
