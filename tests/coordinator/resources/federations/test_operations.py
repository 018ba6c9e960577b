"""Federations through the API: created, steered, looked at, deleted; and their whole life with fake clients."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from promptfed.coordinator.resources.federations import operations as federations
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tokens import digest
from promptfed.shared.seeds import initial_draws, sampling_order
from promptfed.shared.tensors.torch_tensors import decode, encode, state_hash
from promptfed.testing.clients import DEADLINE, FINGERPRINT, SHAPE, bearer, content_digest, drive, spec, trained
from tests import ROOT
from tests.support.coordinators import InThread
from tests.support.open_phases import answer_all, completed, enrolled, launched, supply
from tests.support.waiting import wait_for


@pytest.mark.extended  # draws and sums by numpy and by torch are the same bits on an ordinary CPU only
def test_a_federation_from_create_to_prompts(coordinator: InThread) -> None:
    created = coordinator.http.post("/v1/federations", json=spec(), headers=coordinator.operator)
    federation = created.json()["id"]
    assert created.headers["location"] == f"/v1/federations/{federation}"
    trainers = coordinator.enrol(federation, "b", "a", num_samples=30)
    evaluators = coordinator.enrol(federation, "z", role="evaluator", num_samples=0)
    assert coordinator.post(f"{federation}/start")["state"] == "running"
    drive(trainers + evaluators)
    found = coordinator.get(federation)
    assert (found["state"], found["round"], found["reason"]) == ("finished", 2, None)

    state = {"context": torch.randn(4, 8, generator=initial_draws(7)) * 0.02}
    for number in (1, 2):
        task = {"round": number, "phase": "train"}
        parts = [trained(state, name, task)["context"].double() for name in ("a", "b")]
        state = {"context": ((parts[0] * 0.5) + (parts[1] * 0.5)).float()}
        report = coordinator.get(f"{federation}/rounds/{number}")
        assert report["state_hash"] == state_hash(state)
    assert found["state_hash"] == state_hash(state)

    response = coordinator.http.get(f"/v1/federations/{federation}/prompts", headers=coordinator.operator)
    assert torch.equal(decode(response.content)[0]["context"], state["context"])
    assert response.headers["etag"] == f'"{state_hash(state)}"'


def test_weights_come_from_the_enrolled_numbers_of_samples(coordinator: InThread) -> None:
    federation = coordinator.create(rounds=1, aggregation={"max_weight_share": 0.6})
    clients = [coordinator.enrol(federation, name, num_samples=n)[0] for name, n in (("a", 97), ("b", 1), ("c", 2))]
    coordinator.post(f"{federation}/start")
    drive(clients)
    [phase] = coordinator.get(f"{federation}/rounds/1")["phases"]
    weights = {one["client"]: one["weight"] for one in phase["counted"]}
    assert weights == pytest.approx({"a": 0.6, "b": 0.4 / 3, "c": 0.8 / 3})


def test_a_dry_run_creates_nothing(coordinator: InThread) -> None:
    assert coordinator.post("/v1/federations?dry_run=true", spec())["spec"]["template"] == "a photo of a {}."
    assert coordinator.get("/v1/federations")["federations"] == []


LARGE = {"model": "ViT-B-16", "pretrained": "openai"}
WHOLE = {"privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0}, "aggregation": {"weighting": "uniform"}}
THREE, MANY = {"participation": {"min_clients": 3}}, {"participation": {"min_clients": 200}}


@pytest.mark.extended
@pytest.mark.parametrize("backbone", [{}, LARGE], ids=["embedded", "of open_clip"])
@pytest.mark.parametrize(
    ("refused", "path", "taken"),
    [
        (WHOLE | THREE, "privacy.noise_multiplier", WHOLE | MANY),
        (
            {**WHOLE, **MANY, "privacy": WHOLE["privacy"] | {"epsilon": 1e-3}}, "privacy.epsilon",
            {**WHOLE, **MANY, "privacy": WHOLE["privacy"] | {"epsilon": 100.0}},
        ),
        ({"template": "a " * 80 + "{}."}, "template", {"template": "a " * 20 + "{}."}),
        ({"class_names": ["cat", "a " * 80]}, "class_names", {"class_names": ["cat", "a " * 20]}),
        ({"secure_aggregation": {"minimum": 3}}, "secure_aggregation", {"secure_aggregation": {}, **THREE}),
        ({"backbone": {"shape": {"d_e": 8, "d_v": 8}}}, "backbone.shape", {"backbone": {"shape": SHAPE}}),
    ],
    ids=["few sites", "budget", "template", "class names", "secure sum", "shape"],
)  # fmt: skip
def test_what_no_site_could_join_is_refused_at_the_check(
    coordinator: InThread, refused: dict[str, Any], path: str, taken: dict[str, Any], backbone: dict[str, Any]
) -> None:
    for given in (refused, taken):
        body = spec(**given, **({} if "backbone" in given else {"backbone": backbone}))
        answer = coordinator.post("/v1/federations?dry_run=true", body, status=200 if given is taken else 422)
        assert given is taken or [one["path"] for one in answer["errors"]] == [path]


@pytest.mark.both_databases
def test_federations_are_found_by_id_or_name_and_listed_in_pages(coordinator: InThread) -> None:
    ids = [coordinator.create(name=f"f{number}") for number in range(5)]
    assert coordinator.get("f3")["id"] == ids[3]
    seen, after = [], None
    while True:
        page = coordinator.get("/v1/federations", params={"limit": 2} | ({"after": after} if after else {}))
        seen += [one["id"] for one in page["federations"]]
        after = page["next"]
        if after is None:
            break
    assert seen == ids
    coordinator.get("nothing", status=404)


def test_a_start_without_enough_clients_names_both_numbers(coordinator: InThread) -> None:
    federation = coordinator.create(participation={"min_clients": 3})
    problem = coordinator.post(f"{federation}/start", status=409)
    assert (problem["type"].rsplit("/")[-1], problem["enrolled"], problem["needed"]) == ("not-enough-clients", 0, 3)
    coordinator.enrol(federation, "a", "b")
    problem = coordinator.post(f"{federation}/start", status=409)
    assert (problem["enrolled"], problem["needed"]) == (2, 3)


def test_steering_at_a_wrong_moment_is_refused_with_the_state(coordinator: InThread) -> None:
    federation = coordinator.create()
    for verb in ("pause", "resume"):
        problem = coordinator.post(f"{federation}/{verb}", status=409)
        assert (problem["type"].rsplit("/")[-1], problem["state"]) == ("wrong-state", "enrolling")
    assert coordinator.post(f"{federation}/cancel")["state"] == "cancelled"
    for verb in ("start", "pause", "resume", "cancel"):
        assert coordinator.post(f"{federation}/{verb}", status=409)["state"] == "cancelled"


def test_a_federation_starts_by_itself_when_ready(coordinator: InThread) -> None:
    federation = coordinator.create(start="when_ready")
    coordinator.enrol(federation, "z", role="evaluator", num_samples=0)
    coordinator.enrol(federation, "a")
    assert coordinator.get(federation)["state"] == "enrolling"
    coordinator.enrol(federation, "b")
    coordinator.until(federation, state="running")


def test_a_start_from_words_needs_a_supplied_state(coordinator: InThread) -> None:
    federation = coordinator.create(method={"context_init": "a photo of a"}, start="when_ready", rounds=1)
    clients = coordinator.enrol(federation, "a", "b")
    problem = coordinator.post(f"{federation}/start", status=409)
    assert problem["type"].endswith("/initial-state-missing")
    assert "a photo of a" in problem["detail"]
    end = coordinator.until(federation, state="enrolling")
    while end["reason"] is None:
        end = coordinator.get(federation)
    assert end["reason"].startswith("initial-state-missing")

    state = {"context": torch.ones(4, 8)}
    put = supply(coordinator, federation, encode(state))
    assert put.json()["state_hash"] == state_hash(state)
    coordinator.until(federation, state="running")
    assert torch.equal(clients[0].payload(coordinator.task(clients[0]))["context"], state["context"])


UNFIT: list[tuple[bytes, int, str]] = [
    (b"garbage", 415, "not-safetensors"),
    (encode({"contxt": torch.ones(4, 8)}), 422, "unknown-tensor"),
    (encode({}), 422, "missing-tensor"),
    (encode({"context": torch.ones(4, 9)}), 422, "wrong-shape"),
    (encode({"context": torch.ones(4, 8, dtype=torch.float64)}), 422, "wrong-dtype"),
    (encode({"context": torch.full((4, 8), torch.nan)}), 422, "not-finite"),
    (encode({"context": torch.ones(100, 100)}), 413, "too-large"),
]


def test_a_state_that_does_not_fit_is_refused(coordinator: InThread) -> None:
    federation = coordinator.create(backbone={"shape": SHAPE}, admission={"max_bytes": 20_000})
    for body, status, kind in UNFIT:
        put = supply(coordinator, federation, body)
        assert (put.status_code, put.json()["type"].rsplit("/")[-1]) == (status, kind), put.text


def test_only_the_state_that_is_continued_is_taken(coordinator: InThread) -> None:
    good, other = {"context": torch.ones(4, 8)}, {"context": torch.zeros(4, 8)}
    federation = coordinator.create(backbone={"shape": SHAPE}, continues=state_hash(good))
    assert supply(coordinator, federation, encode(other)).json()["type"].endswith("/initial-state-mismatch")
    assert supply(coordinator, federation, encode(good)).status_code == 200


def test_an_initial_state_made_for_another_backbone_stops_the_start(coordinator: InThread) -> None:
    federation = coordinator.create()
    body = encode({"context": torch.ones(4, 9)})
    assert supply(coordinator, federation, body).status_code == 200
    coordinator.enrol(federation, "a", "b")
    assert coordinator.post(f"{federation}/start", status=409)["type"].endswith("/initial-state-mismatch")


def test_the_first_enrolment_s_backbone_is_shown_and_confirmed_by_start(coordinator: InThread) -> None:
    federation = coordinator.create()
    assert coordinator.get(federation)["backbone"] == {"fingerprint": None, "shape": None, "confirmed": False}
    coordinator.enrol(federation, "a", "b")
    backbone = coordinator.get(federation)["backbone"]
    assert (backbone["fingerprint"], backbone["shape"]["d_t"], backbone["confirmed"]) == (FINGERPRINT, 8, False)
    assert coordinator.post(f"{federation}/start")["backbone"]["confirmed"] is True


def test_a_pause_asks_nobody_and_still_takes_updates(coordinator: InThread) -> None:
    federation, clients = launched(coordinator, "a", "b")
    tasks = coordinator.training(clients)
    coordinator.post(f"{federation}/pause")
    assert clients[0].task().status_code == 204
    answer_all(clients, tasks)
    assert coordinator.get(federation)["round"] == 1
    coordinator.post(f"{federation}/resume")
    assert coordinator.task(clients[0])["kind"] == "evaluate"


def test_what_is_awaited_until_when_is_shown(coordinator: InThread) -> None:
    federation, clients = launched(coordinator, "a", "b")
    tasks = coordinator.training(clients)
    clients[0].answer(tasks[0])
    found = coordinator.get(federation)
    assert (found["phase"], found["asked"], found["answered"]) == ("train", ["a", "b"], ["a"])
    assert [(one["name"], one["until"]) for one in found["awaited"]] == [("b", found["stage"]["deadline"])]
    assert DEADLINE / 2 < found["stage"]["seconds_left"] <= DEADLINE


def test_prompts_come_as_safetensors_with_an_etag(coordinator: InThread) -> None:
    federation = coordinator.create()
    path = f"/v1/federations/{federation}/prompts"
    assert coordinator.get(path, status=404)["type"].endswith("/no-state")
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    coordinator.training(clients)
    raw = coordinator.http.get(path, headers=coordinator.operator)
    assert decode(raw.content)[0]["context"].shape == (4, 8)
    assert raw.headers["repr-digest"] == content_digest(raw.content)
    tag = raw.headers["etag"]
    for known, status in ((tag, 304), (f'"x", W/{tag}', 304), ("*", 304), ('"x"', 200), ("", 200)):
        again = coordinator.http.get(path, headers=coordinator.operator | {"If-None-Match": known})
        assert (again.status_code, again.content) == (status, b"" if status == 304 else raw.content), known
    assert coordinator.get(path, status=404, params={"round": 1})["type"].endswith("/no-state")
    first = coordinator.http.get(path, params={"round": "0"}, headers=coordinator.operator)
    assert (first.content, first.headers["etag"]) == (raw.content, raw.headers["etag"])


def test_metrics_come_as_csv(coordinator: InThread) -> None:
    federation, clients = enrolled(coordinator, "a", "b", rounds=1)
    clients[1].accuracy = 0.75
    coordinator.post(f"{federation}/start")
    drive(clients)
    address = f"/v1/federations/{federation}/metrics"
    response = coordinator.http.get(address, headers=coordinator.operator)
    assert response.headers["content-type"].startswith("text/csv")
    lines = response.text.splitlines()
    assert lines[0] == "round,phase,client,split,name,value"
    wanted = {"1,evaluation,b,test,accuracy,0.75", "1,evaluation,,,trainer_accuracy,0.625", "1,train,,,loss,0.5"}
    assert wanted <= set(lines)


@pytest.mark.both_databases
def test_the_last_round_s_tensors_are_kept_where_no_more_is_asked(coordinator: InThread) -> None:
    federation, _ = completed(coordinator, "a", "b", rounds=3, retention="last_round")
    path = f"/v1/federations/{federation}/prompts"

    def older() -> int:
        return coordinator.http.get(path, params={"round": 2}, headers=coordinator.operator).status_code

    wait_for("the removal of older states", lambda: older() != 200)
    assert coordinator.get(path, params={"round": 2}, status=404)["type"].endswith("/no-state")
    latest = coordinator.http.get(path, headers=coordinator.operator)
    assert latest.status_code == 200
    # Rows go first, what they named a moment later.
    wait_for("the removal of older blobs", lambda: len(coordinator.registry.blobs.all()) <= 4)
    assert len(coordinator.registry.blobs.all()) == 4, "of round 3: its start, the two updates, and the state"
    assert len(coordinator.get(f"{federation}/rounds/1")["phases"][0]["updates"]) == 2, "reports stay"


def test_methods_are_described_to_anyone(coordinator: InThread) -> None:
    listed = coordinator.http.get("/v1/methods").json()["methods"]
    assert {"promptfl", "zero_shot", "coop"} <= {one["name"] for one in listed}
    one = coordinator.http.get("/v1/methods/promptfl").json()
    context = {"name": "context", "shape": ["m", "d_t"], "dtype": "float32", "shared_with_clients": True}
    assert one["phases"][0]["up"] == [context]
    assert one["hyperparameters"]["properties"]["m"]["default"] is None
    assert coordinator.http.get("/v1/methods/nonsense").json()["type"].endswith("/not-found")


def test_an_unknown_client_s_name_is_not_found(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.delete(f"{federation}/clients/nobody", status=404)
    coordinator.post(f"{federation}/clients/nobody/reset", status=404)
    assert coordinator.http.get(f"/v1/federations/{federation}/task", headers=bearer("x")).status_code == 401


def draws(coordinator: InThread, **participation: str) -> tuple[list[list[str]], dict[str, Any]]:
    """Whom six rounds have asked, and what is told of the draw at the end."""
    names = [f"c{k}" for k in range(6)]
    participation = {"min_clients": 1, "fraction": 0.5} | participation
    federation = coordinator.create(rounds=6, participation=participation, evaluation={"every": 6})
    clients = coordinator.enrol(federation, *names)
    coordinator.post(f"{federation}/start")
    assert coordinator.get(federation)["draw"]["secret"] is None, "while it runs, nobody can tell who is next"
    drive(clients)
    view = coordinator.get(federation)
    asked = [one["phases"][0]["asked"] for one in coordinator.get(f"{federation}/rounds")["rounds"][1:]]
    coordinator.delete(federation)
    return asked, view["draw"]


@pytest.mark.extended
def test_who_is_asked_follows_from_a_secret_that_is_told_at_the_end(coordinator: InThread) -> None:
    names = [f"c{k}" for k in range(6)]
    by_seed = [sorted(sampling_order(7, round, names)[:3]) for round in range(1, 7)]
    asked, draw = draws(coordinator)
    again, other = draws(coordinator)
    assert asked != by_seed
    assert again != asked, "each federation has a secret of its own"
    for found, told in ((asked, draw), (again, other)):
        assert found == [sorted(sampling_order(told["secret"], round, names)[:3]) for round in range(1, 7)]
        assert told["commitment"] == hashlib.sha256(told["secret"].encode()).hexdigest()
    public, nothing = draws(coordinator, draw="public")
    assert (public, nothing) == (by_seed, {"commitment": None, "secret": None})


@pytest.mark.extended
def test_every_run_file_of_the_repository_is_read_as_the_commands_read_it(coordinator: InThread) -> None:
    folders = ("examples", "promptfed")
    texts = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.yaml")]
    assert len(texts) > 50
    for text in texts:
        if isinstance(wanted := yaml.safe_load(text), dict):
            if isinstance(wanted.get("clients"), list) and "method" in wanted:  # all data are embedded drawings
                wanted.setdefault("backbone", {"model": "promptfed-tiny"})
            assert coordinator.post("/v1/federations/run-file", {"text": text}, status=200)["content"] == wanted
    typed = '{\n\t"name": "eyes", "training": {"learning_rate": 1e3}}'  # as an editor indents JSON
    read = coordinator.post("/v1/federations/run-file", {"text": typed}, status=200)["content"]
    assert read == {"name": "eyes", "training": {"learning_rate": 1000.0}}


NO_RUN_FILE: list[tuple[str, str]] = [
    ("a: [1", "the file ends within a list"), ("a: 1\na: 2", "line 2: a is given twice"),
    ('{"a": 1, "a": 2}', "line 1: a is given twice"),
    ("a: &x [1]\nb: *x", "line 2: write out what the alias repeats"),
    ("a: 2026-11-27", "write numbers, texts, lists and mappings"), ("a: 2026-99-99", "put a text in quotes"),
    ("a: .inf", "write numbers, texts, lists and mappings"),
    ("a: !!python/object:os.system x", "a tag is not allowed"), ("- a", "this is no run file"),
    ("", "this is no run file"), ("[" * 5000 + "]" * 5000, "nested too deeply"),
]  # fmt: skip


def test_a_text_that_is_no_run_file_is_refused(coordinator: InThread) -> None:
    for text, told in NO_RUN_FILE:
        assert told in coordinator.post("/v1/federations/run-file", {"text": text}, status=422)["detail"]


def test_a_federation_that_is_gone_on_with_by_another_spec_says_so(
    coordinator: InThread, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "spec.yaml"
    asked = {"name": "boot", "method": {"name": "promptfl", "m": 4}, "rounds": 3, "training": {"epochs": 2}}
    asked["backbone"] = {"model": "promptfed-tiny"}
    for more in ({}, {}, {"rounds": 3}):
        file.write_text(json.dumps(asked | more))
        federations.bootstrap(coordinator.registry, Settings(bootstrap=file))
    assert not caplog.records
    file.write_text(json.dumps(asked | {"rounds": 9, "training": {"epochs": 2, "batch_size": 7}}))
    federations.bootstrap(coordinator.registry, Settings(bootstrap=file))
    (record,) = caplog.records
    assert "goes on as it was created (rounds is 3, not 9; training.batch_size is 32, not 7)" in record.getMessage()


@pytest.mark.parametrize(
    ("uses", "there", "minted"), [(5, 0, 5), (None, 0, 2), (None, 1, 1), (5, 2, 3), (None, 2, None)]
)
def test_a_token_is_for_those_who_are_missing(
    uses: int | None, there: int, minted: int | None, coordinator: InThread, tmp_path: Path
) -> None:
    enrolled(coordinator, *"ab"[:there])
    file, token = tmp_path / "spec.yaml", tmp_path / "token"
    file.write_text(json.dumps(spec()))
    settings = Settings(bootstrap=file, enrolment_token_file=token, enrolment_token_uses=uses)
    for _ in range(2):
        federations.bootstrap(coordinator.registry, settings)
    federation = coordinator.registry.find("eyes")
    known = {key: one.uses for key, one in federation.tokens.items() if one.uses < 10}  # but that of `enrolled`
    assert known == ({} if minted is None else {digest(token.read_text().strip()): minted})
