"""A federation with a coordinator process beside the command, and clients played by crews on a Ray cluster.

The result is that of `experiments.simulation.simulation.simulate` with the same spec and clients. On one kind of CPU
the state is the same, bit for bit, for any number of crews.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from promptfed.console.progress import follow
from promptfed.experiments.cluster import connection
from promptfed.experiments.cluster.crew import Assignment, Share, shares, work
from promptfed.experiments.simulation.preparation import prepare
from promptfed.experiments.simulation.run_folder import RunFolder, identity, run_folder
from promptfed.experiments.simulation.simulation import ProgressCallback, ended_badly, expect_all_evaluated, last_rounds
from promptfed.runtime.processes import LocalFederation, Processes, Site
from promptfed.sdk import operations
from promptfed.sdk.client import CA_VARIABLE
from promptfed.sdk.result import FederationResult
from promptfed.shared.errors import BadInput, Failed
from promptfed.shared.files import write_whole
from promptfed.shared.messages import ENDED
from promptfed.shared.methods.core.spec_backbone import BACKBONE_FILE
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.spec.spec import AllowedBackbones, FederationSpec

DAYS = 365
MAX_RESTARTS = 100  # of one crew
START_SECONDS = 300.0  # until all crews must have started
END_SECONDS = 120.0  # until all crews must have ended after their federation
POLL_SECONDS = 0.2
CREW = "a crew ended for good"
PACKAGES = ("promptfed", "torch")  # whose versions must be the same everywhere: bits depend on them


def make_certificate(address: str, folder: Path) -> tuple[Path, Path]:
    """New PEM files in ``folder``: a self-signed certificate for the IP ``address``, and its key.

    Only the owner can read the key.
    """
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "coordinator of a promptfed run")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))  # clocks of a cluster may differ
        .not_valid_after(now + timedelta(days=DAYS))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    certificate_file, key_file = folder / "coordinator.pem", folder / "coordinator.key"
    write_whole(certificate_file, made.public_bytes(Encoding.PEM), synced=False)
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_whole(key_file, private, mode=0o600, synced=False)
    return certificate_file, key_file


@dataclass(frozen=True)
class OnRay:
    """``crews`` on the cluster at ``address`` (None: start Ray here), each with ``gpus_per_crew`` GPUs.

    ``storage`` is a permanent folder that all machines see.
    """

    crews: int = 1
    address: str | None = None
    gpus_per_crew: float = 0.0
    storage: Path | None = None


class Crews(Protocol):
    """The interface to running crews."""

    def begin(self, assignments: Sequence[Assignment]) -> None:
        """Give each crew its assignment."""

    def check(self) -> None:
        """Raise PromptfedError if a crew has failed."""

    def outcomes(self, seconds: float) -> list[Outcomes]:
        """The outcomes of all crews after their end. Raises PromptfedError if that takes longer than ``seconds``."""


class CrewActor:
    """A crew as a Ray actor. If it dies, Ray restarts it with the same assignment."""

    def about(self) -> dict[str, str]:
        """The versions of the packages in its process."""
        return versions()

    def work(self, assignment: Assignment) -> list[Outcomes] | connection.RemoteFailure:
        """As `promptfed.experiments.cluster.crew.work`."""
        return connection.caught(lambda: work(assignment))


def versions() -> dict[str, str]:
    """The versions of the packages in this process."""
    return {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}


def simulate_on_ray(
    spec: FederationSpec | dict[str, object],
    sites: Sequence[Site],
    on: OnRay,
    *,
    pool: int = 1,
    device: str = "cpu",
    allow_backbone: AllowedBackbones = False,
    progress: ProgressCallback | None = None,
    new_data: bool = False,
) -> FederationResult:
    """Run a federation to its end; ``pool`` clients of each crew compute at once, on ``device``.

    Raises:
        PromptfedError: one line: as `simulate`; or Ray is not installed, not reachable or too small, a crew failed, or
            not all crews see the folder.
    """
    started = time.monotonic()
    _check(on, len(sites), device)
    resolved, initial, _ = prepare(spec, sites, pool, None, allow_backbone)
    threads = resolved.training.threads
    kept = run_folder(on.storage, identity(resolved, sites), new_data=new_data)
    with kept as folder, connection.connected(on.address) as cluster:
        connection.expect_room(cluster.nodes(), on.crews, threads * pool, on.gpus_per_crew)
        nodes = cluster.nodes()
        if on.storage is None and len(nodes) > 1:
            text = f"the Ray cluster has {len(nodes)} nodes, and what clients keep must be there for all of them"
            raise BadInput(f"{text}: give --storage FOLDER, one that all nodes see")
        with _crews(cluster, on, threads * pool) as crews, _coordinator(folder, cluster.here) as (local, authority):
            conductor = Conductor(local, crews, folder, authority, progress or (lambda snapshot: None))
            share = Share(on.crews, pool, "cuda" if on.gpus_per_crew else device, allow_backbone)
            result = conductor.conduct(resolved, initial, tuple(sites), share)
    return replace(result, setup_seconds=time.monotonic() - started - result.wall_seconds)


def _check(on: OnRay, clients: int, device: str) -> None:
    """Raise PromptfedError if the crews cannot be started as asked."""
    if not 1 <= on.crews <= clients:
        text = f"{on.crews} crews cannot share {clients} clients: give --crews from 1 to {clients}"
        raise BadInput(text)
    if on.gpus_per_crew > 1 and on.gpus_per_crew != int(on.gpus_per_crew):
        text = f"--gpus-per-crew {on.gpus_per_crew:g}: Ray gives shares of one GPU, or whole ones: give 0.5 or 2"
        raise BadInput(text)
    if device.startswith("cuda") and not on.gpus_per_crew:
        text = "Ray shows a crew no GPU that it has not asked for: give --gpus-per-crew, 0.25 for four crews on one"
        raise BadInput(f"--device {device}: {text}")


@contextmanager
def _coordinator(folder: RunFolder, address: str) -> Iterator[tuple[LocalFederation, str | None]]:
    """A coordinator process on this machine, and the PEM of its certificate if other machines must reach it."""
    options, authority = [], None
    before = os.environ.get(CA_VARIABLE)
    if address != connection.LOOPBACK:
        certificate, key = make_certificate(address, folder.path)
        authority = certificate.read_text()
        options = [f"--host={address}", f"--tls-cert={certificate}", f"--tls-key={key}"]
        os.environ[CA_VARIABLE] = str(certificate)
    try:
        with Processes(folder.path) as processes, LocalFederation(processes, folder.path, options=options) as local:
            yield local, authority
    finally:
        if before is None:
            os.environ.pop(CA_VARIABLE, None)
        else:
            os.environ[CA_VARIABLE] = before


@contextmanager
def _crews(cluster: connection.Cluster, on: OnRay, cpus: float) -> Iterator[RayCrews]:
    """Start the actors, which end with the block."""
    ray = cluster.ray
    actor = ray.remote(CrewActor).options(
        num_cpus=cpus,
        num_gpus=on.gpus_per_crew,
        max_restarts=MAX_RESTARTS,
        max_task_retries=-1,
        scheduling_strategy="SPREAD",
    )
    handles = [actor.remote() for _ in range(on.crews)]
    try:
        yield RayCrews(cluster, handles, [handle.about.remote() for handle in handles])
    finally:
        for handle in handles:
            ray.kill(handle)


@dataclass
class RayCrews:
    """Crews as Ray actors."""

    cluster: connection.Cluster
    handles: list[Any]
    abouts: list[Any]
    _working: list[Any] | None = None

    def begin(self, assignments: Sequence[Assignment]) -> None:
        """Wait until all crews have started, and give them their work.

        Raises:
            PromptfedError: a crew does not start in time, or has other versions than this command.
        """
        ray = self.cluster.ray
        ready, missing = ray.wait(self.abouts, num_returns=len(self.abouts), timeout=START_SECONDS)
        for about in ready:
            expect_same(connection.result_of(ray, about, CREW), versions())
        if missing:
            text = f"{len(missing)} of {len(self.abouts)} crews have not started in {START_SECONDS:.0f} s"
            raise Failed(f"{text}: the cluster has {self.cluster.free()} free")
        pairs = zip(self.handles, assignments, strict=True)
        self._working = [handle.work.remote(assignment) for handle, assignment in pairs]

    def check(self) -> None:
        """Raise PromptfedError if a crew has failed."""
        for reference in self._ended(0)[0]:
            connection.result_of(self.cluster.ray, reference, CREW)

    def outcomes(self, seconds: float) -> list[Outcomes]:
        """The outcomes of all crews after their end."""
        done, missing = self._ended(seconds)
        if missing:
            text = f"{len(missing)} crews go on {seconds:.0f} s after their federation has ended"
            raise Failed(text)
        return [outcomes for reference in done for outcomes in connection.result_of(self.cluster.ray, reference, CREW)]

    def _ended(self, seconds: float) -> tuple[list[Any], list[Any]]:
        """The crews that end within so many seconds, and the others; both empty if no work was left to do."""
        if not self._working:
            return [], []
        done, others = self.cluster.ray.wait(self._working, num_returns=len(self._working), timeout=seconds)
        return done, others


def expect_same(theirs: dict[str, str], ours: dict[str, str]) -> None:
    """Raise PromptfedError if a node has other versions than this command."""
    differing = [
        f"{name} {theirs.get(name)} instead of {ours[name]}" for name in ours if theirs.get(name) != ours[name]
    ]
    if differing:
        text = f"a node of the Ray cluster has {', '.join(differing)}: install the same on all of them"
        raise BadInput(text)


@dataclass
class Conductor:
    """Runs a federation from its creation, or from where an earlier command ended, to its result."""

    local: LocalFederation
    crews: Crews
    folder: RunFolder
    authority: str | None
    progress: ProgressCallback

    def conduct(
        self, spec: FederationSpec, initial: bytes | None, sites: tuple[Site, ...], share: Share
    ) -> FederationResult:
        """Create or continue the federation, and return its result.

        Raises:
            PromptfedError: a crew failed, or the federation did not finish.
            ProcessFailed: the coordinator ended for good.
        """
        api = self.local.api
        federation = self._federation(spec, initial)
        state = api.send(operations.get_federation(federation)).view.state
        if state not in ENDED:
            self.crews.begin(self._assignments(federation, spec, sites, share))
        if state == "enrolling":
            self._until_enrolled(federation, len(sites))
            api.send(operations.steer(federation, "start"))
        elif state == "paused":  # those who failed may have been mended, with more memory for one
            api.send(operations.steer(federation, "resume"))
        begun = time.monotonic()
        self._follow(federation)
        ended = time.monotonic()
        result = api.run(operations.take(federation))
        expect_all_evaluated(result.reports)
        outcomes = sorted(self.crews.outcomes(END_SECONDS), key=lambda kept: (kept.client, kept.split))
        return replace(result, wall_seconds=ended - begun, outcomes=tuple(outcomes))

    def _federation(self, spec: FederationSpec, initial: bytes | None) -> str:
        """The id of the coordinator's federation, or of a new one if there is none or it has never started."""
        api = self.local.api
        earlier = [
            federation for page in api.run(operations.list_federations()) for federation in page.view.federations
        ]
        for federation in earlier:
            if federation.state != "enrolling":
                return federation.id
            api.send(operations.delete_federation(federation.id))
            self.folder.forget_clients()
        return self.local.create(spec, initial)

    def _assignments(
        self, federation: str, spec: FederationSpec, sites: tuple[Site, ...], share: Share
    ) -> list[Assignment]:
        api = self.local.api
        # Twice as many uses as clients: a crew that dies between two steps of an enrolment takes both again.
        token = api.send(operations.mint_token(federation, 2 * len(sites))).view.token
        return [
            Assignment(
                spec, own, federation, api.url, self.authority, token, self.folder, share, os.environ.get(BACKBONE_FILE)
            )
            for own in shares(sites, share.crews)
        ]

    def _until_enrolled(self, federation: str, count: int) -> None:
        while True:
            clients = self.local.api.send(operations.get_federation(federation)).view.clients
            if clients.trainers + clients.evaluators == count:
                return
            self._look()
            time.sleep(POLL_SECONDS)

    def _follow(self, federation: str) -> None:
        for snapshot in follow(self.local.api, federation, between=self._look, poll=POLL_SECONDS):
            self.progress(snapshot)
        if snapshot.state != "finished":
            raise ended_badly(snapshot, self.local.api.send(last_rounds(federation, snapshot)).view.rounds)

    def _look(self) -> None:
        self.local.watch()
        self.crews.check()
