"""A client does only what its owner agreed to: against coordinators that ask for more."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Request, Response
from fastapi.responses import JSONResponse
from scipy import stats
from torch import Tensor

from promptfed.client_service import __main__ as command
from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining import joining
from promptfed.client_service.joining.checks import Check
from promptfed.client_service.joining.consent import Terminal
from promptfed.client_service.joining.disclosure import Disclosure
from promptfed.client_service.monitor import EventTextLines
from promptfed.client_service.privacy import agreement as agreements
from promptfed.client_service.privacy import noisy_counts
from promptfed.client_service.privacy.agreement import Agreement
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.privacy.noisy_counts import DRAWN_FILE, noisy_count, what_leaves
from promptfed.client_service.privacy.policy import Policy
from promptfed.client_service.privacy.protection import reported
from promptfed.client_service.settings import Settings, make_settings
from promptfed.client_service.state import trained_images
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.clip import FeatureCache, load_backbone, shape_of
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.data.source import Source
from promptfed.shared.messages import EnrolmentInfo, SplitResult
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface import ClientContext, Method, MethodError, TrainResult
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.privacy.accounting import Event, budget_rounds, epsilon_of
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.spec.sections import PrivacySpec, SelectionSpec
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors.torch_tensors import decode
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import FakeCoordinator, made_up_source, problem

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


@pytest.mark.extended
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


@pytest.mark.extended
def test_no_more_tasks_than_the_rounds_allow(make: Make) -> None:
    coordinator = make.coordinator(rounds=2)
    coordinator.plan[2:2] = [("train", 1), ("evaluate", 0), ("train", 0)]  # asked once more, and a round of no spec
    coordinator.plan[-1:] = [("train", 2), ("train", 3), ("evaluate", 3), ("evaluate", 2), ("evaluate", 2)]
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert len(coordinator.accepted) == len(sent_updates(coordinator)) == 2
    assert len(coordinator.evaluations) == 2
    assert {failure["type"] for failure in coordinator.failures} == {"NotAgreed"}
    assert len(coordinator.failures) == 7


@pytest.mark.extended
def test_the_evaluation_after_a_budget_that_ends_before_the_rounds_is_agreed_to(make: Make) -> None:
    """The site computes for itself where that is."""
    privacy = {"level": "client", "clip": 1.0, "noise_multiplier": 4.0, "epsilon": 2.0, "delta": 1e-3}
    coordinator = make.coordinator(rounds=30, privacy=privacy, evaluate_every=30)
    last = budget_rounds(4.0, 1.0, 1, 30, 2.0, 1e-3)
    assert 1 < last < 30
    coordinator.plan = [("evaluate", last - 1), ("evaluate", last)]
    assert asyncio.run(make.worker(coordinator, plain_evaluations=True).run()) is Exit.OK
    assert [failure["type"] for failure in coordinator.failures] == ["NotAgreed"]
    assert len(coordinator.evaluations) == 1


@pytest.mark.extended
def test_what_was_answered_is_remembered_over_a_restart(make: Make) -> None:
    coordinator = make.coordinator(rounds=1)
    asyncio.run(make.worker(coordinator).run())
    coordinator.plan = [("train", 1), ("evaluate", 1)]
    asyncio.run(make.worker(coordinator).run())
    assert (len(coordinator.accepted), len(coordinator.evaluations)) == (1, 2)
    assert len(coordinator.failures) == 2


@pytest.mark.extended
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


@pytest.mark.extended
def test_an_evaluator_trains_nothing(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=1)
    own = settings.model_copy(update={"role": "evaluator"})
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert [one["detail"] for one in coordinator.failures] == ["this client evaluates: its owner agreed to no training"]
    assert len(coordinator.evaluations) == 2


PAYLOADS: dict[str, Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]] = {
    "unknown": lambda state: state | {"more": torch.zeros(3)},
    "missing": lambda state: {},
    "longer": lambda state: {"context": torch.cat([state["context"]] * 2)},
    "flat": lambda state: {"context": state["context"].flatten()},
    "integers": lambda state: {"context": state["context"].long()},
    "not finite": lambda state: {"context": state["context"] * float("nan")},
}


@pytest.mark.extended
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


@pytest.mark.extended
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
    assert shape_by_name("promptfed-tiny") == real
    assert shape_by_name("ViT-L-14").d_e == 768
    assert shape_by_name("hf-hub:someone/model") is None
    assert shape_by_name("RN50") is None
    assert shape_by_name("no-such-model") is None


@pytest.mark.extended
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


def test_a_coordinator_that_does_not_say_its_terms(make: Make) -> None:
    def silent(request: Any) -> Any:
        return JSONResponse({"federation_id": "fed-1", "name": "pets", "method": {"name": "promptfl"}})

    coordinator = make.coordinator(rounds=1, alter=silent)
    with pytest.raises(ClientError, match="install the same version") as end:
        asyncio.run(make.worker(coordinator).run())
    assert end.value.exit is Exit.PROTOCOL


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


@pytest.mark.extended
def test_text_says_what_others_learn_and_shows_names_as_text(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = ["sun\u200b[8m", "anchor\ufeff", "umbrella\xad", "pair\u2060"]
    coordinator = make.coordinator(rounds=0, method={"name": "fedclip"}, class_names=hostile)
    coordinator.template = "\u2061{}"
    terminal = Terminal("text", ask=False)
    asyncio.run(make.worker(coordinator, source=made_up_source(names=hostile), consent=terminal.consent).run())
    shown = capsys.readouterr().err
    assert "the operator: features of single images" in shown
    assert r"sun\u200b[8m, anchor\ufeff, umbrella\xad, pair\u2060" in shown
    assert not [letter for letter in shown if ord(letter) < 32 and letter != "\n"]
    assert not {"\u200b", "\ufeff", "\xad", "\u2060", "\u2061"} & set(shown)


def test_a_log_line_is_one_line_of_plain_text() -> None:
    formatter = EventTextLines("%(message)s")
    record = logging.makeLogRecord({"msg": "refused: %s", "args": ("\x1b[2Jgone\nenrolled as x",), "levelno": 20})
    assert formatter.format(record) == r"refused: \x1b[2Jgone\x0aenrolled as x"


@pytest.mark.extended
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


@pytest.mark.extended
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


@pytest.mark.extended
def test_the_command_calls_back_and_deletes(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("promptfed.client_service.joining.consent.ANSWER_SECONDS", 0.5)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
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
        "site-log.jsonl", "lock", trained_images.FILE,
    }  # fmt: skip
    train = make.given["source"].train
    assert trained_images.read_trained(folder) == {train.digest(row) for row in range(len(train))}
    assert folder in trained_images.folders_of("fed-1"), "`promptfed score` finds it"
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


# A protected federation at the client: what leaves, what it costs, and what is refused before anything is computed.


TRAINING = TrainingSpec(learning_rate=0.1, batch_size=6).model_dump()


PRIVACY = PrivacySpec(level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3).model_dump()


PER_ROUND = Event("gaussian", 0.25, 2.0, 4)  # 24 records in batches of 6


@pytest.fixture
def own(settings: Settings, tmp_path: Path) -> Settings:
    return settings.model_copy(update={"ledger": tmp_path / "ledger.jsonl", "max_epsilon": 50.0})


def protected(make: Make, **changes: Any) -> FakeCoordinator:
    return make.coordinator(**({"privacy": PRIVACY, "training": TRAINING, "rounds": 2} | changes))


@pytest.mark.extended
def test_updates_say_what_they_cost_and_nothing_that_depends_on_records(make: Make, own: Settings) -> None:
    coordinator = protected(make)
    assert asyncio.run(make.worker(coordinator, settings=own).run()) is Exit.OK
    updates = [body for body in coordinator.received if b"payload_sha256" in body]
    assert len(updates) == 2
    ledger = Ledger(own.ledger_file)
    assert len(ledger.spends()) == 2
    for number, (body, spent) in enumerate(zip(updates, ledger.spends(), strict=True), start=1):
        told = reported(body)
        assert told is not None
        assert told.epsilon == spent.epsilon == epsilon_of([PER_ROUND] * number, 1e-3)
        assert (told.delta, told.noise) == (1e-3, "secret")
        assert spent.events == (PER_ROUND,)
        _, metadata = decode(body)
        assert isinstance(metadata, dict)
        assert metadata["metrics"] == {"steps": 4.0, "trained_parameters": 448.0}
    assert [(one["splits"], one["withheld"]) for one in coordinator.evaluations] == [({}, True)] * 2
    assert all(one["zero_shot"] == {} and one["metrics"] == {} for one in coordinator.evaluations)


@pytest.mark.extended
def test_noise_is_new_in_every_attempt_unless_it_is_handed_in(make: Make, own: Settings, tmp_path: Path) -> None:
    found = []
    for number, noise in enumerate([None, None, SeededNoise(1), SeededNoise(1)]):
        coordinator = protected(make, rounds=1)
        settings = own.model_copy(update={"state_dir": tmp_path / f"state-{number}"})
        asyncio.run(make.worker(coordinator, settings=settings, noise=noise).run())
        found.append(coordinator.global_state["context"])
    assert not found[0].equal(found[1])
    assert found[2].equal(found[3])


@pytest.mark.door
def test_a_task_beyond_the_budget_is_refused_before_training_and_costs_nothing(
    make: Make, own: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another federation has spent most of it meanwhile."""
    coordinator = protected(make)
    ledger, trained = Ledger(own.ledger_file), []

    def spend_elsewhere(request: Request) -> Response | None:
        if request.url.path.endswith("/payload") and not ledger.spends():
            about = {"federation_id": "other", "coordinator": "http://x", "phase": "train", "noise": "secret"}
            ledger.spend("0" * 64, [PER_ROUND] * 20, 1e3, {**about, "round": 1, "task_id": "t"}, "train")
        return None

    coordinator.alter = spend_elsewhere
    train = PromptFL.train
    monkeypatch.setattr(PromptFL, "train", lambda *given: trained.append(1) or train(*given))
    limit = epsilon_of([PER_ROUND] * 3, 1e-3)
    asyncio.run(make.worker(coordinator, settings=own.model_copy(update={"max_epsilon": limit})).run())
    assert [one["type"] for one in coordinator.failures] == ["privacy-budget-exhausted"] * 2
    assert "has spent ε" in coordinator.failures[0]["detail"]
    assert trained == []
    assert len(ledger.spends()) == 1


