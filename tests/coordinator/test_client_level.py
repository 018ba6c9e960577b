"""Whole clients protected by the coordinator's noise: what is stored, released, shown, refused, and computed again."""

from __future__ import annotations

import json
import math
import re
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import httpx
import pytest
import torch
from sqlalchemy import select

from promptfed.coordinator.domain.round_machine import poisson_sample
from promptfed.coordinator.engine import registry as registries
from promptfed.coordinator.engine.metrics import UNTELLING
from promptfed.coordinator.store.tables import FederationRow, PhaseRow, StateRow, TaskRow, UpdateRow
from promptfed.shared.api.export_card import JSON_FILE
from promptfed.shared.privacy.accounting import Event, epsilon_of, replace_one_epsilon
from promptfed.shared.privacy.noise import NoiseStream, SeededNoise
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import tensor_of, tensors_of
from promptfed.testing.clients import DEADLINE, ScriptedClient, bearer, spec
from tests.shared.spec.test_effects import costs_are_computed_coarsely as costs_are_computed_coarsely
from tests.support.coordinators import InThread, in_thread
from tests.support.open_phases import told as refused_as
from tests.support.waiting import wait_for

NAMES = ("a", "b", "c", "d", "e", "f")

PRIVACY = {"level": "client", "clip": 1.5, "noise_multiplier": 1.0, "accept_noise": True}

POISSON = {"min_clients": 6, "sampling": "poisson", "fraction": 0.5, "quorum": 0.1}


