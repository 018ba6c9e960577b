"""Everything that reaches training is agreed to: each field of a task is changed, and the client refuses to train."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import pty
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from fastapi import Request, Response
from PIL import Image
from pydantic import BaseModel

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.joining.checks import Check, check_data, check_device
from promptfed.client_service.joining.consent import Terminal
from promptfed.client_service.joining.disclosure import EACH, ROUNDS, Declared, Disclosure, _when, disclose
from promptfed.client_service.privacy.agreement import AgreedTerms, Agreement, NotAgreed, terms_of
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import ImageDomain, Source
from promptfed.shared.messages import MOST_PEERS, EnrolmentInfo, PayloadRef, Peer, SecurePart, Task, TaskConfig
from promptfed.shared.methods import METHODS, make_method, resolve_spec
from promptfed.shared.methods.core.interface import Method, Needs
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.spec.sections import CompressionSpec, PrivacySpec, SecureAggregationSpec, SelectionSpec
from promptfed.shared.spec.spec import BackboneShape, BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.spec.weighting import Weighting
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.shared.versions import RELEASE, SYSTEM
from tests import ROOT
from tests.client_service.conftest import Make
from tests.client_service.test_agreement import Owner, sent_updates
from tests.support.fake_coordinator import NAMES, TOKEN, FakeCoordinator, made_up_source, problem
from tests.support.waiting import PATIENCE

FINGERPRINT = "sha256:" + "1" * 64


NOT_AGREED_TO = {
    "task_id": "names the answer",
    "kind": "the schedule is agreed to: `Agreement.expect` checks it against rounds and role",
    "round": "the schedule, as above",
    "phase": "the schedule, as above",
    "deadline": "how long the coordinator waits",
    "seconds_left": "how long the coordinator waits",
    "payload": "changes with every round; it is checked against the phase's tensors, and against the site's policy",
    "epoch": "tells a restarted coordinator; the number of steps back is bounded",
    "secure": "the attempt at a sum; a client checks it in its own part of the protocol",
    "config.backbone.shape": "the sizes are those of the weights that are loaded",
    "config.peers": "vary as clients join; whether there are any, and how many at most, is agreed to",
}


"""Fields of a task that no owner agrees to, with the reason. Others are refused where they change."""


CONFIG = TaskConfig(
    method={"name": "promptfl", "m": 4}, training=TrainingSpec(augmentation="crop_flip", views=3),
    compression=CompressionSpec(up="int8"), backbone=BackboneSpec(fingerprint=FINGERPRINT, shape=BackboneShape(d_e=8)),
    class_names=NAMES, template="a photo of a {}.", rounds=3, seed=7,
    privacy=PrivacySpec(level="client", clip=1.0, noise_multiplier=1.0), secure_aggregation=SecureAggregationSpec(),
    weighting=Weighting(weighting="samples", max_weight_share=0.5), peers=[],
)  # fmt: skip


"""A task's configuration in which every part is there; no spec could have all of them."""


def task_of(config: TaskConfig) -> Task:
    return Task(
        task_id="t", kind="train", round=1, phase="train", deadline=datetime.now(UTC), seconds_left=60.0,
        payload=PayloadRef(url="/p", bytes=1, sha256=FINGERPRINT), config=config,
        secure=SecurePart(phase="train", attempt=1),
    )  # fmt: skip


def agreement_to(config: TaskConfig, folder: Path) -> Agreement:
    info = EnrolmentInfo(
        **dict(config.training_terms()), federation_id="fed-1", name="pets", state="running", evaluate_every=1
    )
    agreed = Agreement.made(
        PrivateState(folder, ephemeral=True),
        terms_of(info, make_method(config.method), "http://127.0.0.1", "trainer", []),
    )
    agreed.pin(FINGERPRINT)
    return agreed


def leaves(model: BaseModel, path: str = "") -> Iterator[tuple[str, BaseModel]]:
    """Every field that holds no further model, as ``config.training.epochs``, recursively."""
    for name in type(model).model_fields:
        value, place = getattr(model, name), f"{path}{name}"
        if isinstance(value, BaseModel):
            yield from leaves(value, f"{place}.")
        else:
            yield place, value


