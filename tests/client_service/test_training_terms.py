"""Everything that reaches training is agreed to: each field of a task is changed, and the client refuses to train."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.privacy.agreement import AgreedTerms, Agreement, NotAgreed, terms_of
from promptfed.client_service.settings import Settings
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import MOST_PEERS, EnrolmentInfo, PayloadRef, Peer, SecurePart, Task, TaskConfig
from promptfed.shared.methods import make_method, resolve_spec
from promptfed.shared.methods.core.interface import Needs
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec.sections import CompressionSpec, SecureAggregationSpec, Weighting
from promptfed.shared.spec.spec import BackboneShape, BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from tests.client_service.conftest import Make
from tests.client_service.test_agreement import Owner, sent_updates
from tests.support.fake_coordinator import NAMES

FINGERPRINT = "sha256:" + "1" * 64

NOT_AGREED_TO = {
    "task_id": "names the answer",
    "kind": "the schedule is agreed to: `Agreement.expect` checks it against rounds and role",
    "round": "the schedule, as above",
    "phase": "the schedule, as above",
    "deadline": "how long the coordinator waits",
    "seconds_left": "how long the coordinator waits",
    "payload": "changes with every round; it is checked against the phase's tensors, and against the site's policy",
    "common_payload": "the coordinator's word on what others were given; the owner is told",
    "epoch": "tells a restarted coordinator; the number of steps back is bounded",
    "secure": "the attempt at a sum; a client checks it in its own part of the protocol",
    "config.backbone.shape": "the sizes are those of the weights that are loaded",
    "config.peers": "vary as clients join; whether there are any, and how many at most, is agreed to",
}
"""Fields of a task that no owner agrees to, with the reason. Others are refused where they change."""

CONFIG = TaskConfig(
    method={"name": "promptfl", "m": 4},
    training=TrainingSpec(augmentation="crop_flip", views=3),
    compression=CompressionSpec(up="int8"),
    backbone=BackboneSpec(fingerprint=FINGERPRINT, shape=BackboneShape(d_e=8)),
    class_names=NAMES,
    template="a photo of a {}.",
    rounds=3,
    seed=7,
    privacy=PrivacySpec(level="client", clip=1.0, noise_multiplier=1.0),
    secure_aggregation=SecureAggregationSpec(),
    weighting=Weighting(weighting="samples", max_weight_share=0.5),
    peers=[],
)
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


# Over the wire, to a client at work

ON_THE_WIRE: dict[str, dict[str, Any]] = {
    "method": {"method": {"name": "promptfl", "m": 5}}, "training.epochs": {"epochs": 2},
    "training.batch_size": {"batch_size": 31}, "training.optimizer": {"optimizer": "adam"},
    "training.learning_rate": {"learning_rate": 0.2}, "training.momentum": {"momentum": 0.5},
    "training.weight_decay": {"weight_decay": 0.5}, "training.schedule": {"schedule": "cosine"},
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


# Peers


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


# What the owner is shown and asked


def test_the_owner_is_shown_seed_and_peers(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptFL, "needs", Needs(domain_descriptions=True))
    owner = Owner()
    coordinator = make.coordinator(rounds=0, seed=4711)
    asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    text = "\n".join(owner.shown[0].lines())
    assert "4711" in text
    assert f"domain descriptions of at most {MOST_PEERS:,} clients" in text


@pytest.mark.parametrize(("what", "value"), [("seed", 8), ("template", "a scan of a {}.")])
def test_another_offer_after_a_restart_is_asked_again(make: Make, what: str, value: Any) -> None:
    coordinator, owner = make.coordinator(rounds=0), Owner()
    asyncio.run(make.worker(coordinator, consent=owner.consent).run())
    setattr(coordinator, what, value)
    owner.answer = False
    with pytest.raises(ClientError, match=f"the federation is not what you agreed to .*{what}"):
        asyncio.run(make.worker(coordinator, consent=owner.consent).run())


# State folders that are not whole


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
