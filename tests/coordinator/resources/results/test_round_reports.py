"""What reports of rounds make of rows: verdicts, means, attempts, and the lines of the CSV."""

from __future__ import annotations

from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.coordinator.engine.readable import Reading
from promptfed.coordinator.resources.results import evaluations, numbers, phases
from promptfed.shared.api.report_schemas import ClientEvaluation, EvaluationReport, PhaseReport
from promptfed.shared.messages import SplitResult

Nothing: Any = None
AT = datetime(2026, 1, 1, tzinfo=UTC).isoformat()


@pytest.mark.parametrize(
    ("counted", "status", "closed", "state", "judged", "verdict"),
    [
        (True, "answered", AT, "running", None, "counted"),
        (True, "answered", AT, "running", {"verdict": "clipped", "influence": 0.5, "distance": 2.0}, "clipped"),
        (False, "discarded", None, "running", None, "discarded"),
        (False, "answered", None, "running", None, "pending"),
        (False, "answered", None, "cancelled", None, "unused"),
        (False, "answered", AT, "running", None, "unused"),
    ],
)
def test_an_update_has_one_verdict(
    counted: bool, status: str, closed: str | None, state: str, judged: dict[str, Any] | None, verdict: str
) -> None:
    task = SimpleNamespace(client="a", id="t", status=status, counted=counted, weight=0.25)
    sent = SimpleNamespace(
        judged=judged, sha256="s", bytes=9, norm=1.5, received_at=AT, metrics={"loss": 1}, spent=None
    )
    federation: Any = SimpleNamespace(run=SimpleNamespace(state=state))
    report = phases._update_report(federation, SimpleNamespace(closed_at=closed), task, sent, 0.5)
    told = (report.verdict, report.influence, report.distance, report.change, report.privacy)
    assert told == (verdict, *((0.5, 2.0) if judged else (None, None)), 0.5, None)


@pytest.mark.parametrize(
    ("parts", "mean"),
    [
        ([], {}),
        ([(0.0, {"loss": 1.0})], {}),
        ([(1.0, {"loss": 1.0}), (3.0, {"loss": 2.0, "other": 5.0})], {"loss": 1.75}),
        ([(0.5, {"loss": 1.0}), (0.0, {"loss": 9.0})], {"loss": 1.0}),
        ([(1.0, {}), (1.0, {"loss": 2.0})], {}),
    ],
)
def test_metrics_are_weighed_where_all_have_sent_them(parts: list[Any], mean: dict[str, float]) -> None:
    assert phases._mean_metrics(parts) == mean
    assert list(phases._mean_metrics([(1.0, dict.fromkeys("hcgbfaed", 1.0))])) == list("abcdefgh")


def task(client: str, status: str, sha256: str | None = "p", failure: Any = None, down: int = 1) -> Any:
    return SimpleNamespace(client=client, status=status, payload_sha256=sha256, failure=failure, bytes_down=down)


def test_a_stage_names_who_answered_failed_and_went() -> None:
    stage = SimpleNamespace(opened_at=AT, deadline=AT, closed_at=AT, completed_at="2026-01-01T00:00:02+00:00")
    failure = {"type": "error", "detail": "x"}
    tasks = [
        task("d", "answered", down=10), task("c", "discarded"), task("b", "expired"), task("a", "withdrawn"),
        task("e", "failed", failure=failure), task("f", "failed", failure={"type": 1}), task("a", "open", None),
    ]  # fmt: skip
    reading = Reading()
    told = phases.stage_report(stage, tasks, reading)
    names = {key: told[key] for key in ("asked", "answered", "expired", "withdrawn", "bytes_down", "seconds")}
    assert names == {
        "asked": list("abcdef"), "answered": ["c", "d"], "expired": ["b"], "withdrawn": ["a", "c"], "bytes_down": 16,
        "seconds": 2.0,
    }  # fmt: skip
    assert [one.client for one in told["failed"]] == ["e"]
    assert len(reading.unreadable) == 1
    assert told["payload_sha256"] == "p", "all that had one had the same"
    all_in = phases.stage_report(stage, [task(name, "answered") for name in "hcgbfaed"], reading)
    assert all_in["asked"] == all_in["answered"] == list("abcdefgh")
    for others in ([task("a", "open", "q")], [task("a", "open", None)]):
        several = [*tasks, *others] if others[0].payload_sha256 else others
        assert phases.stage_report(stage, several, reading)["payload_sha256"] is None


