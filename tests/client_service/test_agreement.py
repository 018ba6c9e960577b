"""A client does only what its owner agreed to: against coordinators that ask for more."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi.responses import JSONResponse

from promptfed.client_service import __main__ as command
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining import joining
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.consent import Terminal
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.log_messages import EventTextLines
from promptfed.client_service.privacy import agreement as agreements
from promptfed.client_service.privacy.agreement import Agreement, differences
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.clip import FeatureCache, load_backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import Method, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator, made_up_source

Change = Callable[[dict[str, Any]], None]


class Owner:
    """A data owner who says ``answer``, and remembers what was shown."""

    def __init__(self, answer: bool = True):
        self.answer = answer
        self.shown: list[Disclosure] = []

    async def consent(self, checks: Sequence[Check], disclosure: Disclosure) -> bool:
        self.shown.append(disclosure)
        return self.answer


def sent_updates(coordinator: FakeCoordinator) -> list[bytes]:
    return [body for body in coordinator.received if b"payload_sha256" in body]


def altered(change: Change) -> Callable[[dict[str, Any]], dict[str, Any]]:
    def garble(task: dict[str, Any]) -> dict[str, Any]:
        change(task["config"])
        return task

    return garble


def test_a_coordinator_that_offers_promptfl_and_asks_for_fedclip_gets_no_features(
    make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    """The attack of the issue: an adapter with trap weights, one batch of all images, whose update tells features."""
    coordinator = make.coordinator(rounds=1)
    d_e = coordinator.shape.d_e
    trap = {
        "adapter_w1": torch.eye(d_e), "adapter_b1": torch.zeros(d_e), "adapter_w2": torch.eye(d_e) * 1e-3,
        "adapter_b2": torch.zeros(d_e),
    }  # fmt: skip
    coordinator.global_state = trap
    greedy = coordinator.training | {"batch_size": 100_000, "epochs": 1, "optimizer": "sgd", "learning_rate": 1.0}
    coordinator.garble = altered(lambda config: config.update(method={"name": "fedclip"}, training=greedy))
    with caplog.at_level(logging.WARNING, "promptfed.client"):
        assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert coordinator.client is not None
    assert not coordinator.accepted
    assert not sent_updates(coordinator)
    assert not coordinator.evaluations
    assert {failure["type"] for failure in coordinator.failures} == {"NotAgreed"}
    detail = coordinator.failures[0]["detail"]
    assert "method.name is fedclip instead of promptfl" in detail
    assert "training.batch_size is 100000 instead of 32" in detail
    assert detail in caplog.text


def test_no_more_tasks_than_the_rounds_allow(make: Make) -> None:
    coordinator = make.coordinator(rounds=2)
    coordinator.plan[2:2] = [("train", 1), ("evaluate", 0), ("train", 0)]  # asked once more, and a round of no spec
    coordinator.plan[-1:] = [("train", 2), ("train", 3), ("evaluate", 3), ("evaluate", 2), ("evaluate", 2)]
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(coordinator.accepted) == len(sent_updates(coordinator)) == 2
    assert len(coordinator.evaluations) == 2
    assert {failure["type"] for failure in coordinator.failures} == {"NotAgreed"}
    assert len(coordinator.failures) == 7


def test_what_was_answered_is_remembered_over_a_restart(make: Make) -> None:
    coordinator = make.coordinator(rounds=1)
    asyncio.run(make.worker(coordinator).run())
    coordinator.plan = [("train", 1), ("evaluate", 1)]
    asyncio.run(make.worker(coordinator).run())
    assert (len(coordinator.accepted), len(coordinator.evaluations)) == (1, 2)
    assert len(coordinator.failures) == 2


def test_an_update_that_is_refused_for_ever_is_not_made_for_ever(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coordinator that takes each update and calls it a bad one would get as many as it likes."""
    from tests.support.fake_coordinator import problem

    def refuse(request: Any) -> Any:
        return problem(422, "not-finite") if request.url.path.endswith("/update") else None

    coordinator = make.coordinator(rounds=1, alter=refuse)
    coordinator.plan = [("train", 1)] * 9
    asyncio.run(make.worker(coordinator).run())
    assert len(sent_updates(coordinator)) == agreements.ATTEMPTS
    assert [one["type"] for one in coordinator.failures].count("NotAgreed") == 9 - agreements.ATTEMPTS