def created(coordinator: InThread, names: tuple[str, ...] = NAMES, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    """A federation at level client, and those who have enrolled."""
    given = {"privacy": PRIVACY, "aggregation": {"weighting": "uniform"}}
    given |= {"participation": {"min_clients": len(names), "quorum": 0.5}}
    federation = coordinator.create(**(given | changes))
    token = coordinator.token(federation)
    clients = [ScriptedClient(coordinator.http, federation, name) for name in names]
    for client in clients:
        assert client.enrol(token).status_code == 201
    return federation, clients


def finish(coordinator: InThread, federation: str, clients: list[ScriptedClient]) -> dict[str, Any]:
    coordinator.post(f"{federation}/start")
    wait_for("the end", lambda: all([client.work() for client in clients]))  # noqa: C419 (all of them work)
    found: dict[str, Any] = coordinator.get(federation)
    assert found["state"] == "finished"
    return found


def phases(coordinator: InThread) -> list[tuple[PhaseRow, StateRow, Tensors, list[Tensors]]]:
    """Each noised phase with the state after it, the state before it, and the updates that counted."""
    registry = coordinator.registry
    with registry.database.read() as session:
        session.expire_on_commit = False
        found = []
        states = list(session.scalars(select(StateRow).order_by(StateRow.id)))
        for before, after in pairwise(states):
            assert after.phase_id is not None
            counted = (TaskRow.phase_id == after.phase_id, TaskRow.counted)
            query = select(UpdateRow.sha256).join(TaskRow, TaskRow.id == UpdateRow.task_id).where(*counted)
            digests = session.scalars(query.order_by(TaskRow.client))
            updates = [tensors_of(registry.blobs.tensors(digest)[0]) for digest in digests]
            row = session.get_one(PhaseRow, after.phase_id)
            found.append((row, after, tensors_of(registry.blobs.tensors(before.sha256)[0]), updates))
        session.expunge_all()
    return found


def literal(row: PhaseRow, before: Tensors, updates: list[Tensors], clip: float, z: float) -> torch.Tensor:
    """base + (Σ Δ·min(1, S/‖Δ‖) + z·S·ξ)/K̄ of one tensor, by the key and K̄ that are stored."""
    base = before["context"].double()
    total = torch.zeros_like(base)
    for update in updates:
        change = update["context"].double() - base
        total += change * min(1.0, clip / float(change.norm()))
    assert row.noise_key is not None
    assert row.expected is not None
    noise = torch.from_numpy(NoiseStream(bytes.fromhex(row.noise_key)).normals(base.numel())).reshape(base.shape)
    return (base + (total + z * clip * noise) / row.expected).float()


@pytest.mark.both_databases
def test_each_state_is_the_formula_of_its_updates_its_key_and_who_was_expected(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=4, participation=POISSON)
    view = finish(coordinator, federation, clients)
    found = phases(coordinator)
    assert len(found) == 4
    assert len({row.noise_key for row, *_ in found}) == 4, "no key twice"
    for row, after, before, updates in found:
        assert row.expected == 3.0
        committed = tensor_of(coordinator.registry.blobs.tensors(after.sha256)[0]["context"])
        torch.testing.assert_close(committed, literal(row, before, updates, 1.5, 1.0), rtol=1e-6, atol=1e-6)
    with coordinator.registry.database.read() as session:
        key = session.get_one(FederationRow, federation.rsplit("/", 1)[-1]).sampling_key
    assert key is not None
    # Samples differ in size; how this secret key draws is not foreseen, so each is compared with what it must draw.
    assert [len(updates) for *_, updates in found] == [len(poisson_sample(key, r, NAMES, 0.5)) for r in range(1, 5)]
    privacy = view["privacy"]
    assert privacy["epsilon"] == pytest.approx(privacy["epsilon_planned"])
    assert privacy["delta"] == view["spec"]["privacy"]["delta"] == 1e-2
    assert privacy["sampling"] == "poisson"
    assert privacy["ratio"] == pytest.approx(math.sqrt(32) / 3)
    assert "times as long as the longest mean change" in privacy["warnings"][0]
    reports = coordinator.get(f"{federation}/rounds")["rounds"]
    told = [phase["privacy"] for report in reports for phase in report["phases"]]
    assert [one["noise"] for one in told] == ["central"] * 4
    spent = [one["epsilon"] for one in told]
    assert spent == sorted(spent)
    assert spent[-1] == privacy["epsilon"]
    clipped = [update for report in reports for phase in report["phases"] for update in phase["updates"]]
    assert {update["verdict"] for update in clipped} == {"clipped"}, "fakes change by far more than the clip"
    assert all(update["influence"] == pytest.approx(1 / 3) for update in clipped)
    for round in range(1, 5):
        again = coordinator.post(f"{federation}/rounds/{round}/replay", json={})
        assert [state["same"] for state in again["states"]] == [True]


def test_who_drops_out_changes_no_divisor(coordinator: InThread, leap: Any) -> None:
    federation, clients = created(coordinator, NAMES[:4], rounds=1)
    coordinator.post(f"{federation}/start")
    tasks = coordinator.training(clients)
    for client, task in zip(clients[:2], tasks, strict=False):
        assert client.answer(task).status_code == 201
    leap(coordinator, DEADLINE)
    wait_for("the state", lambda: len(phases(coordinator)) == 1)
    (row, after, before, updates), *rest = phases(coordinator)
    assert rest == []
    assert (len(updates), row.expected, row.sample_size) == (2, 4.0, 4)
    committed = tensor_of(coordinator.registry.blobs.tensors(after.sha256)[0]["context"])
    torch.testing.assert_close(committed, literal(row, before, updates, 1.5, 1.0), rtol=1e-6, atol=1e-6)


def test_a_round_that_asks_nobody_is_noise_alone(coordinator: InThread) -> None:
    few = {"min_clients": 1, "sampling": "poisson", "fraction": 0.02, "quorum": 0.1}
    federation, clients = created(coordinator, ("a",), rounds=5, participation=few)
    finish(coordinator, federation, clients)
    noised = phases(coordinator)
    # By a key that nobody knows: all five ask with a chance of 0.02^5, 3 in a thousand million.
    assert any(updates == [] for *_, updates in noised)
    for row, after, before, updates in noised:
        committed = tensor_of(coordinator.registry.blobs.tensors(after.sha256)[0]["context"])
        torch.testing.assert_close(committed, literal(row, before, updates, 1.5, 1.0), rtol=1e-6, atol=1e-5)
        assert not torch.equal(committed, before["context"])


def test_rounds_end_where_the_budget_does(coordinator: InThread) -> None:
    limited = PRIVACY | {"noise_multiplier": 4.0, "epsilon": 2.0}
    federation, clients = created(coordinator, rounds=30, privacy=limited, evaluation={"every": 30})
    planned = coordinator.get(federation)["privacy"]
    allowed = planned["budget_rounds"]
    assert 1 <= allowed < 30
    found = finish(coordinator, federation, clients)
    assert (found["round"], found["reason"]) == (allowed, "privacy_budget")
    assert found["privacy"]["epsilon"] == pytest.approx(planned["epsilon_planned"])
    assert found["privacy"]["epsilon"] <= 2.0
    assert coordinator.get(f"{federation}/rounds")["rounds"][-1]["evaluation"] is not None


def test_the_key_of_the_noise_goes_with_the_updates(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=2)
    finish(coordinator, federation, clients)
    everything = [str(coordinator.get(federation + path)) for path in ("", "/rounds", "/clients")]
    keys = kept_keys(coordinator)
    assert len(keys) == 2
    assert not any(str(key) in text for key in keys for text in everything)
    coordinator.delete(f"{federation}/clients/a/updates")
    assert kept_keys(coordinator) == [None, None]
    answer = coordinator.post(f"{federation}/rounds/1/replay", json={}, status=410)
    assert answer["type"].rpartition("/")[2] == "updates-gone"


def kept_keys(coordinator: InThread) -> list[str | None]:
    """Of the phases' noise, as they are stored."""
    with coordinator.registry.database.read() as session:
        query = select(PhaseRow.noise_key).where(PhaseRow.kind == "train").order_by(PhaseRow.id)
        return list(session.scalars(query))


def test_the_last_round_alone_keeps_its_key_where_it_alone_keeps_its_updates(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=3, retention="last_round")
    finish(coordinator, federation, clients)
    wait_for("the older keys are gone", lambda: kept_keys(coordinator)[:2] == [None, None])
    assert kept_keys(coordinator)[2] is not None


def test_the_key_of_the_sampling_is_secret_for_good_and_there_is_no_draw_to_tell(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=2, participation=POISSON)
    finish(coordinator, federation, clients)
    with coordinator.registry.database.read() as session:
        row = session.scalars(select(FederationRow)).one()
        key, draw = row.sampling_key, row.draw_secret
    assert key is not None
    assert len(key) == 64
    assert draw is None
    shown = coordinator.get(federation)
    assert shown["draw"] == {"commitment": None, "secret": None}
    assert key not in str(shown)


def test_hopeless_noise_is_refused_at_creation_at_enrolment_and_at_the_start(coordinator: InThread) -> None:
    hopeless = {"level": "client", "clip": 1.5, "noise_multiplier": 5.0}
    body = spec(privacy=hopeless, aggregation={"weighting": "uniform"}, participation={"min_clients": 2})
    (error,) = coordinator.post("/v1/federations", body, status=422)["errors"]  # the embedded backbone's shape is known
    assert "noise z = 5 on 448 numbers" in error["detail"]
    other = {"model": "RN50", "pretrained": "openai"}
    shaped = body | {"backbone": other | {"shape": {"d_t": 8, "d_e": 8, "d_v": 8}}}
    (error,) = coordinator.post("/v1/federations", shaped, status=422)["errors"]
    assert error["path"] == "privacy.noise_multiplier"
    body["backbone"] = other
    assert "noise z = 5 on 32 numbers over 2 expected clients is r = 14" in error["detail"]
    client = ScriptedClient(coordinator.http, coordinator.post("/v1/federations", body, status=201)["id"], "a")
    refused = client.enrol(coordinator.token(client.federation))
    assert refused.status_code == 409
    assert "2 expected clients is r = 14" in refused.json()["detail"]


def test_seeded_noise_is_marked_and_makes_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registries, "SecretNoise", lambda: SeededNoise(7))
    hashes = []
    for folder in ("one", "two"):
        with in_thread(tmp_path / folder) as coordinator:
            federation, clients = created(coordinator, rounds=3, participation=POISSON)
            finish(coordinator, federation, clients)
            reports = coordinator.get(f"{federation}/rounds")["rounds"]
            hashes.append([report["state_hash"] for report in reports])
            assert {phase["privacy"]["noise"] for report in reports for phase in report["phases"]} == {"seeded"}
    assert hashes[0] == hashes[1]


