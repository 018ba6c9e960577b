"""Sweeps on equal terms: the same grid for all, chosen on images that are no test images, then tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.entries import parse_entries
from promptfed.experiments.bench.folder import DECIDES, Grid, rates_of, sweep, sweep_table
from promptfed.experiments.bench.protocols import KNOWN, PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench, BenchRun
from promptfed.sdk.client import CommandError, Exit
from promptfed.sdk.result import Accuracy

DATA = "symbols:{domain}?topic=weather&per_class=8&test_per_class=2"
SETTING = Setting((DATA,), ("neon", "chalk"))
GRID = Grid((0.001, 0.01, 0.1), (7, 8))


def bench(methods: str, protocol: str = "leave-one-domain-out") -> Bench:
    return Bench(PROTOCOLS[protocol], parse_entries(methods), SETTING, (0,), {"rounds": 1})


def test_the_best_rate_on_the_clients_own_held_out_images_is_taken() -> None:
    """The target's accuracy does not count: it says the opposite here."""
    best = {"promptfl": 0.01, "coop": 0.1}

    def run(trial: Bench) -> list[BenchRun]:
        runs = []
        for job in trial.jobs():
            assert all("validation=0.25" in site.data for site in job.trial.sites)
            name, rate = job.spec["method"]["name"], job.spec["training"]["learning_rate"]
            good = 0.8 if rate == best[name] else 0.5 + 0.01 * (job.seed - 7)
            rows = [Accuracy(1, "a", "trainer", None, "test", good, 0.1, 4)]
            rows.append(Accuracy(1, "t", "evaluator", None, "test", 1 - good, 0.1, 4))
            rows.append(Accuracy(1, "a", "trainer", None, "target", 1 - good, 0.1, 4))
            runs.append(BenchRun(label=job.entry.label, seed=job.seed, trial=job.trial.name, accuracies=rows, rounds=1,
                            costs={}, wall_seconds=0.0, setup_seconds=0.0))  # fmt: skip
        assert len(runs) == 2 * 3 * 2 * 2
        return runs

    tested, rows = sweep(bench("promptfl,coop"), GRID, run)
    assert [(row.label, row.chosen, row.at_edge) for row in rows] == [("promptfl", 0.01, False), ("coop", 0.1, True)]
    assert rows[0].by_rate == pytest.approx({0.001: 0.505, 0.01: 0.8, 0.1: 0.505})
    assert tested.seeds == (0,)
    assert tested.setting.validation is None
    assert [job.spec["training"]["learning_rate"] for job in tested.jobs()] == [0.01, 0.01, 0.1, 0.1]
    assert {entry.label for entry in tested.entries} == {"promptfl", "coop"}
    assert sweep_table(rows)[-1] == "| coop | 50.5 | 50.5 | **80.0** ! |"


@pytest.mark.parametrize(("name", "column"), DECIDES.items())
def test_what_decides_is_a_column_of_its_protocol(name: str, column: str) -> None:
    assert column in KNOWN[name].columns(SETTING)


def test_what_cannot_be_swept_is_refused() -> None:
    with pytest.raises(CommandError, match="names its rate, which --sweep is to choose"):
        sweep(bench("promptfl:training.learning_rate=0.1"), GRID, lambda trial: [])
    with pytest.raises(CommandError, match="--sweep is for base-to-novel"):
        sweep(bench("promptfl", "few-shot:personalisation"), GRID, lambda trial: [])
    for text in ("", "a", "0.1,0.1", "0,1", "-1", "nan", "inf"):
        with pytest.raises(CommandError, match="write different rates above 0"):
            rates_of(text)


def test_a_sweep_from_the_command_line(tmp_path: Path) -> None:
    command = [
        "bench", "personalisation", "--data", DATA, "--domains", "neon,chalk", "--methods", "fedclip", "--rounds",
    ]  # fmt: skip
    command += ["1", "--seeds", "0", "--sweep", "0.1,0.0001", "--out", str(tmp_path), "--json"]
    found = CliRunner().invoke(app, command)
    assert found.exit_code == 0, found.stderr
    record = json.loads((tmp_path / "sweep.json").read_text())
    assert (record["seeds"], record["validation"]) == ([10], 0.25)
    chosen = record["rows"][0]["chosen"]
    [run] = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert run["spec"]["training"]["learning_rate"] == chosen
    assert all("validation" not in client["data"] for client in run["clients"])
    assert (tmp_path / "sweep.md").read_text().startswith("Rates, chosen by `mean`")
    again = CliRunner().invoke(app, [*command, "--sweep-seeds", "0"])
    assert again.exit_code == Exit.BAD_INPUT
    assert "the seed 0 would choose and test" in " ".join(again.stderr.split())
