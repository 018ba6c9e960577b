"""Payloads as differences to the last one: in memory and in files, after a cut line and from a lying coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from promptfed.client_service.http import transfers
from promptfed.client_service.http.coordinator_client import CoordinatorClient
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.shared.clip import FeatureCache, load_backbone, tiny
from promptfed.shared.messages import Task
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import SHAPE, ScriptedClient, secret_of, update_body
from tests.support.coordinators import InThread, in_thread
from tests.support.relay import Cut, Relay

M, WIDE = 64, {**SHAPE, "d_t": 4096}  # a state of a megabyte


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("coordinator") / "data") as server:
        yield server


def rounds_of(coordinator: InThread, name: str) -> Iterator[tuple[ScriptedClient, dict[str, Any], bytes]]:
    """A client, its training task of each round, and the payload."""
    federation = coordinator.create(
        name=name,
        method={"name": "promptfl", "m": M},
        rounds=3,
        compression={"down": "delta"},
        evaluation={"every": 3},
    )
    a, b = coordinator.enrol(federation, f"{name}-a", f"{name}-b", backbone_shape=WIDE)
    coordinator.post(f"{federation}/start")
    task, other = coordinator.training([a, b])
    for round in (1, 2):
        yield a, task, a.http.get(task["payload"]["url"], headers=a.headers).content
        for client, its in ((a, task), (b, other)):
            made = {key: one * 1.001 for key, one in client.payload(its).items()}
            assert client.send(its, update_body(made, its)).status_code == 201
        coordinator.until(federation, round=round + 1)
        task, other = coordinator.task(a), coordinator.task(b)
    yield a, task, a.http.get(task["payload"]["url"], headers=a.headers).content


@pytest.mark.parametrize("in_files", [True, False])
def test_the_next_payload_is_made_from_the_last_one(
    coordinator: InThread, in_files: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "IN_FILES", 1 if in_files else 1 << 40)
    told: list[int] = []

    def kept() -> int:
        return len(list(tmp_path.iterdir()))

    async def run(line: Relay) -> None:
        async with httpx.AsyncClient(trust_env=False) as http:
            given: CoordinatorClient | None = None
            for client, task, whole in rounds_of(coordinator, f"last-{in_files}"):
                if given is None:
                    given = CoordinatorClient(http, line.url, client.federation, 5.0, secret_of(client.name))
                before = line.down
                for _ in range(2):  # the second time nothing is fetched
                    place = await given.payload(Task.model_validate(task), tmp_path)
                told.append(line.down - before)
                assert (place.read_bytes() if isinstance(place, Path) else place) == whole
                assert isinstance(place, Path) is in_files
                assert kept() == in_files, "the last one alone is kept"

    with Relay(coordinator.url, []) as line:
        asyncio.run(run(line))
    size = M * WIDE["d_t"] * 4
    assert size < told[0] < 1.1 * size
    assert all(0 < bytes_down < 0.7 * size for bytes_down in told[1:])


@pytest.mark.parametrize("in_files", [True, False])
@pytest.mark.parametrize("fault", ["cut", "changed", "another base", "longer"])
def test_what_is_no_whole_difference_is_replaced_by_the_payload(
    coordinator: InThread, in_files: bool, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfers, "IN_FILES", 1 if in_files else 1 << 40)

    async def run() -> None:
        rounds = rounds_of(coordinator, f"{fault.replace(' ', '-')}-{in_files}")
        client, task, _ = next(rounds)
        with Relay(coordinator.url, []) as line:
            async with httpx.AsyncClient(trust_env=False) as http:
                given = CoordinatorClient(http, line.url, client.federation, 5.0, secret_of(client.name))
                first = await given.payload(Task.model_validate(task), tmp_path)
                _, task, whole = next(rounds)
                if fault == "changed":
                    broken = bytes(M * WIDE["d_t"] * 4)
                    place: Any = broken
                    if isinstance(first, Path):
                        first.write_bytes(broken)
                        place = first
                    given._last = transfers.Fetched(given._last.digest, place)
                elif fault == "another base":
                    given._last = transfers.Fetched("sha256:" + "0" * 64, first)
                elif fault == "longer":
                    monkeypatch.setattr(coordinator.registry.deltas, "between", lambda *pair: bytes(len(whole) + 1))
                else:
                    line.cuts.append(Cut(down=100_000))
                place = await given.payload(Task.model_validate(task), tmp_path)
                assert (place.read_bytes() if isinstance(place, Path) else place) == whole
                assert line.cuts == []

    asyncio.run(run())


@pytest.mark.extended
@pytest.mark.parametrize("method", ["promptfl", "pfedpg"])
def test_a_federation_has_the_same_bits_with_differences(method: str, tmp_path: Path) -> None:
    """Also with payloads of each client's own; rounded ones give another state, which is near."""
    backbone, features = load_backbone(tiny.MODEL, tiny.PRETRAINED), FeatureCache(tmp_path / "features")
    data = "symbols:{}?topic=weather&per_class=4&test_per_class=2"
    sites = [Site(style, data.format(style)) for style in ("painting", "neon", "chalk")]
    results = {}
    for down in ("none", "delta", "bf16"):
        if (method, down) == ("pfedpg", "bf16"):
            continue
        spec = {"name": "down", "method": {"name": method, "m": 4}, "rounds": 4, "compression": {"down": down}}
        results[down] = simulate(spec | {"seed": 5}, sites, backbone=backbone, features=features)
    assert results["delta"].state_hash == results["none"].state_hash
    down = {name: sum(report["bytes_down"] for report in one.reports) for name, one in results.items()}
    assert down["delta"] < 0.95 * down["none"], "and an evaluation's payload is the next round's"
    if method == "promptfl":
        assert results["bf16"].state_hash != results["none"].state_hash
        assert down["bf16"] < 0.6 * down["none"]
        [plain], [near] = (decode(results[name].body)[0].values() for name in ("none", "bf16"))
        assert 0 < float((plain - near).abs().max()) < 0.1 * float(plain.abs().max())
