"""Steps of the examination by themselves; the whole of it is in tests/promptfed/cli/commands/test_doctor.py."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from promptfed.client_service.joining import doctor
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.doctor import Examination
from promptfed.client_service.settings import Settings
from promptfed.shared.methods.core.interface import MethodError

NOTHING: Any = SimpleNamespace(train=None)


@pytest.mark.parametrize(("delta", "verdict", "spent"), [(None, "warn", "0"), (1e-3, "pass", "2.5")])
def test_a_budget_that_is_new_is_asked_about(
    delta: float | None, verdict: str, spent: str, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = SimpleNamespace(delta=lambda: delta, epsilon=lambda: 2.5, path="l.jsonl")
    planned = SimpleNamespace(noise_multiplier=8.0, epsilon=1.25, most=8.0, delta=1e-3)
    monkeypatch.setattr(doctor, "own_ledger", lambda *given: ledger)
    monkeypatch.setattr(doctor, "federation_method", lambda info: None)
    monkeypatch.setattr(doctor, "site_plan", lambda *given: (planned, None))
    examination = Examination(settings)
    examination._budget(NOTHING, NOTHING, None)
    text = f"ε 1.25 planned, {spent} spent of 8 at δ = 0.001; noise of 8 times the clip a step; ledger l.jsonl"
    [found] = examination.checks
    assert (found.name, found.verdict, found.text) == ("privacy", verdict, text)
    assert (found.advice is None) is (delta is not None)


@pytest.mark.parametrize(("missing", "token", "asked"), [
    ([], True, "ask"), ([], False, "reach"), (["federation"], True, "reach"), (["federation"], False, "reach"),
    (["coordinator"], True, None),
])  # fmt: skip
def test_a_coordinator_is_asked_as_far_as_is_known(
    missing: list[str], token: bool, asked: str | None, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = list[str]()
    monkeypatch.setattr(Examination, "_ask", lambda self, place: done.append("ask"))
    monkeypatch.setattr(Examination, "_reach", lambda self: done.append("reach"))
    given = settings if token else settings.model_copy(update={"enrolment_token_file": None})
    examination = Examination(given, missing=missing)
    examination._federation()
    assert done == ([] if asked is None else [asked])
    assert [check.verdict for check in examination.checks] == ([] if asked else ["warn"])


def test_nobody_is_asked_whom_a_policy_may_forbid(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Examination, "_ask", lambda self, place: NOTHING)
    examination = Examination(settings.model_copy(update={"policy": tmp_path / "policy.yaml"}))
    assert examination._federation() is None
    [found] = examination.checks
    assert found == Check("coordinator", "warn", "not asked", "the site's policy cannot be read")
    examination.policy = NOTHING
    assert examination._federation() is NOTHING


def test_a_method_that_the_backbone_cannot_run_is_told(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(method: Any, shape: Any) -> None:
        raise MethodError("it needs patches")

    monkeypatch.setattr(doctor, "check_fits", refuse)
    monkeypatch.setattr(doctor, "shape_of", lambda backbone: None)
    examination = Examination(settings)
    assert examination._try("method", lambda: examination._fitted(NOTHING, NOTHING, NOTHING, NOTHING)) is None
    assert (examination.checks, examination.healthy) == ([Check("method", "fail", "it needs patches")], False)
