"""A federation on this machine, in processes: one coordinator and its clients, with new tokens."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from promptfed.runtime.processes import Processes
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import full_disk, write_private
from promptfed.shared.messages import Role

START_SECONDS = 300.0  # limit for a process that hangs; a process that ends is noticed at once
LEAST_ROOM = 64 << 10  # bytes without which no service can go on
ENROL_SECONDS = 300.0
ENROL_SECONDS_EACH = 20.0  # a client computes for seconds when it starts, and many start at once
POLL_SECONDS = 0.1
OPERATOR_FILE = "operator.token"
COORDINATOR_FOLDER = "coordinator"


@dataclass(frozen=True)
class Site:
    """One client: its name, its data URI, its role (trainer or evaluator) and further test sets by name.

    ``domain`` describes its images in words; None: the description of the data. ``floor``: its disclosure floor in a
    simulation; None: the usual one.
    """

    name: str
    data: str
    role: Role = "trainer"
    tests: Mapping[str, str] = field(default_factory=dict)
    domain: str | None = None
    floor: int | None = None

    def uris(self) -> list[tuple[str, Role]]:
        """The data URIs, each with the role for which the data are opened."""
        return [(self.data, self.role), *((uri, "trainer") for uri in self.tests.values())]


class Services(ABC):
    """A started coordinator at ``api``, and the clients that are started for it.

    ``permitted`` names backbones outside open_clip's registry that the data owners allow.
    """

    api: Coordinator
    permitted: Sequence[str] = ()
    operator_token: Path | None = None  # its path, if users can read it here

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.close()

    @abstractmethod
    def hand_out(self, token: str) -> None:
        """Write the enrolment token where clients read it."""

    @abstractmethod
    def start_client(self, federation: str, site: Site, gpu: str | None) -> None:
        """Start one client on the CPU or on the named GPU."""

    @abstractmethod
    def watch(self) -> list[str]:
        """Restart the services that died; returns their names. Raises ProcessFailed as `revive` does."""

    def create(self, spec: operations.Spec, initial_state: bytes | None = None) -> str:
        """Create a federation and return its id. ``initial_state`` is a safetensors body, made with a backbone."""
        return str(self.api.run(operations.create(spec, initial_state)).json["id"])

    def enrol(
        self, federation: str, sites: Sequence[Site], progress: Callable[[int], None], gpus: Sequence[str] = ()
    ) -> None:
        """Start the clients of ``sites`` and wait until all have enrolled; ``progress`` receives the number enrolled.

        ``gpus`` are assigned in turn; without GPUs clients compute on the CPU.

        Raises:
            CommandError: the clients did not enrol in time.
            ProcessFailed: a client ended.
        """
        self.hand_out(self.api.send(operations.mint_token(federation, len(sites))).view.token)
        for number, site in enumerate(sites):
            self.start_client(federation, site, gpus[number % len(gpus)] if gpus else None)
        seconds = ENROL_SECONDS + ENROL_SECONDS_EACH * len(sites)
        deadline = time.monotonic() + seconds
        while True:
            pages = self.api.run(operations.list_clients(federation))
            enrolled = sum(len(page.json["clients"]) for page in pages)
            progress(enrolled)
            if enrolled == len(sites):
                return
            if time.monotonic() > deadline:
                text = f"only {enrolled} of {len(sites)} clients enrolled in {seconds:.0f} s: look at the logs"
                raise CommandError(f"{text} with --keep FOLDER", Exit.FAILED)
            self.watch()
            time.sleep(POLL_SECONDS)


class LocalFederation(Services):
    """Processes under ``folder``, started through ``processes``; ``port`` is the coordinator's port (0: any free port).

    ``options`` are further options of the coordinator, such as ``--host`` with a certificate.
    """

    def __init__(self, processes: Processes, folder: Path, port: int = 0, options: Sequence[str] = ()):
        self.processes = processes
        self.folder = folder
        self.api = self._start_coordinator(port, options)
        self.operator_token = folder / COORDINATOR_FOLDER / OPERATOR_FILE

    def hand_out(self, token: str) -> None:
        """Write the token beside the clients' folders."""
        write_private(self._token_file, token)

    def start_client(self, federation: str, site: Site, gpu: str | None) -> None:
        """Start a client's process; ``gpu`` is a torch device, such as ``cuda:1``."""
        options = {
            "coordinator": self.api.url,
            "federation": federation,
            "enrolment-token-file": str(self._token_file),
            "state-dir": str(self.folder / f"client-{site.name}"),
            "ledger": str(self.folder / "ledgers" / f"{site.name}.jsonl"),  # never the user's own folder
            "device": gpu or "cpu",
        }
        arguments = [f"--{key}={value}" for key, value in options.items()]
        arguments += client_options(site, self.permitted)
        self.processes.start(f"client-{site.name}", ["-m", "promptfed.client_service", *arguments])

    def watch(self) -> list[str]:
        """Restart those of ``processes`` that died. Raises CommandError where the disk is full: they would wait."""
        if shutil.disk_usage(self.folder).free < LEAST_ROOM:
            raise full_disk(self.folder)
        return self.processes.watch()

    @property
    def _token_file(self) -> Path:
        return self.folder / "enrolment.token"

    def _start_coordinator(self, port: int, options: Sequence[str]) -> Coordinator:
        data_dir, port_file = self.folder / COORDINATOR_FOLDER, self.folder / "coordinator.url"
        # Its own database, even if the environment names the database of another coordinator.
        arguments = ["-m", "promptfed.coordinator", f"--data-dir={data_dir}", "--database-url=", "--host=127.0.0.1"]
        port_file.unlink(missing_ok=True)  # left by an earlier process in the same folder
        arguments += [f"--port={port}", f"--port-file={port_file}", *options]
        managed = self.processes.start("coordinator", arguments)
        deadline = time.monotonic() + START_SECONDS
        while not port_file.exists():
            if time.monotonic() > deadline:
                raise CommandError(f"the coordinator did not start in {START_SECONDS:.0f} s", Exit.FAILED)
            self.processes.watch()
            time.sleep(POLL_SECONDS)
        url = port_file.read_text().strip()
        # After a restart the coordinator must have the address that the clients know.
        port = int(url.rsplit(":", 1)[1])
        managed.command = [f"--port={port}" if part == "--port=0" else part for part in managed.command]
        token = (data_dir / OPERATOR_FILE).read_text().strip()
        return Coordinator(url, token, meanwhile=self.processes.watch)


def client_options(site: Site, permitted: Sequence[str]) -> list[str]:
    """The client options for its identity and its permissions."""
    tests = [f"--test={name}={uri}" for name, uri in site.tests.items()]
    backbones = [f"--allow-backbone={name}" for name in permitted]
    words = [f"--domain={site.domain}"] if site.domain is not None else []
    return [f"--name={site.name}", f"--role={site.role}", f"--data={site.data}", *words, *tests, *backbones]
