"""What is told of a backbone: sizes, times, memory, and the methods that run with it, as the methods themselves say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from promptfed.cli.main import app
from promptfed.runtime import backbones
from promptfed.runtime.backbones import PARTS, examine, methods_for
from promptfed.sdk.errors import Exit
from promptfed.shared.clip import Backbone, BackboneError, load_backbone, shape_of, tiny
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core.interface.base import MethodError


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.mark.extended
def test_the_command_tells_what_a_backbone_is_and_what_it_takes(backbone: Backbone) -> None:
    done = CliRunner().invoke(app, ["doctor", "--backbone", tiny.MODEL, "--device", "cpu", "--json"])
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["parameters"] == sum(parameter.numel() for parameter in backbone.model.parameters())
    assert facts["preparation"]["mean"] == list(backbone.open_clip_config["preprocess_cfg"]["mean"])
    assert set(facts["seconds"]) == set(facts["memory_mib"]) == set(PARTS)
    assert all(0 < value < 60 for value in facts["seconds"].values())
    assert facts["shape"]["d_t"] == backbone.d_t
    assert set(facts["methods"]) == set(METHODS)
    shown = CliRunner().invoke(app, ["doctor", "--backbone", tiny.MODEL, "--device", "cpu"]).output
    assert "7 million parameters" in shown
    assert f"{len(METHODS)} methods run: coop, " in shown


@pytest.mark.extended
def test_an_unknown_backbone_is_named_in_one_line() -> None:
    done = CliRunner().invoke(app, ["doctor", "--backbone", "ViT-B-61", "--device", "cpu"])
    assert done.exit_code == Exit.BACKBONE
    assert "open_clip has no model 'ViT-B-61'" in done.output
    assert "Traceback" not in done.output


def test_what_takes_too_long_is_told() -> None:
    with pytest.raises(BackboneError, match=r"not within 0\.1 s|not within 0 s"):
        examine(tiny.MODEL, tiny.PRETRAINED, seconds=0.1)


def test_a_part_that_does_not_work_is_left_out_with_its_reason(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any) -> None:
        raise BackboneError("no prompts here")

    monkeypatch.setattr(backbones, "_image_step", refuse)
    told: list[backbones.BackboneFacts] = []
    backbones.measure(tiny.MODEL, "embedded", "cpu", told.append)
    assert told[-1].without == {"image_step": "no prompts here"}
    assert set(told[-1].seconds) == {"features", "text_step"}


@pytest.mark.parametrize("lacking", [("d_v", "patch_tokens"), ("d_t", "text_layers", "context_length")])
def test_refused_methods_have_their_own_reason(
    backbone: Backbone, lacking: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = shape_of(backbone).model_copy(update=dict.fromkeys(lacking))
    monkeypatch.setattr("promptfed.shared.clip.shape.shape_of", lambda backbone: shape)
    able, refused = methods_for(backbone)
    assert ("promptfl" in able) is ("d_t" not in lacking)
    assert "plan" in refused
    assert not set(able) & set(refused)
    assert set(able) | set(refused) == set(METHODS)
    for name, reason in refused.items():
        kind = make_method({"name": name})
        if kind.needs.vision_transformer and "d_v" in lacking:
            with pytest.raises(MethodError) as caught:
                kind.check_backbone(shape)
            assert reason == str(caught.value)


def test_what_a_client_would_refuse_is_refused_too(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Backbone) -> None:
        raise BackboneError("its blocks are unusual")

    monkeypatch.setattr(Backbone, "vision_tower", refuse)
    _, refused = methods_for(backbone)
    assert refused["fedmaple"] == "its blocks are unusual"


def test_a_tokenizer_that_is_not_at_hand_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(source: str) -> None:
        raise OSError("no network")

    monkeypatch.setattr("open_clip.get_tokenizer", absent)
    told: list[backbones.BackboneFacts] = []
    backbones.measure(tiny.MODEL, "embedded", "cpu", told.append)
    assert "no network" in str(told[-1].tokenizer)
    assert set(told[-1].seconds) == set(PARTS)
    assert set(told[-1].methods) == set(METHODS)