def test_an_attempt_begins_with_its_keys() -> None:
    indices = {0: None, 1: 0, 2: 1, 3: 2, 4: 0, 5: 1}
    stages = [SimpleNamespace(round=1, step=step) for step in indices]

    def plan(round: int, step: int) -> Any:
        index = indices[step]
        return SimpleNamespace(secure=None if index is None else SimpleNamespace(index=index))

    federation: Any = SimpleNamespace(rules=SimpleNamespace(plan=plan))
    assert phases.attempts(federation, stages) == [stages[1:4], stages[4:]]


def result(accuracy: float, number: int = 10, **figures: float) -> SplitResult:
    return SplitResult.model_validate({"accuracy": accuracy, "num_samples": number, **figures})


def evaluated(role: str, splits: dict[str, SplitResult], zero_shot: dict[str, SplitResult]) -> ClientEvaluation:
    return ClientEvaluation.model_validate(
        {"role": role, "domain": None, "splits": splits, "zero_shot": zero_shot, "metrics": {}, "received_at": AT}
    )


def test_means_are_by_role_and_split_over_who_has_it() -> None:
    clients = {
        "a": evaluated("trainer", {"test": result(0.5, 10, ece=0.2), "val": result(0.25)}, {"test": result(0.25)}),
        "b": evaluated("trainer", {"test": result(1.0, 30)}, {}),
        "c": evaluated("evaluator", {"val": result(0.75)}, {}),
    }
    told = evaluations._with_means(clients, "single_label")
    assert told["by_split"] == {
        "evaluator": {"val": {"accuracy": 0.75}},
        "trainer": {"test": {"accuracy": 0.75, "zero_shot": 0.25, "ece": 0.2}, "val": {"accuracy": 0.25}},
    }
    assert told["mean"] == {"trainer": {"accuracy": 0.75, "zero_shot": 0.25, "ece": 0.2}}
    assert {role: list(bounds) for role, bounds in told["bounds"].items()} == {
        "evaluator": ["val"],
        "trainer": ["test", "val"],
    }
    assert sorted(told["clients"]["b"].bounds) == ["test"]
    assert [list(told[what]) for what in ("by_split", "bounds")] == [["evaluator", "trainer"]] * 2
    many = evaluated("trainer", dict.fromkeys("hcgbfaed", result(0.5)), {})
    assert list(evaluations._mean_accuracy([many])) == list("abcdefgh")
    assert list(evaluations._bounds([many], "single_label")) == list("abcdefgh")


def test_noisy_counts_cost_their_number_times_each() -> None:
    assert evaluations._spent_counts(None) is None
    event = {"mechanism": "laplace", "q": 1.0, "z": 0.25, "count": 3}
    spent = {"events": [event], "epsilon": 9.0, "delta": 1e-5, "noise": "secret"}
    told = {
        "epsilon": 0.75,
        "count_epsilon": 0.25,
        "counts": 3,
        "ledger_epsilon": 9.0,
        "delta": 1e-5,
        "noise": "secret",
    }
    assert evaluations._spent_counts(spent) == told