def other(value: Any) -> Any:
    """Another value, whether or not a coordinator would accept it."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, str):
        return value + "x"
    if isinstance(value, list):
        return [*value, "x"]
    if isinstance(value, dict):
        return {**value, "x": ["x"]}
    return 5  # where there is none


def changed(model: Any, path: str, value: Any) -> Any:
    """The model with the field at ``path`` replaced, unvalidated."""
    name, _, rest = path.partition(".")
    return model.model_copy(update={name: changed(getattr(model, name), rest, value) if rest else value})


def is_listed(path: str) -> bool:
    return any(path == one or path.startswith(f"{one}.") for one in NOT_AGREED_TO)


TASK = task_of(CONFIG)


FIELDS = dict(leaves(TASK))


AGREED = sorted(path for path in FIELDS if not is_listed(path))


def test_the_example_has_every_part() -> None:
    """Else the walk below would miss the fields of a part that is None."""
    parts = (TrainingSpec, BackboneSpec, PrivacySpec, SecureAggregationSpec, TrainingTerms)
    walked = {path.rpartition(".")[2] for path in FIELDS} | {part for path in FIELDS for part in path.split(".")}
    assert {name for part in parts for name in part.model_fields} <= walked
    assert all(any(path == one or path.startswith(f"{one}.") for path in FIELDS) for one in NOT_AGREED_TO)


def test_offer_consent_and_task_have_the_same_terms() -> None:
    assert all(issubclass(kind, TrainingTerms) for kind in (EnrolmentInfo, AgreedTerms, TaskConfig))
    assert set(TaskConfig.model_fields) - set(TrainingTerms.model_fields) == {"peers"}


def test_the_task_that_was_agreed_to_is_expected(tmp_path: Path) -> None:
    agreement_to(CONFIG, tmp_path).expect(TASK)


@pytest.mark.parametrize("path", AGREED)
def test_a_task_with_one_field_changed_is_refused(tmp_path: Path, path: str) -> None:
    name = path.removeprefix("config.")
    with pytest.raises(NotAgreed, match=f"{name}.* instead of"):
        agreement_to(CONFIG, tmp_path).expect(changed(TASK, path, other(FIELDS[path])))


@pytest.mark.parametrize("part", ["privacy", "secure_aggregation", "class_names", "template"])
def test_a_task_without_a_part_that_was_agreed_to_is_refused(tmp_path: Path, part: str) -> None:
    with pytest.raises(NotAgreed, match=part):
        agreement_to(CONFIG, tmp_path).expect(changed(TASK, f"config.{part}", None))


ON_THE_WIRE: dict[str, dict[str, Any]] = {
    "method": {"method": {"name": "promptfl", "m": 5}}, "training.epochs": {"epochs": 2},
    "training.batch_size": {"batch_size": 31}, "training.optimizer": {"optimizer": "adam"},
    "training.learning_rate": {"learning_rate": 0.2}, "training.momentum": {"momentum": 0.5},
    "training.weight_decay": {"weight_decay": 0.5}, "training.schedule": {"schedule": "constant"},
    "training.augmentation": {"augmentation": "crop_flip"}, "training.views": {"views": 9},
    "training.threads": {"threads": 2}, "training.deterministic": {"deterministic": True},
    "training.tf32": {"tf32": True}, "backbone.model": {"model": "ViT-B-32"},
    "backbone.pretrained": {"pretrained": "openai"}, "backbone.precision": {"precision": "fp16"},
    "backbone.fingerprint": {"fingerprint": FINGERPRINT}, "class_names": {"class_names": [*NAMES, "x"]},
    "template": {"template": "{}"}, "rounds": {"rounds": 4}, "seed": {"seed": 8},
    "privacy": {"privacy": {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0}},
    "secure_aggregation": {"secure_aggregation": {}}, "weighting": {"weighting": {"weighting": "samples"}},
    "compression": {"compression": {"up": "int8"}}, "selection": {"selection": {"share": 0.5}},
    "peers": {"peers": [{"name": "b", "role": "trainer"}]},
}  # fmt: skip


def test_a_client_trains_and_evaluates_by_no_changed_field(make: Make) -> None:
    """Training and evaluation for each field of a task's configuration, with that field changed; then one as agreed."""
    whole = {path.removeprefix("config.") for path in FIELDS if path.startswith("config.")}
    nested = {path for path in whole if path.partition(".")[0] in ("training", "backbone") and "shape" not in path}
    assert set(ON_THE_WIRE) == nested | set(TaskConfig.model_fields) - {"training", "backbone"}
    coordinator = make.coordinator(rounds=1)
    changes = list(ON_THE_WIRE.items())
    coordinator.plan = [*[("train", 1)] * len(changes), *[("evaluate", 0)] * len(changes), ("train", 1)]

    def garble(task: dict[str, Any]) -> dict[str, Any]:
        at = 2 * len(changes) + 1 - len(coordinator.plan)
        if at < 2 * len(changes):
            path, change = changes[at % len(changes)]
            part = path.partition(".")[0] if "." in path else None
            (task["config"] if part is None else task["config"][part]).update(change)
        return task

    coordinator.garble = garble
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert [failure["type"] for failure in coordinator.failures] == ["NotAgreed"] * len(changes) * 2
    assert not coordinator.evaluations
    for path, failure in zip([*ON_THE_WIRE, *ON_THE_WIRE], coordinator.failures, strict=True):
        assert f"{path}" in failure["detail"]
    assert len(sent_updates(coordinator)) == len(coordinator.accepted) == 1


