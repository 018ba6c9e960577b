"""The bench of the image side: its commands run the very federations that it runs, its questions name its rows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import image_methods
from benchmarks.image_methods import (
    DATA,
    LEFT_OUT,
    METHODS,
    PERSONAL,
    QUESTIONS,
    Method,
    benches,
    choose,
    commands,
    table,
    with_runs,
    written,
)
from benchmarks.image_summary import renewed
from promptfed.cli.bench import make_bench
from promptfed.experiments.bench.entries import parse_entry
from promptfed.experiments.bench.results import BenchRun, write_json
from promptfed.experiments.bench.runner import Bench, Runner
from promptfed.experiments.protocols.derived import KNOWN
from promptfed.experiments.protocols.setting import Setting
from promptfed.shared.methods import METHODS as KNOWN_METHODS
from tests.promptfed.experiments.test_runner import accuracy, run_of

BY_LABEL = {method.label: method for method in METHODS}
FEW = tuple(BY_LABEL[label] for label in ("promptfl", "fedavg, last block", "fedprox, last block", "tip_adapter"))


def test_the_questions_name_rows_and_every_row_is_a_method() -> None:
    labels = [method.label for method in METHODS]
    assert len(set(labels)) == len(labels)
    assert {name for asked in QUESTIONS.values() for _, a, b in asked for name in (a, b)} <= set(labels)
    assert {method.like for method in METHODS if method.like} <= {method.label for method in METHODS if method.rates}
    assert all(parse_entry(method.entry).method["name"] in KNOWN_METHODS for method in METHODS)


def test_rates_are_chosen_on_other_styles_than_those_of_the_tables() -> None:
    assert all(not set(data.domains) & set(data.sweep) for data in DATA.values())
    assert all(DATA[data.rates_of].sweep for data in DATA.values())


@pytest.mark.parametrize("every", [False, True])
def test_the_printed_commands_run_the_very_federations(every: bool, tmp_path: Path) -> None:
    rates = (":training.learning_rate=0.05", ":training.learning_rate=0.0001", ":training.learning_rate=0.0001", "")
    entries = [parse_entry(method.entry + rate, method.label) for method, rate in zip(FEW, rates, strict=True)]
    planned = benches("symbols", entries, (0, 1), every)
    spec, first, *lines = commands("symbols", FEW, entries, planned).splitlines()
    name, _, text = spec.removeprefix("# ").partition(": ")
    (tmp_path / name).write_text(text)
    assert yaml.safe_load(text) == DATA["symbols"].spec
    assert "--validation 0.25 --seeds 10" in first
    wanted = {protocol: {job.key for bench in own for job in bench.jobs()} for protocol, own in planned.items()}
    found: dict[str, set[str]] = {protocol: set() for protocol in planned}
    for line in lines:
        _, _, protocol, *words = shlex.split(line)
        options = dict(zip(words[::2], words[1::2], strict=True))
        targets = tuple(options["--targets"].split(",")) if "--targets" in options else ()
        domains, shots = tuple(options["--domains"].split(",")), int(options["--shots"])
        given = Setting((options["--data"],), domains, targets, shots=shots)
        bench = make_bench(protocol, options["--methods"], given, options["--seeds"], tmp_path / name, None, None)
        found[protocol] |= {job.key for job in bench.jobs()}
    assert found == wanted
    assert len(wanted[LEFT_OUT]) == len(entries) * 2 * (3 if every else 1)


def test_each_seed_leaves_another_style_out() -> None:
    planned = benches("symbols", [parse_entry("promptfl")], (0, 1, 2, 3), every=False)
    turns = [bench.setting.targets for bench in planned[LEFT_OUT]]
    assert turns == [("sketch",), ("chalk",), ("neon",), ("sketch",)]
    named = benches("names", [parse_entry("promptfl")], (0, 1), every=False)
    assert list(named) == [LEFT_OUT], "things of one drawing each are nobody's own to be tested on"
    assert [bench.setting.targets for bench in named[LEFT_OUT]] == [DATA["names"].targets] * 2


def test_only_methods_whose_federations_are_all_done_are_gathered(tmp_path: Path) -> None:
    entries = [parse_entry("promptfl"), parse_entry("fedclip")]
    [bench] = benches("symbols", entries, (0,), every=True)[LEFT_OUT]
    runner = Runner(tmp_path)
    (tmp_path / "runs").mkdir()
    jobs = bench.jobs()
    for job in jobs[:-1]:
        done = run_of(accuracy("test", 0.5, 0.2), label=job.entry.label)
        write_json(runner.path(job), done)
    whole, runs = with_runs(bench, runner)
    assert [entry.label for entry in whole.entries] == ["promptfl"]
    assert [(run.label, run.trial) for run in runs] == [("promptfl", name) for name in ("sketch", "chalk", "neon")]


def test_rows_of_several_seeds_become_one_with_the_seeds_that_it_has() -> None:
    def done(seed: int, *labels: str) -> tuple[Bench, list[BenchRun]]:
        entries = [parse_entry(label) for label in labels]
        bench = Bench(KNOWN[PERSONAL], entries, Setting(("digits",)), (seed,))
        return bench, [run_of(accuracy("test", 0.5 + 0.1 * seed, 0.2), label=label, seed=seed) for label in labels]

    rows = {row["label"]: row for row in table([done(0, "promptfl", "fedclip"), done(1, "promptfl")])}
    assert list(rows) == ["zero-shot", "promptfl", "fedclip"]
    assert [(row["seeds"], [one["mean"] for one in row["scores"]]) for row in rows.values()] == [
        ([0, 1], [0.2, 0.2]),
        ([0, 1], [0.5, 0.6]),
        ([0], [0.5]),
    ]
    assert rows["zero-shot"]["costs"] is None
    assert rows["promptfl"]["costs"]["bytes_up"] == 2000


def test_each_set_of_rates_is_a_sweep_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], tuple[int, ...], float | None]] = []

    def shown(bench: Bench, runner: Any) -> list[BenchRun]:
        assert runner.out == tmp_path / "symbols" / "rates"
        asked.append((bench.setting.domains, tuple(bench.seeds), bench.setting.validation))
        return [
            run_of(accuracy("test", 1 - entry.changes["training"]["learning_rate"], 0.1), label=entry.label, seed=10)
            for entry in bench.entries
        ]

    monkeypatch.setattr(image_methods, "run_shown", shown)
    entries, rows = choose("emoji", FEW, tmp_path)
    assert asked == [(DATA["symbols"].sweep, (10,), 0.25)] * 2, "emoji takes the rates that symbols chose"
    assert [entry.label for entry in entries] == [method.label for method in FEW]
    rates = [entry.changes.get("training", {}).get("learning_rate") for entry in entries]
    assert rates == [0.01, 0.0001, 0.0001, None], "the lowest is the best here; what trains nothing has none"
    assert [row.label for row in rows] == [method.label for method in FEW[:2]]


def test_a_head_s_rates_are_tried_with_each_rate_beneath_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    best = (0.0003, 0.01)

    def shown(bench: Bench, runner: Any) -> list[BenchRun]:
        found = []
        for entry in bench.entries:
            rates = entry.changes["training"]["learning_rate"], entry.method["head_learning_rate"]
            found.append(run_of(accuracy("test", 0.9 if rates == best else 0.2, 0.1), label=entry.label, seed=10))
        return found

    monkeypatch.setattr(image_methods, "run_shown", shown)
    headed = [method for method in METHODS if method.head_rates]
    assert {len(method.rates) * len(method.head_rates) for method in headed} == {9}, "as many candidates for each"
    [entry], rows = choose("symbols", [BY_LABEL["fedrod"]], tmp_path)
    assert written(entry) == "fedrod:head_learning_rate=0.01:training.learning_rate=0.0003"
    assert [row.label for row in rows] == [f"fedrod, head {rate}" for rate in (0.003, 0.01, 0.03)]


def test_rows_that_ran_again_take_the_place_of_former_ones() -> None:
    def half(value: float, *labels: str, asked: tuple[tuple[str, str], ...]) -> dict[str, Any]:
        return {
            "table": [{"label": label, "scores": [value]} for label in labels],
            "measures": [{"label": label, "accuracy": [value]} for label in labels],
            "questions": [{"question": a + b, "a": a, "b": b, "difference": value} for a, b in asked],
            "seconds": 1,
            "provenance": [{"commit": str(value)}],
        }

    rated = {"fedavg": "fedavg:training.learning_rate=1", "fedrod": "fedrod:training.learning_rate=1"}
    questions = (("pfedpg", "fedrod"), ("fedavg", "promptfl"), ("fedrod", "tip_adapter"))
    former = {
        "chosen": rated,
        "rates": [{"label": "fedavg", "chosen": 1}, {"label": "fedrod", "chosen": 1}],
        PERSONAL: half(0.1, "zero-shot", "fedavg", "fedrod", "fedrod (generic)", asked=questions),
        LEFT_OUT: half(0.1, "zero-shot", "fedrod", asked=()),
    }
    record = {
        "chosen": {"fedrod": "fedrod:head_learning_rate=2", "fedavg": "another"},
        "rates": [{"label": "fedrod, head 2", "chosen": 1}],
        PERSONAL: half(
            0.2, "fedavg", "fedrod", "fedrod (generic)", asked=(("fedavg", "promptfl"), ("pfedpg", "fedrod"))
        ),
        LEFT_OUT: half(0.2, asked=()),
    }
    found = renewed(former, record, ["fedrod"], ["fedavg", "fedrod"])
    assert found["chosen"] == {"fedavg": rated["fedavg"], "fedrod": "fedrod:head_learning_rate=2"}
    assert [row["label"] for row in found["rates"]] == ["fedavg", "fedrod, head 2"]
    assert [(row["label"], row["scores"]) for row in found[PERSONAL]["table"]] == [
        ("zero-shot", [0.1]),
        ("fedavg", [0.1]),
        ("fedrod", [0.2]),
        ("fedrod (generic)", [0.2]),
    ]
    answers = {(each["a"], each["b"]): each["difference"] for each in found[PERSONAL]["questions"]}
    assert answers == {("fedavg", "promptfl"): 0.1, ("pfedpg", "fedrod"): 0.2}, "one without a new answer is dropped"
    assert list(answers) == [("pfedpg", "fedrod"), ("fedavg", "promptfl")], "in their former order"
    assert found[PERSONAL]["provenance"] == [{"commit": "0.1"}, {"commit": "0.2"}]
    assert found[LEFT_OUT] == former[LEFT_OUT]


@pytest.mark.slow
def test_a_run_leaves_both_tables_the_rates_and_the_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        image_methods.DATA,
        "symbols",
        image_methods.Data(
            "symbols:{domain}?topic=signs&per_class=8&test_per_class=4",
            ("sketch", "neon"),
            ("quickdraw",),
            "symbols",
            2,
            {"rounds": 1, "training": {"epochs": 1, "batch_size": 32}, "evaluation": {"every": 1}},
        ),
    )
    monkeypatch.setattr(
        image_methods,
        "METHODS",
        (Method("fedclip", "fedclip", (0.01, 0.1)), Method("fedmaple", "fedmaple:m=2", (0.02,))),
    )
    image_methods.main(["symbols", "--out", str(tmp_path), "--seeds", "0", "--every-target"])
    summary = json.loads((tmp_path / "symbols" / "summary.json").read_text())
    assert {row["label"] for row in summary["rates"]} == {"fedclip", "fedmaple"}
    for protocol in (LEFT_OUT, PERSONAL):
        assert {row["label"] for row in summary[protocol]["table"]} == {"zero-shot", "fedclip", "fedmaple"}
    [asked] = summary[LEFT_OUT]["questions"]
    assert (asked["a"], asked["b"], asked["test_set"], asked["pictures"]) == (
        "fedmaple",
        "fedclip",
        "unseen",
        2 * 13 * 4,
    )
    assert summary[PERSONAL]["questions"] == []
