"""What is done with an export: a folder classified, a score with its confusion."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.cli.scoring import confusion, scores
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.state.site_log import read, verify
from promptfed.client_service.state.trained_images import note_trained
from promptfed.coordinator.store.tables import TaskRow
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.export import ExportOptions, export
from promptfed.runtime.processes import Site
from promptfed.shared.clip import FeatureCache, load_backbone
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.data import open_source
from promptfed.shared.metrics.estimates import Estimate
from promptfed.shared.metrics.pooling import pool_estimates
from promptfed.shared.privacy.accounting import Event, epsilon_of
from promptfed.shared.service.reasons import Exit
from promptfed.testing.clients import drive
from tests.promptfed.conftest import command
from tests.support.coordinators import InThread, in_thread
from tests.support.own_images import SHAPES, picture, write_folder


def test_a_folder_of_images_becomes_a_table(exported: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", ("circle", "bar"), seed=9, each=2)
    (tmp_path / "in" / "bar" / "broken.png").write_bytes(b"nothing")
    (tmp_path / "in" / "notes.txt").write_text("no image")
    (tmp_path / "in" / "bar" / "logo.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    done = command("predict", tmp_path / "in", "--export", exported, "--out", tmp_path / "answers.csv")
    assert done.exit_code == 0, done.output
    assert "Wrote 4 answers" in done.stdout
    shown = command("data", "show", f"folder:{tmp_path / 'in'}").output
    for name in ("broken.png", "logo.svg"):
        [told] = [line for line in done.stderr.splitlines() if name in line]
        assert told in shown, "in the words of `data show`"
    text = (tmp_path / "answers.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [row["image"] for row in rows] == ["bar/0.png", "bar/1.png", "circle/0.png", "circle/1.png"]
    one = command("predict", tmp_path / "in" / "bar" / "0.png", "--export", exported, "--json")
    [answer] = json.loads(one.stdout)
    assert rows[0]["class"] == answer["class_name"]
    # one image and four are multiplied in other orders, and logits are cosines times a hundred
    assert float(rows[0]["probability"]) == pytest.approx(answer["classes"][0]["probability"], abs=5e-5)
    best = max(answer["classes"], key=lambda row: row["zero_shot"])
    assert (rows[0]["zero_shot_class"], float(rows[0]["zero_shot_probability"])) == (
        best["name"],
        pytest.approx(best["zero_shot"], abs=5e-5),
    )
    assert command("predict", tmp_path / "in", "--export", exported).stdout == text
    for more in ((tmp_path / "in", "--json"), (tmp_path / "in" / "bar" / "0.png", "--out", "x"), (tmp_path, tmp_path)):
        assert command("predict", *more, "--export", exported).exit_code == Exit.USAGE
    (tmp_path / "empty").mkdir()
    assert "holds no image" in command("predict", tmp_path / "empty", "--export", exported).stderr


def test_a_score_is_that_of_the_answers(exported: Path, tmp_path: Path) -> None:
    write_folder(tmp_path / "in", ("circle", "bar"), seed=9, each=3)
    done = command("score", exported, f"folder:{tmp_path / 'in'}", "--out", tmp_path / "score", "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    table = command("predict", tmp_path / "in", "--export", exported).stdout
    answers = [
        (row["image"].split("/")[0], row["class"], row["zero_shot_class"]) for row in csv.DictReader(io.StringIO(table))
    ]
    assert told["images"] == len(answers) == 6
    assert told["accuracy"] == pytest.approx(sum(label == found for label, found, _ in answers) / 6)
    assert told["zero_shot"]["accuracy"] == pytest.approx(sum(label == found for label, _, found in answers) / 6)
    with (tmp_path / "score" / "confusion.csv").open(newline="") as file:
        matrix = {row["class"]: row for row in csv.DictReader(file)}
    for label in SHAPES:
        for found in SHAPES:
            assert int(matrix[label][found]) == sum(answer[:2] == (label, found) for answer in answers)
    assert json.loads((tmp_path / "score" / "score.json").read_text()) == told
    (tmp_path / "in" / "ring").mkdir()
    picture("circle", 1).save(tmp_path / "in" / "ring" / "0.png")
    refused = command("score", exported, f"folder:{tmp_path / 'in'}", "--out", tmp_path / "other")
    assert "does not choose among the classes ring" in refused.stderr
    assert not (tmp_path / "other").exists()


def test_a_score_leaves_out_what_a_client_here_has_trained_on(
    exported: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    uri = f"folder:{write_folder(tmp_path / 'in', ('circle', 'bar'), seed=9, each=5)}"
    source, federation = open_source(uri), json.loads((exported / "card.json").read_text())["federation"]["id"]
    digests = [source.train.digest(row) for row in range(len(source.train))]

    def score(name: str, *more: str | Path) -> tuple[dict[str, Any], str]:
        done = command("score", exported, uri, "--out", tmp_path / name, "--json", *more)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout), done.stderr

    told, said = score("unknown")
    assert (told["images"], "trained_on" in told) == (10, False)
    assert "is not known" in said
    note_trained(tmp_path, federation, digests[:1])
    assert score("one")[0]["images"] == 9
    note_trained(tmp_path, federation, digests)
    told, said = score("known")
    assert (told["images"], told["trained_on"]) == (len(source.test), len(digests)) == (2, 8)
    assert f"8 of the 10 images of {uri} were trained on and left out." in said
    (tmp_path / "other").mkdir()
    note_trained(tmp_path / "other", "another", ["0" * 64])
    told, said = score("named", "--state-dir", tmp_path / "other")
    assert (told["images"], told["trained_on"], "None of the 10 images" in said) == (10, 0, True)
    note_trained(tmp_path, federation, [source.test.digest(row) for row in range(2)])
    for more, why in (((), "all 10 images of"), (("--state-dir", tmp_path / "in"), "records no training images")):
        refused = command("score", exported, uri, "--out", tmp_path / "none", *more)
        assert (refused.exit_code, why in refused.stderr) == (Exit.BAD_INPUT, True)
    assert not (tmp_path / "none").exists()


def test_verify_without_a_key_says_what_it_did_not_check(exported: Path, tmp_path: Path) -> None:
    whole = command("verify", exported, "--no-recompute")
    assert whole.exit_code == 0, whole.output
    assert "was not checked: give its --key" in whole.stdout
    shutil.copytree(exported, tmp_path / "changed")
    weights = tmp_path / "changed" / "class_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    refused = command("verify", tmp_path / "changed", "--no-recompute")
    assert refused.exit_code == Exit.BAD_INPUT
    assert "class_weights.safetensors" in refused.stderr


def test_scores_of_several_sites_are_pooled(exported: Path, tmp_path: Path) -> None:
    files = []
    for site, each in (("north", 6), ("south", 4), ("east", 5)):
        write_folder(tmp_path / site, ("circle", "bar"), seed=each, each=each)
        done = command("score", exported, f"folder:{tmp_path / site}", "--out", tmp_path / "scores" / site)
        assert done.exit_code == 0, done.output
        files.append(tmp_path / "scores" / site)
    scored = json.loads((files[0] / "score.json").read_text())
    [bar, circle] = sorted(scored["classes"], key=lambda one: one["name"])
    assert (bar["positives"], bar["negatives"], circle["positives"]) == (6, 6, 6)
    done = command("pool", *files, "--json")
    assert done.exit_code == 0, done.output
    told = json.loads(done.stdout)
    of_sites = [json.loads((file / "score.json").read_text())["accuracy_interval"] for file in files]
    wanted = pool_estimates([Estimate(**one) for one in of_sites])
    assert wanted is not None
    assert told["figures"]["accuracy"]["mean"] == pytest.approx(wanted.mean)
    assert set(told["figures"]) <= {"accuracy", "AUROC of circle", "AUROC of bar"}
    assert "accuracy" in command("pool", *files).output
    (tmp_path / "copy.json").write_text(json.dumps(scored | {"accuracy": 0.5}))
    again = command("pool", *files, tmp_path / "copy.json", "--json")
    assert json.loads(again.stdout) == told | {"copies": [str(tmp_path / "copy.json")]}, "it is of the same images"
    assert f"copy.json counts with {files[0]}" in again.stderr
    refused = command("pool", files[0], tmp_path / "copy.json")
    assert (refused.exit_code, "give two sites or more" in refused.stderr) == (Exit.BAD_INPUT, True)
    other = scored | {"state": "sha256:" + "0" * 64}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "score.json").write_text(json.dumps(other))
    for given, text in (
        ((files[0],), "give two sites or more"),
        ((files[0], tmp_path / "other"), "not scored the same export"),
        ((files[0], tmp_path / "none.json"), "cannot read"),
    ):
        refused = command("pool", *given)
        assert refused.exit_code == Exit.BAD_INPUT
        assert text in refused.stderr.replace("\n", " ")


def test_figures_of_a_score_by_hand() -> None:
    labels, predicted = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 1, 1])
    told = torch.tensor([[0.9, 0.1, 0], [0.1, 0.9, 0], [0.1, 0.9, 0], [0.1, 0.9, 0]])
    found = scores(labels, predicted, torch.tensor([0.9, 0.9, 0.9, 0.9]), told, ["a", "b", "c"])
    assert found.accuracy == 0.75
    assert (found.majority, found.one_answer, found.auroc) == (0.5, 0.75, 0.75)
    assert found.ece == pytest.approx(0.15)
    assert (found.worst_class, found.worst_class_accuracy) == ("a", 0.5)
    assert found.macro_f1 == pytest.approx((2 / 3 + 4 / 5) / 2)
    assert confusion(labels, predicted, 3).tolist() == [[1, 1, 0], [0, 2, 0], [0, 0, 0]]


# `promptfed federation replay` against a real coordinator: same hashes, errors in one line.


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    with in_thread(tmp_path_factory.mktemp("replay") / "data") as server:
        for name, rounds in (("eyes", 2), ("changed", 1)):
            federation = server.create(
                name=name, rounds=rounds, participation={"min_clients": 5, "deadline_seconds": 3600}
            )
            clients = server.enrol(federation, *"abcde")
            server.post(f"{federation}/start")
            drive(clients)
        with server.registry.database.write() as session:
            mine = (TaskRow.federation_id == federation, TaskRow.client == "c", TaskRow.weight.is_not(None))
            for task in session.query(TaskRow).filter(*mine):
                task.weight = 0.9
        yield server


@pytest.fixture
def replay(coordinator: InThread) -> Callable[..., Result]:
    def run(*arguments: str) -> Result:
        token = coordinator.settings.data_dir / "operator.token"
        options = ["--coordinator", coordinator.url, "--token-file", str(token)]
        return CliRunner().invoke(app, ["federation", "replay", *arguments, *options], env={"COLUMNS": "160"})

    return run


def test_a_whole_run_comes_to_its_hashes(coordinator: InThread, replay: Callable[..., Result]) -> None:
    done = replay("eyes")
    assert (done.exit_code, done.stdout.strip()) == (0, "3 rounds: 3 of 3 states came to their hashes again.")
    found = json.loads(replay("eyes", "--json").stdout)["rounds"]
    recorded = [one["state_hash"] for one in coordinator.get("eyes/rounds")["rounds"]]
    assert [one["states"][-1]["replayed_hash"] for one in found] == recorded


def test_another_run_than_was_recorded_is_a_failure(replay: Callable[..., Result]) -> None:
    done = replay("changed")
    assert done.exit_code == Exit.FAILED
    assert done.stdout.strip() == "2 rounds: 1 of 2 states came to their hashes again."
    assert done.stderr.startswith("promptfed: not the run that was recorded: round 1, train: sha256:")


# `promptfed privacy`, `ledger` and `policy` at the command line.


DATA = "symbols:painting?topic=weather&per_class=4&test_per_class=2&partition=iid&clients=2&client={}"


SPEC = {
    "name": "planned", "method": {"name": "promptfl"}, "rounds": 25, "training": {"batch_size": 80, "epochs": 1},
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


def test_adopt_records_its_question_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.cli.commands.ledger.ANSWER_SECONDS", 0.1)
    (tmp_path / "identity.json").write_text(json.dumps({"federation_id": "f", "secret": "s"}))
    asked = run("ledger", "adopt", "--state-dir", str(tmp_path), "--coordinator", "http://127.0.0.1:1")
    assert asked.exit_code != 0
    told = read(tmp_path)
    assert ([line["asked"] for line in told], told[0]["to"]) == ([{"spends": 1}], "http://127.0.0.1:1")
    verify(tmp_path)


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
        about["federation"] = "retina"
        ledger.spend(str(number) * 64, [event], 8.0, {**about, "noise": "secret"}, "train")
    shown = run("ledger", "show", "--ledger", str(path), "--json")
    assert shown.exit_code == 0, shown.output
    facts = json.loads(shown.stdout.splitlines()[-1])
    assert facts["epsilon"] == epsilon_of([event, event], 1e-4)
    assert facts["left"] == 8.0 - facts["epsilon"]
    assert [one["federation"] for one in facts["federations"]] == ["a", "b"]
    first = facts["federations"][0]
    assert first["epsilon"] == epsilon_of([event], 1e-4)
    assert first["name"] == "retina"
    assert first["first"] == first["last"] <= date.today().isoformat()
    assert facts["epsilon_replace_one"] > facts["epsilon"]
    in_words = " ".join(run("ledger", "show", "--ledger", str(path)).stdout.split())
    assert "retina" in in_words
    assert "one record of the training images" in in_words
    assert run("ledger", "verify", "--ledger", str(path)).exit_code == 0
    path.write_bytes(path.read_bytes().replace(b'"z": 8.0', b'"z": 9.0', 1))
    broken = run("ledger", "verify", "--ledger", str(path))
    assert (broken.exit_code, "does not hold together" in broken.stderr) == (Exit.LEDGER, True)


def test_what_is_not_there_does_not_hold_together(tmp_path: Path) -> None:
    for asked in (
        ("ledger", "verify", "--ledger"),
        ("ledger", "show", "--ledger"),
        ("site-log", "show"),
        ("site-log", "verify"),
    ):
        done = run(*asked, str(tmp_path / "none"))
        assert (done.exit_code, done.stdout) == (Exit.BAD_INPUT, "")
        assert "there is no ledger" in done.stderr or "holds no site-log" in done.stderr
    (tmp_path / "site-log.head").write_text("{}")
    assert run("site-log", "show", str(tmp_path)).exit_code == 0, "it begins with its head"


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
    summary = result.facts.privacy
    assert summary is not None
    assert (summary.clients, summary.noise, summary.noise_multiplier, summary.rounds_counted) == (2, "seeded", 4.0, 1)
    names = open_source(DATA.format(0), "trainer").class_names
    export(result, tmp_path / "export", ExportOptions(class_names=names), backbone)
    card = json.loads((tmp_path / "export" / "card.json").read_text())
    assert card["privacy"]["epsilon_max"] == summary.epsilon_max
    assert "this is no guarantee to anybody" in (tmp_path / "export" / "card.md").read_text()
