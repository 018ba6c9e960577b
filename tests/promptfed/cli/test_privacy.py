"""`promptfed privacy`, `ledger` and `policy` at the command line."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.state.site_log import read, verify
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.export import ExportOptions, export
from promptfed.runtime.processes import Site
from promptfed.sdk.client import Exit
from promptfed.shared.clip import FeatureCache, load_backbone, tiny
from promptfed.shared.data import open_source
from promptfed.shared.privacy.accounting import Event, epsilon_of

DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=2&client={}"

SPEC = {
    "name": "planned", "method": {"name": "promptfl"}, "rounds": 25, "training": {"batch_size": 80},
    "privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 2.0},
}  # fmt: skip


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_a_plan_says_what_a_federation_will_cost_each_size_of_client(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    done = run("privacy", "plan", str(tmp_path / "spec.json"), "--samples", "800", "--json")
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout.splitlines()[-1])["clients"]
    assert (one["delta"], one["sampling"], one["steps"], one["noise"]) == (1e-4, 0.1, 250, 2.0)
    assert one["epsilon"] == pytest.approx(3.25, abs=0.01)  # the table of the documentation
    plain = {key: value for key, value in SPEC.items() if key != "privacy"}
    (tmp_path / "spec.json").write_text(json.dumps(plain))
    refused = run("privacy", "plan", str(tmp_path / "spec.json"), "--samples", "800")
    assert (refused.exit_code, "not protected" in refused.stderr) == (Exit.BAD_INPUT, True)


def test_a_plan_adds_what_the_ledger_of_the_data_has_spent(tmp_path: Path) -> None:
    (tmp_path / "spec.json").write_text(json.dumps(SPEC))
    ledger = Ledger(tmp_path / "ledger.jsonl", "eyes")
    ledger.open(1e-5)
    about = {"federation_id": "a", "coordinator": "http://x", "round": 1, "phase": "train", "task_id": "t"}
    spent, tests = Event("gaussian", 1.0, 4.0, 3), Event("laplace", 1.0, 0.5, 1)
    ledger.spend("1" * 64, [spent], 4.0, {**about, "noise": "secret"}, "train")
    ledger.spend("2" * 64, [tests], 0.5, {**about, "noise": "secret"}, "test")  # images of another budget
    done = run(
        "privacy", "plan", str(tmp_path / "spec.json"), "--samples", "800", "--ledger", str(ledger.path), "--json"
    )
    assert done.exit_code == 0, done.output
    (client,) = json.loads(done.stdout.splitlines()[-1])["clients"]
    planned = Event("gaussian", client["sampling"], client["noise"], client["steps"])
    assert client["delta"] == 1e-5, "the ledger's own"
    assert client["epsilon"] == pytest.approx(epsilon_of([planned], 1e-5), abs=1e-4)
    assert client["with earlier"] == pytest.approx(epsilon_of([spent, planned], 1e-5), abs=1e-4)
    assert client["replace-one"] > client["epsilon"]


def test_a_ledger_names_its_federations_and_their_dates(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl", "eyes")
    ledger.open(1e-4)
    about = {"federation_id": "f-1", "coordinator": "http://x", "round": 1, "phase": "train", "task_id": "t"}
    event = Event("gaussian", 1.0, 8.0, 1)
    ledger.spend("1" * 64, [event], 8.0, {**about, "federation": "retina", "noise": "secret"}, "train")
    shown = run("ledger", "show", "--ledger", str(ledger.path), "--json")
    facts = json.loads(shown.stdout.splitlines()[-1])
    (told,) = facts["federations"]
    today = date.today().isoformat()
    assert (told["name"], told["first"] <= today, told["last"] == told["first"]) == ("retina", True, True)
    assert date.fromisoformat(told["first"])
    assert facts["epsilon_replace_one"] > facts["epsilon"]
    in_words = run("ledger", "show", "--ledger", str(ledger.path)).stdout
    assert "retina" in in_words
    assert "one record of the training images" in " ".join(in_words.split())


def test_adopt_records_its_question_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.cli.commands.site.ANSWER_SECONDS", 0.1)
    (tmp_path / "identity.json").write_text(json.dumps({"federation_id": "f", "secret": "s"}))
    asked = run("ledger", "adopt", "--state-dir", str(tmp_path), "--coordinator", "http://127.0.0.1:1")
    assert asked.exit_code != 0
    told = read(tmp_path)
    assert ([line["asked"] for line in told], told[0]["to"]) == ([{"spends": 1}], "http://127.0.0.1:1")
    verify(tmp_path)


def test_a_ledger_that_is_not_there_is_named(tmp_path: Path) -> None:
    shown = run("ledger", "show", "--ledger", str(tmp_path / "none.jsonl"))
    assert (shown.exit_code, "none.jsonl" in shown.stderr) == (Exit.BAD_INPUT, True)


def test_a_plan_says_what_a_federation_of_whole_clients_will_cost(tmp_path: Path) -> None:
    spec = {
        "name": "planned", "method": {"name": "promptfl"}, "rounds": 4,
        "participation": {"min_clients": 100, "sampling": "poisson", "fraction": 0.1},
        "aggregation": {"weighting": "uniform"}, "privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0},
    }  # fmt: skip
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    done = run("privacy", "plan", str(tmp_path / "spec.json"), "--clients", "200", "--json")
    assert done.exit_code == 0, done.output
    (one,) = json.loads(done.stdout.splitlines()[-1])["clients"]
    assert (one["clients"], one["expected"], one["delta"], one["rounds"], one["noise"]) == (200, 20.0, 1e-3, 4, 1.0)
    known, secret = Event("gaussian", 1.0, 1.0, 4), Event("gaussian", 0.1, 1.0, 4)
    assert one["epsilon"] == pytest.approx(epsilon_of([known], 1e-3), abs=1e-4), "rounds tell who took part"
    assert one["if secret"] == pytest.approx(epsilon_of([secret], 1e-3), abs=1e-4)
    assert one["replace-one"] == pytest.approx(epsilon_of([Event("gaussian", 1.0, 0.5, 4)], 1e-3), abs=1e-3)
    assert one["epsilon of a round"] < one["epsilon"]


def test_the_ledger_is_shown_and_verified(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path, "eyes")
    ledger.open(1e-4)
    event = Event("gaussian", 1.0, 8.0, 1)
    for number, federation in enumerate(("a", "b")):
        about = {"federation_id": federation, "coordinator": "http://x", "round": 1, "phase": "train", "task_id": "t"}
        ledger.spend(str(number) * 64, [event], 8.0, {**about, "noise": "secret"}, "train")
    shown = run("ledger", "show", "--ledger", str(path), "--json")
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout.splitlines()[-1])
    assert facts["epsilon"] == epsilon_of([event, event], 1e-4)
    assert facts["left"] == 8.0 - facts["epsilon"]
    assert [one["federation"] for one in facts["federations"]] == ["a", "b"]
    assert facts["federations"][0]["epsilon"] == epsilon_of([event], 1e-4)
    assert run("ledger", "verify", "--ledger", str(path)).exit_code == 0
    path.write_bytes(path.read_bytes().replace(b'"z": 8.0', b'"z": 9.0', 1))
    broken = run("ledger", "verify", "--ledger", str(path))
    assert (broken.exit_code, "does not hold together" in broken.stderr) == (Exit.LEDGER, True)


def test_the_example_policy_is_one_and_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "policy.yaml"
    path.write_text(run("policy", "example").stdout)
    found = run("policy", "check", str(path), "--json")
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout.splitlines()[-1])["policy"]["limits"]["rounds"] == 50
    path.write_text("version: 1\nlimit: 3\n")
    assert run("policy", "check", str(path)).exit_code == Exit.POLICY


def test_an_export_says_what_protects_it(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    backbone = load_backbone(tiny.MODEL, tiny.PRETRAINED)
    spec = {
        "name": "attacked", "method": {"name": "promptfl", "m": 4}, "rounds": 1, "training": {"batch_size": 4},
        "seed": 3, "privacy": {"level": "sample", "clip": 0.3, "noise_multiplier": 4.0},
    }  # fmt: skip
    sites = [Site(f"site-{number}", DATA.format(number)) for number in range(2)]
    result = simulate(spec, sites, backbone=backbone, features=FeatureCache(tmp_path / "features"))
    summary = result.privacy()
    assert summary is not None
    assert (summary.clients, summary.noise, summary.noise_multiplier, summary.rounds_counted) == (2, "seeded", 4.0, 1)
    names = open_source(DATA.format(0), "trainer").class_names
    export(result, tmp_path / "export", ExportOptions(class_names=names), backbone)
    card = json.loads((tmp_path / "export" / "card.json").read_text())
    assert card["privacy"]["epsilon_max"] == summary.epsilon_max
    assert "this is no guarantee to anybody" in (tmp_path / "export" / "card.md").read_text()
