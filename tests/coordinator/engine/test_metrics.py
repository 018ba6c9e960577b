"""The coordinator's own figures count what has happened."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from promptfed.coordinator.engine.metrics import ALERTING, Metrics
from promptfed.shared.api.api_schemas import FAILURES
from tests.support.coordinators import InProcess
from tests.support.open_phases import completed


def test_a_run_is_counted(coordinator: InProcess) -> None:
    """Two rounds of two clients, and three evaluations of both."""
    _, clients = completed(coordinator, "a", "b", rounds=2, participation={"min_clients": 2})
    found = {
        (sample.name.removeprefix("promptfed_"), *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(coordinator.http.get("/metrics").text)
        for sample in family.samples
    }
    counts = {
        ("tasks_settled_total", "answered"): 10, ("updates_total", "counted"): 4, ("updates_total", "refused"): 0,
        ("rounds_completed_total",): 2, ("phases_completed_total",): 5, ("federation_moves_total", "running"): 1,
        ("federation_moves_total", "finished"): 1, ("federation_moves_total", "failed"): 0,
        ("work_seconds_count", "aggregate"): 2, ("phase_seconds_count", "train"): 2,
        ("phase_seconds_count", "evaluate"): 3, ("update_seconds_count",): 4, ("uploads",): 0,
        ("update_bytes_total",): sum(len(body) for client in clients for body in client.sent.values()),
    }  # fmt: skip
    assert {name: found.get(name) for name in counts} == counts
    assert found["payload_bytes_total",] > 0
    assert found["phase_seconds_sum", "train"] > 0


def shown(metrics: Metrics, name: str) -> dict[str, float]:
    """The samples of a figure by their only label."""
    families = text_string_to_metric_families(metrics.text().decode())
    samples = [sample for family in families for sample in family.samples if sample.name == f"promptfed_{name}_total"]
    return {"".join(sample.labels.values()): sample.value for sample in samples}


def test_refusals_are_verdicts_of_updates_alone_and_failures_have_known_kinds() -> None:
    metrics = Metrics()
    kinds = sorted(FAILURES)
    assert shown(metrics, "privacy_failures") == dict.fromkeys(kinds, 0.0), "an alert sees no increase in a first value"
    assert shown(metrics, "refusals") == dict.fromkeys(ALERTING, 0.0)
    for kind, of_update in (
        ("phase-closed", True),
        ("not-finite", True),
        ("not-found", False),
        ("unauthorized", False),
    ):
        metrics.refused(kind, of_update)
    assert shown(metrics, "updates") == {"late": 1, "refused": 1, "rejected": 0}
    refusals = {kind: count for kind, count in shown(metrics, "refusals").items() if count}
    assert refusals == dict.fromkeys(("phase-closed", "not-finite", "not-found", "unauthorized"), 1.0)
    for kind in (kinds[0], "made up by a client"):
        metrics.failed(kind)
    assert shown(metrics, "privacy_failures") == dict.fromkeys(kinds, 0.0) | {kinds[0]: 1.0}