def test_the_number_of_peers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def peers(count: int) -> Task:
        known = [Peer(name=f"c{number}", role="trainer") for number in range(count)]
        return task_of(CONFIG.model_copy(update={"peers": known}))

    alone = agreement_to(CONFIG, tmp_path / "alone")
    with pytest.raises(NotAgreed, match="peers describes 1 client instead of 0 at most"):
        alone.expect(peers(1))
    monkeypatch.setattr(PromptFL, "needs", Needs(domain_descriptions=True))
    together = agreement_to(CONFIG, tmp_path / "together")
    together.expect(peers(MOST_PEERS))
    with pytest.raises(
        NotAgreed, match=f"peers describes {MOST_PEERS + 1:,} clients instead of {MOST_PEERS:,} at most"
    ):
        together.expect(peers(MOST_PEERS + 1))


def test_the_owner_is_shown_seed_and_peers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptFL, "needs", Needs(domain_descriptions=True))
    owner = Owner()
    coordinator = make.coordinator(rounds=0, seed=4711)
    asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    text = "\n".join(owner.shown[0].lines())
    assert "4711" in text
    assert f"domain descriptions of at most {MOST_PEERS:,} clients" in text


def test_an_offer_that_is_lost_is_fetched_again(make: Make, settings: Settings) -> None:
    """Without a valid enrolment token the client says what it needs; with one it is the client that it was."""
    coordinator = make.coordinator(rounds=1)
    asyncio.run(make.worker(coordinator).run())
    folder = settings.state_dir
    (folder / "enrolment.json").unlink()
    before = {path.name: path.read_bytes() for path in folder.glob("*.json")}
    lost = settings.model_copy(update={"enrolment_token_file": None})
    with pytest.raises(
        ClientError, match="does not hold all that the federation trains by: give --enrolment-token-file"
    ) as end:
        asyncio.run(make.worker(coordinator, settings=lost).run())
    assert end.value.exit is Exit.NOT_ALLOWED
    assert {path.name: path.read_bytes() for path in folder.glob("*.json")} == before
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK
    assert (folder / "identity.json").read_bytes() == before["identity.json"]
    assert asyncio.run(make.worker(coordinator, settings=lost).run()) is Exit.OK


def test_the_terms_of_a_spec_are_all_there() -> None:
    """A new field of the terms needs no line at the coordinator: every one is found in the spec."""
    spec = resolve_spec({"name": "pets", "method": {"name": "promptfl"}, "seed": 9, "class_names": NAMES})
    terms = TrainingTerms.of(spec)
    assert (terms.seed, terms.rounds, terms.class_names, terms.privacy) == (9, spec.rounds, NAMES, None)
    assert terms.training == spec.training


# Joining: what is wrong is said in one line, with an exit code, before the coordinator hears of the client.


def ends(worker: Worker) -> ClientError:
    with pytest.raises(ClientError) as end:
        asyncio.run(worker.run())
    assert "\n" not in str(end.value)
    assert worker.monitor.status.stage == "failed"
    return end.value


def test_starting_again_is_the_same_client(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=0)
    asyncio.run(make.worker(coordinator).run())
    first = coordinator.client
    coordinator.plan = [("evaluate", 0)]
    asyncio.run(make.worker(coordinator).run())
    assert coordinator.client == first
    assert [call[2] for call in coordinator.calls if call[1].endswith("/clients")] == [201, 200]


def test_a_taken_name(make: Make, settings: Settings, tmp_path: Path) -> None:
    coordinator = make.coordinator(rounds=0)
    asyncio.run(make.worker(coordinator).run())
    other = settings.model_copy(update={"state_dir": tmp_path / "other"})
    error = ends(make.worker(coordinator, settings=other))
    assert error.exit is Exit.NAME_TAKEN
    assert "'hospital-a' is taken" in str(error)


@pytest.mark.parametrize("content", [None, "", "\n", "not\x00printable"])
def test_no_usable_enrolment_token(make: Make, settings: Settings, content: str | None) -> None:
    assert settings.enrolment_token_file is not None
    settings.enrolment_token_file.unlink()
    if content is not None:
        settings.enrolment_token_file.write_text(content)
    coordinator = make.coordinator()
    assert ends(make.worker(coordinator)).exit is Exit.NOT_ALLOWED
    assert ends(make.worker(coordinator, settings=settings.model_copy(update={"enrolment_token_file": None}))).exit is (
        Exit.NOT_ALLOWED
    )
    assert not coordinator.calls