def test_every_number_of_a_round_is_a_line() -> None:
    update = SimpleNamespace(
        client="=a", metrics={"loss": 1.5}, norm=2.0, bytes=3, weight=0.5, influence=None, distance=4.0
    )
    phase = SimpleNamespace(
        phase="train",
        metrics={"loss": 1.25},
        measured=SimpleNamespace(phase={"gamma": 0.5}, clients={"b": {"share": 0.75}}),
        asked=["a", "b"],
        answered=["a"],
        counted=[],
        bytes_up=7,
        bytes_down=8,
        seconds=None,
        updates=[update],
    )
    client = evaluated("trainer", {"test": result(0.5, ece=0.25)}, {"test": result(0.125)})
    client.metrics = {"tau": 9.0}
    evaluation = SimpleNamespace(clients={"a": client}, mean={"trainer": {"accuracy": 0.5}})
    report: Any = SimpleNamespace(round=3, phases=[phase], evaluation=evaluation)
    lines = numbers._csv(numbers._numbers(report)).decode().splitlines()
    assert lines == [
        "3,train,,,loss,1.25", "3,train,,,gamma,0.5", "3,train,,,asked,2.0", "3,train,,,answered,1.0",
        "3,train,,,counted,0.0", "3,train,,,bytes_up,7.0", "3,train,,,bytes_down,8.0", "3,train,'=a,,loss,1.5",
        "3,train,'=a,,norm,2.0", "3,train,'=a,,bytes,3.0", "3,train,'=a,,weight,0.5", "3,train,'=a,,distance,4.0",
        "3,train,b,,share,0.75", "3,evaluation,a,test,accuracy,0.5", "3,evaluation,a,test,zero_shot,0.125",
        "3,evaluation,a,test,ece,0.25", "3,evaluation,a,,tau,9.0", "3,evaluation,,,trainer_accuracy,0.5",
    ]  # fmt: skip
    phase.seconds, report.evaluation = 1.5, None
    assert "3,train,,,seconds,1.5" in numbers._csv(numbers._numbers(report)).decode().splitlines()


def test_a_sum_s_report_is_of_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    end = "2026-01-01T00:00:05+00:00"
    stages = [
        SimpleNamespace(id=id, round=1, step=id, opened_at=AT, completed_at=end if id == 5 else None, measured=None)
        for id in range(1, 6)
    ]
    stages[-1].measured = {"phase": {"mean_norm": 0.5}}
    first = PhaseReport.model_construct(failed=["first"], expired=["z"], unreadable=["u"], secure=None)
    monkeypatch.setattr(phases, "phase_report", lambda session, federation, stage: {1: first}[stage.id])
    failure = {"type": "error", "detail": "x"}
    tasks = [
        SimpleNamespace(phase_id=at, client=name, status=status, failure=why, bytes_down=1)
        for at, name, status, why in (
            (1, "a", "expired", None), (2, "b", "expired", None), (3, "c", "expired", failure),
            (3, "d", "answered", failure), (4, "e", "answered", None), (5, "b", "expired", None),
        )
    ]  # fmt: skip
    monkeypatch.setattr(phases, "rows_by_client", lambda session, table, *where: tasks)
    spent = {"epsilon": 1.0, "delta": 1e-5, "noise_multiplier": 1.0, "noise": "secret", "ledger_epsilon": 1.0}
    answers = [
        SimpleNamespace(client=name, digest=f"sha256:{name}", weight=weight, counted=counted, spent=cost)
        for name, weight, counted, cost in (
            ("a", 0.25, True, spent), ("b", None, True, None), ("c", 0.5, False, {"epsilon": "x"}),
        )
    ]  # fmt: skip

    asked: list[dict[str, Any]] = []

    def session(total: Any, sent: int | None) -> Any:
        values = iter([sent, "sha256:state"])
        return SimpleNamespace(
            execute=lambda query: asked.append(query.compile().params) or SimpleNamespace(all=lambda: answers),
            scalars=lambda query: SimpleNamespace(one_or_none=lambda: total),
            scalar=lambda query: next(values),
        )

    secure = SimpleNamespace(attempt=2)
    federation: Any = SimpleNamespace(rules=SimpleNamespace(plan=lambda round, step: SimpleNamespace(secure=secure)))
    told = phases.secure_report(session(SimpleNamespace(count=3, weight=40.0), 99), federation, stages)
    assert [(one.client, one.weight) for one in told.counted] == [("a", 0.25), ("b", 0.0)]
    assert ([getattr(one, "client", one) for one in told.failed], told.expired) == (["first", "c", "d"], ["b", "z"])
    assert (told.bytes_up, told.bytes_down, told.seconds, told.state_hash) == (99, 6, 5.0, "sha256:state")
    assert told.secure is not None
    assert (told.secure.attempt, told.secure.sum_clients, told.secure.sum_weight) == (2, 3, 40.0)
    assert (told.secure.mean_norm, list(told.secure.privacy or ())) == (0.5, ["a"])
    assert (len(told.unreadable), told.unreadable[0]) == (2, "u")
    for answer in answers:
        answer.spent = None
    stages[-1].completed_at = None
    bare = phases.secure_report(session(None, None), federation, stages)
    assert bare.secure is not None
    assert (bare.secure.sum_clients, bare.secure.sum_weight, bare.secure.privacy) == (None, None, None)
    assert (bare.bytes_up, bare.completed_at, bare.seconds) == (0, None, None)
    stages[-1].measured = {"phase": "x"}
    damaged = phases.secure_report(session(None, None), federation, stages)
    assert (damaged.secure and damaged.secure.mean_norm, len(damaged.unreadable)) == (None, 2)
    assert [list(params.values()) for params in asked] == [[[3]]] * 3, "those who sent vectors, which is the third step"