@pytest.mark.extended
@pytest.mark.parametrize(
    "other", [None, PRIVACY | {"noise_multiplier": 0.3}, PRIVACY | {"clip": 16.0}, PRIVACY | {"evaluation": "plain"}]
)
def test_a_task_with_less_protection_than_was_agreed_is_refused(
    make: Make, own: Settings, other: dict[str, Any] | None
) -> None:
    coordinator = protected(make, rounds=1)

    def garble(task: dict[str, Any]) -> dict[str, Any]:
        config = {key: value for key, value in task["config"].items() if key != "privacy"}
        return task | {"config": config if other is None else config | {"privacy": other}}

    coordinator.garble = garble
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert {one["type"] for one in coordinator.failures} == {"NotAgreed"}
    assert all("privacy" in one["detail"] for one in coordinator.failures)
    assert coordinator.count("GET", "/payload") == 0
    assert coordinator.accepted == {}
    assert Ledger(own.ledger_file).spends() == []


NOT_TOLD = "this client's own log says why"


CENTRAL = PrivacySpec(level="client", clip=1.0, noise_multiplier=1.0, delta=1e-3).model_dump()


def _fail(*given: Any, **options: Any) -> Any:
    raise MethodError("record 17 has label 3")


def _diverge(self: PromptFL, context: ClientContext, payload: dict[str, Tensor], private: object) -> TrainResult:
    if context.protection is not None:
        context.protection.used = True
    return TrainResult({name: tensor * float("nan") for name, tensor in payload.items()})


