"""What the coordinator tells of differential privacy: to its operator of all clients, to a client of itself."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import torch

from promptfed.coordinator.resources.federations import views
from promptfed.coordinator.resources.federations.views import _warnings
from promptfed.shared.methods.core.interface import MethodError
from promptfed.shared.privacy.accounting import COARSE, epsilon_of, training_event
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import ScriptedClient
from tests.support.coordinators import InThread
from tests.support.open_phases import kind, open_first_phase

GOOD = {"context": torch.ones(4, 8)}
SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
PLANNED = {"units": 10, "noise_multiplier": 1.0, "epsilon_planned": 4.5, "delta": 1e-3}


def body(task: dict[str, Any], units: int, spends: dict[str, Any] | None = None, **more: Any) -> bytes:
    """A protected update of a batch of 32 and one epoch."""
    spent = {"epsilon": 3.5, "delta": 1e-3, "noise": "seeded", "events": [training_event(units, 32, 1, 1.0).as_json()]}
    spent |= spends or {}
    about = {"task_id": task["task_id"], "payload_sha256": task["payload"]["sha256"], "metrics": {}}
    return encode(GOOD, about | {"privacy": spent} | more)


def computed_epsilon(units: int, updates: int) -> float:
    """What so many updates cost, as the coordinator computes it."""
    return epsilon_of([training_event(units, 32, 1, 1.0)] * updates, 1e-3, COARSE)


def read(client: ScriptedClient, what: str, **asked: Any) -> httpx.Response:
    return client.http.get(f"{client.path}/{what}", params=asked, headers=client.headers)


def test_what_a_client_has_spent_is_told_to_it_and_to_the_operator(coordinator: InThread) -> None:
    federation, (a, b), (task, _) = open_first_phase(coordinator, training={"epochs": 1}, privacy=SAMPLE)
    units = coordinator.get(f"{federation}/clients")["clients"][0]["num_samples"]
    before = coordinator.get(f"{federation}/privacy")
    told = [(one["client"], one["spent"], one["last"]) for one in before["clients"]]
    assert told == [("a", [], None), ("b", [], None)]
    sent = body(task, units)
    receipt = a.send(task, sent)
    assert receipt.status_code == 201, receipt.text
    own = read(a, "spends").json()
    assert (own["client"], len(own["spends"])) == ("a", 1)
    (one,) = own["spends"]
    assert one["release"] == receipt.json()["sha256"].removeprefix("sha256:")
    assert one["events"] == [training_event(units, 32, 1, 1.0).as_json()]
    assert (one["epsilon"], one["delta"], one["noise"], one["round"], one["split"]) == (3.5, 1e-3, "seeded", 1, "train")
    assert read(b, "spends").json()["spends"] == []
    view = coordinator.get(f"{federation}/privacy")
    assert view["level"] == "sample"
    computed = computed_epsilon(units, 1)
    assert [(one["client"], one["spent"]) for one in view["clients"]] == [("a", [computed]), ("b", [])]
    assert (view["clients"][0]["last"]["epsilon"], view["clients"][0]["last"]["ledger_epsilon"]) == (computed, 3.5)
    assert any("noise from a seed" in text and text.endswith(": a") for text in view["warnings"])
    assert any("tells no plan of its training" in text for text in view["warnings"])


def test_what_noisy_counts_have_cost_is_told_to_who_has_made_them(coordinator: InThread) -> None:
    federation = coordinator.create()
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    event = {"mechanism": "laplace", "q": 1.0, "z": 0.1, "count": 2}
    result = {"test": {"accuracy": 0.5, "num_samples": 20}}
    for number, client in enumerate(clients, 1):
        spent = {"events": [event], "epsilon": float(number), "delta": 1e-3, "noise": "secret"}
        url = f"{client.path}/tasks/{coordinator.task(client)['task_id']}/evaluation"
        sent = {"splits": result, "zero_shot": result, "privacy": spent}
        assert client.http.put(url, json=sent, headers=client.headers).status_code == 201
        told = [(one["split"], one["epsilon"], one["events"]) for one in read(client, "spends").json()["spends"]]
        assert told == [("test", float(number), [event])]


@pytest.mark.both_databases
def test_the_page_of_all_clients_is_what_each_of_them_is_told(coordinator: InThread) -> None:
    federation, clients, tasks = open_first_phase(
        coordinator, training={"epochs": 1}, privacy=SAMPLE, rounds=3, evaluation={"every": 1}
    )
    a, b = clients
    units = coordinator.get(f"{federation}/clients")["clients"][0]["num_samples"]
    third = 4 + 1 / 3
    for number in range(3):
        for client, task in zip(clients, tasks, strict=True):
            if client is b and number == 2:
                continue
            spent = {"epsilon": number + third, "epsilon_replace_one": number + 2 * third, "noise": "secret"}
            if (client, number) == (a, 1):
                spent = {"epsilon": 3.25, "noise": "seeded"}  # of a new ledger
            assert client.send(task, body(task, units, spent)).status_code == 201
        if number < 2:
            tasks = coordinator.training(clients)
    told = {one["client"]: one for one in coordinator.get(f"{federation}/privacy")["clients"]}
    assert told["a"]["spent"] == [computed_epsilon(units, count) for count in (1, 2, 3)]
    assert told["b"]["spent"] == told["a"]["spent"][:2]
    words = {
        name: [spend["epsilon"] for spend in read(one, "spends").json()["spends"]] for name, one in (("a", a), ("b", b))
    }
    assert words == {"a": [third, 3.25, 2 + third], "b": [third, 1 + third]}
    for client in clients:
        spends, page = read(client, "spends").json()["spends"], told[client.name]
        last = spends[-1]
        own = {"epsilon": "ledger_epsilon", "epsilon_replace_one": "ledger_epsilon_replace_one"}
        shown = {key: page["last"][own.get(key, key)] for key in (*own, "delta", "noise")}
        assert shown == {key: last[key] for key in shown}
        assert page["last"]["epsilon"] == page["spent"][-1]
        assert page["last"]["noise_multiplier"] == last["events"][0]["z"]


def test_what_a_client_plans_is_stored_shown_and_held_against_its_updates(coordinator: InThread) -> None:
    federation = coordinator.create(training={"epochs": 1}, privacy=SAMPLE | {"noise_multiplier": None, "epsilon": 5.0})
    token = coordinator.token(federation)
    clients = [ScriptedClient(coordinator.http, federation, name) for name in ("a", "b")]
    for wrong in ({"units": 11}, {"units": 9}):
        refused = clients[0].enrol(token, protection=PLANNED | wrong)
        assert (refused.status_code, kind(refused)) == (422, "privacy-mismatch"), refused.text
    for one in clients:
        assert one.enrol(coordinator.token(federation), protection=PLANNED).status_code == 201
    coordinator.post(f"{federation}/start")
    (task, _) = coordinator.training(clients)
    [one, _] = coordinator.get(f"{federation}/privacy")["clients"]
    assert one["planned"] == PLANNED
    less = body(task, 10, {"events": [training_event(10, 32, 1, 0.5).as_json()], "epsilon": 9.0, "noise": "secret"})
    assert kind(clients[0].send(task, less)) == "privacy-mismatch", "less noise than it has declared"
    assert clients[0].send(task, body(task, 10)).status_code == 201


def test_a_federation_without_protection_takes_no_plan_and_is_told_so(coordinator: InThread) -> None:
    federation = coordinator.create()
    client = ScriptedClient(coordinator.http, federation, "a")
    assert kind(client.enrol(coordinator.token(federation), protection=PLANNED)) == "privacy-mismatch"
    view = coordinator.get(f"{federation}/privacy")
    assert (view["level"], view["clients"], view["smallest_sum"]) == ("none", [], None)
    assert "nothing is protected" in view["warnings"][0]


def test_refused_tasks_of_budgets_and_policies_are_counted_by_kind(coordinator: InThread) -> None:
    federation, (a, b), (task, other) = open_first_phase(coordinator, training={"epochs": 1}, privacy=SAMPLE)
    for client, asked, why in ((a, task, "privacy-budget-exhausted"), (b, other, "MethodError")):
        url = f"{client.path}/tasks/{asked['task_id']}/failure"
        told = client.http.post(url, json={"type": why, "detail": "no"}, headers=client.headers)
        assert told.status_code == 200
    assert coordinator.get(f"{federation}/privacy")["failures"] == {"privacy-budget-exhausted": 1}
    metrics = coordinator.http.get("/metrics").text
    assert 'promptfed_privacy_failures_total{kind="privacy-budget-exhausted"} 1.0' in metrics
    assert "MethodError" not in metrics


@pytest.mark.parametrize(("privacy", "sums", "bare"), [(0, 0, True), (1, 0, False), (0, 1, False), (1, 1, False)])
def test_warnings_name_what_protects_nothing_and_whom_they_are_about(privacy: bool, sums: bool, bare: bool) -> None:
    def client(name: str, noise: str | None, planned: float | None, ledger: float = 0) -> Any:
        last = SimpleNamespace(noise=noise, ledger_epsilon=ledger) if noise else None
        plan = SimpleNamespace(epsilon_planned=planned) if planned else None
        return SimpleNamespace(client=name, last=last, planned=plan)

    spec = SimpleNamespace(secure_aggregation=True if sums else None)
    federation: Any = SimpleNamespace(privacy=True if privacy else None, spec=spec)
    nothing = "nothing is protected: whoever has the prompts or an update can test for a training image"
    clients = [client("a", "secret", 2, 2.019), client("b", None, 2), client("c", "secret", 2, 1)]
    assert _warnings(federation, clients) == ([nothing] if bare else [])
    clients += [client("d", "seeded", 2, 2.021), client("e", "seeded", None, 9), client("f", "secret", 1, 3)]
    clients += [client("g", None, None)]
    assert _warnings(federation, clients)[bare:] == [
        "noise from a seed, which protects nothing: d, e",
        "an older version, which tells no plan of its training: e, g",
        "ε of the ledger is over what this federation was to cost: other federations share it: d, f",
    ]


def test_a_view_counts_who_is_active_and_hides_a_secret_draw_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    roles = [("trainer", True), ("trainer", True), ("evaluator", True), ("trainer", False), ("evaluator", False)]
    members = {str(n): SimpleNamespace(role=role, active=active) for n, (role, active) in enumerate(roles)}
    run: Any = SimpleNamespace(members=members, state="running", round=3, stage=None)
    federation: Any = SimpleNamespace(run=run, draw_secret=None, deadline="2030-01-01T00:00:00+00:00")
    told = views._counts(federation)
    assert (told.trainers, told.evaluators, told.withdrawn) == (2, 1, 2)
    assert (views._draw(federation).commitment, views._draw(federation).secret) == (None, None)
    federation.draw_secret = "drawn"
    digest = hashlib.sha256(b"drawn").hexdigest()
    for state, secret in (("running", None), ("paused", None), ("finished", "drawn"), ("failed", "drawn")):
        run.state = state
        assert (views._draw(federation).commitment, views._draw(federation).secret) == (digest, secret)
    assert views._stage(federation) is None
    monkeypatch.setattr(views.clock, "monotonic", lambda: 100.0)
    about: dict[str, Any] = {"kind": "train", "name": "train", "sample_size": 2, "extended": True}
    for state, closed, deadline, left in (
        ("running", False, 103.0, 3.0), ("running", False, 99.0, 0.0), ("running", True, 103.0, None),
        ("paused", False, 103.0, None),
    ):  # fmt: skip
        run.state, run.stage = state, SimpleNamespace(closed=closed, deadline=deadline, **about)
        stage = views._stage(federation)
        assert stage is not None
        assert (stage.seconds_left, stage.closing, stage.round, stage.extended) == (left, closed, 3, True)
    assert views._time("damaged") is None
    assert views._time(federation.deadline) is not None


def test_what_tells_who_takes_part_is_hidden(coordinator: InThread) -> None:
    federation, _, _ = open_first_phase(coordinator)
    with coordinator.registry.database.read() as session:
        view = views.federation_view(session, coordinator.registry.get(federation))
    hidden = views.without_participation(view)
    names = {"stage", "asked", "answered", "failed", "awaited"}
    changed = {name for name, value in dict(view).items() if dict(hidden)[name] != value}
    assert changed <= names
    assert {"stage", "asked", "awaited"} <= changed
    assert (hidden.stage, hidden.asked, hidden.awaited) == (None, [], [])


@pytest.mark.parametrize(("ratio", "warned"), [(None, 0), (1.0, 0), (1.01, 1)])
def test_noise_larger_than_what_is_learned_is_warned_of(
    ratio: float | None, warned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    noise = None if ratio is None else SimpleNamespace(ratio=ratio, after_rounds=7, told=lambda: "it is drowned")
    monkeypatch.setattr(views, "_drowned", lambda federation, clients: noise if clients == 4 else None)
    kinds = ("epsilon", "epsilon_replace_one", "epsilon_if_secret")
    monkeypatch.setattr(views, "costs", lambda spec, phases: dict.fromkeys(kinds, float(phases)))
    monkeypatch.setattr(views, "noised_phases", lambda method, last, rounds: 10 * last + rounds)
    monkeypatch.setattr(views, "released", lambda session, federation: 5)
    privacy: Any = SimpleNamespace(protects_clients=True, delta=1e-3, clip=0.5, noise_multiplier=0.7)
    spec = SimpleNamespace(privacy=privacy, participation=SimpleNamespace(sampling="fixed"))
    rules = SimpleNamespace(min_clients=4, last_round=2, rounds=3, budget_rounds=None)
    trainers = ["a", "b", "c"]
    federation: Any = SimpleNamespace(
        spec=spec, rules=rules, absent=None, method=None, run=SimpleNamespace(trainers=lambda: trainers)
    )
    session: Any = None
    told = views.central_privacy(session, federation)
    assert told is not None
    assert (told.clients, told.ratio, told.warnings) == (4, ratio, ["it is drowned"] * warned)
    assert (told.epsilon, told.epsilon_planned, told.sampling) == (5.0, 23.0, "fixed")
    trainers += ["d", "e"]
    more = views.central_privacy(session, federation)
    assert more is not None
    assert more.clients == 5
    federation.absent = "no method"
    assert views.central_privacy(session, federation) is None
    federation.absent, privacy.protects_clients = None, False
    assert views.central_privacy(session, federation) is None


def test_noise_is_compared_where_the_shape_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*about: Any) -> None:
        raise MethodError("no")

    federation: Any = SimpleNamespace(shape=None, method=None, spec=None, context=lambda: None)
    monkeypatch.setattr(views, "drowned", lambda method, spec, context, clients: ("drowned", clients))
    assert views._drowned(federation, 3) is None
    federation.shape = object()
    assert views._drowned(federation, 3) == ("drowned", 3)
    monkeypatch.setattr(views, "drowned", refuse)
    assert views._drowned(federation, 3) is None