def test_the_csv_has_one_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numbers, "round_report", lambda session, federation, number: number)
    monkeypatch.setattr(numbers, "_numbers", lambda number: [(number, "train", None, None, "loss", 1.0)])
    database: Any = SimpleNamespace(read=nullcontext)
    federation: Any = None
    header = "round,phase,client,split,name,value\n"
    for begun, lines in (([], [header]), ([1, 2], [f"{header}1,train,,,loss,1.0\n", "2,train,,,loss,1.0\n"])):
        assert [piece.decode() for piece in numbers.as_csv(database, federation, begun)] == lines


def test_an_evaluation_is_of_those_whose_answers_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    body = {"splits": {"test": {"accuracy": 0.5, "num_samples": 10}}, "zero_shot": {}, "metrics": {"tau": 1.0}}
    tasks = [
        SimpleNamespace(**vars(task(name, status)), id=name)
        for name, status in {"a": "answered", "b": "discarded", "c": "answered", "d": "answered"}.items()
    ]
    rows = [
        SimpleNamespace(task_id=name, body=of, received_at=AT) for name, of in (("a", body), ("b", body), ("d", {}))
    ]
    by_table = {evaluations.TaskRow: tasks, evaluations.EvaluationRow: rows}
    monkeypatch.setattr(evaluations, "rows_by_client", lambda session, table, *where: by_table[table])
    federation: Any = SimpleNamespace(
        clients=dict.fromkeys("abcd", SimpleNamespace(role="trainer", domain=None)),
        spec=SimpleNamespace(task="single_label"),
    )
    stage = SimpleNamespace(id=1, opened_at=AT, deadline=AT, closed_at=None, completed_at=None)
    told = evaluations.evaluation_report(Nothing, federation, stage)
    assert (sorted(told.clients), told.bytes_up, told.clients["a"].withheld) == (["a"], 0, False)
    assert told.mean == {"trainer": {"accuracy": 0.5}}
    assert [line.partition(":")[0] for line in told.unreadable] == ["the evaluation of d"]


def final_test(stage: object, selection: object = "accuracy") -> tuple[Any, Any]:
    """A federation and a session that finds this stage of its final test."""
    found = SimpleNamespace(one_or_none=lambda: stage)
    spec = SimpleNamespace(selection=selection, task="single_label")
    return SimpleNamespace(execute=lambda query: found), SimpleNamespace(id="f", spec=spec)


