"""Joining: what is wrong is said in one line, with an exit code, before the coordinator hears of the client."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import Request, Response
from PIL import Image

from promptfed.client_service.exits import ClientError, Exit
from promptfed.client_service.settings import Settings
from promptfed.client_service.worker import Worker
from promptfed.shared.clip import Backbone
from promptfed.shared.data import ImageDomain
from promptfed.shared.spec.section import RELEASE, SYSTEM
from tests.client_service.conftest import Make
from tests.support.fake_coordinator import TOKEN, FakeCoordinator, made_up_source, problem


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


@pytest.mark.parametrize(
    ("offered", "parts", "exit", "said"),
    [
        ({"model": "hf-hub:someone/model", "pretrained": None}, {"backbone": None}, Exit.BACKBONE, "--allow-backbone"),
        ({"fingerprint": "sha256:" + "0" * 64}, {}, Exit.BACKBONE, "has other weights here"),
        ({"protocol_version": "1-3"}, {}, Exit.PROTOCOL, r"version 3 of the protocol.*: update the coordinator$"),
        ({"protocol_version": "99"}, {}, Exit.PROTOCOL, r"version 99 of the protocol.*: update this client$"),
        ({"secure_aggregation": {"minimum": 3}}, {}, Exit.PROTOCOL, "it is of an earlier version"),
        ({"unknown": "of-tomorrow"}, {}, Exit.PROTOCOL, "of-tomorrow"),
        (
            {"unknown": "other", "method_package": "promptfed-other==2.1"},
            {},
            Exit.PROTOCOL,
            r"it comes from the package promptfed-other==2\.1: install it beside promptfed, if you trust it",
        ),
        (
            {"method_package": "promptfed-other==2.1"},
            {},
            Exit.PROTOCOL,
            r"is promptfed-other==2\.1 at the coordinator and promptfed's own here",
        ),
        (answers(Response(b"<html>a portal</html>")), {}, Exit.PROTOCOL, ""),
        (answers(problem(404, "not-found", "no such federation")), {}, Exit.REFUSED, "no such federation"),
        (
            answers(Response(b"<html>a portal</html>", 404)),
            {},
            Exit.REFUSED,
            r"(?=.*answers 404).*is the address right\?",
        ),
        (
            {},
            {"source": made_up_source(names=["sun", "lynx", "anchor", "otter"])},
            Exit.BAD_INPUT,
            "^(?!.*look alike).*does not know the classes 'lynx', 'otter'",
        ),
        (
            {},
            {"source": made_up_source(names=["Sun", "anchor"])},
            Exit.BAD_INPUT,
            r"\(these look alike: 'Sun' and 'sun'\)",
        ),
        (ROOM_FOR_13, {"source": LONG}, Exit.BAD_INPUT, NEEDS_17),
        (ROOM_FOR_13, {"tests": {"novel": LONG}}, Exit.BAD_INPUT, NEEDS_17),
    ],
)
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


@pytest.mark.parametrize(
    ("model", "refused", "permitted", "said"),
    [
        ("ViT-S-32-alt", [[], ["ViT-S-32-alt"], ["hf-hub:someone/model"]], ["FILE"], "must permit it"),
        ("timm:test_vit", [[], ["timm:test_vit"], ["FILE"]], ["timm:test_vit", "FILE"], "--allow-backbone"),
    ],
)
def test_consent_is_to_one_name_and_to_a_model_of_timm_none_to_a_file_with_weights(
    model: str,
    refused: list[list[str]],
    permitted: list[str],
    said: str,
    make: Make,
    settings: Settings,
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "weights.pt"
    checkpoint.write_bytes(b"no checkpoint")
    coordinator = make.coordinator(model=model, pretrained=str(checkpoint))

    def told(allowed: list[str]) -> str:
        names = [str(checkpoint) if one == "FILE" else one for one in allowed]
        own = settings.model_copy(update={"allow_backbone": names})
        return str(ends(make.worker(coordinator, backbone=None, settings=own)))

    assert all(said in told(allowed) for allowed in refused)
    assert "cannot be loaded" in told(permitted)


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


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("unreadable image", "2.png cannot be read"),
        ("empty class", "moon is empty"),
        ("no class", "no class folder"),
        ("uri", "'floppy'"),
        ("domain", "'two words'"),
    ],
)
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


def test_what_enrolment_sends_is_all_that_it_may(
    make: Make, settings: Settings, backbone: Backbone, tmp_path: Path
) -> None:
    own = settings.model_copy(update={"data": folder(tmp_path / "secret-place", "")})
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
