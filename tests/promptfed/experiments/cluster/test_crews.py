"""Crews without Ray: threads that play their shares over HTTP against a real coordinator. Same spec, same state."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from promptfed.console.progress import Snapshot
from promptfed.experiments.cluster import crew
from promptfed.experiments.cluster.crew import Assignment, Share, work
from promptfed.experiments.cluster.run import Conductor, RayCrews, make_certificate
from promptfed.experiments.simulation.preparation import prepare
from promptfed.experiments.simulation.run_folder import RunFolder
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.result import FederationResult
from promptfed.shared.errors import PromptfedError
from promptfed.shared.metrics.outcomes import Outcomes
from tests.support.coordinators import InThread, in_thread
from tests.support.waiting import PATIENCE

DATA = "symbols:painting?topic=faces&per_class=4&test_per_class=2&partition=iid&clients=3&client={}"
SITES = tuple(Site(f"site-{number}", DATA.format(number)) for number in range(3))
SPEC: dict[str, Any] = {
    "name": "small",
    "method": {"name": "fedpgp"},  # has private state
    "backbone": {"model": "promptfed-tiny"},
    "rounds": 2,
    "training": {"learning_rate": 0.02, "batch_size": 4},
    "participation": {"min_clients": 2, "fraction": 0.6},
    "seed": 5,
}
KEY = "5e" * 32


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass
class Threads:
    """Crews in threads of this process."""

    kept: list[Outcomes] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)
    _failed: list[PromptfedError] = field(default_factory=list)

    def begin(self, assignments: Sequence[Assignment]) -> None:
        self.assignments = list(assignments)
        self._threads = [threading.Thread(target=self._work, args=(one,), daemon=True) for one in assignments]
        for thread in self._threads:
            thread.start()

    def _work(self, assignment: Assignment) -> None:
        try:
            self.kept += work(assignment)
        except PromptfedError as error:
            self._failed.append(error)

    def check(self) -> None:
        if self._failed:
            raise self._failed[0]

    def outcomes(self, seconds: float) -> list[Outcomes]:
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        self.check()
        return self.kept


class Local:
    """A coordinator in a thread, as `LocalFederation` shows one in a process."""

    def __init__(self, server: InThread, folder: Path):
        self.api = Coordinator(server.url, (folder / "operator.token").read_text().strip())

    def create(self, spec: operations.Spec, initial_state: bytes | None = None) -> str:
        return str(self.api.run(operations.create(spec, initial_state)).json["id"])

    def watch(self) -> list[str]:
        return []


def conducted(
    tmp_path: Path, sites: Sequence[Site], crews: int, threads: Threads | None = None, spec: dict[str, Any] = SPEC
) -> FederationResult:
    wanted, initial, _ = prepare(spec, sites, 1, None, allow_backbone=False)
    snapshots: list[Snapshot] = []
    with in_thread(tmp_path / "coordinator") as server:
        local: Any = Local(server, tmp_path / "coordinator")
        folder = RunFolder(tmp_path, KEY, lasting=True)
        conductor = Conductor(local, threads or Threads(), folder, None, snapshots.append)
        result = conductor.conduct(wanted, initial, tuple(sites), Share(crews, 1, "cpu", False))
    assert snapshots[-1].state == "finished"
    return result


def test_two_crews_come_to_the_state_of_a_simulation_in_one_process(tmp_path: Path) -> None:
    simulated = simulate(SPEC, SITES)
    threads = Threads()
    crewed = conducted(tmp_path, SITES, 2, threads)
    assert crewed.state_hash == simulated.state_hash
    assert crewed.body == simulated.body
    assert crewed.accuracies() == simulated.accuracies()
    assert crewed.outcomes == simulated.outcomes
    # An update tells how long it took, and is filled up to eight bytes.
    assert abs(crewed.bytes_up - simulated.bytes_up) <= 8 * len(SITES) * SPEC["rounds"]
    # Somebody who starts a crew of it again finds its clients' last answers, and that there is nothing left to do.
    again = conducted(tmp_path, SITES, 2, others := Threads())
    assert others.assignments == []
    assert again.state_hash == crewed.state_hash


def test_client_whose_data_cannot_be_opened_ends_run_with_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "PATIENCE_SECONDS", 0.5)  # of the other crew, which no Ray takes away
    sites = [*SITES[:2], Site("broken", f"folder:{tmp_path / 'nowhere'}")]
    with pytest.raises(PromptfedError, match=r"client broken: .*nowhere"):
        conducted(tmp_path, sites, 2)


def test_a_run_that_never_began_begins_anew(tmp_path: Path) -> None:
    """The command died while clients enrolled: their folders know a federation that is not begun by anybody."""

    @dataclass
    class Dying(Threads):
        def check(self) -> None:
            raise KeyboardInterrupt

        def begin(self, assignments: Sequence[Assignment]) -> None:
            (tmp_path / "clients" / "client-site-0").mkdir(parents=True)
            (tmp_path / "clients" / "client-site-0" / "identity.json").write_text("{}")

    with pytest.raises(KeyboardInterrupt):
        conducted(tmp_path, SITES, 1, Dying())
    result = conducted(tmp_path, SITES, 1, spec={**SPEC, "rounds": 1})
    assert {one.client for one in result.accuracies()} == {site.name for site in SITES}


def test_crews_that_had_nothing_to_do_have_ended() -> None:
    """Of a run that had finished before; Ray refuses to wait for nothing."""

    def refuse(*_: object, **__: object) -> None:
        raise ValueError("wait() expected a list of ray.ObjectRef")

    nothing: Any = SimpleNamespace(ray=SimpleNamespace(wait=refuse))
    crews = RayCrews(nothing, [], [])
    crews.check()
    assert crews.outcomes(1.0) == []


def test_another_machines_crews_talk_tls_to_a_coordinator_that_they_know(tmp_path: Path) -> None:
    certificate, key = make_certificate("127.0.0.1", tmp_path)
    assert key.stat().st_mode & 0o777 == 0o600
    stranger = tmp_path / "stranger"
    stranger.mkdir()
    options = {"tls_cert": certificate, "tls_key": key}
    with in_thread(tmp_path / "coordinator", **options) as server:
        url = server.url.replace("http://", "https://")
        known = ssl.create_default_context(cadata=certificate.read_text())
        assert httpx.get(f"{url}/healthz", verify=known, trust_env=False, timeout=PATIENCE).status_code == 200
        unknown = ssl.create_default_context(cafile=make_certificate("127.0.0.1", stranger)[0])
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(f"{url}/healthz", verify=unknown, trust_env=False, timeout=PATIENCE)


def test_a_secret_is_in_no_text_of_an_assignment(tmp_path: Path) -> None:
    threads = Threads()
    with pytest.raises(PromptfedError):
        conducted(tmp_path, [Site("broken", f"folder:{tmp_path / 'nowhere'}"), *SITES[:2]], 1, threads)
    [one] = threads.assignments
    assert KEY not in repr(one)
    assert one.enrolment_token not in repr(one)
