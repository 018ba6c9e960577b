"""Secure sums over the whole coordinator, with real clients' part of them: exact, whoever is lost; nothing to see."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from promptfed.client_service.exits import Failure
from promptfed.client_service.privacy.secure import SecureWork
from promptfed.shared.messages import PrivacyEvent, SpendReport, Task
from promptfed.shared.privacy.accounting import COARSE, epsilon_of, training_event
from promptfed.shared.secagg import member
from promptfed.shared.secagg.vectors import as_tensors, encoded, mean_change
from promptfed.shared.spec.weighting import WHOLE_WEIGHT, Weighting, whole_weights
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import arrays_of, decode, encode, tensors_of
from promptfed.testing.clients import DEADLINE, trained, update_body
from tests.support.coordinators import InThread
from tests.support.open_phases import prompts
from tests.support.secure_clients import SecureClient
from tests.support.secure_sums import encode_change
from tests.support.waiting import PATIENCE, wait_for

TEN = tuple("abcdefghij")
ROUND_1 = {"round": 1, "phase": "train"}
Leap = Callable[[InThread, float], None]


def federation_of(
    coordinator: InThread,
    *names: str,
    secure: Mapping[str, Any] | None = None,
    liars: Mapping[str, type[SecureClient]] = MappingProxyType({}),
    **changes: Any,
) -> Any:
    """A started federation of one round, and its clients, some of whom are ``liars``."""
    given = {"participation": {"min_clients": len(names), "quorum": 0.5}, "rounds": 1} | changes
    federation = coordinator.create(secure_aggregation={"step_seconds": DEADLINE} | dict(secure or {}), **given)
    token = coordinator.token(federation)
    clients = [liars.get(name, SecureClient)(coordinator.http, federation, name) for name in names]
    for number, client in enumerate(clients):
        assert client.enrol(token, num_samples=10 + number).status_code == 201
    coordinator.post(f"{federation}/start")
    return federation, clients


def step(client: SecureClient, lost: Mapping[str, tuple[str, ...]]) -> str | None:
    """Answer one task, unless the client is lost in it; what it was, or ``ended``."""
    response = client.task()
    if response.status_code == 410:
        return "ended"
    if response.status_code != 200:
        return None
    task = response.json()
    if client.name in lost.get(task["kind"], ()):
        return None
    answer = client.answer(task)
    assert answer.status_code in (200, 201), answer.text
    return str(task["kind"])


def drive(
    coordinator: InThread,
    clients: list[SecureClient],
    leap: Leap,
    lost: Mapping[str, tuple[str, ...]] | None = None,
    until: str = "",
) -> None:
    """To the federation's end, or a stage; who is lost in a step is lost for good, and its deadline passes."""
    federation, end = clients[0].federation, time.monotonic() + PATIENCE
    there, gone = list(clients), set[str]()
    while (view := coordinator.get(federation))["state"] == "running":
        assert time.monotonic() < end
        stage, awaited = view["stage"], {one["name"] for one in view["awaited"]}
        # Who is to be lost in a later step may only be slow in this one.
        gone |= set((lost or {}).get(stage["kind"], ())) if stage is not None else set()
        if stage is not None and stage["phase"] == until:
            return
        if stage is not None and not stage["closing"] and awaited and awaited <= gone:
            there = [client for client in there if client.name not in (lost or {}).get(stage["kind"], ())]
            leap(coordinator, DEADLINE)
            # What comes next has its whole time: another leap would take it away.
            wait_for("its end", lambda before=where(stage): where(coordinator.get(federation)["stage"]) != before)
        done = [step(client, lost or {}) for client in there]
        if not any(done):
            time.sleep(0.01)


def where(stage: Mapping[str, Any] | None) -> tuple[Any, ...]:
    """What of a stage changes when its time is up."""
    return () if stage is None else tuple(stage[key] for key in ("round", "phase", "kind", "closing", "extended"))


def expected(before: Tensors, names: list[str], weights: Mapping[str, float]) -> Tensors:
    """The same encoding, summed in the clear."""
    total: Any = 0
    for name in names:
        update = trained(before, name, ROUND_1)
        total = total + encode_change(arrays_of(update), arrays_of(before), weights[name])
    mean = mean_change(total, sum(weights[name] for name in names))
    shapes = {name: tuple(tensor.shape) for name, tensor in before.items()}
    return tensors_of(as_tensors(mean, arrays_of(before), shapes))


