"""Reports of many updates: the JSON is what it was when it was made at once, and now leaves as it is made."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from sqlalchemy.orm import Session

from promptfed.coordinator.reports import rounds
from promptfed.coordinator.reports.rounds import json_pieces
from promptfed.coordinator.store.database import DatabaseAway
from promptfed.shared.api.api_schemas import MetricList
from promptfed.shared.api.report_schemas import FailureReport, RoundPage, RoundReport
from tests.support.coordinators import InThread
from tests.support.many_rows import played

ROUNDS, CLIENTS = 3, 450


@pytest.fixture
def coordinator(served: InThread) -> InThread:
    """On a real socket, which these tests look at."""
    return served


@pytest.fixture(autouse=True)
def long_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """All rounds of these federations are one page."""
    monkeypatch.setattr(rounds, "MOST_TASKS", 10_000)


@pytest.fixture
def federation(coordinator: InThread) -> str:
    id = coordinator.create()
    played(coordinator.registry, id, ROUNDS, CLIENTS)
    return id


@pytest.mark.parametrize("length", [0, 1, 8, 9, 200, 201, 400, 401])
def test_pieces_are_the_json_of_the_whole(coordinator: InThread, length: int) -> None:
    id = coordinator.create()
    played(coordinator.registry, id, 1, max(1, length))
    with coordinator.registry.database.read() as session:
        report = rounds.round_report(session, coordinator.registry.get(id), 1)
    [phase] = report.phases
    phase.failed = [FailureReport(client=f"é{k}", type="\n", detail='"') for k in range(length)]
    phase.asked = [str(k) for k in range(length)]
    phase.measured.clients = {str(k): {"γ": 1e-7 * k} for k in range(length)}
    assert b"".join(json_pieces(report)) == report.model_dump_json().encode()


@pytest.mark.both_databases
def test_rounds_and_metrics_are_what_the_rows_say(coordinator: InThread) -> None:
    id = coordinator.create()
    played(coordinator.registry, id, ROUNDS, CLIENTS)
    path = f"/v1/federations/{id}"
    answer = coordinator.http.get(f"{path}/rounds", headers=coordinator.operator)
    assert "content-length" not in answer.headers
    assert answer.headers["content-type"] == "application/json"
    page = RoundPage.model_validate_json(answer.content)
    assert answer.content == page.model_dump_json().encode()
    assert [report.round for report in page.rounds] == [1, 2, 3]
    for report in page.rounds:
        alone = coordinator.http.get(f"{path}/rounds/{report.round}", headers=coordinator.operator)
        assert RoundReport.model_validate_json(alone.content) == report
        assert len(report.phases[0].updates) == len(report.phases[0].counted) == CLIENTS
        assert report.evaluation is not None
        assert len(report.evaluation.clients) == CLIENTS
        mean = report.evaluation.by_split["trainer"]["test"]
        assert (mean["accuracy"], mean["ece"], mean["macro_f1"]) == (0.5, 0.125, 0.375)
    numbers = MetricList.model_validate_json(
        coordinator.http.get(f"{path}/metrics", headers=coordinator.operator).content
    ).metrics
    counted = Counter(number.name for number in numbers)
    assert counted["loss"] == ROUNDS * (CLIENTS + 1)
    assert (counted["ece"], counted["trainer_ece"], counted["macro_f1"]) == (ROUNDS * CLIENTS, ROUNDS, ROUNDS * CLIENTS)
    lines = csv.DictReader(
        io.StringIO(coordinator.http.get(f"{path}/metrics?format=csv", headers=coordinator.operator).text)
    )
    named = [number.model_dump() for number in numbers]
    assert [
        {key: value or None for key, value in line.items()}
        | {"round": int(line["round"]), "value": float(line["value"])}
        for line in lines
    ] == named


def test_pages_of_rounds_follow_each_other(coordinator: InThread, federation: str) -> None:
    first = coordinator.get(f"{federation}/rounds?limit=2")
    assert ([report["round"] for report in first["rounds"]], first["next"]) == ([1, 2], "2")
    second = coordinator.get(f"{federation}/rounds?limit=2&after=2")
    assert ([report["round"] for report in second["rounds"]], second["next"]) == ([3], None)
    assert coordinator.get(f"{federation}/rounds?after=3") == {"rounds": [], "next": None}


def test_a_page_ends_before_its_reports_get_long(
    coordinator: InThread, federation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_TASKS", 4 * CLIENTS)  # each client trains and evaluates
    first = coordinator.get(f"{federation}/rounds")
    assert ([report["round"] for report in first["rounds"]], first["next"]) == ([1, 2], "2")
    monkeypatch.setattr(rounds, "MOST_TASKS", 1)
    second = coordinator.get(f"{federation}/rounds?after=1")
    assert ([report["round"] for report in second["rounds"]], second["next"]) == ([2], "2"), "one round at least"


def test_metrics_have_pages_where_a_limit_is_given(coordinator: InThread, federation: str) -> None:
    whole = coordinator.get(f"{federation}/metrics")
    assert whole["next"] is None
    first = coordinator.get(f"{federation}/metrics?limit=2")
    second = coordinator.get(f"{federation}/metrics?limit=2&after={first['next']}")
    assert (first["next"], second["next"]) == ("2", None)
    assert first["metrics"] + second["metrics"] == whole["metrics"]
    lines = coordinator.http.get(
        f"/v1/federations/{federation}/metrics?format=csv&after=2", headers=coordinator.operator
    ).text.splitlines()
    assert {line.partition(",")[0] for line in lines[1:]} == {"3"}


class Counting:
    """A database that counts its reading transactions, and the most that were open at once."""

    def __init__(self, coordinator: InThread):
        self._database = coordinator.registry.database
        self.begun = self.open = 0

    @contextmanager
    def read(self) -> Iterator[Session]:
        self.begun += 1
        self.open += 1
        with self._database.read() as session:
            yield session
        self.open -= 1


def test_a_round_is_read_when_its_turn_comes_and_no_transaction_waits_for_the_reader(
    coordinator: InThread, federation: str
) -> None:
    known = coordinator.registry.get(federation)
    database = Counting(coordinator)
    for _ in rounds.page(database, known, [1, 2, 3], None):
        assert database.begun <= 1 or database.open == 0
        if database.begun == 1:
            assert database.open == 0, "while a piece is on its way nothing is held"
    assert database.begun == 3
    database = Counting(coordinator)
    pieces = rounds.as_json(database, known, [1, 2, 3])
    for _ in range(3):
        next(pieces)
    assert (database.begun, database.open) == (1, 0), "the first round"


@pytest.mark.parametrize("path", ["rounds", "metrics", "metrics?format=csv"])
def test_an_answer_that_cannot_be_finished_is_cut_off_and_one_that_cannot_begin_is_refused(
    coordinator: InThread, federation: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = rounds.round_report
    last = 3

    def fails(session: Session, known: object, number: int) -> RoundReport:
        if number == last:
            raise DatabaseAway("a test")
        return read(session, known, number)

    monkeypatch.setattr(rounds, "round_report", fails)
    monkeypatch.setattr(rounds, "round_report", fails)
    address = f"/v1/federations/{federation}/{path}"
    with pytest.raises(httpx.RemoteProtocolError):
        coordinator.http.get(address, headers=coordinator.operator)
    last = 1
    assert coordinator.http.get(address, headers=coordinator.operator).status_code == 503
