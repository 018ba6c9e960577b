"""What a client trains and tests on in trials before round 1, and what its owner agrees to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from promptfed.client_service.exits import ClientError
from promptfed.client_service.joining.disclosure import Declared, disclose
from promptfed.client_service.joining.trials import trial_settings
from promptfed.client_service.privacy.agreement import Agreement, terms_of
from promptfed.client_service.privacy.protection import trial_events
from promptfed.client_service.settings import make_settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training.data import held_out
from promptfed.coordinator.domain.federation import new_federation
from promptfed.coordinator.operations.enrolment import enrolment_info
from promptfed.shared.data import open_source
from promptfed.shared.messages import EnrolmentInfo, TrialOffer
from promptfed.shared.methods import make_method, resolve_spec

DATA = "symbols:neon?topic=weather&per_class=8&test_per_class=2&partition=iid&clients=2&client={}"
SPEC: dict[str, Any] = {"name": "tuned", "method": {"name": "promptfl", "m": 2}, "seed": 3}


def test_held_out_images_are_training_images_that_are_not_trained_on() -> None:
    source = open_source(DATA.format(0))
    divided = held_out(source, 0.25, 7)

    def digests(split: Any) -> set[str]:
        return {split.digest(row) for row in range(len(split))}

    assert digests(divided.train) | digests(divided.test) == digests(source.train)
    assert not digests(divided.train) & digests(divided.test)
    assert not digests(divided.test) & digests(source.test)
    assert digests(held_out(source, 0.25, 7).test) == digests(divided.test) != digests(held_out(source, 0.25, 8).test)


def test_of_a_class_with_one_image_nothing_is_held_out() -> None:
    source = open_source(DATA.format(0))
    first = [int((source.train.labels == label).nonzero()[0]) for label in range(len(source.class_names))]
    rows = torch.tensor(sorted({*first, *(source.train.labels == 0).nonzero()[:, 0].tolist()}))
    few = held_out(type(source)(**{**vars(source), "train": source.train.select(rows)}), 0.25, 7)
    assert set(few.test.labels.tolist()) == {0}
    assert len(few.train) + len(few.test) == len(rows)


# What the owner agrees to


def offer(**changes: Any) -> EnrolmentInfo:
    others = [{"method": {"name": "fedclip"}}, {"method": {"name": "fedlora"}, "training": {"learning_rate": 0.5}}]
    made = new_federation("fed-1", resolve_spec({**SPEC, "tuning": {"candidates": others}, **changes}))
    return enrolment_info(made)


def test_the_consent_lists_every_candidate_and_what_it_sends() -> None:
    info = offer()
    method = make_method(info.method)
    terms = terms_of(info, method, "http://127.0.0.1", "trainer", [])
    declared = Declared("a", "trainer", 8, ("sun", "rain"), None, "cpu", None)
    text = "\n".join(disclose(terms, info, method, declared, None).lines())
    assert terms.tuning is not None
    assert [candidate.method["name"] for candidate in terms.tuning.candidates] == ["promptfl", "fedclip", "fedlora"]
    for candidate in terms.tuning.candidates:
        assert f"{candidate.method['name']}: " in text
        for tensors in candidate.sends.values():
            assert all(tensor in text for tensor in tensors)
    assert "learning_rate 0.5" in text
    assert "75% of the training images" in text


def test_the_choice_of_a_candidate_asks_nobody_again_and_another_candidate_does(tmp_path: Path) -> None:
    info = offer()

    def terms(given: EnrolmentInfo) -> Any:
        return terms_of(given, make_method(given.method), "http://127.0.0.1", "trainer", [])

    agreement = Agreement.made(PrivateState(tmp_path, ephemeral=True), terms(info))
    assert info.tuning is not None
    chosen = info.model_copy(update={"tuning": info.tuning.model_copy(update={"chosen": 1})}).with_candidate(1)
    assert agreement.changes(terms(chosen)) == []
    agreement.follow(terms(chosen))
    assert agreement.consent.terms.method["name"] == "fedclip"
    other = offer(tuning={"candidates": [{"method": {"name": "fedclip"}}]})
    assert any("tuning.candidates" in change for change in agreement.changes(terms(other)))


def test_groups_that_cannot_be_divided_end_the_client_before_anything_is_sent() -> None:
    source = open_source(DATA.format(0))
    source.train.groups = ("one patient",) * len(source.train)
    with pytest.raises(ClientError, match=r"no training images can be held out: .*one group"):
        held_out(source, 0.25, 7)


def test_a_trial_that_was_not_agreed_to_has_no_folder(tmp_path: Path) -> None:
    info = offer()
    settings = make_settings(
        coordinator="http://127.0.0.1", federation="tuned", name="a", data=DATA.format(0), state_dir=tmp_path
    )
    own = trial_settings(settings, info, TrialOffer(federation="fed-2", rung=1, candidate=2))
    assert (own.state_dir, own.features_dir) == (tmp_path / "trials" / "2-3", tmp_path / "features")
    for beyond in ({"rung": 2}, {"candidate": 3}):
        with pytest.raises(ClientError, match="and there is none"):
            trial_settings(settings, info, TrialOffer(federation="fed-2", **beyond))


def test_the_planned_cost_of_trials_is_that_of_every_rung() -> None:
    privacy = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.5}
    privacy |= {"evaluation": "noisy", "evaluation_epsilon": 2.0}
    rates = [{"method": {"name": "promptfl", "m": 2}, "training": {"learning_rate": rate}} for rate in (0.1, 0.2, 0.3)]
    training = {"epochs": 2, "batch_size": 10, "learning_rate": 0.4}
    info = offer(privacy=privacy, training=training, tuning={"candidates": rates, "rounds": 3, "held_out": 0.25})
    events = trial_events(info, 40)
    trained = [event for event in events if event.mechanism == "gaussian"]
    steps = 2 * 3  # epochs, batches of ten of the thirty images that are not held out
    assert {(event.q, event.z) for event in trained} == {(10 / 30, 1.5)}
    assert [event.count for event in trained] == [2 * steps] * 4 + [3 * steps] * 2
    assert [(event.z, event.count) for event in events if event.mechanism == "laplace"] == [(2.0, 3)] * 6
    assert info.tuning is not None
    over = info.model_copy(update={"tuning": info.tuning.model_copy(update={"chosen": 0})})
    assert trial_events(over, 40) == []