@pytest.mark.parametrize("kind", ["train", "share", "mask", "confirm", "unmask"])
def test_with_30_percent_lost_in_a_step_the_sum_is_exact(coordinator: InThread, leap: Leap, kind: str) -> None:
    federation, clients = federation_of(coordinator, *TEN, aggregation={"weighting": "samples"})
    drive(coordinator, clients, leap, {kind: ("b", "f", "j")})
    report = coordinator.get(f"{federation}/rounds/1")
    phase = report["phases"][0]
    names = [one["client"] for one in phase["counted"]]
    assert names == (list(TEN) if kind in ("confirm", "unmask") else list("acdeghi"))
    members = {name: 10 + n for n, name in enumerate(TEN) if kind != "train" or name in names}
    rule = Weighting(weighting="samples")
    weights = {name: whole / WHOLE_WEIGHT for name, whole in whole_weights(members, rule).items()}
    wanted = expected(prompts(coordinator, federation, 0), names, weights)
    found = prompts(coordinator, federation, 1)
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), "bit for bit"
    changed = {name: trained(prompts(coordinator, federation, 0), name, ROUND_1) for name in names}
    for name, tensor in found.items():
        plain: Any = sum(update[name] * members[client] for client, update in changed.items())
        assert (tensor - plain / sum(members[one] for one in names)).abs().max() <= 1e-5, "the plain weighted mean"
    assert phase["secure"]["sum_clients"] == len(names)
    assert phase["secure"]["sum_weight"] == sum(weights[name] for name in names)
    assert phase["updates"] == [], "no client has a norm"
    again = coordinator.post(f"{federation}/rounds/1/replay", {})
    assert all(one["same"] for one in again["states"]), again
    told = coordinator.http.get("/metrics", headers=coordinator.operator).text
    assert 'promptfed_phase_seconds_count{kind="mask"} 1.0' in told


@pytest.mark.both_databases
def test_too_few_shares_begin_another_attempt_without_training(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, *TEN[:5])
    drive(coordinator, clients, leap, {"share": ("a", "b", "c")}, until="train/2")
    drive(coordinator, clients, leap)
    report = coordinator.get(f"{federation}/rounds/1")
    assert [phase["secure"]["attempt"] for phase in report["phases"]] == [1, 2]
    assert [client.trained for client in clients] == [1] * 5
    assert report["phases"][1]["secure"]["sum_clients"] == 5


def windows(content: bytes) -> set[bytes]:
    return {content[at : at + 16] for at in range(len(content) - 15)}


def seen_by(coordinator: InThread, folder: Path, clients: list[SecureClient], caplog: str) -> bytes:
    """All that the coordinator has stored, logged and received."""
    files = b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())
    return files + caplog.encode() + b"".join(body for client in clients for body in client.bodies)


@pytest.mark.parametrize("mutant", [False, True])
def test_nothing_that_the_coordinator_has_holds_a_part_of_an_update(
    coordinator: InThread,
    leap: Leap,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mutant: bool,
) -> None:
    """The mutant leaves one client's masks away, and the check at the door: the same look finds it."""
    if mutant:
        whole = member.mask_vector
        monkeypatch.setattr(member, "mask_vector", lambda *given: given[-1] if given[2] == 0 else whole(*given))
        monkeypatch.setattr("promptfed.coordinator.resources.tasks.exchanges.looks_unmasked", lambda vector: False)
    federation, clients = federation_of(coordinator, *TEN[:4], aggregation={"weighting": "uniform"})
    changes: dict[str, Any] = {}
    secrets: set[str] = set()
    end = time.monotonic() + PATIENCE
    while (coordinator.get(federation)["stage"] or {}).get("kind") != "unmask":
        assert time.monotonic() < end
        for client in clients:
            step(client, {"unmask": TEN})
            if (content := client.state.read_file("secure-work.safetensors")) is not None:
                changes[client.name] = decode(content)[0]["change"].numpy()
            attempt = json.loads(client.state.read_note("secure-attempt.json") or '{"secrets": {}}')
            secrets |= {*attempt["secrets"].values(), client.state.read_note("signing.key") or ""}
    assert len(changes) == 4
    there = seen_by(coordinator, tmp_path, clients, caplog.text)
    if not mutant:
        drive(coordinator, clients, leap)
        assert coordinator.get(federation)["state"] == "finished"
        there += seen_by(coordinator, tmp_path, clients, caplog.text)
    found = False
    for name, change in changes.items():
        update = trained(prompts(coordinator, federation, 0), name, ROUND_1)
        tensors = [change, encoded(change), *(tensor.numpy() for tensor in update.values())]
        clear = [one.tobytes() for one in tensors]
        found = found or any(window in there for content in clear for window in windows(content))
    assert found is mutant
    assert len(secrets) == 4 * 4, "the mask and share keys, seeds and identity keys"
    for secret in secrets:
        assert secret not in there.decode("latin-1")
        assert not any(window in there for window in windows(bytes.fromhex(secret)))


