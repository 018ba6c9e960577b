"""Kill -9 on real processes at every named instant of a secure sum: the undisturbed state, and one reveal a client.

A client or the coordinator dies at its first or second arrival at the point and is started again; on PostgreSQL too.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.privacy.ledger import Ledger
from promptfed.console.progress import follow
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import LocalFederation, Managed, Processes, Site
from promptfed.sdk import operations
from promptfed.shared.privacy.accounting import epsilon_of
from promptfed.shared.service.fault_points import VARIABLE
from tests.support.fault_points import SECURE_POINTS

#: The points of secure sums at a client, in their order.
CLIENT_POINTS = (
    "secure-work-written", "keys-written", "keys-sent", "share-written", "share-sent", "mask-written", "mask-sent",
    "confirm-written", "confirm-sent", "reveal-marked", "unmask-written", "unmask-sent",
)  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=3&client={}"
SITES = [Site(name, DATA.format(k)) for k, name in enumerate(("north", "south", "east"))]
SPEC: dict[str, Any] = {
    "name": "summed", "method": {"name": "promptfl", "m": 2}, "backbone": {"model": "promptfed-tiny"}, "rounds": 2,
    "training": {"learning_rate": 0.02, "batch_size": 4}, "participation": {"min_clients": 3},
    "secure_aggregation": {"threshold": 1.0}, "seed": 7,
}  # fmt: skip


class Armed(Processes):
    """Processes of which one dies once at its fault point."""

    victim, fault = "", ""
    deaths = 0

    def start(self, name: str, arguments: list[str]) -> Managed:
        common = self.environment
        self.environment = common | ({VARIABLE: self.fault} if name == self.victim else {})
        try:
            return super().start(name, arguments)
        finally:
            self.environment = common

    def watch(self) -> list[str]:
        victim = self.running.get(self.victim)
        if victim is not None and victim.ended() is not None and VARIABLE in victim.environment:
            assert victim.ended() == -signal.SIGKILL, victim.tail(5)
            self.deaths += 1
            del victim.environment[VARIABLE]
        return super().watch()


@pytest.fixture(scope="module")
def undisturbed() -> str:
    torch.set_num_threads(1)
    return str(simulate(SPEC, SITES).state_hash)


@pytest.fixture
def armed(tmp_path: Path) -> Iterator[Armed]:
    with Armed(tmp_path, environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}) as processes:
        yield processes


def run(armed: Armed, folder: Path, options: list[str]) -> str:
    """The state's hash in which the federation ends."""
    with LocalFederation(armed, folder, options=options) as local:
        federation = local.create(SPEC)
        local.enrol(federation, SITES, lambda count: None)
        local.api.send(operations.steer(federation, "start"))
        for last in follow(local.api, federation, between=local.watch):
            assert last.state in ("enrolling", "running", "finished"), last.describe()
        return str(local.api.run(operations.accuracies(federation)).federation.state_hash)


@pytest.mark.parametrize("point", CLIENT_POINTS)
def test_a_client_dies(point: str, armed: Armed, undisturbed: str, tmp_path: Path) -> None:
    armed.victim, armed.fault = "client-south", f"{point}:1"
    assert run(armed, tmp_path, []) == undisturbed
    assert armed.deaths == 1


@pytest.mark.parametrize("database", [None, "postgresql"])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("point", SECURE_POINTS)
def test_the_coordinator_dies(
    point: str,
    count: int,
    database: str | None,
    armed: Armed,
    undisturbed: str,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    often = {"sum-computed": 2, "exchanges-deleted": 2}.get(point, count)  # once a round
    armed.victim, armed.fault = "coordinator", f"{point}:{min(count, often)}"
    options = [f"--database-url={request.getfixturevalue('postgres').schema()}"] if database else []
    assert run(armed, tmp_path, options) == undisturbed
    assert armed.deaths == 1


# Together with differential privacy

PAID = {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0, "delta": 1e-3}
PAYING_POINTS = (
    "secure-work-written", "mask-written", "spend-locked", "spend-half-written", "spend-written", "mask-sent",
)  # fmt: skip


@pytest.fixture
def paying(tmp_path: Path) -> Iterator[Armed]:
    with Armed(tmp_path, environment={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}) as processes:
        yield processes


def paid_for(processes: Armed, folder: Path) -> None:
    """Run it; each client has paid for each round once, as the coordinator is told."""
    with LocalFederation(processes, folder) as local:
        federation = local.create(SPEC | {"privacy": PAID})
        local.enrol(federation, SITES, lambda count: None)
        local.api.send(operations.steer(federation, "start"))
        for last in follow(local.api, federation, between=local.watch):
            assert last.state in ("enrolling", "running", "finished"), last.describe()
        reports = local.api.run(operations.accuracies(federation)).reports
    told = [report["phases"][-1]["secure"]["privacy"] for report in reports[1:]]
    for site in SITES:
        spends = Ledger(folder / "ledgers" / f"{site.name}.jsonl").spends()
        assert [one.round for one in spends] == [1, 2], "one spend a round, whatever was done again"
        assert len({one.release for one in spends}) == 2
        events = [event for one in spends for event in one.events]
        assert spends[-1].epsilon == epsilon_of(events, 1e-3)
        ours = [one.epsilon for one in spends]
        assert [report[site.name]["ledger_epsilon"] for report in told] == ours
        assert [report[site.name]["epsilon"] for report in told] == pytest.approx(ours, rel=1e-3), (
            "of its own accounting"
        )
    assert [report["phases"][-1]["secure"]["sum_clients"] for report in reports[1:]] == [3, 3]
    assert processes.deaths == 1


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("point", PAYING_POINTS)
def test_a_client_that_pays_dies(point: str, count: int, paying: Armed, tmp_path: Path) -> None:
    paying.victim, paying.fault = "client-south", f"{point}:{count}"
    paid_for(paying, tmp_path)


@pytest.mark.parametrize("fault", ["exchange-before-commit:8", "exchange-committed:8", "sum-computed:1"])
def test_the_coordinator_of_those_who_pay_dies(fault: str, paying: Armed, tmp_path: Path) -> None:
    paying.victim, paying.fault = "coordinator", fault
    paid_for(paying, tmp_path)
