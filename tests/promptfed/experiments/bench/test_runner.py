"""A bench from the command line to its table: what it runs, what it keeps, and how its numbers come about."""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from promptfed.cli.bench import make_bench
from promptfed.cli.main import app
from promptfed.experiments.bench import runner as bench_module
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import BENCH_FILE, Bench, BenchRun, Runner, claim, costs, data_hash, read_run
from promptfed.experiments.bench.tables import TableRow, cell, far_below, markdown, rows_of, scores_of
from promptfed.sdk.result import Accuracy
from promptfed.shared import get_extra
from promptfed.shared.data import open_source
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods.core import registry
from promptfed.shared.metrics.figures import calibration_error
from promptfed.shared.service.reasons import Exit
from promptfed.shared.spec.spec import FederationSpec

DATA = "symbols:neon?topic=weather&per_class=4&test_per_class=3"


ARGUMENTS = [
    "bench", "personalisation", "--methods", "promptfl,coop:m=2", "--data", DATA, "--partition", "iid",
    "--clients", "2", "--rounds", "1", "--m", "4", "--json",
]  # fmt: skip


def invoke(*arguments: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, list(arguments))
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("bench")
    code, stdout, stderr = invoke(*ARGUMENTS, "--seeds", "0", "--out", str(out))
    assert code == 0, stderr
    return out, json.loads(stdout.splitlines()[-1])


def test_it_writes_results_with_their_provenance(finished: tuple[Path, dict[str, Any]]) -> None:
    out, shown = finished
    whole = json.loads((out / "results.json").read_text())
    assert {key: value for key, value in whole.items() if key != "runs"} == shown
    assert [(run["label"], run["seed"]) for run in whole["runs"]] == [("promptfl", 0), ("coop:m=2", 0)]
    for run in whole["runs"]:
        assert run["spec"]["method"]["m"] == (4 if run["label"] == "promptfl" else 2)
        assert run["spec"]["participation"]["min_clients"] == 2
        assert {one["round"] for one in run["accuracies"]} == {0, 1}
        assert run["provenance"]["packages"]["torch"]
        assert run["backbone"].startswith("sha256:")
    first, second = whole["runs"]
    assert first["data"] == second["data"]
    assert first["data"].startswith("sha256:")
    assert first["state_hash"] != second["state_hash"]


def test_the_table_is_what_the_clients_measured(finished: tuple[Path, dict[str, Any]]) -> None:
    out, shown = finished
    run = json.loads((out / "results.json").read_text())["runs"][0]
    last = [one for one in run["accuracies"] if one["round"] == 1]
    rows = {row["label"]: row for row in shown["table"]}
    assert list(rows) == ["zero-shot", "promptfl", "coop:m=2"]
    mean = sum(one["accuracy"] for one in last) / 2
    assert rows["promptfl"]["scores"][0]["mean"] == pytest.approx(mean)
    assert rows["promptfl"]["scores"][0]["worst client"] == min(one["accuracy"] for one in last)
    assert rows["zero-shot"]["scores"][0]["mean"] == pytest.approx(sum(one["zero_shot"] for one in last) / 2)
    assert rows["promptfl"]["costs"]["bytes_up"] > 4 * 4 * 112  # m x d_t float32
    assert f"| promptfl | {100 * mean:.1f}" in (out / "table.md").read_text()