@pytest.mark.door
def test_an_update_in_the_clear_is_not_taken(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, "a", "b", "c", method={"name": "promptfl", "m": 16})
    while (coordinator.get(federation)["stage"] or {}).get("kind") != "train":
        for client in clients:
            step(client, {"train": TEN})
    task = coordinator.task(clients[0])
    payload = clients[0].payload(task)
    refused = clients[0].send(task, update_body(trained(payload, "a", task), task))
    assert refused.status_code == 409
    assert refused.json()["type"].endswith("/wrong-task-kind")
    while (coordinator.get(federation)["stage"] or {}).get("kind") != "mask":
        for client in clients:
            step(client, {"mask": ("a",)})
    task = coordinator.task(clients[0])
    told = clients[0].http.get(task["payload"]["url"], headers=clients[0].headers).content
    masked, about = decode(clients[0].prepared(Task.model_validate(task), told))
    small = {"masked": torch.ones_like(masked["masked"])}
    for tensors, metadata, kind in (
        (small, about, "looks-unmasked"),
        (masked, {"roster_sha256": "0" * 64}, "wrong-roster"),
        ({"masked": masked["masked"][1:]}, about, "bad-exchange"),
        ({"masked": masked["masked"].float()}, about, "bad-exchange"),
    ):
        answer = clients[0].exchange(task, encode(tensors, metadata))
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (422, kind), answer.text
    drive(coordinator, clients, leap)
    assert coordinator.get(federation)["state"] == "finished"


@pytest.mark.door
def test_a_client_that_has_revealed_takes_part_in_no_other_attempt(coordinator: InThread, leap: Leap) -> None:
    federation, clients = federation_of(coordinator, "a", "b", "c")
    kept: dict[str, dict[str, Any]] = {}
    while coordinator.get(federation)["state"] == "running":
        for client in clients:
            response = client.task()
            if response.status_code != 200:
                continue  # what comes between this question and the next has not been looked at
            if client is clients[0] and response.json()["kind"] != "evaluate":
                told = client.http.get(response.json()["payload"]["url"], headers=client.headers).content
                kept.setdefault(response.json()["kind"], response.json() | {"told": told})
            # Two of the three can open the sum: who is looked at here must be one of them.
            step(client, {} if "unmask" in kept else {"unmask": ("b", "c")})
    restarted = SecureWork(clients[0].state, federation)
    again = {key: value for key, value in kept["train"].items() if key != "told"}
    second = Task.model_validate(again | {"secure": again["secure"] | {"attempt": 2}})
    for task, kind in (
        (Task.model_validate(again), "already-revealed"),
        (second, "already-revealed"),
        (Task.model_validate(again | {"round": 2}), "payload-repeated"),
    ):
        with pytest.raises(Failure) as refused:
            restarted.expect(task)
        assert refused.value.kind == kind


def test_another_list_is_neither_signed_nor_revealed_for(coordinator: InThread) -> None:
    """What was answered once is answered again with the same bytes, whatever is asked for now."""
    federation, clients = federation_of(coordinator, *TEN[:5])
    while (coordinator.get(federation)["stage"] or {}).get("kind") != "confirm":
        for client in clients:
            step(client, {})
    task = Task.model_validate(coordinator.task(clients[0]))
    told = clients[0].http.get(task.payload.url, headers=clients[0].headers).content
    first = clients[0].prepared(task, told)
    alive = np.arange(5).tolist()
    other = f'{{"alive": {alive[:4]}, "dropped": [4]}}'.encode()
    restarted = SecureWork(clients[0].state, federation)
    assert restarted.answer(task, other).body == first
    assert restarted.unsent() is not None


