"""Many clients of one data set: the same labels, images and digests as each by itself, and nothing done twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from PIL import Image

from promptfed.shared.data import DataError, Source, folder, open_source, symbols
from promptfed.shared.data import source as data_source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.data.source import image_digest

SMALL = "symbols:sketch?topic=faces&per_class=5&test_per_class=5"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The data sets that were really opened."""
    found: list[str] = []
    real = symbols.open_symbols

    def opener(body: str, options) -> Source:  # type: ignore[no-untyped-def]
        found.append(options.uri)
        return real(body, options)

    monkeypatch.setattr(symbols, "open_symbols", opener)
    return found


def assert_same(found: Source, wanted: Source) -> None:
    assert (found.uri, found.class_names, found.domain, found.template) == (
        wanted.uri,
        wanted.class_names,
        wanted.domain,
        wanted.template,
    )
    for mine, other in ((found.train, wanted.train), (found.test, wanted.test)):
        assert torch.equal(mine.labels, other.labels)
        assert [mine.digest(k) for k in range(len(mine))] == [other.digest(k) for k in range(len(other))]
        assert mine.image(len(mine) - 1).tobytes() == other.image(len(other) - 1).tobytes()


OPTIONS = [
    "", "&shots=2", "&classes=novel", "&partition=iid&clients=3&client={}",
    "&partition=dirichlet&alpha=1&clients=3&client={}&partition_seed=2", "&partition=pathological&clients=3&client={}",
    "&classes=base&partition=pathological&classes_per_client=1&client={}&shots=3",
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_each_client_sees_what_it_would_see_alone(options: str, opened: list[str]) -> None:
    shared = SharedSources()
    uris = [SMALL + options.format(k) for k in range(3)]
    together = [shared.open(uri) for uri in uris]
    assert len(opened) == 1
    for uri, source in zip(uris, together, strict=True):
        assert_same(source, open_source(uri))


def test_another_data_set_is_another(opened: list[str]) -> None:
    shared = SharedSources()
    for uri in (
        SMALL,
        SMALL + "&shots=1",
        SMALL.replace("per_class=5&", "per_class=7&"),
        SMALL.replace("sketch", "neon"),
    ):
        assert_same(shared.open(uri), open_source(uri))
    assert len([uri for uri in opened if uri != SMALL + "&shots=1"]) == 2 * 3


def test_an_image_is_decoded_and_hashed_once_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cat", "bird"):
        (tmp_path / name).mkdir()
        for k in range(10):
            Image.new("RGB", (4, 4), (k, len(name), 0)).save(tmp_path / name / f"{k}.png")
    hashed: list[bytes] = []
    for module in (folder, data_source):
        monkeypatch.setattr(
            module, "image_digest", lambda image: (hashed.append(image.tobytes()), image_digest(image))[1]
        )
    shared = SharedSources()
    clients = [shared.open(f"folder:{tmp_path}?partition=iid&clients=2&client={k}") for k in (0, 1, 0, 1)]
    all_digests = [[client.train.digest(k) for k in range(len(client.train))] for client in clients]
    assert len(hashed) == len(set(hashed)) == 20
    assert all_digests[0] == all_digests[2]
    assert not set(all_digests[0]) & set(all_digests[1])


def test_a_source_can_be_handed_in() -> None:
    shared, source = SharedSources(), open_source(SMALL)
    shared.add("anything", source)
    assert shared.open("anything") is source


REFUSED = [
    "nothing:here", SMALL + "&unknown=1", SMALL + "&partition=iid&clients=3&client=3",
    SMALL + "&partition=iid&clients=3", SMALL + "&alpha=1", "symbols:nowhere",
]  # fmt: skip


@pytest.mark.parametrize("uri", REFUSED)
def test_refusals_are_those_of_a_single_client(uri: str) -> None:
    shared = SharedSources()
    shared.open(SMALL + "&partition=iid&clients=3&client=0")
    with pytest.raises(DataError) as alone:
        open_source(uri)
    with pytest.raises(DataError) as together:
        shared.open(uri)
    assert str(together.value) == str(alone.value)
