"""One process or many: the same spec comes to the same state, bit for bit, and to the same accuracies (promise 4).

The processes are the real ones: a coordinator and a client for each site, over HTTP on loopback.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from promptfed.console.progress import follow
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import LocalFederation, Processes, Site
from promptfed.sdk import operations
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone

DATA = "symbols:{}?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=2&client={}"
SITES = [
    Site("north", DATA.format("painting", 0), tests={"sketches": "symbols:sketch?topic=office&test_per_class=1"}),
    Site("south", DATA.format("painting", 1)),
    Site("east", DATA.format("neon", 0)),
    Site("referee", DATA.format("cartoon", 0), role="evaluator"),
]

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalFederation]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with Processes(tmp_path, environment=threads) as processes, LocalFederation(processes, tmp_path) as made:
        yield made


def spec(method: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": method.replace("_", "-"), "method": {"name": method} | changes, "rounds": 2,
        "training": {"learning_rate": 0.02, "batch_size": 4}, "backbone": {"model": "promptfed-tiny"},
        "participation": {"min_clients": 2, "fraction": 0.5, "draw": "public"},
        "aggregation": {"max_weight_share": 1.0}, "seed": 5,
    }  # fmt: skip


def in_processes(
    local: LocalFederation, spec: dict[str, Any], sites: list[Site], trouble: Callable[[], object] = lambda: None
) -> FederationResult:
    """Run the spec with a process for each site; ``trouble`` comes again and again while it runs."""

    def watch() -> None:
        trouble()
        local.watch()

    federation = local.create(spec)
    local.enrol(federation, sites, lambda count: None)
    local.api.send(operations.steer(federation, "start"))
    for last in follow(local.api, federation, between=watch):
        assert last.state in ("enrolling", "running", "finished"), last.describe()
    return local.api.run(operations.accuracies(federation))


def measured(reports: list[dict[str, Any]]) -> list[Any]:
    """What must agree besides the states: who was asked, losses, accuracies, bytes."""
    found: list[Any] = []
    for report in reports:
        for phase in report["phases"]:
            losses = {one["client"]: one["metrics"].get("loss") for one in phase["updates"]}
            found.append((report["round"], phase["phase"], phase["asked"], losses, phase["state_hash"]))
        clients = report["evaluation"]["clients"]
        found.append({name: (one["splits"], one["zero_shot"]) for name, one in clients.items()})
    return found


def assert_same(simulated: FederationResult, real: FederationResult) -> None:
    assert simulated.federation.state == real.federation.state == "finished"
    assert measured(simulated.reports) == measured(real.reports)
    assert simulated.state_hash == real.federation.state_hash
    assert simulated.bytes_down == sum(report["bytes_down"] for report in real.reports)


@pytest.mark.parametrize(
    ("method", "changes", "sites"),
    [
        ("plan", {}, SITES[:2]),  # two phases, deep prompts
        pytest.param("promptfl", {"m": 4}, SITES, marks=pytest.mark.slow),
        pytest.param("fedpgp", {}, SITES, marks=pytest.mark.slow),  # private state
        pytest.param("pfedmoap", {}, SITES, marks=pytest.mark.slow),  # rows, gates, payloads of their own
        pytest.param("promptfl_amp", {}, SITES, marks=pytest.mark.slow),
        pytest.param("pfedprompt", {}, SITES, marks=pytest.mark.slow),
        pytest.param("fedotp", {}, SITES, marks=pytest.mark.slow),  # private state, patch features
        pytest.param("promptfolio", {}, SITES, marks=pytest.mark.slow),
        pytest.param("promptfl_per", {}, SITES, marks=pytest.mark.slow),
        pytest.param("fast_pt", {"merge_domains": True}, SITES, marks=pytest.mark.slow),  # is told its peers' domains
    ],
)
def test_the_states_are_the_same(
    method: str, changes: dict[str, Any], sites: list[Site], backbone: Backbone, local: LocalFederation
) -> None:
    wanted = spec(method, **changes)
    simulated = simulate(wanted, sites, backbone=backbone, pool=2)
    assert_same(simulated, in_processes(local, wanted, sites))


@pytest.mark.slow
@pytest.mark.parametrize("killed", [None, "client-south", "coordinator"])
def test_a_sum_that_nobody_sees_is_the_same(
    killed: str | None, backbone: Backbone, local: LocalFederation, tmp_path: Path
) -> None:
    wanted = spec("promptfl", m=4) | {"participation": {"min_clients": 3}, "secure_aggregation": {"threshold": 1.0}}
    seen = []

    def kill_once() -> None:
        log = (tmp_path / "client-south.log").read_text() if killed else ""
        if "train: loss" in log and not seen:
            seen.append(local.processes.running[killed or ""].process)
            seen[0].kill()

    real = in_processes(local, wanted, SITES, kill_once)
    simulated = simulate(wanted, SITES, backbone=backbone, pool=2)
    assert [process.returncode for process in seen] == ([-9] if killed else [])
    assert simulated.state_hash == real.federation.state_hash
    sums = [phase["secure"] for report in real.reports for phase in report["phases"]]
    assert len(sums) == wanted["rounds"]
    assert all(sums)
