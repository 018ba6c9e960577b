"""Which of a client's numbers are taken: those that its method declares, never under a name of the coordinator's."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest

from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core import client_numbers
from promptfed.shared.methods.core.client_numbers import LARGEST, OF_REPORTS, declared
from promptfed.testing.coordinator import local_coordinator
from tests.support.open_phases import completed, metrics


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_declares_a_name_of_the_reports(name: str) -> None:
    method = make_method({"name": name})
    patterns = [*client_numbers.of_training(method, False, False), *client_numbers.of_evaluation(method)]
    assert not [taken for taken in OF_REPORTS for pattern in patterns if fnmatch.fnmatchcase(taken, pattern)]


def test_names_and_values_have_limits() -> None:
    given = {"loss": 0.5, "losses": 1.0, "mst_a": -LARGEST, "mst_b": 1.01 * LARGEST, "mst_c": -1e308, "weight": 1.0}
    assert declared(given, ["loss", "mst_*", "weight"]) == {"loss": 0.5, "mst_a": -LARGEST}
    assert declared(given, []) == {}


def test_all_names_of_the_table_of_numbers_are_known(tmp_path: Path) -> None:
    with local_coordinator(tmp_path / "coordinator") as coordinator:
        federation, _ = completed(coordinator, "a", "b", rounds=1)
        lines = metrics(coordinator, federation)
    assert {line["name"] for line in lines if line["phase"] != "evaluation" or line["client"]} - {"loss"} <= OF_REPORTS
