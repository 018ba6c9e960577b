"""`promptfed federation words`: the backbone's words and the class names' features, as the coordinator takes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from promptfed.cli.commands.words import make_lexicon, supply_words, vocabulary, whole_words
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError
from promptfed.shared.clip import Backbone, load_backbone, shape_of, tiny
from promptfed.shared.methods.core.text_features import name_features
from promptfed.shared.tensors.torch_tensors import decode
from promptfed.testing.clients import CLASSES, drive
from tests.support.coordinators import InThread, in_thread


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    return load_backbone(tiny.MODEL, "embedded")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[InThread]:
    with in_thread(tmp_path / "data") as server:
        yield server


def test_words_are_single_tokens_with_their_own_embeddings(backbone: Backbone) -> None:
    words, embeddings = vocabulary(backbone)
    assert words == sorted(set(words))
    assert embeddings.shape == (len(words), backbone.d_t)
    assert {"circle", "photo", "the"} <= set(words)
    for word in ("circle", "photo"):
        assert torch.equal(embeddings[words.index(word)], backbone.embed_words(word)[0])


def test_each_kind_of_vocabulary_has_its_own_mark_of_a_word() -> None:
    clip = SimpleNamespace(encoder={"cat</w>": 0, "ca": 1, "!</w>": 2, "ü</w>": 3, "dog</w>": 4})
    assert list(whole_words(clip)) == ["cat", "dog"]

    def of(*tokens: str) -> list[str]:
        inner = SimpleNamespace(get_vocab=lambda: dict.fromkeys(tokens, 0))
        return list(whole_words(SimpleNamespace(tokenizer=inner)))

    assert of("Ġcat", "cat", "Ġ1", "Ġdog") == ["cat", "dog"]
    assert of("▁cat", "cat") == ["cat"]
    assert of("cat", "##s", "[CLS]") == ["cat"]


def test_a_lexicon_names_its_rows(backbone: Backbone) -> None:
    tensors, about = decode(make_lexicon(backbone, CLASSES))
    assert isinstance(about, dict)
    assert about["class_names"] == CLASSES
    assert len(about["words"]) == len(tensors["word_embeddings"])
    assert torch.equal(tensors["class_features"], name_features(backbone, CLASSES))


def test_the_command_makes_the_page_speak(
    coordinator: InThread, backbone: Backbone, capsys: pytest.CaptureFixture[str]
) -> None:
    own = {"backbone_fingerprint": backbone.fingerprint, "backbone_shape": shape_of(backbone).model_dump()}
    federation = coordinator.create(participation={"min_clients": 1, "deadline_seconds": 3600}, rounds=1)
    clients = coordinator.enrol(federation, "a", **own)
    coordinator.post(f"{federation}/start")
    drive(clients)
    token = coordinator.operator["Authorization"].split()[1]
    with Coordinator(coordinator.url, token) as api:
        supply_words(api, "eyes", allow_backbone=False, as_json=False)
    assert "features of 3 class names" in " ".join(capsys.readouterr().out.split())
    found = coordinator.get(f"{federation}/insights")
    assert len(found["words"]["contexts"][0]["vectors"]) == 4
    assert found["words"]["spacing"] > 0


def test_another_backbone_s_words_are_refused(coordinator: InThread) -> None:
    coordinator.enrol(coordinator.create(), "a")
    token = coordinator.operator["Authorization"].split()[1]
    with Coordinator(coordinator.url, token) as api, pytest.raises(CommandError, match="fingerprint"):
        supply_words(api, "eyes", allow_backbone=False, as_json=True)