@pytest.mark.parametrize(
    ("selection", "selected", "stage", "adds"),
    [
        ("accuracy", 2, "final", True),
        ("accuracy", 1, "final", False),
        (None, 2, "final", False),
        ("accuracy", 2, None, False),
    ],
)
def test_the_final_test_is_told_with_the_round_that_was_selected(
    selection: str | None, selected: int, stage: str | None, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, federation = final_test(stage, selection)
    of_round = {"a": evaluated("trainer", {"val": result(0.5)}, {"val": result(0.25)})}
    tested = {
        "a": evaluated("trainer", {"test": result(0.75)}, {"test": result(0.125)}),
        "b": evaluated("trainer", {"test": result(0.25)}, {}),
    }
    before = EvaluationReport.model_construct(clients=of_round, unreadable=["x"], mean={}, by_split={}, bounds={})
    final = EvaluationReport.model_construct(clients=tested, unreadable=["y"])
    monkeypatch.setattr(evaluations, "selected_round", lambda session, federation: selected)
    monkeypatch.setattr(evaluations, "evaluation_report", lambda session, federation, stage: final)
    told = evaluations.with_final_test(session, federation, 2, before)
    if not adds:
        assert told is before
        return
    assert {name: sorted(client.splits) for name, client in told.clients.items()} == {
        "a": ["test", "val"],
        "b": ["test"],
    }
    assert sorted(told.clients["a"].zero_shot) == ["test", "val"]
    assert (told.unreadable, told.mean["trainer"]["accuracy"]) == (["x", "y"], 0.5)


def test_a_phase_s_report_is_of_its_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {"a": 1.0, "b": 1.0, "c": 50.0}
    stage = SimpleNamespace(
        id=1, name="train", sample_size=3, extended=False, opened_at=AT, deadline=AT, closed_at=AT, completed_at=AT,
        measured={"phase": {"gamma": 0.5}, "clients": {"a": {"share": 1.0}}, "changes": changes},
    )  # fmt: skip
    told_of = {"a": (True, 0.75, 1.0), "b": (True, 0.25, 3.0), "c": (True, None, 9.0), "d": (False, None, 7.0)}
    tasks = [
        SimpleNamespace(**vars(task(name, "answered")), id=name, counted=counted, weight=weight)
        for name, (counted, weight, _) in told_of.items()
    ]
    updates = [
        SimpleNamespace(
            task_id=name, judged=None, sha256=f"sha256:{name}", bytes=10, norm=1.0, received_at=AT, spent=None,
            metrics={"loss": loss},
        )
        for name, (_, _, loss) in told_of.items()
    ]  # fmt: skip
    by_table = {phases.TaskRow: [*tasks, SimpleNamespace(**vars(task("e", "open")), id="e")], phases.UpdateRow: updates}
    monkeypatch.setattr(phases, "rows_by_client", lambda session, table, *where: by_table[table])
    session: Any = SimpleNamespace(scalar=lambda query: "sha256:state")
    federation: Any = SimpleNamespace(run=SimpleNamespace(state="running"))
    report = phases.phase_report(session, federation, stage)
    assert [(one.client, one.sha256, one.weight) for one in report.counted] == [
        ("a", "sha256:a", 0.75), ("b", "sha256:b", 0.25), ("c", "sha256:c", 0.0)
    ]  # fmt: skip
    assert [(one.client, one.change, one.far, one.verdict) for one in report.updates] == [
        ("a", 1.0, None, "counted"), ("b", 1.0, None, "counted"), ("c", 50.0, 50.0, "counted"),
        ("d", None, None, "unused"),
    ]  # fmt: skip
    assert (report.metrics, report.bytes_up, report.state_hash) == ({"loss": 1.5}, 40, "sha256:state")
    assert (report.measured.phase, report.measured.clients) == ({"gamma": 0.5}, {"a": {"share": 1.0}})
    stage.measured, updates[0].bytes = {"phase": "x"}, "many"
    report = phases.phase_report(session, federation, stage)
    assert [line.partition(":")[0] for line in report.unreadable] == ["what was measured", "the update of a"]
    assert [one.client for one in report.updates] == ["b", "c", "d"]
    assert [one.client for one in report.counted] == ["a", "b", "c"], "it counts all the same"
    assert (report.metrics, report.bytes_up, report.measured.phase) == ({"loss": 3.0}, 30, {})
