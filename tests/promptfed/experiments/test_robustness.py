"""Corrupted pictures and unseen classes under every protocol: test sets, columns, AUROC against its definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.experiments.bench.results import BenchRun
from promptfed.experiments.figures.bench_metrics import open_sets_of
from promptfed.shared.metrics import auroc, false_positives
from promptfed.shared.metrics.outcomes import Outcomes

DATA = "symbols:neon?topic=weather&per_class=4&test_per_class=2"


def told(split: str, confidence: tuple[float, ...], client: str = "a") -> Outcomes:
    zeros = (0,) * len(confidence)
    return Outcomes(2, client, split, ("sun", "moon"), zeros, zeros, confidence, "same")


def run(outcomes: list[Outcomes], seed: int = 0) -> BenchRun:
    costs = {"bytes_up": 0.0, "bytes_down": 0.0, "seconds": 0.0}
    return BenchRun(
        label="coop",
        seed=seed,
        trial="all",
        accuracies=[],
        rounds=2,
        costs=costs,
        wall_seconds=0,
        setup_seconds=0,
        outcomes=outcomes,
    )


def test_auroc_and_fpr95_are_their_definitions() -> None:
    draws = np.random.default_rng(0)
    known, unseen = draws.integers(0, 30, 200) / 30, draws.integers(0, 25, 150) / 30
    pairs = [(1.0 if a > b else 0.5 if a == b else 0.0) for a in known for b in unseen]
    assert auroc(known, unseen) == pytest.approx(np.mean(pairs), abs=1e-12)
    threshold = max(t for t in known if np.mean(known >= t) >= 0.95)
    assert false_positives(known, unseen) == np.mean(unseen >= threshold)
    assert (auroc([0.9, 0.8], [0.1]), false_positives([0.9, 0.8], [0.1])) == (1.0, 0.0)
    with pytest.raises(ValueError, match="0 known images"):
        auroc([], [0.1])


def test_open_sets_pair_each_clients_own_images() -> None:
    """Pooled, the sure client's unseen images would stand above the unsure one's known ones."""
    sure = [told("base", (0.9, 0.8), "a"), told("unseen", (0.7,), "a")]
    unsure = [told("base", (0.4, 0.3), "b"), told("unseen", (0.2,), "b")]
    [found] = open_sets_of([run([*sure, *unsure])])
    assert (found.label, found.auroc, found.fpr95) == ("coop", [1.0], [0.0])
    assert open_sets_of([run([told("base", (0.9,))])]) == []


def test_a_bench_has_the_table_of_unseen_classes(tmp_path: Path) -> None:
    command = ["bench", "base-to-novel", "--data", DATA, "--methods", "promptfl", "--clients", "2", "--seeds", "0"]
    command += ["--rounds", "1", "--unseen-classes", "--out", str(tmp_path / "a"), "--json"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])["open_sets"]
    assert [row["label"] for row in rows] == ["promptfl", "promptfl (zero-shot)"]
    assert all(0 <= row["auroc"][0] <= 1 for row in rows)
    table = (tmp_path / "a" / "table.md").read_text()
    assert "AUROC of unseen classes" in table
    assert "| unseen |" not in table, "where nothing can be right, an accuracy says nothing"