def test_noisy_counts_are_told_as_such(coordinator: InThread) -> None:
    """What a client says that its accuracies cost the test images stands beside them."""
    federation, (client,) = created(coordinator, ("a",), privacy={"level": "none"}, rounds=1)
    coordinator.post(f"{federation}/start")
    task = coordinator.task(client)
    event = {"mechanism": "laplace", "q": 1.0, "z": 0.1, "count": 2}
    spent = {"events": [event], "epsilon": 1.0, "delta": 1e-3, "noise": "secret"}
    result = {"test": {"accuracy": 0.5, "num_samples": 20}}
    body = {"splits": result, "zero_shot": result, "privacy": spent}
    path = f"/v1/federations/{federation}/tasks/{task['task_id']}/evaluation"
    for events in ([event, event], [event | {"z": 0.5}], [event | {"count": 3}], [event | {"mechanism": "gaussian"}]):
        refused = coordinator.http.put(
            path, json=body | {"privacy": spent | {"events": events}}, headers=client.headers
        )
        assert refused_as(refused) == (422, "privacy-mismatch")
    assert coordinator.http.put(path, json=body, headers=client.headers).status_code == 201
    found = coordinator.get(f"{federation}/rounds")["rounds"][0]["evaluation"]["clients"]["a"]["privacy"]
    own = {"ledger_epsilon": 1.0, "delta": 1e-3, "noise": "secret"}
    assert found == own | {"epsilon": 0.2, "count_epsilon": 0.1, "counts": 2}