def test_an_evaluator_trains_nothing(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=1)
    own = settings.model_copy(update={"role": "evaluator"})
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert [one["detail"] for one in coordinator.failures] == ["this client evaluates: its owner agreed to no training"]
    assert len(coordinator.evaluations) == 2


# Payloads


PAYLOADS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "unknown": lambda state: state | {"more": torch.zeros(3)},
    "missing": lambda state: {},
    "longer": lambda state: {"context": torch.cat([state["context"]] * 2)},
    "flat": lambda state: {"context": state["context"].flatten()},
    "integers": lambda state: {"context": state["context"].long()},
    "not finite": lambda state: {"context": state["context"] * float("nan")},
}


@pytest.mark.parametrize("how", PAYLOADS)
def test_a_payload_is_held_against_what_the_phase_declares(make: Make, how: str) -> None:
    coordinator = make.coordinator(rounds=1)
    coordinator.global_state = PAYLOADS[how](coordinator.global_state)
    asyncio.run(make.worker(coordinator).run())
    assert [failure["type"] for failure in coordinator.failures] == ["TensorError"] * 3
    assert not coordinator.accepted
    assert not coordinator.evaluations


def test_numbers_that_a_method_does_not_declare_stay_here(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    real = PromptFL.train

    def telling(self: PromptFL, *arguments: Any) -> TrainResult:
        result = real(self, *arguments)
        return replace(result, metrics=result.metrics | {"pixel_3_of_image_0": 0.25})

    monkeypatch.setattr(PromptFL, "train", telling)
    coordinator = make.coordinator(rounds=1)
    asyncio.run(make.worker(coordinator).run())
    (update,) = sent_updates(coordinator)
    assert b"loss" in update
    assert b"pixel" not in update


# Consent, and its change


def test_consent_comes_before_the_backbone_and_the_features(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def load(*arguments: Any) -> Any:
        loaded.append("backbone")
        return load_backbone("promptfed-tiny", None)

    monkeypatch.setattr(joining, "open_backbone", load)
    features = FeatureCache(make.settings.features_dir)
    owner, coordinator = Owner(answer=False), make.coordinator(rounds=0)
    with pytest.raises(ClientError) as end:
        asyncio.run(make.worker(coordinator, backbone=None, features=features, consent=owner.consent).run())
    assert end.value.exit is Exit.DECLINED
    assert (loaded, features.images_computed, coordinator.client) == ([], 0, None)
    # The sizes are told all the same.
    assert owner.shown[0].exchanges[0].tensors[0].shape == (4, coordinator.shape.d_t)
    assert asyncio.run(make.worker(coordinator, backbone=None, features=features).run()) is Exit.OK
    assert loaded == ["backbone"]


def test_the_sizes_of_a_backbone_are_known_without_it() -> None:
    real = shape_of(load_backbone("promptfed-tiny", None))
    # Whether patches have features only the tower itself tells.
    assert shape_by_name("promptfed-tiny") == real.model_copy(update={"patch_tokens": None})
    assert shape_by_name("ViT-L-14").d_e == 768
    assert shape_by_name("hf-hub:someone/model") is None
    assert shape_by_name("RN50") is None
    assert shape_by_name("no-such-model") is None


def test_a_change_of_the_offer_is_asked_again(make: Make) -> None:
    coordinator, owner = make.coordinator(rounds=1), Owner()
    asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    assert owner.shown[0].changes == ()
    coordinator.training = coordinator.training | {"epochs": 9}
    owner.answer = False
    with pytest.raises(ClientError, match=r"training\.epochs is 9 instead of 1") as end:
        asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    assert end.value.exit is Exit.DECLINED
    assert owner.shown[1].changes == ("training.epochs is 9 instead of 1",)
    assert "NOT WHAT YOU AGREED TO" in owner.shown[1].lines()[0]
    owner.answer = True
    asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    assert len(owner.shown) == 3  # a yes is kept


def test_nobody_at_the_terminal_agrees_to_a_change(make: Make) -> None:
    coordinator = make.coordinator(rounds=1)
    alone = Terminal("text", ask=False)
    assert asyncio.run(make.worker(coordinator, consent=alone.consent).run()) is Exit.OK
    coordinator.method = {"name": "promptfl", "m": 6}
    with pytest.raises(ClientError, match=r"method\.m is 6 instead of 4.*--agree") as end:
        asyncio.run(make.worker(coordinator, consent=alone.consent).run())
    digest = str(end.value).rsplit(" ", 1)[1]
    with pytest.raises(ClientError):
        other = Terminal("text", ask=False, agree="0" * 16)
        asyncio.run(make.worker(coordinator, consent=other.consent).run())
    coordinator.plan = []
    named = Terminal("text", ask=False, agree=digest)
    assert asyncio.run(make.worker(coordinator, consent=named.consent).run()) is Exit.OK


def test_a_coordinator_that_does_not_say_its_terms(make: Make) -> None:
    def silent(request: Any) -> Any:
        return JSONResponse({"federation_id": "fed-1", "name": "pets", "method": {"name": "promptfl"}})

    coordinator = make.coordinator(rounds=1, alter=silent)
    with pytest.raises(ClientError, match="install the same version") as end:
        asyncio.run(make.worker(coordinator).run())
    assert end.value.exit is Exit.PROTOCOL


def test_differences_are_told_in_plain_text() -> None:
    assert differences({"a": 1, "b": [1]}, {"a": 1, "b": [1]}) == []
    assert differences({"a": 1}, {"a": True}) == ["a is True instead of 1"]
    (told,) = differences({"a": 1}, {"a": 1, "c\x1b[2J": "\u202ex"})
    assert told == r"c\x1b[2J is \u202ex instead of (nothing)"
    assert len(differences({"a": "x"}, {"a": "y" * 10_000})[0]) < 500


# What others learn


@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_each_method_says_what_it_discloses(name: str) -> None:
    """Whose updates are no plain means, or are gradients by image features, says more than the base does."""
    kind, method = METHODS[name], make_method({"name": name})
    phases = [phase for round in (1, 2) for phase in method.phases(round, 2)]
    sent = [phase for phase in phases if phase.up]
    assert bool(method.disclosures) is bool(sent)
    assert all(one.to in ("operator", "sites") and one.what for one in method.disclosures)
    if any(not phase.mean for phase in sent):
        assert kind.disclosures is not Method.disclosures, "say what other sites learn of a client's own update"


def test_what_other_sites_learn_is_told() -> None:
    def told(name: str, to: str) -> str:
        return " ".join(one.what for one in make_method({"name": name}).disclosures if one.to == to)

    assert "this client's own text and visual prompts" in told("plan", "sites")
    assert "domain prompt" in told("fast_pt", "sites")
    assert "the words that describe its domain" in told("fast_pt", "sites")
    assert "features of single images" in told("fedclip", "operator")
    assert "image features" in told("fedcocoop", "operator")


def test_text_says_what_others_learn_and_shows_names_as_text(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = ["sun\x1b[8m\x1b[2J", "anchor\u202e", "umbrella\r\nLeaves it never", "pair\x9b3J"]
    coordinator = make.coordinator(rounds=0, method={"name": "fedclip"}, class_names=hostile)
    coordinator.template = "\x1b]0;x\x07{}"
    terminal = Terminal("text", ask=False)
    asyncio.run(make.worker(coordinator, source=made_up_source(names=hostile), consent=terminal.consent).run())
    shown = capsys.readouterr().err
    assert "the operator: features of single images" in shown
    assert r"sun\x1b[8m\x1b[2J, anchor\u202e, umbrella\x0d\x0aLeaves it never, pair\x9b3J" in shown
    assert not [letter for letter in shown if ord(letter) < 32 and letter != "\n"]
    assert not {"\x1b", "\x9b", "\u202e"} & set(shown)
    assert "\nLeaves it never" not in shown


def test_a_log_line_is_one_line_of_plain_text() -> None:
    formatter = EventTextLines("%(message)s")
    record = logging.makeLogRecord({"msg": "refused: %s", "args": ("\x1b[2Jgone\nenrolled as x",), "levelno": 20})
    assert formatter.format(record) == r"refused: \x1b[2Jgone\x0aenrolled as x"


# One payload for all


def test_the_owner_is_told_where_others_were_given_something_else(make: Make) -> None:
    other = "sha256:" + "e" * 64

    def lie(task: dict[str, Any]) -> dict[str, Any]:
        return task | {"common_payload": other if task["round"] == 1 else None}

    told: list[Any] = []
    coordinator = make.coordinator(rounds=2, garble=lie)
    worker = make.worker(coordinator, hook=lambda event, facts: told.append(facts) if "other" in event else None)
    assert asyncio.run(worker.run()) is Exit.OK
    assert [one["common"] for one in told] == [None, other, None, None]
    honest = make.coordinator(rounds=0)
    asyncio.run(make.worker(honest, hook=lambda event, facts: told.append(facts) if "other" in event else None).run())
    assert len(told) == 4


# A coordinator that was restored from a backup


def test_rounds_are_answered_again_for_a_restored_coordinator_but_not_for_ever(make: Make) -> None:
    coordinator = make.coordinator(rounds=2)
    events: list[str] = []
    asyncio.run(make.worker(coordinator).run())
    for number in range(agreements.RESTORES):
        coordinator.epoch = f"restored {number}"
        coordinator.plan = [("train", 2), ("evaluate", 2)]
        coordinator.accepted.clear()
        asyncio.run(make.worker(coordinator, hook=lambda event, facts: events.append(event)).run())
        assert len(coordinator.accepted) == 1
    assert events.count("again") == agreements.RESTORES
    assert coordinator.failures == []
    coordinator.plan, coordinator.epoch = [("train", 1)], "once more"
    terminal = Terminal("text", ask=False)
    with pytest.raises(ClientError, match="went back to earlier rounds 3 times"):
        asyncio.run(make.worker(coordinator, consent=terminal.consent).run())


# Calling it back


def test_consent_can_be_called_back(make: Make, settings: Settings) -> None:
    coordinator, owner = make.coordinator(rounds=2), Owner()

    async def scenario() -> None:
        worker = make.worker(coordinator, consent=owner.consent)

        def call_back(event: str, facts: Any) -> None:
            if event == "accepted":
                (settings.state_dir / agreements.WITHDRAWN).write_text("now")

        worker.monitor._hook = call_back
        with pytest.raises(ClientError, match="withdrawn consent") as end:
            await worker.run()
        assert end.value.exit is Exit.WITHDRAWN

    asyncio.run(scenario())
    assert len(coordinator.accepted) == 1
    owner.answer = False
    with pytest.raises(ClientError, match="consent was withdrawn at now"):
        asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    assert len(coordinator.accepted) == 1
    owner.answer = True  # agreed to anew
    assert asyncio.run(make.worker(coordinator, consent=owner.consent).run()) is Exit.OK
    assert len(coordinator.accepted) == 2


def test_the_command_calls_back_and_deletes(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.client_service.joining.consent.ANSWER_SECONDS", 0.5)
    source = make.coordinator(rounds=1, method={"name": "coop", "m": 4})
    features = FeatureCache(make.settings.features_dir)
    asyncio.run(make.worker(source, features=features).run())
    folder = make.settings.state_dir
    assert {"committed.safetensors", "serving.json", "features"} <= {path.name for path in folder.iterdir()}
    line = ["--coordinator", "http://127.0.0.1:9", "--federation", "pets", "--state-dir", str(folder), "--withdraw"]
    assert command.main([*line, "--delete-private"]) == Exit.UNREACHABLE  # nobody listens: the operator is to be told
    left = {path.name for path in folder.iterdir()}
    assert left == {
        "identity.json", "enrolment.json", "consent.json", "answers.json", "withdrawn", "site-log.head",
        "site-log.jsonl", "lock",
    }  # fmt: skip
    state = PrivateState(folder)
    terms = agreements.Consent.model_validate_json((folder / agreements.FILE).read_bytes()).terms
    kept = Agreement.kept(state)
    assert kept is not None
    assert "consent was withdrawn" in kept.changes(terms)[0]
    state.close()
    nowhere = [*line[:-2], str(tmp_path / "none"), "--withdraw"]
    assert command.main(nowhere) == Exit.STATE


def test_deleting_goes_with_calling_back() -> None:
    with pytest.raises(ClientError, match="--delete-private goes with --withdraw"):
        make_settings(coordinator="http://127.0.0.1", federation="f", data="d", delete_private=True)