@pytest.mark.extended
@pytest.mark.parametrize("privacy", [PRIVACY, CENTRAL], ids=["sample", "client"])
@pytest.mark.parametrize(
    ("where", "change"),
    [("train", _fail), ("train", _diverge), ("prepare", _fail)],
    ids=["train", "diverge", "prepare"],
)
def test_why_protected_training_failed_is_not_told(
    where: str,
    change: Callable[..., Any],
    privacy: dict[str, Any],
    make: Make,
    own: Settings,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PromptFL, where, change, raising=False)
    coordinator = protected(make, rounds=1, privacy=privacy)
    asyncio.run(make.worker(coordinator, settings=own).run())
    works = {one["type"].removesuffix("-failed") for one in coordinator.failures}
    assert works == {"training", "evaluation"} if where == "prepare" else {"training"}
    for work in coordinator.failures:
        kind = work["type"].removesuffix("-failed")
        assert work["detail"] == f"protected {kind} failed; {NOT_TOLD}"
    assert Ledger(own.ledger_file).spends() == []


@pytest.mark.extended
def test_why_evaluation_failed_is_not_told(make: Make, own: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptFL, "classifier", _fail)
    coordinator = protected(make, rounds=1)
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert {(one["type"], one["detail"]) for one in coordinator.failures} == {
        ("evaluation-failed", f"protected evaluation failed; {NOT_TOLD}")
    }


