"""A federation in containers with a private network, volumes and read-only file systems, which are removed by label."""

from __future__ import annotations

import io
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest, Mount
from requests.exceptions import RequestException

from promptfed.runtime.processes import Services, Site, client_options, revive
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.shared.errors import BadInput, Failed, Unreachable
from promptfed.shared.service.addresses import bind

LABEL = "promptfed.launch"
IMAGES = {"coordinator": "promptfed-coordinator", "client": "promptfed-client"}
USER = 10001  # user of both images
COORDINATOR_PORT = 8080
LOOPBACK = "127.0.0.1"
STOP_TRIES = 3
QUERY = ("--query-gpu=uuid", "--format=csv,noheader")


@dataclass
class Container:
    """One started container, a `promptfed.runtime.processes.Service`; ``handle`` is the Docker SDK's object."""

    name: str
    handle: Any
    restarts: int = 0

    def ended(self) -> int | None:
        """The exit code; None while it runs."""
        self.handle.reload()
        state = self.handle.attrs["State"]
        return int(state["ExitCode"]) if state["Status"] in ("exited", "dead") else None

    def start_again(self) -> None:
        """Start the container again with its volumes."""
        self.handle.start()

    def tail(self, lines: int) -> str:
        """The last lines of its log."""
        return str(self.handle.logs(tail=lines).decode(errors="replace").strip())


@dataclass
class Containers:
    """Starts containers and removes everything it created at the end of a ``with`` block; ``logs``: the log folder."""

    engine: Any
    logs: Path | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    running: dict[str, Container] = field(default_factory=dict)

    def __enter__(self) -> Containers:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._keep_logs()
        finally:
            self.stop()

    def called(self, name: str) -> str:
        """The engine's name for ``name``, by which containers of the network also reach it."""
        return f"promptfed-{self.id}-{name}"

    @property
    def labels(self) -> dict[str, str]:
        """The labels that identify our containers, volumes and network."""
        return {LABEL: self.id}

    def network(self) -> None:
        """Create the network on which the containers find one another by name."""
        self.engine.networks.create(self.called("network"), driver="bridge", labels=self.labels)

    def volume(self, name: str) -> str:
        """Create a volume; returns the engine's name for it."""
        return str(self.engine.volumes.create(self.called(name), labels=self.labels).name)

    def start(self, name: str, service: str, command: list[str], mounts: list[Mount], **more: Any) -> Container:
        """Start a container of the service's image; ``more`` is passed to the engine unchanged."""
        handle = self.engine.containers.create(
            IMAGES[service],
            command,
            name=self.called(name),
            labels=self.labels,
            network=self.called("network"),
            mounts=mounts,
            read_only=True,
            tmpfs={"/tmp": "size=256m"},  # noqa: S108 (inside the container)
            cap_drop=["ALL"],
            security_opt=["no-new-privileges:true"],
            **more,
        )
        container = self.running[name] = Container(name, handle)
        handle.start()
        return container

    def watch(self) -> list[str]:
        """Restart the containers that died; returns their names. Raises ProcessFailed as `revive` does."""
        return revive(self.running.values())

    def stop(self) -> None:
        """Remove everything with our label.

        Raises:
            PromptfedError: the engine refused to remove something.
        """
        left: list[str] = []
        for _ in range(STOP_TRIES):  # an interrupted request may have created something after the first look
            ours = self._ours()
            if not ours:
                return
            left = [reason for thing, options in ours if (reason := _removed(thing, options))]
        if left:
            raise Failed(f"could not remove {', '.join(left)}: remove it with `docker`")

    def _ours(self) -> list[tuple[Any, dict[str, bool]]]:
        """Everything with our label and the call that removes it. Containers come first, since they use the rest."""
        labelled = {"label": f"{LABEL}={self.id}"}
        containers = self.engine.containers.list(all=True, filters=labelled, ignore_removed=True)
        return [
            *((container, {"force": True, "v": True}) for container in containers),
            *((network, {}) for network in self.engine.networks.list(filters=labelled)),
            *((volume, {"force": True}) for volume in self.engine.volumes.list(filters=labelled)),
        ]

    def _keep_logs(self) -> None:
        if self.logs is not None:
            for name, container in self.running.items():
                with suppress(NotFound):
                    (self.logs / f"{name}.log").write_bytes(container.handle.logs())


class ContainerFederation(Services):
    """A coordinator in a container, whose API is published on a loopback port, and clients in other containers."""

    def __init__(self, containers: Containers, port: int = 0):
        self.containers = containers
        containers.network()
        self._join = containers.volume("join")
        self.api = self._start_coordinator(port or _free_port())

    def hand_out(self, token: str) -> None:
        """Write the token into a volume that is read-only for clients."""
        self._coordinator.handle.put_archive("/join", _archive("enrolment.token", token))

    def start_client(self, federation: str, site: Site, gpu: str | None) -> None:
        """Start a client's container; ``gpu`` is an NVIDIA device id. Image folders are mounted read-only."""
        site, folders = with_absolute_paths(site)
        name = f"client-{site.name}"
        command = [
            f"--coordinator=http://{self.containers.called('coordinator')}:{COORDINATOR_PORT}",
            "--allow-plain-http",  # plain HTTP within one private network
            f"--federation={federation}",
            f"--device={'cpu' if gpu is None else 'cuda'}",
            *client_options(site, self.permitted),
        ]
        mounts = [
            Mount("/join", self._join, read_only=True),
            Mount("/state", self.containers.volume(name)),
            *(Mount(folder, folder, type="bind", read_only=True) for folder in folders),
        ]
        requests = [] if gpu is None else [DeviceRequest(device_ids=[gpu], capabilities=[["gpu"]])]
        self.containers.start(name, "client", command, mounts, device_requests=requests)

    def watch(self) -> list[str]:
        """Restart those of ``containers`` that died."""
        return self.containers.watch()

    def _start_coordinator(self, port: int) -> Coordinator:
        mounts = [Mount("/data", self.containers.volume("coordinator")), Mount("/join", self._join)]
        self._coordinator = self.containers.start(
            "coordinator",
            "coordinator",
            ["--host=0.0.0.0", "--allow-plain-http"],
            mounts,
            ports={f"{COORDINATOR_PORT}/tcp": (LOOPBACK, port)},
        )
        url = f"http://{LOOPBACK}:{port}"
        with Coordinator(url, "none-yet", meanwhile=self.watch) as starting:
            starting.send(operations.READY)
        code, output = self._coordinator.handle.exec_run(["cat", "/data/operator.token"])
        if code != 0:
            raise Failed(f"cannot read the operator token: {output.decode(errors='replace')}")
        return Coordinator(url, output.decode().strip(), meanwhile=self.watch)


