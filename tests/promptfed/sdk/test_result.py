"""A figure has its interval in every view of a result, and one function has computed it."""

from __future__ import annotations

import io
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from promptfed.cli.commands.run import _table, summaries, summary
from promptfed.cli.scoring import ScoreFigures, _cell
from promptfed.console import progress
from promptfed.console.progress import result_table
from promptfed.experiments.bench.tables import measures_of, measures_table
from promptfed.library.result import Result
from promptfed.sdk.result import FederationReports, FederationResult
from promptfed.shared.metrics.estimates import gain_margin, mean_interval, proportion
from promptfed.shared.metrics.outcomes import Outcomes
from tests.promptfed.experiments.bench.test_runner import run_of
from tests.promptfed.sdk.test_client import FEDERATION


def result(counts: dict[str, int], **about: Any) -> FederationResult:
    """Sites with so many test images each; 80 % right, 60 % before."""

    def told(share: float, count: int) -> dict[str, dict[str, Any]]:
        return {"test": {"accuracy": share, "num_samples": count}}

    now = datetime.now(UTC).isoformat()
    clients = {
        name: {"role": "trainer", "domain": None, "splits": told(0.8, count), "zero_shot": told(0.6, count),
               "metrics": {}, "received_at": now, **about.get("of_client", {})}
        for name, count in counts.items()
    }  # fmt: skip
    report = {"round": 1, "evaluation": {"clients": clients}, "bytes_up": 0, "bytes_down": 0}
    status = FEDERATION.model_dump(mode="json")
    status["spec"] |= about.get("spec", {})
    return FederationResult(status, [report], round=1)


def drawn(table: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return out.getvalue()


def test_a_mean_has_the_interval_of_its_images() -> None:
    low, high = mean_interval([(0.8, 50)])
    assert (low, high) == pytest.approx((0.669629, 0.887562), abs=1e-5)  # statsmodels' by Wilson
    one = proportion(40, 50)
    assert one is not None
    assert (one.low, one.high) == (low, high)
    several = mean_interval([(0.8, 50)] * 4)
    assert 0.4 < (several[1] - several[0]) / (high - low) < 0.6  # half of it, as of four times as many images
    assert mean_interval([(1.0, 5), (1.0, 5)])[1] == 1
    assert gain_margin([(0.6, 0.8, 50)]) == pytest.approx(1.96 * (0.2404 / 52 + 0.1677 / 52) ** 0.5, abs=1e-3)


def test_every_view_has_the_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "console", Console(width=160))
    found = result({"a": 50, "b": 50})
    [first, _] = found.final()
    assert (first.low, first.high) == mean_interval([(0.8, 50)])
    for shown in (drawn(result_table(found.final(), "accuracy")), str(Result(found)), Result(found)._repr_html_()):
        assert shown.count("80.0 % [67.0, 88.8]") == 2
    means = "80.0 % [72.2, 87.8]", "+20.0 ± 17.4", "+20.0 ± 12.3"  # 1.96·√(2·0.788·0.212/52)/2 beside 80 %
    assert all(text in drawn(result_table(found.final(), "accuracy")) for text in means)
    monkeypatch.setattr(progress, "console", Console(width=80))
    narrow = drawn(result_table(found.final(), "accuracy")).splitlines()
    assert max(map(len, narrow)) <= 80
    assert any("[72.2, 87.8] │" in line for line in narrow)
    monkeypatch.setattr(progress, "console", Console(width=160))
    many = result({f"c{number}": 50 for number in range(20)}).final()
    assert "80.0 % [77.5, 82.5]" in drawn(_table(many, "accuracy"))
    assert summaries(found.final())[0].interval == mean_interval([(0.8, 50)] * 2)
    assert summary(found, 1.0)["intervals"]["client:a"] == [first.low, first.high]
    scored = ScoreFigures(images=50, accuracy=0.8, accuracy_interval=proportion(40, 50), ece=0, macro_f1=0,
                          worst_class="a", worst_class_accuracy=0)  # fmt: skip
    assert _cell(scored, "accuracy") == "80.0 % [67.0, 88.8]"
    assert _cell(scored, "macro_f1") == "0.0 %"


@pytest.mark.parametrize("about", [
    {"spec": {"task": "multi_label"}},
    {"of_client": {"privacy": {"epsilon": 1, "ledger_epsilon": 1, "delta": 0, "count_epsilon": 1, "counts": 1,
                               "noise": "secret"}}},
])  # fmt: skip
def test_precisions_and_noisy_counts_have_none(about: dict[str, Any]) -> None:
    found = result({"a": 50, "b": 50}, **about)
    assert [row.low for row in found.final()] == [None, None]
    assert "[" not in drawn(result_table(found.final(), "accuracy")) + str(Result(found)).partition("\n")[2][60:]
    assert summaries(found.final())[0].gain_margin is None


def test_a_bench_counts_the_images_of_one_seed() -> None:
    """Seeds share their test images: three seeds are not three times as many."""
    right = (0,) * 40 + (1,) * 10
    own = Outcomes(1, "a", "test", ("x", "y"), (0,) * 50, right, (0.9,) * 50, "sha256:1")
    runs = [run_of(seed=seed).model_copy(update={"outcomes": [own]}) for seed in range(3)]
    [measured] = measures_of(runs)
    assert measured.interval == pytest.approx(mean_interval([(0.8, 50)]))
    assert "80.0 (67.0 to 88.8)" in "\n".join(measures_table([measured]))


def test_a_finished_selection_decides_which_round_is_shown_and_reports_alone_are_no_whole_result() -> None:
    whole = result({"north": 50})
    rounds = [report | {"round": round, "state_hash": f"of {round}"} for round in (1, 2) for report in whole.reports]
    chosen = {
        "selection": {
            "metric": "accuracy",
            "split": "validation",
            "share": 0.2,
            "round": 1,
            "value": 0.8,
            "compared": 2,
        }
    }
    for state, more, shown in (("running", chosen, 2), ("finished", chosen, 1), ("finished", {}, 2)):
        found = FederationReports(whole.status | more | {"state": state}, rounds)
        assert (found.evaluated_round, found.result_hash, found.final()[0].round) == (shown, f"of {shown}", shown)
    assert FederationResult(whole.status | chosen | {"state": "finished"}, rounds, round=2).evaluated_round == 2
    assert not [name for name in ("facts", "card", "state", "body") if hasattr(found, name)]


def test_what_ended_a_federation_early_is_told_in_words() -> None:
    given = {"finished": ["its privacy budget is spent"], "paused": []}
    views = {state: FEDERATION.model_copy(update={"state": state, "reason": "privacy_budget"}) for state in given}
    assert {state: progress.why_this_round(view) for state, view in views.items()} == given