@pytest.mark.parametrize("lost", ["expired", "deleted", "not given"])
def test_who_has_enrolled_needs_no_token_any_more(make: Make, settings: Settings, lost: str) -> None:
    coordinator = make.coordinator(rounds=0)
    asyncio.run(make.worker(coordinator).run())
    coordinator.plan, coordinator.epoch = [("evaluate", 0)], "restored"
    assert settings.enrolment_token_file is not None
    if lost == "expired":
        settings.enrolment_token_file.write_text("expired")
    elif lost == "deleted":
        settings.enrolment_token_file.unlink()
    else:
        settings = settings.model_copy(update={"enrolment_token_file": None})
    assert asyncio.run(make.worker(coordinator, settings=settings).run()) is Exit.OK
    assert len(coordinator.evaluations) == 2


LONG = made_up_source(names=["sun", "a b c d e f g h i j k l m n"])


NEEDS_17 = "'a b c d e f g h i j k l m n' needs 17 tokens and the context 16"


ROOM_FOR_13: dict[str, Any] = {"method": {"name": "promptfl", "m": 16}, "class_names": None}


"""A context of 16 vectors leaves 13 tokens; a template of four words would have had room."""


def answers(response: Response) -> dict[str, Any]:
    return {"alter": lambda request: response}


@pytest.mark.parametrize(("offered", "parts", "exit", "said"), [
    ({"model": "hf-hub:someone/model", "pretrained": None}, {"backbone": None}, Exit.BACKBONE, "--allow-backbone"),
    ({"fingerprint": "sha256:" + "0" * 64}, {}, Exit.BACKBONE, "has other weights here"),
    ({"protocol_version": "1-3"}, {}, Exit.PROTOCOL, r"version 3 of the protocol.*: update the coordinator$"),
    ({"protocol_version": "99"}, {}, Exit.PROTOCOL, r"version 99 of the protocol.*: update this client$"),
    ({"unknown": "of-tomorrow"}, {}, Exit.PROTOCOL, "of-tomorrow"),
    ({"unknown": "other", "method_package": "promptfed-other==2.1"}, {}, Exit.PROTOCOL,
     r"it comes from the package promptfed-other==2\.1: install it beside promptfed, if you trust it"),
    ({"method_package": "promptfed-other==2.1"}, {}, Exit.PROTOCOL,
     r"is promptfed-other==2\.1 at the coordinator and promptfed's own here"),
    (answers(Response(b"<html>a portal</html>")), {}, Exit.PROTOCOL, ""),
    (answers(problem(404, "not-found", "no such federation")), {}, Exit.REFUSED, "no such federation"),
    ({}, {"source": made_up_source(names=["sun", "lynx", "anchor", "otter"])}, Exit.BAD_INPUT,
     "^(?!.*look alike).*does not know the classes 'lynx', 'otter'"),
    ({}, {"source": made_up_source(names=["Sun", "anchor"])}, Exit.BAD_INPUT, r"\(these look alike: 'Sun' and 'sun'\)"),
    (ROOM_FOR_13, {"source": LONG}, Exit.BAD_INPUT, NEEDS_17),
    (ROOM_FOR_13, {"tests": {"novel": LONG}}, Exit.BAD_INPUT, NEEDS_17),
])  # fmt: skip
def test_what_does_not_fit_is_one_line_before_the_client_enrols(
    offered: dict[str, Any], parts: dict[str, Any], exit: Exit, said: str, make: Make
) -> None:
    coordinator = make.coordinator(**{key: value for key, value in offered.items() if key != "unknown"})
    if "unknown" in offered:
        coordinator.method = {"name": offered["unknown"]}
    error = ends(make.worker(coordinator, **parts))
    assert error.exit is exit
    assert re.search(said, str(error)), str(error)
    assert coordinator.client is None


