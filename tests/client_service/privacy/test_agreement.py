"""What a consent covers: every difference is named, rounds go forward, and what was sent stays counted."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from promptfed.client_service.exits import ClientError
from promptfed.client_service.privacy import agreement as agreements
from promptfed.client_service.privacy.agreement import (
    ATTEMPTS,
    RESTORES,
    WITHDRAWN,
    Agreement,
    NotAgreed,
    differences,
    metrics_of,
    phases_of,
    tensors_of,
    terms_of,
)
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import MOST_PEERS, EnrolmentInfo, Task
from promptfed.shared.methods import make_method
from promptfed.shared.spec.sections import FINAL
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from tests.support.agreed import agreed

PROMPTFL = {"name": "promptfl", "m": 4}


def task(round: int, phase: str = "train", epoch: str = "e1", kind: str = "train") -> Task:
    return cast(Task, SimpleNamespace(round=round, phase=phase, epoch=epoch, kind=kind))


def agreement(folder: Path) -> Agreement:
    return agreed(PrivateState(folder), PROMPTFL)


@pytest.mark.parametrize(
    ("agreed", "asked", "told"),
    [
        ({"a": 1, "b": {"c": [1, 2]}}, {"b": {"c": [1, 2]}, "a": 1}, []),
        ({"a": 1}, {"a": 2}, ["a is 2 instead of 1"]),
        ({"a": 1}, {"a": True}, ["a is True instead of 1"]),
        ({"a": 1}, {"a": 1.0}, ["a is 1.0 instead of 1"]),
        ({"a": {"b": 1}}, {"a": {"c": 1}}, ["a.b is (nothing) instead of 1", "a.c is 1 instead of (nothing)"]),
        ({"a": None}, {"a": {"b": 1}}, ["a is {'b': 1} instead of None"]),
        ({"a": {"b": 1}}, {"a": None}, ["a is None instead of {'b': 1}"]),
        ({}, {"c\x1b[2J": "\u202ex"}, [r"c\x1b[2J is \u202ex instead of (nothing)"]),
        ({"a": "y" * 200}, {"a": "x" * 201}, [f"a is {'x' * 200}... instead of {'y' * 200}"]),
    ],
)
def test_each_difference_is_named_with_its_place(agreed: Any, asked: Any, told: list[str]) -> None:
    assert differences(agreed, asked) == told


def test_phases_are_known_with_the_rounds_that_have_them() -> None:
    found = phases_of(make_method({"name": "fast_pt"}))
    assert {name: rounds for name, (_, rounds) in found.items()} == {"global": [1, 2, 3], "domain_prompts": [3]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, None), ({"round": 3}, None), ({"round": 0}, "round 0 of 3 has no phase 'train'"),
        ({"round": 4}, "round 4 of 3 has no phase 'train'"),
        ({"phase": "second"}, "has no phase 'second'; agreed: train"),
        ({"secure": "a step"}, "not one of the secure sums"), ({"kind": "mask"}, "not one of the secure sums"),
    ],
)  # fmt: skip
def test_training_is_of_an_agreed_round_phase_and_kind(changes: Any, words: str | None, tmp_path: Path) -> None:
    asked = SimpleNamespace(**{"round": 1, "phase": "train", "kind": "train", "secure": None} | changes)
    if words is None:
        agreement(tmp_path)._expect_training(cast(Task, asked))
    else:
        with pytest.raises(NotAgreed, match=words):
            agreement(tmp_path)._expect_training(cast(Task, asked))


@pytest.mark.parametrize(
    ("selection", "kind", "phase", "selected", "words"),
    [
        (True, "evaluate", FINAL, 2, None), (True, "evaluate", FINAL, None, "None instead of one of 3 rounds"),
        (True, "evaluate", FINAL, 4, "4 instead of one of 3 rounds"), (True, "evaluate", "evaluate", None, None),
        (True, "evaluate", "evaluate", 2, "2 instead of none"), (True, "train", "train", 2, "2 instead of none"),
        (False, "evaluate", FINAL, 2, "2 instead of none"), (False, "evaluate", FINAL, None, None),
    ],
)  # fmt: skip
def test_a_chosen_round_is_named_in_the_final_evaluation_alone(
    selection: bool, kind: str, phase: str, selected: Any, words: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Agreement, "_expect_terms", lambda *given: None)
    own = agreed(PrivateState(tmp_path), PROMPTFL, selection={"share": 0.25} if selection else None)
    asked = SimpleNamespace(round=3, phase=phase, kind=kind, secure=None, epoch="e1", selected=selected)
    if words is None:
        own.expect(cast(Task, asked))
    else:
        with pytest.raises(NotAgreed, match=words):
            own.expect(cast(Task, asked))


@pytest.mark.parametrize(
    ("round", "holds"), [(0, True), (1, False), (2, True), (3, True), (4, False)]
)  # fmt: skip
def test_an_evaluation_is_due_every_so_many_rounds_and_after_the_last(
    round: int, holds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Agreement, "_expect_terms", lambda *given: None)
    own = agreement(tmp_path)
    terms = own.consent.terms.model_copy(update={"evaluate_every": 2, "role": "evaluator"})
    own.consent = own.consent.model_copy(update={"terms": terms})
    asked = {"phase": "evaluation", "secure": None, "selected": None, "epoch": "e1"}
    evaluation = cast(Task, SimpleNamespace(round=round, kind="evaluate", **asked))
    if holds:
        own.expect(evaluation)
        own.note_sending(evaluation)
        own.note_settled("evaluate", round, "evaluation")
        with pytest.raises(NotAgreed, match="is over"):
            own.expect(evaluation)
    else:
        with pytest.raises(NotAgreed, match=f"no evaluation was agreed to after round {round} of 3"):
            own.expect(evaluation)
    with pytest.raises(NotAgreed, match="this client evaluates"):
        own.expect(cast(Task, SimpleNamespace(round=1, kind="train", **asked)))


@pytest.mark.parametrize(
    ("values", "fingerprint", "peers", "told"),
    [
        ((1, 1, 1), None, 0, None), ((1, 1, 1), "loaded", 0, None), ((2, 2, 1), None, 0, "a is 2 .*; b is 2 .* 1$"),
        ((2, 2, 2), None, 0, "; b is 2 instead of 1; and 1 more$"),
        ((1, 1, 1), "another", 0, "is another instead of loaded$"),
        ((1, 1, 1), None, 1, "peers describes 1 client instead of 0 at most$"),
    ],
)  # fmt: skip
def test_a_task_is_told_in_what_it_differs(
    values: tuple[int, ...], fingerprint: Any, peers: int, told: str | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    own = agreement(tmp_path)
    own.pin("loaded")
    config = SimpleNamespace(backbone=SimpleNamespace(fingerprint=fingerprint), peers=[None] * peers)
    given = {id(config): dict(zip("abc", values, strict=True)), id(own.consent.terms): dict.fromkeys("abc", 1)}
    monkeypatch.setattr(agreements, "_compared", lambda terms: given[id(terms)] | {"method": {}})
    monkeypatch.setattr(agreements, "_method_of", lambda config: {})
    monkeypatch.setattr(agreements, "SHOWN_DIFFERENCES", 2)
    asked = cast(Task, SimpleNamespace(config=config))
    if told is None:
        own._expect_terms(asked)
    else:
        with pytest.raises(NotAgreed, match=told):
            own._expect_terms(asked)


def test_who_evaluates_agrees_to_send_no_tensors_and_no_numbers_of_training() -> None:
    for name, peers in (("promptfl", 0), ("fast_pt", MOST_PEERS)):
        method = make_method({"name": name})
        info = EnrolmentInfo(
            federation_id="fed-1", name="pets", method={"name": name}, seed=0, backbone=BackboneSpec(), rounds=3,
            class_names=None, template=None, state="running", training=TrainingSpec(), evaluate_every=1,
        )  # fmt: skip
        trains, tests = (terms_of(info, method, "http://x", role, ["far", "b"]) for role in ("trainer", "evaluator"))
        assert (trains.sends, trains.metrics) == (tensors_of(method), metrics_of(method, info))
        assert trains.sends
        assert trains.metrics
        assert (tests.sends, tests.metrics) == ({}, [])
        assert (tests.accuracies, tests.most_peers, tests.role) == (["test", "b", "far"], peers, "evaluator")


def test_an_offer_has_one_name_whatever_its_owner_chooses_of_it(tmp_path: Path) -> None:
    terms = agreement(tmp_path).consent.terms
    own = terms.model_copy(update={"coordinator": "http://x", "accuracies": ["test", "far"]})
    assert own.digest == terms.digest != terms.model_copy(update={"rounds": 4}).digest
    assert re.fullmatch("[0-9a-f]{16}", terms.digest)


def test_a_phase_is_answered_a_few_times_and_not_after_it_counts(tmp_path: Path) -> None:
    own = agreement(tmp_path)
    for _ in range(ATTEMPTS):
        own._expect_turn(task(2))
        own.note_sending(task(2))
    with pytest.raises(NotAgreed, match=f"was answered {ATTEMPTS} times"):
        own._expect_turn(task(2))
    own._expect_turn(task(2, "second"))
    own.note_settled("train", 2, "train")
    own.note_settled("train", 2, "train")
    assert own.sent.settled == ["train train"], "noted once"
    for over in (task(2), task(1, "second")):
        with pytest.raises(NotAgreed, match="is over"):
            own._expect_turn(over)
    own._expect_turn(task(2, kind="evaluate"))
    own._expect_turn(task(3))
    own.note_sending(task(3))
    assert (own.sent.round, own.sent.sent, own.sent.settled) == (3, {"train train": 1}, [])
    own.note_settled("train", 4, "train")  # sent before a kill, and noted only now
    assert (own.sent.round, own.sent.sent, own.sent.settled) == (4, {"train train": 1}, ["train train"])
    assert Agreement.kept(own.state).sent == own.sent, "on the disk"


def test_a_restored_coordinator_is_followed_so_many_times(tmp_path: Path) -> None:
    own = agreement(tmp_path)
    own.note_sending(task(3))
    own.note_settled("train", 3, "train")
    for number in range(RESTORES):
        assert own.changes(own.consent.terms) == []
        again = task(3, epoch=f"e{number + 2}")
        own._expect_turn(again)
        own.note_sending(again)
        own.note_settled("train", 3, "train")
        assert (own.sent.restores, own.sent.epoch) == (number + 1, again.epoch)
    with pytest.raises(NotAgreed, match=f"went back {RESTORES} times"):
        own._expect_turn(task(own.sent.round, epoch="another"))
    assert own.changes(own.consent.terms) == [f"the coordinator went back to earlier rounds {RESTORES} times"]
    own.state.write_note(WITHDRAWN, "noon")
    assert own.changes(own.consent.terms)[0] == "consent was withdrawn at noon"
    with pytest.raises(ClientError, match="withdrawn consent"):
        own.expect_consent()
    anew = Agreement.made(own.state, own.consent.terms)
    assert (anew.sent.restores, anew.sent.sent, anew.changes(own.consent.terms)) == (0, own.sent.sent, [])


@pytest.mark.parametrize(("allowed", "last"), [(7, 7), (None, 30)])
def test_a_budget_may_end_before_the_rounds_do(
    allowed: int | None, last: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agreement = agreed(PrivateState(tmp_path), {"name": "promptfl", "m": 4}, rounds=30)
    monkeypatch.setattr(agreements, "allowed_rounds", lambda method, terms: allowed)
    assert agreement.last_round == last


def test_consent_that_cannot_be_read_is_damaged(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    assert Agreement.kept(state) is None
    agreement = agreed(state, {"name": "promptfl", "m": 4})
    kept = Agreement.kept(state)
    assert kept is not None
    assert kept.consent == agreement.consent
    state.write_note(agreements.FILE, '{"terms": 3}')
    with pytest.raises(ClientError, match=rf"{agreements.FILE} is damaged"):
        Agreement.kept(state)
