"""Federations that earlier code has played: every state of theirs is computed again to its hash."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator

import pytest

from tests.support.coordinators import InProcess, in_process
from tests.support.recording import ARCHIVE, CASES, WITHDRAWN

GONE = {(WITHDRAWN, 1)}  # the withdrawn client's update is deleted


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """A coordinator on the recorded store."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    with in_process(folder) as coordinator:
        yield coordinator


@pytest.fixture(scope="module")
def ids(recorded: InProcess) -> dict[str, str]:
    """Each recorded federation's id by its name."""
    return {federation.name: federation.id for federation in recorded.registry.federations.values()}


def test_all_are_there_and_each_of_43_methods(recorded: InProcess, ids: dict[str, str]) -> None:
    assert set(ids) == set(CASES)
    methods = {federation.spec.method["name"] for federation in recorded.registry.federations.values()}
    assert len(methods) == 43
    assert methods <= set(ids)


@pytest.mark.parametrize("name", CASES)
def test_every_round_comes_to_its_hashes_again(recorded: InProcess, ids: dict[str, str], name: str) -> None:
    last = recorded.get(ids[name])["round"]
    for round in range(last + 1):
        gone = (name, round) in GONE
        answer = recorded.post(f"{ids[name]}/rounds/{round}/replay", {}, status=410 if gone else 200)
        if gone:
            assert answer["type"].endswith("/updates-gone")
            continue
        assert [state["origin"] for state in answer["states"] if not state["same"]] == []
        assert answer["states"] or name == "zero_shot", "its rounds change nothing"
