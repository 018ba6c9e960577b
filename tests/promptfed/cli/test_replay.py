"""`promptfed federation replay` against a real coordinator: same hashes, errors in one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from typer.testing import CliRunner, Result

from promptfed.cli.main import app
from promptfed.coordinator.store.tables import TaskRow
from promptfed.sdk.client import Exit
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread, in_thread


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


@pytest.mark.parametrize(
    ("arguments", "exit", "says"),
    [(["nobody"], Exit.REFUSED, "no federation"), (["eyes", "--round", "9"], Exit.REFUSED, "round 9 is not over")],
)
def test_what_goes_wrong_is_one_line(
    replay: Callable[..., Result], arguments: list[str], exit: Exit, says: str
) -> None:
    done = replay(*arguments)
    assert done.exit_code == exit
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
