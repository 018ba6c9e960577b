"""A run computed again from its kept updates: to the same hashes; and phases as they would have been."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.store.tables import StateRow, TaskRow
from promptfed.shared.methods import METHODS
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash
from promptfed.testing.clients import ScriptedClient, drive, update_body
from tests.support import literal_rules as literal
from tests.support.coordinators import InThread, in_thread
from tests.support.two_phase import TwoPhase
from tests.support.waiting import PATIENCE


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.fixture(autouse=True)
def two_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "two_phase", TwoPhase)


def again(coordinator: InThread, federation: str, round: int, status: int = 200, **asked: Any) -> Any:
    return coordinator.post(f"{federation}/rounds/{round}/replay", asked, status=status)


def finished(coordinator: InThread, method: str, **changes: Any) -> str:
    """A federation of three rounds with a newcomer for the third, from which another client is withdrawn."""
    federation = coordinator.create(method={"name": method}, rounds=3, participation={"quorum": 0.5}, **changes)
    clients = [coordinator.enrol(federation, name, num_samples=n)[0] for name, n in (("b", 10), ("d", 30), ("a", 20))]
    coordinator.post(f"{federation}/start")
    play(coordinator, federation, clients, until=1)
    clients += coordinator.enrol(federation, "c", num_samples=40)
    play(coordinator, federation, clients, until=2)
    coordinator.delete(f"{federation}/clients/b")
    drive([client for client in clients if client.name != "b"])
    assert coordinator.get(federation)["state"] == "finished"
    return federation


def play(coordinator: InThread, federation: str, clients: list[ScriptedClient], until: int) -> None:
    while coordinator.get(federation)["round"] <= until:
        for client in clients:
            client.work()
        time.sleep(0.005)


@pytest.mark.both_databases
def test_a_whole_run_comes_to_the_same_hashes(coordinator: InThread) -> None:
    federation = finished(coordinator, "two_phase")
    reports = {one["round"]: one for one in coordinator.get(f"{federation}/rounds")["rounds"]}
    origins = []
    for round in range(4):
        found = again(coordinator, federation, round)
        assert found["note"] is None
        for state in found["states"]:
            assert (state["same"], state["replayed_hash"], state["distance"]) == (True, state["state_hash"], 0)
            origins.append(state["origin"])
        phases = [one for one in found["states"] if one["updates"]]
        assert [one["state_hash"] for one in phases] == [one["state_hash"] for one in reports[round]["phases"]]
        for state, phase in zip(phases, reports[round]["phases"], strict=True):
            counted = {one["client"]: one["weight"] for one in phase["counted"]}
            assert {one["client"]: one["weight"] for one in state["updates"]} == counted
        if found["states"]:
            assert found["states"][-1]["state_hash"] == reports[round]["state_hash"]
    once = ["prompts", "aggregators"]
    assert origins == ["initial", *once, *once, "join", *once]


def test_a_supplied_state_and_robust_rules_are_computed_again_too(coordinator: InThread) -> None:
    federation = coordinator.create(
        rounds=2, participation={"min_clients": 5}, aggregation={"rule": "multi_krum", "clip_norm": "median"}
    )
    body = encode({"context": torch.full((4, 8), 0.25)})
    url = f"/v1/federations/{federation}/initial-state"
    assert coordinator.http.put(url, content=body, headers=coordinator.operator).status_code == 200
    clients = coordinator.enrol(federation, *"abcde")
    coordinator.post(f"{federation}/start")
    drive(clients)
    for round in range(3):
        found = again(coordinator, federation, round)
        assert [one["same"] for one in found["states"]] == [True]
    report = coordinator.get(f"{federation}/rounds/2")["phases"][0]["updates"]
    keys = ("client", "weight", "verdict", "influence", "distance")
    assert [{key: one[key] for key in keys} for one in found["states"][0]["updates"]] == [
        {key: one[key] for key in keys} for one in report
    ]


def state_of(coordinator: InThread, federation: str, round: int) -> Tensors:
    headers = coordinator.operator | {"Accept": "application/octet-stream"}
    url = f"/v1/federations/{federation}/prompts"
    return decode(coordinator.http.get(url, params={"round": round}, headers=headers).content)[0]


def one_round(
    coordinator: InThread, method: str = "promptfl", names: str = "abcde", **changes: Any
) -> tuple[str, Tensors]:
    """A finished federation of one round; what each client has sent."""
    changes = {"participation": {"min_clients": 2}, "admission": {"max_update_norm": 1e6}} | changes  # b's is long
    federation = coordinator.create(rounds=1, method={"name": method}, **changes)
    clients = [coordinator.enrol(federation, name, num_samples=10 * (i + 1))[0] for i, name in enumerate(names)]
    coordinator.post(f"{federation}/start")
    sent = {}
    tasks = coordinator.training(clients)
    if method == "promptfl":
        for number, (client, task) in enumerate(zip(clients, tasks, strict=True)):
            draws = torch.Generator().manual_seed(number)
            sent[client.name] = torch.randn(4, 8, generator=draws) * (100 if client.name == "b" else 1)
            assert client.send(task, update_body({"context": sent[client.name]}, task)).status_code == 201
    drive(clients)
    return federation, sent


@pytest.fixture(scope="module")
def over(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[InThread, str, Tensors]]:
    """A coordinator with two federations that are over: of five, with what they have sent, and of two (``pair``)."""
    with in_thread(tmp_path_factory.mktemp("replay") / "data") as coordinator:
        five, sent = one_round(coordinator, aggregation={"max_weight_share": 0.4})
        one_round(coordinator, name="pair", names="ab")
        yield coordinator, five, sent


def test_one_phase_as_it_would_have_been_under_another_rule(over: tuple[InThread, str, Tensors]) -> None:
    coordinator, federation, sent = over
    before, committed = state_of(coordinator, federation, 0)["context"], state_of(coordinator, federation, 1)["context"]
    found = again(coordinator, federation, 1, aggregation={"rule": "krum"})
    wanted = torch.tensor(literal.krum([one.reshape(-1).tolist() for one in sent.values()], 1)).reshape(4, 8)
    [state] = found["states"]
    assert state["distance"] == pytest.approx(float((wanted - committed).norm()), rel=1e-4)
    assert state["moved"] == pytest.approx(float((before - committed).norm()), rel=1e-4)
    assert state["same"] is False
    assert sorted(one["verdict"] for one in state["updates"]) == ["counted"] + ["rejected"] * 4
    assert found["aggregation"]["tolerate"] == 0.2
    assert "clients would have trained differently afterwards" in found["note"]
    tensors = coordinator.http.post(
        f"/v1/federations/{federation}/rounds/1/replay",
        json={"aggregation": {"rule": "krum"}},
        headers=coordinator.operator | {"Accept": "application/octet-stream"},
    )
    made = decode(tensors.content)[0]
    assert torch.allclose(made["context"], wanted, atol=1e-5)
    assert tensors.headers["etag"].strip('"') == state_hash(made) == state["replayed_hash"]
    assert coordinator.get(federation)["state_hash"] == state["state_hash"], "nothing has changed"


def test_one_phase_as_it_would_have_been_without_a_client(over: tuple[InThread, str, Tensors]) -> None:
    coordinator, federation, sent = over
    [state] = again(coordinator, federation, 1, without=["b", "c"])["states"]
    weights = {one["client"]: one["weight"] for one in state["updates"]}
    assert weights == pytest.approx({"a": 0.2, "d": 0.4, "e": 0.4})
    wanted = sum(weight * sent[name] for name, weight in weights.items())
    committed = state_of(coordinator, federation, 1)["context"]
    assert state["distance"] == pytest.approx(float((wanted - committed).norm()), rel=1e-4)
    both = again(coordinator, federation, 1, without=["b"], aggregation={"rule": "median"})
    assert {one["weight"] for one in both["states"][0]["updates"]} == {0.25}
    assert both["aggregation"]["max_weight_share"] == 0.4


def test_a_method_that_takes_no_mean_can_do_without_a_client_but_not_without_its_own_rule(
    coordinator: InThread,
) -> None:
    federation, _ = one_round(coordinator, method="two_phase", names="abc")
    refused = again(coordinator, federation, 1, status=409, aggregation={"rule": "median"})
    assert refused["type"].endswith("/not-a-mean")
    assert "two_phase does not combine its updates by a mean in its phase 'prompts'" in refused["detail"]
    found = again(coordinator, federation, 1, without=["b"])["states"]
    assert [one["origin"] for one in found] == ["prompts", "aggregators"]
    assert all(not one["same"] for one in found)
    assert [[u["client"] for u in one["updates"]] for one in found] == [["a", "c"]] * 2


@pytest.mark.parametrize(
    ("round", "asked", "status", "kind", "says"),
    [
        (2, {}, 404, "no-state", "round 2 is not over: pair is in round 1; wait, or name an earlier one"),
        (1, {"without": ["zoe"]}, 404, "not-found", "pair has no client 'zoe'"),
        (1, {"without": ["a", "b"]}, 409, "too-few-updates", "no update is left"),
        (
            1,
            {"aggregation": {"rule": "krum"}},
            409,
            "too-few-updates",
            "krum with tolerate 0.2 needs at least 5 updates",
        ),
        (1, {"aggregation": {"rule": "best"}}, 422, "invalid-request", "aggregation.rule"),
        (1, {"aggregation": {"rule": "median", "tolerate": 0.2}}, 422, "invalid-request", "takes none"),
        (1, {"rule": "median"}, 422, "invalid-request", "rule"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    over: tuple[InThread, str, Tensors], round: int, asked: dict[str, Any], status: int, kind: str, says: str
) -> None:
    refused = again(over[0], "pair", round, status=status, **asked)
    assert refused["type"].endswith(f"/{kind}")
    assert says in refused["detail"]


def test_a_round_without_updates_says_that_nothing_could_be_otherwise(over: tuple[InThread, str, Tensors]) -> None:
    coordinator, federation, _ = over
    answer = again(coordinator, federation, 0, without=["a"])
    assert answer["states"] == []
    assert answer["note"] == "nothing of round 0 was computed again: no update was aggregated in it"
    refused = coordinator.http.post(
        f"/v1/federations/{federation}/rounds/0/replay",
        json={"without": ["a"]},
        headers=coordinator.operator | {"Accept": "application/octet-stream"},
    )
    assert (refused.status_code, refused.json()["type"].rsplit("/")[-1]) == (404, "no-state")


def test_rounds_under_way_and_rounds_not_kept_are_refused(coordinator: InThread) -> None:
    federation = coordinator.create(rounds=3, retention="last_round")
    clients = coordinator.enrol(federation, "a", "b")
    assert again(coordinator, federation, 0, status=404)["type"].endswith("/no-state")
    coordinator.post(f"{federation}/start")
    coordinator.training(clients)
    assert again(coordinator, federation, 1, status=404)["type"].endswith("/no-state")
    drive(clients)
    coordinator.until(federation, state="finished")

    def refused() -> httpx.Response:
        return coordinator.http.post(
            f"/v1/federations/{federation}/rounds/1/replay", json={}, headers=coordinator.operator
        )

    gone = eventually(refused, 410)
    assert gone.json()["type"].endswith("/updates-gone")
    assert "retention: last_round" in gone.json()["detail"]


def eventually(ask: Callable[[], httpx.Response], status: int) -> httpx.Response:
    end = time.monotonic() + PATIENCE
    while (answer := ask()).status_code != status:
        assert time.monotonic() < end, f"{status} does not come; it is {answer.status_code}: {answer.text}"
        time.sleep(0.05)
    return answer


def test_what_was_changed_afterwards_shows(over: tuple[InThread, str, Tensors]) -> None:
    coordinator, federation, _ = over
    assert [one["same"] for one in again(coordinator, federation, 1)["states"]] == [True]
    weights: list[float] = []

    def change(weight: float) -> None:
        mine = (TaskRow.federation_id == federation, TaskRow.client == "d", TaskRow.weight.is_not(None))
        with coordinator.registry.database.write() as session:
            row = session.query(TaskRow).where(*mine).one()
            weights.append(row.weight or 0)
            row.weight = weight

    change(0.9)
    assert [one["same"] for one in again(coordinator, federation, 1)["states"]] == [False]
    change(weights[0])


def test_a_long_replay_holds_up_nobody(over: tuple[InThread, str, Tensors], monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator, federation, _ = over
    after_phase = global_state.after_phase
    begun, go_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Tensors:
        begun.set()
        assert go_on.wait(PATIENCE)
        return after_phase(*arguments)

    monkeypatch.setattr(global_state, "after_phase", slow)
    with asking(coordinator, f"{federation}/rounds/1/replay") as answers:
        assert begun.wait(PATIENCE)
        assert coordinator.http.get("/readyz").status_code == 200
        assert coordinator.get(federation)["state"] == "finished"
        assert answers == []
        go_on.set()
    assert [one["states"][0]["same"] for one in answers] == [True]


def test_a_stop_does_not_wait_for_a_long_replay(coordinator: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, _ = one_round(coordinator)
    begun, go_on = threading.Event(), threading.Event()

    def endless(*_: Any) -> Tensors:
        begun.set()
        go_on.wait(2 * PATIENCE)  # longer than a stop may take here
        raise AssertionError("nobody wants this any more")

    monkeypatch.setattr(global_state, "after_phase", endless)
    url = f"{coordinator.url}/v1/federations/{federation}/rounds/1/replay"
    answers: list[object] = []

    def ask() -> None:
        try:
            answers.append(httpx.post(url, json={}, headers=coordinator.operator, timeout=PATIENCE).status_code)
        except httpx.TransportError as error:
            answers.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert begun.wait(PATIENCE)
    coordinator.stop()
    assert coordinator.registry.computing, "a process ends without waiting for it"
    go_on.set()
    thread.join(PATIENCE)
    assert len(answers) == 1
    assert answers != [200]


@contextmanager
def asking(coordinator: InThread, path: str) -> Iterator[list[Any]]:
    """A POST that is under way during the block."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(coordinator.post(path, {})))
    thread.start()
    yield answers
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_a_state_that_is_not_what_was_recorded_shows_although_what_follows_from_it_is(coordinator: InThread) -> None:
    federation = coordinator.create(rounds=2)
    drive(started(coordinator, federation, "a", "b"))
    assert [one["same"] for one in again(coordinator, federation, 1)["states"]] == [True]
    with coordinator.registry.database.write() as session:
        [first] = session.query(StateRow).where(StateRow.federation_id == federation, StateRow.round == 0)
        first.state_hash = "sha256:" + "0" * 64
    [found] = again(coordinator, federation, 1)["states"]
    assert found["replayed_hash"] == found["state_hash"]
    assert found["same"] is False, "it was computed from another state than the one that is recorded"


def started(coordinator: InThread, federation: str, *names: str) -> list[ScriptedClient]:
    clients = coordinator.enrol(federation, *names)
    coordinator.post(f"{federation}/start")
    return clients