@contextmanager
def federation_in_containers(engine: Any, port: int, logs: Path | None) -> Iterator[ContainerFederation]:
    """A coordinator in a container, ready for clients. Everything is removed after the block.

    Raises:
        PromptfedError: the engine refuses a request.
    """
    with _engine_errors(), Containers(engine, logs) as containers, ContainerFederation(containers, port) as federation:
        yield federation


def open_engine() -> Any:
    """The Docker engine of the environment, which must have both images.

    Raises:
        PromptfedError: no engine answers, or an image is missing.
    """
    try:
        engine = docker.from_env()
        engine.ping()
    except (DockerException, RequestException):
        text = "no Docker engine answers: start one, or use --runtime process"
        raise Unreachable(text) from None
    for image in IMAGES.values():
        try:
            engine.images.get(image)
        except ImageNotFound:
            text = f"there is no image {image}: run `docker compose build` in promptfed's folder"
            raise BadInput(text) from None
    return engine


def with_absolute_paths(site: Site) -> tuple[Site, tuple[str, ...]]:
    """The site with absolute data paths, and the host folders that its container needs.

    Raises:
        PromptfedError: a path does not exist.
    """
    folders: set[str] = set()

    def mounted(text: str, uri: str) -> str:
        path = Path(text).expanduser().resolve()
        if not path.exists():
            raise BadInput(f"client {site.name}: {uri}: there is no {path}")
        folders.add(str(path if path.is_dir() else path.parent))
        return str(path)

    def absolute(uri: str) -> str:
        address, mark, query = uri.partition("?")
        scheme, _, body = address.partition(":")
        if scheme in ("folder", "csv"):
            return f"{scheme}:{mounted(body, uri)}{mark}{query}"
        options = dict(parse_qsl(query))
        if "root" not in options:
            return uri
        return f"{address}?{urlencode(options | {'root': mounted(options['root'], uri)}, safe='/')}"

    tests = {name: absolute(uri) for name, uri in site.tests.items()}
    return replace(site, data=absolute(site.data), tests=tests), tuple(sorted(folders))


@contextmanager
def _engine_errors() -> Iterator[None]:
    """Turn the engine's errors into a PromptfedError of one line."""
    try:
        yield
    except (DockerException, RequestException) as error:
        reason = _reason(error)
        if "could not select device driver" in reason:
            text = "the Docker engine has no GPUs to give: install NVIDIA's container toolkit, or use --gpus none"
            raise Failed(text) from None
        raise Failed(f"the Docker engine refuses: {reason}") from None


def _removed(thing: Any, options: dict[str, bool]) -> str | None:
    """Remove one object; returns its name and the reason if it could not be removed."""
    try:
        thing.remove(**options)
    except NotFound:
        return None
    except APIError as error:
        return f"{thing.name} ({_reason(error)})"
    return None


def _reason(error: Exception) -> str:
    said = error.explanation if isinstance(error, APIError) and error.explanation else error
    return " ".join(str(said).split())


def _archive(name: str, text: str) -> bytes:
    """A tar archive with one file that only the user of the images can read."""
    body = f"{text}\n".encode()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.uid, entry.gid = len(body), 0o600, USER, USER
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        tar.addfile(entry, io.BytesIO(body))
    return archive.getvalue()


def _free_port() -> int:
    """A free port. If the engine chose the port, it would change with each restart of the container."""
    with bind(LOOPBACK, 0) as listening:
        return int(listening.getsockname()[1])


def choose_gpus(asked: str, find: Callable[[], list[str]]) -> list[str]:
    """The GPUs to use. ``auto``: all that ``find`` returns; ``none``: no GPU; a number: that many of them.

    Raises:
        PromptfedError: there are fewer GPUs, or ``asked`` has another form.
    """
    if asked == "none":
        return []
    if asked != "auto" and not (asked.isdecimal() and int(asked) > 0):
        raise BadInput(f"--gpus {asked} is not known: use auto, none or a number")
    gpus = find()
    if asked == "auto":
        return gpus
    if int(asked) > len(gpus):
        text = f"--gpus {asked} asks for more GPUs than there are ({len(gpus)}): use auto, none or a smaller number"
        raise BadInput(text)
    return gpus[: int(asked)]


def gpus_of_torch() -> list[str]:
    """The GPUs by torch's device names: ``cuda:0`` and so on."""
    import torch

    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def gpus_of_engine() -> list[str]:
    """Ids with which a container can be given a GPU of this machine."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    try:
        answer = subprocess.run([tool, *QUERY], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return []  # the tool is installed without a driver
    return answer.stdout.split()
