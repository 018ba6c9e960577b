"""The facts of a card: whoever takes the result has the coordinator's, and the arithmetic is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

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
from tests.support.coordinators import InThread, Make
from tests.support.open_phases import completed, launched


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
            "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 0.3, "accept_noise": True},
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


def test_an_archive_of_the_selected_round_has_the_last_state_and_no_other_is_signed(
    coordinator: InThread, tmp_path: Path
) -> None:
    federation, clients = launched(coordinator, "a", "b", rounds=3, selection={})
    drive([Measuring(one.http, one.federation, one.name, figures=(0.2, 0.5, 0.4, 0.3)) for one in clients])
    place, path = archive(coordinator, f"{federation}/rounds/1", tmp_path), f"{federation}/rounds/1/card/signature"
    assert verify_export(place, None, recompute=False).card.selection.round == 1
    with ZipFile(place) as packed:
        last, _ = decode(packed.read("final.safetensors"))
        card = json.loads(packed.read("card.json"))
    assert state_hash(last) == coordinator.get(federation)["state_hash"]
    assert "final.safetensors" not in ZipFile(archive(coordinator, f"{federation}/rounds/3", tmp_path)).namelist()
    coordinator.post(path, json=card)
    card["files"]["final.safetensors"] = card["files"]["prompts.safetensors"]
    coordinator.post(path, json=card, status=409)


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