def test_a_method_that_trains_without_its_protection_sends_nothing(
    make: Make, own: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PromptFL, "train", lambda self, context, payload, private: TrainResult(dict(payload)))
    coordinator = protected(make, rounds=1)
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert [one["type"] for one in coordinator.failures] == ["training-failed"]
    assert coordinator.accepted == {}


@pytest.mark.extended
def test_private_tensors_of_unprotected_training_are_no_start(make: Make, own: Settings) -> None:
    method = {"name": "fedpgp", "m": 4, "b": 2}
    plain = protected(make, method=method, rounds=1, privacy=None)
    asyncio.run(make.worker(plain, settings=own).run())
    coordinator = protected(make, method=method, rounds=2, epoch="second")
    coordinator.client = plain.client
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert [one["type"] for one in coordinator.failures] == ["private-state-unprotected"] * 2
    again = protected(make, method=method, rounds=2, epoch="third")
    again.client = plain.client
    anew = own.model_copy(update={"reset_private": True})
    asyncio.run(make.worker(again, settings=anew).run())
    assert again.failures == []
    assert len(again.accepted) == 2
    state = PrivateState(own.state_dir)
    assert state.committed()[1].privacy == "sample"
    state.close()


@pytest.mark.door
def test_an_update_is_paid_before_it_is_sent_and_once_however_often_it_is_sent(make: Make, own: Settings) -> None:
    coordinator = protected(make, rounds=1)
    ledger, seen = Ledger(own.ledger_file), []

    def lose(request: Request) -> Response | None:
        if request.url.path.endswith("/update"):
            seen.append(len(ledger.spends()))
            if len(seen) < 3:
                return problem(503, "not-ready")
        return None

    coordinator.alter = lose
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert seen == [1, 1, 1]
    assert len(ledger.spends()) == 1