@pytest.mark.door
def test_a_client_without_a_key_or_with_another_s_is_not_enrolled(coordinator: InThread) -> None:
    federation = coordinator.create(secure_aggregation={}, participation={"min_clients": 3})
    token = coordinator.token(federation)
    plain = coordinator.client(federation, "a").enrol(token)
    assert (plain.status_code, plain.json()["type"].rsplit("/", 1)[-1]) == (422, "identity-missing")
    first, second = (SecureClient(coordinator.http, federation, name) for name in "ab")
    assert first.enrol(token).status_code == 201
    second.state.write_note("signing.key", first.state.read_note("signing.key") or "")
    taken: httpx.Response = second.enrol(token)
    assert (taken.status_code, taken.json()["type"].rsplit("/", 1)[-1]) == (409, "key-taken")


@pytest.mark.door
def test_another_identity_key_under_a_known_name_is_refused_until_the_name_is_reset(coordinator: InThread) -> None:
    federation = coordinator.create(secure_aggregation={}, participation={"min_clients": 3})
    token = coordinator.token(federation)
    client = SecureClient(coordinator.http, federation, "a")
    assert client.enrol(token).status_code == 201
    assert client.enrol(token).status_code == 200, "the same key again"
    client.state.remove_note("signing.key")
    changed = client.enrol(token)
    assert (changed.status_code, changed.json()["type"].rsplit("/", 1)[-1]) == (409, "identity-changed")
    assert "ask the operator to reset its name" in changed.json()["detail"]
    coordinator.post(f"{federation}/clients/a/reset")
    mine = coordinator.token(federation, client="a")
    assert client.enrol(mine, secret="e" * 64).status_code == 201


@pytest.mark.door
def test_a_proof_of_another_key_is_refused(coordinator: InThread) -> None:
    federation = coordinator.create(secure_aggregation={}, participation={"min_clients": 3})
    client = SecureClient(coordinator.http, federation, "a")
    refused = client.enrol(coordinator.token(federation), identity_key="ab" * 32)
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (422, "bad-signature")


@pytest.mark.parametrize(("spent", "kind"), [(None, "privacy-missing"), (2.0, "privacy-mismatch"), (1.0, None)])
def test_a_masked_change_has_a_cost(coordinator: InThread, leap: Leap, spent: float | None, kind: str | None) -> None:
    """By its client's own word, held against the public terms; the report tells it."""
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
    asked = {"training": {"batch_size": 5, "epochs": 1}, "aggregation": {"weighting": "uniform"}}
    federation, clients = federation_of(coordinator, "a", "b", "c", privacy=privacy, **asked)
    for number, client in enumerate(clients):
        client.spent = report_of(10 + number, spent if client.name == "b" else 1.0)
    while (coordinator.get(federation)["stage"] or {}).get("kind") != "mask":
        for client in clients:
            step(client, {"mask": TEN})
    answer = clients[1].answer(coordinator.task(clients[1]))
    if kind is not None:
        assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (422, kind), answer.text
        return
    drive(coordinator, clients, leap)
    (phase,) = coordinator.get(f"{federation}/rounds/1")["phases"]
    told = phase["secure"]["privacy"]
    assert {name: one["ledger_epsilon"] for name, one in told.items()} == dict.fromkeys("abc", 9.5)
    computed = {name: one["epsilon"] for name, one in told.items()}
    assert computed == {
        name: epsilon_of([training_event(10 + number, 5, 1, 1.0)], 1e-3, COARSE) for number, name in enumerate("abc")
    }


def report_of(samples: int, z: float | None) -> SpendReport | None:
    """What a client of so many samples reports that trained with noise z, in batches of 5."""
    if z is None:
        return None
    event = training_event(samples, 5, 1, z).as_json()
    return SpendReport(events=[PrivacyEvent(**event)], epsilon=9.5, delta=1e-3, noise="seeded")