def test_it_goes_on_where_it_stopped(finished: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    out, shown = finished
    asked: list[str] = []
    simulate = bench_module.simulate

    def counted(spec: FederationSpec, *rest: Any, **options: Any) -> Any:
        asked.append(spec.method["name"])
        return simulate(spec, *rest, **options)

    monkeypatch.setattr(bench_module, "simulate", counted)
    code, stdout, _ = invoke(*ARGUMENTS, "--seeds", "0", "--out", str(out))
    assert (code, asked) == (0, [])
    assert json.loads(stdout.splitlines()[-1])["table"] == shown["table"]
    victim = next(path for path in (out / "runs").glob("*.json") if '"label": "promptfl"' in path.read_text())
    victim.unlink()
    code, stdout, _ = invoke(*ARGUMENTS, "--seeds", "0", "--out", str(out))
    assert (code, asked) == (0, ["promptfl"])
    again, before = (found["table"] for found in (json.loads(stdout.splitlines()[-1]), shown))
    assert [row["scores"] for row in again] == [row["scores"] for row in before]


def report(asked: int, up: int, down: int, seconds: list[float]) -> dict[str, Any]:
    phase = {
        "asked": [f"c{k}" for k in range(asked)], "bytes_up": up, "bytes_down": down,
        "updates": [{"metrics": {"train_seconds": one, "trained_parameters": asked + 1.0}} for one in seconds],
    }  # fmt: skip
    return {"round": 1, "phases": [phase]}


def test_a_run_by_other_defaults_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench("personalisation", "coop,coop:training.learning_rate=0.02", Setting((DATA,)), "0", None, 1, 4)
    default, named = (job.key for job in bench.jobs())
    assert default == named, "the rate is the default"
    monkeypatch.setitem(registry.FACTORS[registry.TINY], "sgd", 20)
    default, kept = (job.key for job in bench.jobs())
    assert (default == named, kept == named) == (False, True)


def test_costs_are_per_client_and_round() -> None:
    empty = {"round": 0, "phases": []}
    found = costs([empty, report(2, 200, 100, [1.0, 3.0]), report(4, 800, 400, [1.0, 1.0, 1.0, 1.0])])
    assert found == {"bytes_up": 150.0, "bytes_down": 75.0, "seconds": 1.5, "trained": 4.0}
    assert costs([empty]) == {"bytes_up": 0.0, "bytes_down": 0.0, "seconds": 0.0, "trained": 0.0}


def accuracy(split: str, value: float, zero_shot: float | None, round: int = 2) -> Accuracy:
    return Accuracy(round, "a", "trainer", None, split, value, zero_shot, num_samples=5)


def run_of(*rows: Accuracy, label: str = "promptfl", seed: int = 0) -> BenchRun:
    cost = {"bytes_up": 2000.0, "bytes_down": 10.0, "seconds": 0.5, "trained": 7.0}
    return BenchRun(
        label=label, seed=seed, trial="all", rounds=2, accuracies=list(rows), costs=cost,
        wall_seconds=1.0, setup_seconds=1.0,
    )  # fmt: skip


def test_variants_have_rows_of_their_own_and_only_the_last_round_counts() -> None:
    protocol = PROTOCOLS["personalisation"]
    found = run_of(accuracy("test", 0.9, 0.1, round=1), accuracy("test", 0.5, 0.3), accuracy("test@adapted", 0.7, 0.3))
    scores, zero_shot = scores_of(protocol, [found])
    assert {variant: one["mean"] for variant, one in scores.items()} == {"": 0.5, "adapted": 0.7}
    assert zero_shot is not None
    assert zero_shot["mean"] == 0.3
    assert scores_of(protocol, [run_of(accuracy("test", 0.5, None))])[1] is None


def test_seeds_become_mean_and_deviation_and_what_is_below_zero_shot_is_flagged() -> None:
    described = Bench(PROTOCOLS["personalisation"], parse_entries("promptfl"), Setting((DATA,)), (0, 1))
    results = [run_of(accuracy("test", 0.5, 0.55), seed=0), run_of(accuracy("test", 0.3, 0.45), seed=1)]
    rows = rows_of(described, results)
    assert [row.label for row in rows] == ["zero-shot", "promptfl"]
    text = markdown(described, rows)
    assert "| zero-shot | 50.0 ± 7.1 |" in text
    assert "| promptfl | 40.0 ± 14.1 ▼ | 0.0 ± 0.0 | 40.0 ± 14.1 ▼ | 7 | 2.0 kB | 10 B | 0.50 |" in text
    assert "below zero-shot:" not in text, "10.0 points are not more than 10"
    far = [row if row.is_zero_shot else replace(row, scores=({**row.scores[0], "mean": 0.2},)) for row in rows]
    remark = "promptfl lies up to 30 points below zero-shot: try a lower learning rate, or `promptfed tune`."
    assert far_below(["mean"], far) == [remark]
    assert far_below(["sd of clients"], rows) == []
    alone = TableRow("x", ({"mean": 0.5},))
    assert cell(alone, "mean", None) == "50.0"


def test_a_method_is_compared_with_zero_shot_over_its_own_class_names() -> None:
    described = Bench(PROTOCOLS["personalisation"], parse_entries("promptfl,fedtpg,coop"), Setting((DATA,)), (0,))
    results = [
        run_of(accuracy("test", 0.6, 0.55)),
        run_of(accuracy("test", 0.8, 0.9), label="fedtpg"),
        run_of(accuracy("test", 0.5, 0.55), label="coop"),
    ]
    rows = rows_of(described, results)
    labels = ["zero-shot", "promptfl", "zero-shot, as for fedtpg", "fedtpg", "coop"]
    assert [row.label for row in rows] == labels
    text = markdown(described, rows)
    for line in ("| zero-shot | 55.0 |", "| zero-shot, as for fedtpg | 90.0 |", "| promptfl | 60.0 |"):
        assert line in text
    assert "| fedtpg | 80.0 ▼ |" in text
    assert "| coop | 50.0 ▼ |" in text


def test_a_run_of_another_protocol_is_used_again_under_this_ones_name(tmp_path: Path) -> None:
    runner = Runner(tmp_path)
    tables = []
    for name, setting in (
        ("few-shot:personalisation", Setting((DATA,), clients=2, partition="iid", curve=(1,))),
        ("personalisation", Setting((DATA,), clients=2, partition="iid", shots=1)),
    ):
        described = Bench(PROTOCOLS[name], parse_entries("zero_shot"), setting, (0,), {"rounds": 1})
        rows = rows_of(described, runner.run_all(described.jobs(), lambda done, total, job: None))
        tables.append(rows[-1].scores[0])
    assert len(list((tmp_path / "runs").glob("*.json"))) == 1
    assert tables[0] == {"1 shot": tables[1]["mean"]}
    assert set(tables[1]) == {"mean", "sd of clients", "worst client"}, "no column for the domain that all share"


def test_a_job_that_cannot_run_is_named_and_finished_ones_stay(tmp_path: Path) -> None:
    setting = Setting((DATA,), clients=2, partition="iid")
    described = Bench(
        PROTOCOLS["personalisation"], parse_entries("zero_shot,promptfl:m=40"), setting, (0,), {"rounds": 1}
    )
    with pytest.raises(PromptfedError, match="promptfl:m=40, seed 0: "):
        Runner(tmp_path).run_all(described.jobs(), lambda done, total, job: None)
    assert len(list((tmp_path / "runs").glob("*.json"))) == 1


def test_a_seed_in_the_spec_is_refused(tmp_path: Path) -> None:
    spec = tmp_path / "base.yaml"
    spec.write_text("seed: 1\n")
    code, _, stderr = invoke(*ARGUMENTS, "--spec", str(spec), "--out", str(tmp_path))
    assert (code, "names a seed" in " ".join(stderr.split())) == (Exit.BAD_INPUT, True)


def test_novel_classes_are_never_those_that_the_uri_trains_on(tmp_path: Path) -> None:
    """With classes=base in the URI, both halves would be its base classes."""
    with pytest.raises(PromptfedError, match="sets classes itself"):
        make_bench("base-to-novel", "coop", Setting((DATA + "&classes=base",)), "0", None, None, None)


@pytest.mark.parametrize("content", ["{}", "[]", "{"])
def test_a_file_that_is_no_result_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(content)
    with pytest.raises(PromptfedError, match=r"run\.json cannot be read: remove it"):
        read_run(path)


def test_a_damaged_result_is_told_in_one_line(finished: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    content = json.loads(next((finished[0] / "runs").glob("*.json")).read_text())
    path = tmp_path / "run.json"
    path.write_text(json.dumps(content | {"rounds": "two", "costs": [1]}))
    with pytest.raises(PromptfedError) as refused:
        read_run(path)
    told = str(refused.value)
    assert told.startswith(f"{path} cannot be read: remove it to run it again (rounds: must be a valid integer")
    assert "; costs: must be a mapping" in told
    assert "\n" not in told
    assert "https://" not in told


def test_what_a_protocol_looks_at_is_what_changes_its_federations() -> None:
    """Every field of a setting, changed: the federations differ if and only if the protocol says that it is used."""
    plain = "symbols:sketch?topic=games&per_class=8&test_per_class=2"
    by_domain = plain.replace("sketch", "{domain}")
    changed = {
        "domains": ("neon", "chalk"), "targets": ("neon",), "clients": 3, "classes_per_client": 2, "partition": "iid",
        "alpha": 50.0, "shots": 2, "validation": 0.5, "curve": (2,), "target_images": "all",
    }  # fmt: skip
    settings = {
        "base-to-novel": Setting((plain,), clients=2),
        "leave-one-domain-out": Setting((by_domain,), ("neon", "sketch")),
        "personalisation": Setting((plain,), clients=2, partition="dirichlet", alpha=30.0),
        "cross-dataset": Setting((plain, "digits"), clients=2, partition="dirichlet", alpha=30.0),
    }
    settings |= {f"few-shot:{name}": one for name, one in settings.items()}
    settings["few-shot:personalisation"] = Setting((by_domain,), ("neon", "sketch"))
    for name, setting in settings.items():
        protocol = PROTOCOLS[name]
        before = protocol.trials(setting, 1, False)
        for field, value in changed.items():
            other = replace(setting, **{field: value})
            differs = protocol.trials(other, 1, False) != before
            assert differs == (field in protocol.used(other) | protocol.used(setting)), (name, field)


def test_the_hash_of_the_data_is_of_names_labels_and_pixels_of_both_splits() -> None:
    whole = open_source(DATA)
    fewer = {
        "train": replace(whole, train=whole.train.select(torch.arange(1, len(whole.train)))),
        "test": replace(whole, test=whole.test.select(torch.arange(1, len(whole.test)))),
        "names": replace(whole, class_names=tuple(reversed(whole.class_names))),
        "pixels": open_source(DATA.replace("neon", "sketch")),
    }
    hashes = {name: data_hash({"a": one}) for name, one in fewer.items()}
    assert len({data_hash({"a": whole}), data_hash({"b": whole}), *hashes.values()}) == 6
    assert data_hash({"a": open_source(DATA)}) == data_hash({"a": whole})


# A bench's folder: whose it is, what is done, and its curve.


GAMES = "symbols:sketch?topic=games&per_class=4&test_per_class=2"


def bench(out: Path, *more: str, data: str = GAMES, methods: str = "zero_shot") -> tuple[int, str, str]:
    arguments = ["personalisation", "--data", data, "--clients", "2", "--partition", "iid", "--seeds", "0"]
    result = CliRunner().invoke(app, ["bench", *arguments, "--methods", methods, "--out", str(out), *more])
    return result.exit_code, result.stdout, result.stderr


def test_a_folder_of_another_bench_is_refused_and_of_the_same_goes_on(tmp_path: Path) -> None:
    assert bench(tmp_path)[0] == 0
    before = (tmp_path / "results.json").read_bytes()
    for more, differs in (((), "setting was"), (("--rounds", "2"), 'spec was {}, is {"rounds": 2}')):
        code, _, stderr = bench(tmp_path, *more, data=GAMES if more else GAMES.replace("games", "signs"))
        assert code == Exit.BAD_INPUT
        assert "holds another bench" in stderr
        assert differs in stderr
    assert (tmp_path / "results.json").read_bytes() == before
    other = ["bench", "cross-dataset", "--data", GAMES, "--data", "digits", "--methods", "zero_shot"]
    result = CliRunner().invoke(app, [*other, "--out", str(tmp_path)])
    assert 'protocol was "personalisation", is "cross-dataset"' in result.stderr
    code, _, stderr = bench(tmp_path, methods="zero_shot,promptfl:m=2:rounds=2")
    assert code == 0
    assert f"1 of 2 federations are done in {tmp_path}" in stderr


def test_a_claim_that_is_killed_while_it_writes_leaves_a_folder_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = Bench(PROTOCOLS["personalisation"], parse_entries("zero_shot"), Setting((GAMES,)), (0,))
    claim(tmp_path, wanted)
    before = (tmp_path / BENCH_FILE).read_bytes()
    write = os.fdopen

    def half(descriptor: int, mode: str = "r", *more: Any, **options: Any) -> Any:
        file = write(descriptor, mode, *more, **options)
        file.write(b"{")
        file.close()
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fdopen", half)
    monkeypatch.setattr(Path, "write_bytes", lambda path, body: half(os.open(path, os.O_WRONLY | os.O_TRUNC), "wb"))
    with pytest.raises(KeyboardInterrupt):
        claim(tmp_path, wanted)
    assert (tmp_path / BENCH_FILE).read_bytes() == before


def test_accuracy_by_round_is_drawn(tmp_path: Path) -> None:
    assert bench(tmp_path, methods="promptfl:m=2:rounds=3")[0] == 0
    assert (tmp_path / "rounds-trainers.png").exists()


def test_a_bench_without_matplotlib_is_whole_but_for_its_plots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    code, stdout, stderr = bench(tmp_path, methods="promptfl:m=2:rounds=3")
    assert code == 0
    assert f"No plots, which need matplotlib: {get_extra('plots')}\n" in stderr
    assert f"Wrote results.json, table.md in {tmp_path}." in " ".join(stdout.split())
    assert re.search(r"│ promptfl:\S+ +│ test +│ \d+\.\d \(\d+\.\d to \d+\.\d\)", stdout), "the intervals of table.md"
    assert not list(tmp_path.glob("*.png"))


def document(finished: tuple[Path, dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((finished[0] / "results.json").read_text())
    return found


def test_every_answer_is_kept_in_this_process(finished: tuple[Path, dict[str, Any]]) -> None:
    promptfl, _ = document(finished)["runs"]
    data = {client["name"]: client["data"] for client in promptfl["clients"]}
    told = {(one["client"], one["split"]): one for one in promptfl["outcomes"]}
    assert set(told) == {(client, split) for client in data for split in ("test", "test@zero-shot")}
    for accuracy in promptfl["accuracies"]:
        if accuracy["round"] == 1:
            one = told[accuracy["client"], accuracy["split"]]
            right = [a == b for a, b in zip(one["labels"], one["predicted"], strict=True)]
            assert sum(right) / len(right) == pytest.approx(accuracy["accuracy"])
            assert all(1 / len(one["class_names"]) - 1e-6 <= sure <= 1 for sure in one["confidence"])
    for client, uri in data.items():
        assert told[client, "test"]["labels"] == open_source(uri).test.labels.tolist()


def test_calibration_stands_in_the_document(finished: tuple[Path, dict[str, Any]]) -> None:
    whole = document(finished)
    row = next(row for row in whole["measures"] if (row["label"], row["split"]) == ("promptfl", "test"))
    told = [one for one in whole["runs"][0]["outcomes"] if one["split"] == "test"]
    sure = [value for one in told for value in one["confidence"]]
    right = [a == b for one in told for a, b in zip(one["labels"], one["predicted"], strict=True)]
    assert row["ece"] == [pytest.approx(calibration_error(sure, right), abs=1e-12)]
    assert (
        "| method | test set | accuracy | over zero-shot | p below (Holm) | majority | AUROC | ECE | macro-F1 |"
        in (finished[0] / "table.md").read_text()
    )