# Who takes part under Poisson sampling: what each class of readers learns of it, channel by channel.

FEDERATION = "/v1/federations/{federation}"

OF_VIEWERS = {
    FEDERATION: "without who is asked, awaited or has answered, and without the phase's deadline",
    f"{FEDERATION}/prompts": "the noised states, which the amplified epsilon covers",
    f"{FEDERATION}/rounds/{{round}}/card": "a card, without bytes and counted updates",
    f"{FEDERATION}/rounds/{{round}}/card.md": "that card in words",
    f"{FEDERATION}/rounds/{{round}}/export": "that card and the states",
    f"{FEDERATION}/enrolment-tokens": "who has enrolled, which is public",
}

OF_CLIENTS = {f"{FEDERATION}/{own}" for own in ("task", "tasks/{task_id}/payload", "spends")}


@pytest.fixture
def viewer(coordinator: InThread) -> dict[str, str]:
    made = coordinator.post("/v1/operators", {"name": "otto", "role": "viewer", "hours": 1}, status=201)
    return bearer(made["token"])


def routes(coordinator: InThread, kind: str) -> set[str]:
    """What a caller of this kind may read of a federation."""
    paths = coordinator.get("/openapi.json")["paths"]
    reads = [(path, verbs[verb]) for path, verbs in paths.items() for verb in ("get", "head") if verb in verbs]
    of_kind = {path for path, call in reads if any(kind in scheme for scheme in call.get("security", []))}
    return {path for path in of_kind if path.startswith(FEDERATION)}


def read(coordinator: InThread, path: str, federation: str, headers: dict[str, str]) -> httpx.Response:
    place = path.format(federation=federation, round=1, task_id="none")
    return coordinator.http.get(place, headers=headers)