@pytest.mark.extended
def test_an_update_that_waits_is_paid_after_a_restart_with_the_same_bytes(
    make: Make, own: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the update's writing and its spend: it costs once, and is not trained again."""
    from promptfed.client_service.training import trainer

    class Killed(BaseException):
        pass

    def die(name: str) -> None:
        if name == "pending-written":
            raise Killed

    coordinator = protected(make, rounds=1)
    with monkeypatch.context() as patched:
        patched.setattr(trainer, "point", die)
        with pytest.raises(Killed):
            asyncio.run(make.worker(coordinator, settings=own).run())
    assert Ledger(own.ledger_file).spends() == []
    monkeypatch.setattr(PromptFL, "train", None)  # not called: the bytes are there
    asyncio.run(make.worker(coordinator, settings=own).run())
    assert len(Ledger(own.ledger_file).spends()) == 1
    assert len(coordinator.accepted) == 1


NOISY = PrivacySpec(
    level="sample", clip=0.3, noise_multiplier=2.0, delta=1e-3, evaluation="noisy", evaluation_epsilon=0.5
)


@pytest.fixture
def apart(source: Source) -> Source:
    """The source without the test images that are trained on as well."""
    trained = {source.train.digest(row) for row in range(len(source.train))}
    rows = [row for row in range(len(source.test)) if source.test.digest(row) not in trained]
    return replace(source, test=source.test.select(source.test.labels.new_tensor(rows)))


def noisy(make: Make, **changes: Any) -> FakeCoordinator:
    return make.coordinator(**({"privacy": NOISY.model_dump(), "training": TRAINING, "rounds": 2} | changes))


def test_a_count_has_just_the_distribution_that_it_is_paid_for() -> None:
    """P(k + η) ∝ e^(−a·|η|), with all beyond 0 and N gathered at these."""
    right, images, a, draws = 6, 9, 0.7, 6000
    stream, result = SeededNoise(3).stream("counts"), SplitResult(accuracy=right / images, num_samples=images)
    found = Counter(round(noisy_count(stream, result, a).accuracy * images) for _ in range(draws))
    weight = (1 - exp(-a)) / (1 + exp(-a))
    chance = {count: weight * exp(-a * abs(count - right)) for count in range(1, images)}
    chance[0] = sum(weight * exp(-a * abs(count - right)) for count in range(-200, 1))
    chance[images] = sum(weight * exp(-a * abs(count - right)) for count in range(images, 200))
    assert sum(chance.values()) == pytest.approx(1)
    keys = sorted(chance)
    tried = stats.chisquare([found[key] for key in keys], [draws * chance[key] for key in keys])
    assert tried.pvalue > 1e-6
    told = noisy_count(stream, result.model_copy(update={"ece": 0.1, "macro_f1": 0.2}), a)
    assert (told.num_samples, told.ece, told.macro_f1) == (images, None, None), "no other figure leaves"


@pytest.mark.door
def test_each_release_is_paid_once_and_the_template_s_is_drawn_once(make: Make, own: Settings, apart: Source) -> None:
    coordinator = noisy(make)
    assert asyncio.run(make.worker(coordinator, settings=own, source=apart).run()) is Exit.OK
    first, second = coordinator.evaluations
    ledger = Ledger(own.ledger_file)
    spends = [one for one in ledger.spends() if one.split == "test"]
    assert [one.events for one in spends] == [(Event("laplace", 1.0, 0.5, 2),), (Event("laplace", 1.0, 0.5, 1),)]
    assert ledger.epsilon("test") == pytest.approx(epsilon_of([Event("laplace", 1.0, 0.5, 3)], 1e-3))
    assert first["zero_shot"] == second["zero_shot"], "sent again unchanged"
    for told in (first, second):
        assert told["metrics"] == {}
        assert told["splits"]["test"]["num_samples"] == len(apart.test)
        assert (told["splits"]["test"]["accuracy"] * len(apart.test)) % 1 == pytest.approx(0, abs=1e-9)
        assert told["privacy"]["noise"] == "secret"
    assert [one["privacy"]["epsilon"] for one in (first, second)] == [one.epsilon for one in spends]
    assert len([one for one in ledger.spends() if one.split == "train"]) == 2


@pytest.mark.extended
@pytest.mark.parametrize("at", ["counts-written", "counts-spent"])
def test_a_client_that_dies_between_drawing_and_sending_sends_the_same_and_pays_once(
    at: str, make: Make, own: Settings, apart: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = noisy(make, rounds=1)

    class Died(BaseException):
        pass

    def die(name: str) -> None:
        if name == at:
            raise Died

    with monkeypatch.context() as patched, pytest.raises(Died):
        patched.setattr(noisy_counts, "point", die)
        asyncio.run(make.worker(coordinator, settings=own, source=apart).run())
    drawn = json.loads((own.state_dir / DRAWN_FILE).read_text())
    ledger = Ledger(own.ledger_file)
    assert len(ledger.spends()) == (at == "counts-spent")
    assert coordinator.evaluations == []
    assert asyncio.run(make.worker(coordinator, settings=own, source=apart).run()) is Exit.OK
    sent = coordinator.evaluations[0]
    assert sent["splits"] == drawn["body"]["splits"]
    assert [one.split for one in ledger.spends()] == ["test", "train", "test"]


@pytest.mark.door
def test_what_the_budget_has_no_room_for_is_withheld(make: Make, own: Settings, apart: Source, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    policy.write_text(f"version: 1\nprivacy: {{max_epsilon: 50, max_test_epsilon: 1.1}}\nledger: {own.ledger_file}\n")
    coordinator = noisy(make)
    settings = own.model_copy(update={"policy": policy})
    assert asyncio.run(make.worker(coordinator, settings=settings, source=apart).run()) is Exit.OK
    first, second = coordinator.evaluations
    assert first["splits"] != {}
    assert (second["splits"], second["zero_shot"], second["withheld"]) == ({}, {}, True)
    assert [one.split for one in Ledger(own.ledger_file).spends()] == ["test", "train", "train"]


SECOND = [
    pytest.param(why, marks=pytest.mark.extended) for why in ("trained and tested on", "fine-tuned", "the policy")
]


@pytest.mark.parametrize("why", [*SECOND, "the floor"])
def test_where_no_noise_helps_is_withheld(why: str, make: Make, own: Settings, apart: Source, tmp_path: Path) -> None:
    coordinator = noisy(make, rounds=1)
    if why == "fine-tuned":
        coordinator = noisy(make, rounds=1, method={"name": "promptfl_ft", "m": 4})
    if why == "trained and tested on":
        apart = replace(apart, test=apart.train)
    if why in ("the policy", "the floor"):
        metrics = "accuracy: withheld" if why == "the policy" else f"floor: {len(apart.test)}"
        policy = tmp_path / "policy.yaml"
        policy.write_text(f"version: 1\nmetrics: {{{metrics}}}\nledger: {own.ledger_file}\n")
        own = own.model_copy(update={"policy": policy})
    assert asyncio.run(make.worker(coordinator, settings=own, source=apart).run()) is Exit.OK
    assert coordinator.failures == []
    assert [(one["splits"], one["withheld"]) for one in coordinator.evaluations] == [({}, True)] * 2
    assert [one.split for one in Ledger(own.ledger_file).spends()] == ["train"]


@pytest.mark.door
def test_the_stricter_of_federation_and_owner_says_what_leaves() -> None:
    method, tuned = make_method({"name": "promptfl"}), make_method({"name": "promptfl_ft"})

    def leaves(asked: str | None, owner: str | None, **given: Any) -> str:
        privacy = None if asked is None else NOISY.model_copy(update={"evaluation": asked})
        if given.pop("level", "sample") == "client":
            privacy = PrivacySpec(level="client", clip=1.0, evaluation=asked)
        policy = None if owner is None else Policy.model_validate({"version": 1, "metrics": {"accuracy": owner}})
        info = EnrolmentInfo.model_construct(privacy=privacy, selection=given.pop("selection", None))
        return what_leaves(info, given.pop("method", method), given.pop("role", "trainer"), policy, **given)

    asked = ("withheld", "noisy", "plain")
    assert [[leaves(one, owner) for one in asked] for owner in (None, *asked)] == [
        ["withheld", "noisy", "withheld"],  # in the clear only where both say so
        ["withheld"] * 3,
        ["withheld", "noisy", "noisy"],
        ["withheld", "noisy", "plain"],
    ]
    assert [leaves(None, owner) for owner in (None, *asked)] == ["plain", "withheld", "noisy", "plain"]
    assert [leaves(one, "plain", method=tuned) for one in asked] == ["withheld"] * 3
    assert [leaves(None, owner, method=tuned) for owner in (None, "noisy")] == ["plain", "withheld"]
    assert leaves("noisy", "noisy", method=tuned, role="evaluator") == "noisy", "who trains nothing tunes nothing"
    chosen = SelectionSpec.model_construct()
    found = [leaves(*given, selection=chosen) for given in (("noisy", "noisy"), ("plain", "plain"), (None, None))]
    assert found == ["withheld", "plain", "plain"], "noise does not select"
    whole = [[leaves(one, owner, level="client") for one in ("plain", "withheld", None)] for owner in (None, "plain")]
    assert whole == [["withheld"] * 3, ["plain", "withheld", "withheld"]], "in the clear only where both say so"
    assert leaves("plain", "plain", level="client", method=tuned) == "plain", (
        "noise for whole clients hides records too"
    )
    assert leaves("plain", None, handed_in=True) == "plain"
    several = make_method({"name": "promptfl", "task": "multi_label"})
    figures = [leaves(*one, method=several) for one in (("noisy", None), (None, "noisy"), ("plain", "plain"))]
    assert figures == ["withheld", "withheld", "plain"], "a mean average precision is no count"
    assert leaves(None, "noisy", method=several, role="evaluator") == "withheld"
    said = [[leaves(one, owner, role="evaluator") for one in asked] for owner in (None, "noisy", "plain")]
    assert said == [["withheld", "noisy", "withheld"], ["noisy"] * 3, ["plain"] * 3], "its own test set is its own"
