"""The facts of a card: whoever takes the result has the coordinator's, and the arithmetic is right."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from promptfed.coordinator.resources.results import exports
from promptfed.export.verification import verify_export
from promptfed.sdk.client import Coordinator
from promptfed.sdk.operations import take
from promptfed.shared.api.export_card import Facts
from promptfed.shared.errors import PromptfedError
from promptfed.shared.metrics.estimates import gain_margin, mean_interval
from promptfed.shared.tensors import method_part
from promptfed.shared.tensors.torch_tensors import decode, state_hash
from promptfed.testing.clients import CLASSES, bearer, drive
from tests.coordinator.engine.test_selection import Measuring
from tests.shared.spec.test_effects import costs_are_computed_coarsely as costs_are_computed_coarsely
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import completed, kind, launched

Card = dict[str, Any]


def told(coordinator: InThread, federation: str, round: int) -> Facts:
    return Facts.model_validate(coordinator.get(f"{federation}/rounds/{round}/card"))


def taken(coordinator: InThread, federation: str, round: int) -> Facts:
    """As `promptfed export` takes them; their hash is of the state that comes beside them."""
    token = coordinator.operator["Authorization"].split()[1]
    with Coordinator(coordinator.url, token) as api:
        found = api.run(take(federation, round))
    assert found.facts.hashes.state == state_hash(method_part(found.state))
    assert found.facts.hashes.backbone == found.federation.backbone.fingerprint
    return found.facts


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": {"server": {"optimizer": "adam"}}},
        {
            "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0, "accept_noise": True},
            "aggregation": {"weighting": "uniform", "max_weight_share": 1},
        },
    ],
    ids=["plain", "with a server optimizer", "protected"],
)
def test_the_coordinator_knows_what_an_exporter_finds(coordinator_with: Make, changes: dict[str, Any]) -> None:
    coordinator = coordinator_with()
    federation = coordinator.create(rounds=2, **changes)
    clients = coordinator.enrol(federation, "b", "a", num_samples=1000)
    clients += coordinator.enrol(federation, "referee", role="evaluator", num_samples=0)
    coordinator.post(f"{federation}/start")
    drive(clients)
    coordinator.until(federation, state="finished")
    for round in (0, 1, 2):
        facts = told(coordinator, federation, round)
        assert facts == taken(coordinator, federation, round)
        assert (facts.round, facts.rounds) == (round, 2)
        assert [one.name for one in facts.participants] == ["a", "b", "referee"]
        assert [one.updates_counted for one in facts.participants] == [round, round, 0]
        assert facts.accuracy.round == round
        means = {"adapted": 0.5, "zero_shot": 0.25}  # as every scripted client answers
        assert facts.accuracy.mean == {"trainer": means, "evaluator": means}
        reports = [coordinator.get(f"{federation}/rounds/{number}") for number in range(round + 1)]
        assert facts.bytes.up == sum(report["bytes_up"] for report in reports)
        assert (facts.privacy is not None) == ("privacy" in changes)
    coordinator.get(f"{federation}/rounds/3/card", status=404)


def archive(coordinator: InThread, path: str, folder: Path, token: dict[str, str] | None = None) -> Path:
    answer = coordinator.http.get(f"/v1/federations/{path}/export", headers=token or coordinator.operator)
    assert answer.status_code == 200, answer.text
    place = folder / answer.headers["content-disposition"].partition('"')[2].rstrip('"')
    place.write_bytes(answer.content)
    return place


@pytest.mark.parametrize(
    "changes", [{}, {"aggregation": {"server": {"optimizer": "adam"}}}], ids=["plain", "with a server optimizer"]
)
def test_the_coordinator_s_archive_is_an_export_whose_text_verify_compares(
    coordinator: InThread, changes: dict[str, Any], tmp_path: Path
) -> None:
    federation, _ = completed(coordinator, "a", "b", name="styles", rounds=2, **changes)
    key = coordinator.get("/v1/signing-key")["public_key"]
    place = archive(coordinator, f"{federation}/rounds/2", tmp_path)
    assert place.name == "styles.zip"
    verified = verify_export(place, key, recompute=False)
    assert verified.remarks == ()
    assert verified.card.use.promptfed
    with ZipFile(place) as packed:
        text = packed.read("card.md").decode()
        state, _ = decode(packed.read("prompts.safetensors"))
    assert not [name for name in state if name.startswith("server.")]
    assert "`promptfed export` makes class weights" in text
    shown = coordinator.http.get(f"/v1/federations/{federation}/rounds/2/card.md", headers=coordinator.operator).text
    assert shown.partition("Made by")[0] == text.partition("Made by")[0]
    viewer = coordinator.post("/v1/operators", {"name": "eve", "role": "viewer", "hours": 1}, status=201)["token"]
    unsigned = archive(coordinator, f"{federation}/rounds/2", tmp_path, bearer(viewer))
    assert unsigned.name == "styles-unsigned.zip"
    with pytest.raises(PromptfedError, match="not signed"):
        verify_export(unsigned, key)


CONFIG, WEIGHTS, MERGED = (
    "backbone/open_clip_config.json",
    "backbone/open_clip_model.safetensors",
    "class_weights.safetensors",
)
FILE: Card = {"bytes": 1, "sha256": "0" * 64}
STATE, FINAL = "prompts.safetensors", "final.safetensors"
SPENT: Card = {
    "level": "sample", "unit": "record", "relation": "zero-out", "epsilon_max": 0.1, "epsilon_median": 0.1,
    "clients": 2, "delta": 1e-6, "clip": 1.0, "noise_multiplier": 9.0, "noise": "secret", "accountant": "pld",
    "rounds_counted": 1, "evaluation": "withheld",
}  # fmt: skip
LIES: list[tuple[Callable[[Card], object], str, str]] = [
    (lambda card: None, "", ""),
    (lambda card: card.update(rounds=4), "rounds", "it is 3"),
    (lambda card: card.update(template="x"), "template", "it is 'a photo of a {}.'"),
    (lambda card: card["backbone"].update(model="ViT-B-16"), "backbone", "it is BackboneSpec(model='promptfed-tiny'"),
    (lambda card: card["federation"].update(name="another"), "federation", "it is FederationName(name='eyes'"),
    (lambda card: card["hashes"].update(spec="sha256:" + "0" * 64), "hashes", "it is Hashes("),
    (lambda card: card.update(round=2), "round", "it is 1, not 2"),
    (lambda card: card["accuracy"]["mean"].update(trainer={"adapted": 0.99}), "accuracy", "it is Accuracies("),
    (lambda card: card.update(privacy=SPENT), "privacy", "it is None"),
    (lambda card: numbered(card), "", ""),
    (lambda card: card["participants"][1].update(name="c"), "participants", "it is [Participant(name='a'"),
    (lambda card: card.update(class_names=None), "class_names", "trainers named classes"),
    (lambda card: card.update(class_names=None, class_names_from=None), "class_names", "trainers named classes"),
    (lambda card: card.update(class_names=[]), "class_names", "each class has a name of its own"),
    (lambda card: card.update(class_names=["x", "x"]), "class_names", "each class has a name of its own"),
    (lambda card: card["class_names"].reverse(), "class_names", "trainers named ['circle', 'square', 'star']"),
    (lambda card: card.update(class_names=["x"], class_names_from="who exported it"), "", ""),
    (
        lambda card: card.update(class_names_from="the federation's spec"),
        "class_names",
        "class_names_from is 'who exported it' or \"the federation's trainers\"",
    ),
    (lambda card: card["files"].update({"../" + "x" * 300: FILE}), "files.../" + "x" * 197, ""),
    (lambda card: card["files"].pop("card.md"), "files.card.md", "an export has this file, and its card names it"),
    (lambda card: card["files"].pop(STATE), f"files.{STATE}", "an export has this file, and its card names it"),
    (lambda card: card["files"].pop(FINAL), "", ""),
    (lambda card: card["files"][STATE].update(FILE), f"files.{STATE}", "the state's file is CardFile("),
    (lambda card: card["files"][STATE].update(bytes=1), f"files.{STATE}", "the state's file is CardFile("),
    (lambda card: card["files"][STATE].pop("tensors"), "", ""),
    (lambda card: card["files"][STATE].update(tensors={}), f"files.{STATE}", "the state's file is CardFile("),
    (lambda card: card["files"][FINAL].update(FILE), f"files.{FINAL}", "it is not the last round's state"),
    (lambda card: card["files"].update({CONFIG: FILE}), "files", "its configuration and its weights together"),
    (lambda card: card["files"].update({WEIGHTS: FILE}), "files", "its configuration and its weights together"),
    (lambda card: card["files"].update({CONFIG: FILE, WEIGHTS: FILE}), "", ""),
    (lambda card: card["use"].update(open_clip=True), "use.open_clip", "only there"),
    (lambda card: card["files"].update({MERGED: FILE}), "use.open_clip", "only there"),
    (lambda card: (card["use"].update(open_clip=True), card["files"].update({MERGED: FILE})), "", ""),
    (lambda card: card.update(signature="00"), "signature", "a card holds no signature"),
    (lambda card: card.update(novel=1), "novel", "unknown key"),
]


def numbered(card: Card) -> None:
    for one in (*card["participants"], *card["accuracy"]["clients"]):
        key = "name" if "name" in one else "client"
        one[key] = {"a": "client 1", "b": "client 2"}[one[key]]


@pytest.mark.door
def test_a_card_is_signed_if_it_says_what_the_coordinator_knows(coordinator: InThread, tmp_path: Path) -> None:
    federation, clients = launched(coordinator, "a", "b", rounds=3, selection={})
    drive([Measuring(one.http, one.federation, one.name, figures=(0.2, 0.5, 0.4, 0.3)) for one in clients])
    path = f"/v1/federations/{federation}/rounds/1/card/signature"
    place = archive(coordinator, f"{federation}/rounds/1", tmp_path)
    assert verify_export(place, None, recompute=False).card.selection.round == 1
    with ZipFile(place) as packed:
        last, card = decode(packed.read(FINAL))[0], packed.read("card.json")
    assert state_hash(last) == coordinator.get(federation)["state_hash"]
    assert FINAL not in ZipFile(archive(coordinator, f"{federation}/rounds/3", tmp_path)).namelist()
    for number, (lie, place, why) in enumerate(LIES):
        told = json.loads(card)
        lie(told)
        answer = coordinator.http.post(path, json=told, headers=coordinator.operator)
        errors = answer.json().get("errors", []) if answer.status_code != 200 else []
        expected = 200 if not place else 422 if place == "novel" else 409
        assert (number, answer.status_code, [one["path"] for one in errors]) == (
            number,
            expected,
            [place] * bool(place),
        )
        assert all(why in one["detail"] for one in errors), errors
    refused = coordinator.http.post(
        path, content=b"{", headers=coordinator.operator | {"Content-Type": "application/json"}
    )
    assert kind(refused) == "unreadable-body"
    assert [exports._short("x" * number)[-2:] for number in (198, 199)] == ["x'", ".."]


@pytest.mark.door
def test_reports_have_the_intervals_of_clients_and_means(coordinator: InThread) -> None:
    for task, there in (("single_label", True), ("multi_label", False)):
        federation, _ = completed(coordinator, "a", "b", name=task, rounds=1, task=task, class_names=CLASSES)
        evaluation = coordinator.get(f"{federation}/rounds/1")["evaluation"]
        found = [
            *(one.get("bounds") for one in evaluation["clients"].values()),
            evaluation.get("bounds", {}).get("trainer"),
        ]
        low, high = mean_interval([(0.5, 20)])
        one = {"test": {"low": low, "high": high, "margin": gain_margin([(0.25, 0.5, 20)])}}
        low, high = mean_interval([(0.5, 20)] * 2)
        both = {"test": {"low": low, "high": high, "margin": gain_margin([(0.25, 0.5, 20)] * 2)}}
        assert found == ([one, one, both] if there else [None, None, found[2]])
        assert there or not found[2]
