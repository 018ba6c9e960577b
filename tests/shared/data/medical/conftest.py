"""Each test has an index of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from promptfed.shared.data import readers, worker


@pytest.fixture(autouse=True)
def own_index(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a child runs, run in this process: a child takes a second to start."""

    def read(child: readers._Child, request: readers.Request, into: memoryview | None) -> readers.Answer:
        told, parts = worker.answer(json.loads(json.dumps(request.__dict__)))
        return readers._answer(json.loads(json.dumps(told)), memoryview(b"".join(parts)))

    monkeypatch.setattr(readers._Child, "read", read)