def test_no_channel_of_a_viewer_tells_who_took_part(coordinator: InThread, viewer: dict[str, str]) -> None:
    federation, clients = created(coordinator, rounds=2, participation=POISSON)
    finish(coordinator, federation, clients)
    telling = {path: read(coordinator, path, federation, viewer) for path in routes(coordinator, "viewer")}
    assert telling.keys() >= OF_VIEWERS.keys()
    for path, answer in sorted(telling.items()):
        if path in OF_VIEWERS:
            assert answer.status_code in (200, 404), (path, answer.text)
        else:
            assert answer.status_code == 403, f"{path} is a new channel: does it tell who took part?"
            assert "samples its clients in secret" in answer.json()["detail"]
        assert read(coordinator, path, federation, coordinator.operator).status_code in (200, 404), path
    card = read(coordinator, f"{FEDERATION}/rounds/{{round}}/card", federation, viewer).json()
    archive = ZipFile(BytesIO(read(coordinator, f"{FEDERATION}/rounds/{{round}}/export", federation, viewer).content))
    for facts in (card, json.loads(archive.read(JSON_FILE))):
        assert facts["bytes"] is None
        assert {one["updates_counted"] for one in facts["participants"]} == {None}
    assert card["privacy"]["epsilon_if_secret"] < card["privacy"]["epsilon_max"]
    other, _ = created(coordinator, ("p", "q"), name="open", participation={"min_clients": 2})
    assert read(coordinator, f"{FEDERATION}/rounds", other, viewer).status_code == 200


def test_a_viewer_does_not_see_whom_an_open_round_asks(coordinator: InThread, viewer: dict[str, str]) -> None:
    everybody = POISSON | {"fraction": 1.0, "quorum": 1.0}
    federation, clients = created(coordinator, rounds=1, participation=everybody)
    coordinator.post(f"{federation}/start")
    coordinator.training(clients)
    seen = coordinator.get(federation)
    assert seen["asked"] == list(NAMES)
    listed = coordinator.get("/v1/federations", headers=viewer)["federations"]
    for hidden in (coordinator.get(federation, headers=viewer), *listed):
        kept = {key: hidden[key] for key in ("asked", "answered", "failed", "awaited", "stage")}
        assert kept == {"asked": [], "answered": [], "failed": [], "awaited": [], "stage": None}
        assert hidden["privacy"] == seen["privacy"]


def test_a_client_learns_of_its_own_tasks_alone(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=2, participation=POISSON)
    assert routes(coordinator, "client") == OF_CLIENTS, "a new channel: does it tell who took part?"
    finish(coordinator, federation, clients)


def families(text: str) -> set[str]:
    return set(re.findall(r"^(promptfed_\w+?)(?:_created)?(?:\{.*)? ", text, re.MULTILINE))


def test_open_figures_count_and_time_nothing_of_clients(coordinator: InThread) -> None:
    before = families(coordinator.http.get("/metrics").text)
    assert "promptfed_update_bytes_total" in before
    federation, clients = created(coordinator, rounds=1, participation=POISSON)
    finish(coordinator, federation, clients)
    assert families(coordinator.http.get("/metrics").text) <= {*UNTELLING, "promptfed_event_streams"}
    coordinator.delete(federation)
    assert families(coordinator.http.get("/metrics").text) <= set(UNTELLING), "what was counted stays in the sums"


def test_both_epsilons_are_stated_and_the_stated_one_is_of_who_knows_the_rounds(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=4, participation=POISSON, privacy=PRIVACY)
    view = finish(coordinator, federation, clients)["privacy"]
    z, delta = 1.0, view["delta"]
    rounds, amplified = [Event("gaussian", 1.0, z, 4)], [Event("gaussian", 0.5, z, 4)]
    expected = {"epsilon": epsilon_of(rounds, delta), "epsilon_replace_one": replace_one_epsilon(rounds, delta)}
    expected["epsilon_if_secret"] = epsilon_of(amplified, delta)
    assert {key: view[key] for key in expected} == expected
    assert {key: view[key.replace("epsilon", "epsilon_planned")] for key in expected} == expected
    last = coordinator.get(f"{federation}/rounds")["rounds"][-1]["phases"][-1]["privacy"]
    assert {key: last[key] for key in expected} == expected