def test_consent_is_to_one_name(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(model="timm:test_vit", pretrained="of-nobody")

    def told(*allowed: str) -> str:
        own = settings.model_copy(update={"allow_backbone": list(allowed)})
        return str(ends(make.worker(coordinator, backbone=None, settings=own)))

    assert "must permit it by --allow-backbone timm:test_vit" in told()
    assert "must permit it by --allow-backbone timm:test_vit" in told("timm:test_vit2", "of-nobody")
    assert "has no weights 'of-nobody'" in told("timm:test_vit")


def test_a_wrong_enrolment_token_and_a_device_that_is_not_here(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator()
    error = ends(make.worker(coordinator, backbone=None, settings=settings.model_copy(update={"device": "cuda:99"})))
    assert error.exit is Exit.BACKBONE
    assert str(error).startswith("The device 'cuda:99' cannot be used: ")
    assert str(error).endswith("Or give --device cpu.")
    assert coordinator.client is None
    assert settings.enrolment_token_file is not None
    settings.enrolment_token_file.write_text("another")
    error = ends(make.worker(coordinator))
    assert error.exit is Exit.NOT_ALLOWED
    assert "the enrolment token is not valid" in str(error)


def test_a_federation_that_is_over(make: Make) -> None:
    coordinator = make.coordinator(rounds=0, state="finished")
    error = ends(make.worker(coordinator))
    assert error.exit is Exit.REFUSED
    assert "is finished" in str(error)
    coordinator.state = "running"
    asyncio.run(make.worker(coordinator).run())
    coordinator.state = "finished"
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK


def folder(root: Path, spoil: str) -> str:
    for name in ("sun", "anchor"):
        (root / name).mkdir(parents=True)
        for index in range(4):
            Image.new("RGB", (8, 8), (index * 9, 0, 0)).save(root / name / f"{index}.png")
    if spoil == "unreadable image":
        (root / "sun" / "2.png").write_bytes(b"\x89PNG\r\n")
    elif spoil == "empty class":
        (root / "moon").mkdir()
    elif spoil == "no class":
        for path in [*root.glob("*/*.png"), *root.glob("*")]:
            path.unlink() if path.is_file() else path.rmdir()
    return f"folder:{root}"


@pytest.mark.parametrize(("spoil", "words"), [
    ("unreadable image", "2.png cannot be read"), ("empty class", "moon is empty"), ("no class", "no class folder"),
    ("uri", "'floppy'"), ("domain", "'two words'"),
])  # fmt: skip
def test_data_that_cannot_be_used(make: Make, settings: Settings, tmp_path: Path, spoil: str, words: str) -> None:
    coordinator = make.coordinator()
    data = "floppy:a" if spoil == "uri" else folder(tmp_path / "images", spoil)
    source = replace(made_up_source(), domain=ImageDomain("two words", "a {}")) if spoil == "domain" else None
    own = settings.model_copy(update={"data": data})
    error = ends(make.worker(coordinator, settings=own, source=source))
    assert error.exit is Exit.BAD_INPUT
    assert words in str(error)
    assert not coordinator.calls


def test_a_state_folder_of_another_federation(make: Make, settings: Settings) -> None:
    coordinator = make.coordinator(rounds=0)
    asyncio.run(make.worker(coordinator).run())
    error = ends(make.worker(coordinator, settings=settings.model_copy(update={"federation": "birds"})))
    assert error.exit is Exit.STATE
    assert "belongs to federation pets" in str(error)


def test_what_enrolment_sends_is_all_that_it_may(make: Make, backbone: Backbone, tmp_path: Path) -> None:
    own = make.settings.model_copy(update={"data": folder(tmp_path / "secret-place", "")})
    coordinator: FakeCoordinator = make.coordinator(rounds=0, class_names=None)
    asyncio.run(make.worker(coordinator, settings=own, source=None).run())
    (body,) = (json.loads(body) for body in coordinator.received if b'"secret"' in body)
    secret: Any = body.pop("secret")
    assert len(secret) == 64
    assert body == {
        "name": "hospital-a", "role": "trainer", "num_samples": 6, "class_names": ["anchor", "sun"], "domain": None,
        "backbone_fingerprint": backbone.fingerprint,
        "backbone_shape": {
            "d_t": backbone.d_t, "d_v": backbone.d_v, "d_e": backbone.d_e, "text_layers": backbone.text_layers,
            "vision_layers": backbone.vision_layers, "context_length": backbone.context_length, "patch_size": 8,
            "patch_tokens": backbone.patch_tokens, **backbone.sizes,
        },
        "device": "cpu", "release": RELEASE, "system": SYSTEM,
    }  # fmt: skip
    assert not any(b"secret-place" in body or TOKEN.encode() in body for body in coordinator.received)


def test_refusal_of_enrolment_leaves_nothing_that_hinders_a_second_try(make: Make) -> None:
    def other_backbone(request: Request) -> Response | None:
        return problem(409, "other-backbone", "x") if request.url.path.endswith("/clients") else None

    coordinator = make.coordinator(rounds=0, alter=other_backbone)
    assert ends(make.worker(coordinator)).exit is Exit.BACKBONE
    coordinator.alter = lambda request: None
    assert asyncio.run(make.worker(coordinator).run()) is Exit.OK


def test_what_is_told_is_what_is_sent(make: Make, backbone: Backbone) -> None:
    owner, coordinator = Owner(), make.coordinator(rounds=2)
    assert asyncio.run(make.worker(coordinator, consent=owner.consent).run()) is Exit.OK
    told, *others = owner.shown
    assert others == []
    assert coordinator.client is not None
    sent = coordinator.client.model_dump(exclude={"secret", "backbone_shape"})
    sent["fingerprint"] = sent.pop("backbone_fingerprint")
    assert told.facts()["declared"] == sent  # the very request that enrolled
    assert (told.facts()["floor"], told.facts()["states"]) == (1, None)
    text = "\n".join(told.lines())
    assert coordinator.client.secret not in text
    assert coordinator.client.secret not in json.dumps(told.facts())
    updates = [decode(body)[0] for body in coordinator.received if body[8:9] == b"{"]
    assert len(updates) == 2
    for update in updates:
        sent = {name: (tuple(one.shape), one.numel() * one.element_size()) for name, one in update.items()}
        (exchange,) = told.exchanges
        assert exchange.when == EACH
        assert sent == {one.name: (one.shape, one.bytes) for one in exchange.tensors}
    assert f"context (4, {backbone.d_t}) float32, {4 * backbone.d_t * 4:,} bytes" in text


def test_a_no_sends_nothing(make: Make) -> None:
    owner, coordinator = Owner(answer=False), make.coordinator()
    with pytest.raises(ClientError, match="nothing of the above was sent") as end:
        asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    assert end.value.exit is Exit.DECLINED
    assert coordinator.client is None
    assert [(verb, path) for verb, path, _ in coordinator.calls if not path.endswith("/enrolment")] == []


def info_of(method: str) -> EnrolmentInfo:
    backbone = BackboneSpec()
    known: dict[str, Any] = {
        "federation_id": "f", "name": "pets", "template": None, "state": "running", "class_names": NAMES,
    }  # fmt: skip
    plan: dict[str, Any] = {"rounds": 3, "training": TrainingSpec(), "seed": 0, "evaluate_every": 1}
    return EnrolmentInfo(method={"name": method}, backbone=backbone, **known, **plan)


def told_of(
    method: Method, declared: Declared, shape: BackboneShape | None, tests: list[str], **changes: Any
) -> Disclosure:
    info = info_of(method.name).model_copy(update=changes)
    terms = terms_of(info, method, "http://127.0.0.1", declared.role, tests)
    return disclose(terms, info, method, declared, shape)


@pytest.fixture
def declared() -> Declared:
    return Declared("a", "trainer", 4, tuple(NAMES), None, "cpu", "sha256:" + "0" * 64)


@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_every_method_can_be_told(declared: Declared, backbone: Backbone, name: str) -> None:
    method = make_method({"name": name})
    told = told_of(method, declared, shape_of(backbone), ["novel"])
    promised = {spec.name for round in (1, 2, 3) for phase in method.phases(round, 3) for spec in phase.up}
    tensors = [one for exchange in told.exchanges for one in exchange.tensors]
    assert {one.name for one in tensors} == promised
    unknown = {size for one in tensors for size in one.shape if isinstance(size, str)}
    assert unknown == ({"n"} if name in ("fast_pt", "fedapt") else set())  # how many domains there will be
    evaluator = replace(declared, role="evaluator")
    assert told_of(method, evaluator, shape_of(backbone), []).exchanges == ()


def test_the_readme_lists_what_the_consent_shows(declared: Declared, backbone: Backbone) -> None:
    section = (ROOT / "README.md").read_text().split("## What leaves a site")[1].split("\n## ")[0]
    listed = set(re.findall(r"\*\*(\w+)\*\*", section))
    shown, figures = set(), ""
    sums = SecureAggregationSpec()
    for more in ({}, {"secure_aggregation": sums}):
        lines = told_of(make_method({"name": "promptfl"}), declared, shape_of(backbone), [], **more).lines()
        leaving = lines[next(k for k, line in enumerate(lines) if line.startswith("Leaves")) :]
        leaving = leaving[: leaving.index("Who learns what of it:")]
        shown |= {found[1] for line in leaving if (found := re.match(r"  (\w+) {2,}", line)) and found[1] != "nothing"}
        figures += " ".join(leaving)
    assert listed == shown
    for word in ("ECE", "macro-F1", "seconds", "mean shares", "number of images"):
        assert word in section, word
        assert word in figures, word


def test_the_floor_and_its_states_are_told(declared: Declared, backbone: Backbone) -> None:
    info = info_of("promptfl")
    method = make_method({"name": "promptfl"})
    terms = terms_of(info, method, "http://127.0.0.1", declared.role, [])
    told = disclose(terms, info, method, declared, shape_of(backbone), limits=(10, 15))
    text = "\n".join(told.lines())
    assert "all from ranges of 10 images; nothing of a test set of fewer than 20" in text
    assert "of at most 15 states on one test set (metrics.states); 4 may be asked for" in text
    assert "ECE" not in text
    fewer = "\n".join(replace(told, limits=(10, 3)).lines())
    assert "of at most 3 states on one test set (metrics.states), the last round's among them; 4 may be asked" in fewer
    assert (told.facts()["floor"], told.facts()["states"]) == (10, 15)
    several = terms.model_copy(update={"method": terms.method | {"task": "multi_label"}})
    text = "\n".join(replace(told, terms=several).lines())
    assert "of several labels no figure leaves under this site's floor" in text


def test_the_last_rounds_tensors_are_told_apart(declared: Declared, backbone: Backbone) -> None:
    told = told_of(make_method({"name": "fast_pt"}), declared, shape_of(backbone), [])
    assert [(one.phase, one.when) for one in told.exchanges] == [
        ("global", EACH),
        ("domain_prompts", "after the last round"),
    ]
    by_name = {tensor.name: tensor for exchange in told.exchanges for tensor in exchange.tensors}
    assert by_name["classifier_weight"].shape == ("n", backbone.d_e)
    assert by_name["classifier_weight"].bytes is None


def test_of_secure_sums_it_is_told_that_changes_leave_under_masks_alone(declared: Declared) -> None:
    method = make_method({"name": "promptfl"})
    secure = SecureAggregationSpec(minimum=5)
    told = "\n".join(told_of(method, declared, None, [], secure_aggregation=secure, evaluation="withheld").lines())
    assert "as a part of a sum that nobody sees into, 64 bits a number (phase train)" in told
    assert "of the changes nothing but sums of at least 5 clients" in told
    assert "metrics   none" in told
    assert "accuracies are withheld" in told
    assert "gradients of images" not in told
    assert "key       public, made here" in told
    plain = "\n".join(told_of(method, declared, None, [], secure_aggregation=secure, evaluation="plain").lines())
    assert "accuracy  on its test images" in plain


def ask(monkeypatch: pytest.MonkeyPatch, disclosure: Disclosure, answer: str | None, ask: bool = True) -> bool:
    """What the terminal makes of an answer; None where no terminal is there."""
    leader, follower = pty.openpty()
    try:
        with os.fdopen(follower, "r+b", buffering=0) as raw, io.TextIOWrapper(raw) as stdin:
            if answer is not None:
                monkeypatch.setattr(sys, "stdin", stdin)
                monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
                os.write(leader, answer.encode())
            else:
                monkeypatch.setattr(sys, "stdin", io.StringIO(""))
            terminal = Terminal("text", ask)
            return asyncio.run(asyncio.wait_for(terminal.consent([], disclosure), PATIENCE))
    finally:
        os.close(leader)


@pytest.fixture
def disclosure(declared: Declared) -> Disclosure:
    return told_of(make_method({"name": "promptfl"}), declared, None, [])


@pytest.mark.parametrize(
    ("answer", "joins"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), (None, True)]
)
def test_a_person_is_asked_and_nobody_else(
    monkeypatch: pytest.MonkeyPatch, disclosure: Disclosure, answer: str | None, joins: bool
) -> None:
    assert ask(monkeypatch, disclosure, answer) is joins


def test_yes_is_not_asked(monkeypatch: pytest.MonkeyPatch, disclosure: Disclosure) -> None:
    assert ask(monkeypatch, disclosure, "n\n", ask=False) is True


def test_a_log_of_json_has_the_disclosure_as_one_event(
    disclosure: Disclosure, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO, "promptfed.client"):
        terminal = Terminal("json", ask=False)
        assert asyncio.run(terminal.consent([Check("images", "pass", "were read")], disclosure))
    events = {record.event: record.facts for record in caplog.records}
    assert events["check"]["verdict"] == "pass"
    assert events["disclosure"]["declared"]["class_names"] == NAMES
    assert capsys.readouterr().err == ""


def given(**changes: Any) -> dict[str, Any]:
    return {"coordinator": "http://127.0.0.1:8080", "federation": "pets", "data": "digits"} | changes


def test_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert verdicts("auto", "cpu", "cuda", "cuda:1") == ["warn", "warn", "fail", "fail"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: Card())
    assert verdicts("auto", "cuda", "cuda:1", "cpu") == ["pass", "pass", "fail", "warn"]


class Card:
    name = "a GPU"
    total_memory = 8 << 30


def verdicts(*wanted: str) -> list[str]:
    return [check_device(one).verdict for one in wanted]


def test_names_that_look_alike_are_a_warning(source: Source) -> None:
    names = ("blue bird", "Blue-Bird", "cat", "c\u0430t", "dog", "d\u200bog", "bird", "birds", "caf\u00e9", "cafe")
    text = check_data(replace(source, class_names=names), "trainer")[1]
    assert (text.name, text.verdict) == ("classes", "warn")
    for pair in ("'Blue-Bird' and 'blue bird'", "'cat' and 'c\u0430t' (spelt 'c\\u0430t')", "(spelt 'd\\u200bog')"):
        assert pair in text.text
    assert "birds" not in text.text
    assert "caf" not in text.text
    assert "classes" not in [check.name for check in check_data(source, "trainer")]


CENTRAL = {"level": "client", "clip": 1.5, "noise_multiplier": 2.0, "delta": 1e-5, "evaluation": "plain"}
NOISY = PrivacySpec(
    level="sample", clip=0.5, noise_multiplier=2.0, delta=1e-5, evaluation="noisy", evaluation_epsilon=0.5
)
ALL_RANGES = "            all from ranges of 10 images; nothing of a test set of fewer than 20"


@pytest.mark.parametrize(("changes", "there", "absent"), [
    ({}, ["  classes   told apart among 4 of the federation's; template the data's own", "  rounds    up to 3",
          "  seed      7, which batches and crops follow from",
          "  backbone  promptfed-photo with weights embedded, fp32",
          "  accuracy  on its test images, novel, with the number of images, and the template's beside it",
          "  tensor    context (4, 112) float32, 1,792 bytes",
          "  progress  while it trains: the part of its steps that is done",
          "  evaluate  every 1 round, before the first and after the last", "  domain    none declared",
          "  every other site: the aggregate of all updates", "  metrics   loss, train_seconds, trained_parameters"],
     ["THIS IS NOT", "clients  ", "privacy  ", "  sums", "rounded", "grey"]),
    ({"class_names": None, "template": "a {}", "evaluate_every": 2},
     ["  classes   told apart among this client's own; template 'a {}'",
      "  evaluate  every 2 rounds, before the first and after the last"], []),
    ({"method": {"name": "fedclip"}}, ["  the operator: features of single images", " bytes in all"], []),
    ({"limits": (10, 4)}, [ALL_RANGES, "at most 4 states on one test set (metrics.states); 4 may be asked"], []),
    ({"limits": (10, 3)},
     ["of at most 3 states on one test set (metrics.states), the last round's among them; 4 may be asked for"], []),
    ({"limits": (10, 4), "rounds": 7, "evaluate_every": 2},
     ["states on one test set (metrics.states), the last round's among them; 5 may"], []),
    ({"method": {"name": "promptfl", "task": "multi_label"}, "limits": (2, 4)},
     ["of several labels no figure leaves"], ["accuracy  on"]),
    ({"method": {"name": "promptfl", "task": "multi_label"}}, ["accuracy  on its test images"], ["no figure leaves"]),
    ({"selection": SelectionSpec(share=0.25)},
     ["accuracy  on 25% of the training images, which are held out, and once at the end its test images, novel,"], []),
    ({"privacy": NOISY, "limits": (10, 3)},
     ["as numbers of right answers with noise, ε = 0.5 each out of the test images' own budget", "at most 3 states"],
     ["  progress", "all from ranges", "adds noise"]),
    ({"privacy": PrivacySpec(**CENTRAL, epsilon=8.0)},
     ["noise of 2 times the clip 1.5, ε = 8 at most at δ = 1e-05: whoever"], ["  progress"]),
    ({"privacy": PrivacySpec(**CENTRAL)}, ["noise of 2 times the clip 1.5 at δ = 1e-05: whoever"], []),
    ({"evaluation": "withheld"}, ["nothing   but that it was made: accuracies are withheld"], ["accuracy  on"]),
    ({"compression": CompressionSpec(up="int8")},
     ["  sending   changes from what was received, rounded at random to int8"], []),
    ({"told": ("the seed is 8 instead of 7",)},
     ["THIS IS NOT WHAT YOU AGREED TO BEFORE:", "  the seed is 8 instead of 7"], []),
    ({"role": "evaluator"},
     ["  images    4, the number of test images"], ["rounds  ", "seed  ", "tensor", "gradients of images", "key  "]),
    ({"secure_aggregation": SecureAggregationSpec(minimum=5), "weighting": Weighting(weighting="samples")},
     ["learns sums of at least 5 clients; other sites learn a key and the number of training images, no name"],
      ["progress"]),
    ({"secure_aggregation": SecureAggregationSpec(minimum=5), "weighting": Weighting(weighting="uniform")},
     ["other sites learn a key, no name", "  key       public"], []),
    ({"role": "evaluator", "secure_aggregation": SecureAggregationSpec(minimum=5)}, ["leave under masks"], ["  key "]),
])  # fmt: skip
def test_what_the_owner_reads(changes: dict[str, Any], there: list[str], absent: list[str], backbone: Backbone) -> None:
    given = {"method": {"name": "promptfl", "m": 4}, "seed": 7} | changes
    limits, told, role = given.pop("limits", (1, 4)), given.pop("told", ()), given.pop("role", "trainer")
    method = make_method(given["method"])
    info = info_of("promptfl").model_copy(update=given)
    terms = terms_of(info, method, "http://127.0.0.1", role, ["novel"])
    declared = Declared("a", role, 4, tuple(NAMES), None, "cpu", "sha256:" + "0" * 64)
    lines = disclose(terms, info, method, declared, shape_of(backbone), told, None, limits).lines()
    text = "\n".join(lines)
    assert [line for line in there if line not in text] == []
    assert [line for line in absent if line in text] == []


def test_when_a_phase_leaves() -> None:
    every = list(range(1, ROUNDS + 1))
    said = {
        EACH: every,
        "before the first round": [1],
        "after the last round": [ROUNDS],
        "in round 2 and later": every[1:],
    }
    assert {_when(rounds): rounds for rounds in said.values()} == said
