"""What a run file leaves open and its data say."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptfed.runtime.run_file import completed, read_run
from promptfed.shared.data import DataError

FEWER, ALL, OTHERS = "symbols:neon?only=sun,cloud", "symbols:sketch?only=anchor,cloud,sun", "symbols:neon?only=sun,key"


@pytest.mark.parametrize(
    ("trainers", "evaluator", "named"),
    [
        ((ALL, ALL), None, True),
        ((FEWER, ALL), FEWER, True),  # a site, or an unseen domain, that lacks a class
        ((ALL, OTHERS), None, False),  # no trainer has all classes
        ((FEWER, FEWER), ALL, False),  # a class that nobody learns
    ],
)
def test_class_names_are_those_of_the_trainer_that_has_all(
    trainers: tuple[str, ...], evaluator: str | None, named: bool, tmp_path: Path
) -> None:
    path = tmp_path / "run.yaml"
    lines = [f"  - {{name: site{k}, data: '{uri}'}}" for k, uri in enumerate(trainers)]
    lines += [f"  - {{name: judge, role: evaluator, data: '{evaluator}'}}"] if evaluator else []
    path.write_text("\n".join(["method: {name: fedtaskres}", "clients:", *lines]))
    run = read_run(path)
    assert sorted(run.spec.get("class_names") or []) == (["anchor", "cloud", "sun"] if named else [])
    assert "class_names" not in completed({"method": {"name": "promptfl"}}, run.sites)[0]


def test_data_that_cannot_be_opened_are_named_first(tmp_path: Path) -> None:
    """Not the list of classes, which they would have given; the file may be written before them."""
    path = tmp_path / "run.yaml"
    path.write_text(f"method: {{name: fedtaskres}}\nclients: [{{name: a, data: 'folder:{tmp_path}/absent'}}]\n")
    run = read_run(path)
    with pytest.raises(DataError, match="absent"):
        completed(run.spec, run.sites)
