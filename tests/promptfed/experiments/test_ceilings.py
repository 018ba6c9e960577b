"""Ceilings: who trains on what, that nobody trains on what is tested, shares of the room; budgets in steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.runner import Bench
from promptfed.experiments.bench.tables import TableRow, rooms_of, rooms_table
from promptfed.experiments.protocols.derived import CEILINGS
from promptfed.experiments.protocols.protocols import PROTOCOLS
from promptfed.experiments.protocols.setting import Setting
from promptfed.sdk.errors import CommandError
from promptfed.sdk.result import Accuracy
from promptfed.shared.data import DataError, open_source
from promptfed.shared.data.source import Split
from promptfed.shared.data.union import union_uri

DATA = "symbols:{domain}?topic=weather&per_class=4&test_per_class=2"
THREE = Setting((DATA,), domains=("sketch", "neon", "chalk"), targets=("neon",), shots=2)
TARGETS, CLIENTS = CEILINGS["ceilings:leave-one-domain-out"], CEILINGS["ceilings:personalisation"]


def digests(split: Split) -> list[str]:
    return [split.digest(row) for row in range(len(split))]


def one(client: str, split: str, accuracy: float, role: str = "trainer") -> Accuracy:
    return Accuracy(1, client, role, None, split, accuracy, 0.5, 10)


def test_a_union_has_all_images_of_its_parts() -> None:
    uris = ["symbols:sketch?topic=games&per_class=2&test_per_class=1", "symbols:neon?topic=games&per_class=3&shots=2"]
    whole, parts = open_source(union_uri(uris)), [open_source(uri) for uri in uris]
    for name in ("train", "test"):
        wanted = [digest for part in parts for digest in digests(getattr(part, name))]
        assert digests(getattr(whole, name)) == wanted
        labels = [label for part in parts for label in getattr(part, name).labels.tolist()]
        assert getattr(whole, name).labels.tolist() == labels
    assert whole.class_names == parts[0].class_names
    with pytest.raises(DataError, match="has other classes than"):
        open_source(union_uri([uris[0], "digits"]))
    with pytest.raises(DataError, match="names no source"):
        open_source("union:")


@pytest.mark.parametrize("personal", [False, True])
def test_each_ceiling_trains_on_what_it_says_and_is_tested_on_the_same_images(personal: bool) -> None:
    trials = {trial.name: trial for trial in TARGETS.trials(THREE, 3, personal)}
    assert list(trials) == [
        "federated/neon", "on target/neon", "centralised/neon", "single source sketch/neon", "single source chalk/neon",
    ]  # fmt: skip
    target = open_source(THREE.uri(DATA.replace("{domain}", "neon"), 3))
    for name, trial in trials.items():
        trainers = [site for site in trial.sites if site.role == "trainer"]
        assert len(trainers) == (2 if name.startswith("federated") else 1)
        if name.startswith("on target"):
            tested = open_source(trainers[0].data).test
            assert digests(open_source(trainers[0].data).train) == digests(target.train)
        else:
            tests = [site.tests["target"] for site in trainers] if personal else [trial.sites[-1].data]
            tested = open_source(tests[0]).test
            trained = [digest for site in trainers for digest in digests(open_source(site.data).train)]
            assert not set(trained) & set(digests(target.test))
            assert len(trained) == len(target.train) * (1 if name.startswith("single") else 2)
        assert digests(tested) == digests(target.test)
    with pytest.raises(CommandError, match="test on its test split"):
        TARGETS.trials(replace(THREE, target_images="all"), 0, personal)


def test_scores_are_means_over_targets_and_sources() -> None:
    rows = {
        "federated/neon": [one("a", "test", 0.9), one("t", "test", 0.6, "evaluator")],
        "on target/neon": [one("target", "test", 0.8)],
        "centralised/neon": [one("pooled", "test", 0.1), one("pooled", "target", 0.7)],
        "single source a/neon": [one("t", "test", 0.5, "evaluator")],
        "single source b/neon": [one("t", "test", 0.3, "evaluator")],
    }
    found = TARGETS.scores(rows, lambda row: row.accuracy)
    assert found == pytest.approx({"federated": 0.6, "on target": 0.8, "centralised": 0.7, "single source": 0.4})
    assert TARGETS.scores({"federated/neon": rows["federated/neon"]}, lambda row: row.accuracy) == {"federated": 0.6}
    clients = {
        "federated/all": [one("a", "test", 0.8), one("b", "test", 0.6)],
        "alone/a": [one("a", "test", 0.4)], "alone/b": [one("b", "test", 0.6)],
        "centralised/all": [one("pooled", "test", 0.0), one("pooled", "a", 0.9), one("pooled", "b", 0.7)],
    }  # fmt: skip
    found = CLIENTS.scores(clients, lambda row: row.accuracy)
    assert found == pytest.approx({"federated": 0.7, "alone": 0.5, "centralised": 0.8})


def test_the_share_of_the_room() -> None:
    def row(label: str, federated: float, ceiling: float | None, template: bool = False) -> TableRow:
        scores = {"federated": federated} | ({"on target": ceiling} if ceiling is not None else {})
        return TableRow(label, (scores,), None if template else {"bytes_up": 0.0})

    rows = [row("zero-shot", 0.5, 0.5, True), row("a", 0.6, 0.9), row("b", 0.5, 0.505), row("c", 0.55, None)]
    found = rooms_of(rows)
    assert [(room.label, room.ceiling_of) for room in found] == [("a", "on target"), ("b", "on target")]
    assert found[0].share == pytest.approx(0.25)
    assert found[1].share is None
    assert "| a | 50.0 | 60.0 | 90.0 | on target | 25 % |" in rooms_table(found)
    assert "| b | 50.0 | 50.0 | 50.5 | on target | no room |" in rooms_table(found)


def test_budgets_in_steps_are_as_many_for_every_amount_of_images() -> None:
    base = {"training": {"epochs": 2, "batch_size": 4}}
    bench = Bench(PROTOCOLS["leave-one-domain-out"], parse_entries("promptfl"), THREE, (0,), base, steps=100)
    images = len(open_source(bench.jobs()[0].trial.sites[0].data).train)
    assert images == 20
    assert [job.spec["rounds"] for job in bench.jobs()] == [math.ceil(100 / (2 * math.ceil(images / 4)))]
    more = replace(bench, setting=replace(THREE, shots=4))
    assert [job.spec["rounds"] for job in more.jobs()] == [5]
    assert bench.jobs()[0].spec["evaluation"]["every"] == 10


def test_a_method_that_needs_several_clients_has_no_ceiling_with_one() -> None:
    bench = Bench(TARGETS, parse_entries("promptfl,fast_pt:m=2"), THREE, (0,), {"rounds": 1})
    kinds = {
        label: [job.trial.name for job in bench.jobs() if job.entry.label == label]
        for label in ("promptfl", "fast_pt:m=2")
    }
    assert kinds["fast_pt:m=2"] == ["federated/neon"]
    assert len(kinds["promptfl"]) == 5


def test_ceilings_from_the_command_line(tmp_path: Path) -> None:
    arguments = [
        "ceilings:personalisation",
        "--data",
        DATA,
        "--domains",
        "neon,chalk",
        "--methods",
        "promptfl",
        "--m",
        "2",
    ]
    more = ["--steps", "2", "--shots", "2", "--seeds", "0", "--out", str(tmp_path), "--json"]
    found = CliRunner().invoke(app, ["bench", *arguments, *more])
    assert found.exit_code == 0, found.stderr
    shown = json.loads(found.stdout.splitlines()[-1])
    row = shown["table"][1]
    assert set(row["scores"][0]) == {"federated", "alone", "centralised"}
    assert row["costs"]["steps"] >= 2
    assert shown["rooms"][0]["federated"] == pytest.approx(row["scores"][0]["federated"])
    assert "| share of the room |" in (tmp_path / "table.md").read_text()
    both = CliRunner().invoke(app, ["bench", *arguments, *more, "--rounds", "1"])
    assert "--steps and --rounds both say how long to train" in " ".join(both.stderr.split())
