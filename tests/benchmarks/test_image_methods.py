"""The bench of the image side: its commands run the very federations that it runs, its questions name its rows."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks import image_methods
from benchmarks.image_methods import DATA, LEFT_OUT, METHODS, PERSONAL, QUESTIONS, Method, choose, commands, setting
from promptfed.cli.bench import make_bench
from promptfed.experiments.entries import parse_entry
from promptfed.experiments.known import KNOWN
from promptfed.experiments.results import Run
from promptfed.experiments.runner import Bench
from promptfed.experiments.setting import Setting
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


def test_the_printed_commands_run_the_very_federations(tmp_path: Path) -> None:
    data = DATA["symbols"]
    rates = (":training.learning_rate=0.05", ":training.learning_rate=0.0001", ":training.learning_rate=0.0001", "")
    entries = [parse_entry(method.entry + rate, method.label) for method, rate in zip(FEW, rates, strict=True)]
    spec, *lines = commands("symbols", FEW, entries, (0, 1)).replace("\\\n", "").splitlines()
    name, _, text = spec.removeprefix("# ").partition(": ")
    (tmp_path / name).write_text(text)
    assert yaml.safe_load(text) == data.spec
    wanted = {
        protocol: Bench(KNOWN[protocol], entries, setting(data, data.domains), (0, 1), data.spec)
        for protocol in (LEFT_OUT, PERSONAL)
    }
    assert len(lines) == 3, "the rates, then two protocols"
    for line in lines[1:]:
        _, _, protocol, *words = shlex.split(line)
        options = dict(zip(words[::2], words[1::2], strict=True))
        given = Setting((options["--data"],), tuple(options["--domains"].split(",")), shots=int(options["--shots"]))
        found = make_bench(protocol, options["--methods"], given, options["--seeds"], tmp_path / name, None, None)
        assert [job.key for job in found.jobs()] == [job.key for job in wanted[protocol].jobs()]


def test_each_set_of_rates_is_a_sweep_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[tuple[str, ...], tuple[int, ...], float | None]] = []

    def shown(bench: Bench, runner: Any) -> list[Run]:
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
    image_methods.main(["symbols", "--out", str(tmp_path), "--seeds", "0"])
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
