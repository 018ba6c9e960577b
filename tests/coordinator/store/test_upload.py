"""A body in memory is what a file of it would be."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock, call

import pytest

from promptfed.coordinator.store.upload import Upload
from promptfed.shared.tensors import TensorError


def test_a_small_body_is_refused_and_kept_as_a_file_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content, file, held = b"no tensors at all", tmp_path / "file", Mock()
    file.write_bytes(content)
    small, large = Upload(tmp_path / "small", 17, "sha", content=content), Upload(file, 17, "sha")
    told = list[str]()
    for one in (small, large):
        assert one.read() == content
        with pytest.raises(TensorError) as refused:
            one.tensors()
        told.append(f"{refused.value.kind} {refused.value}")
        one.keep(held)
    assert told[0] == told[1]
    assert held.method_calls == [call.add_small(content, "sha"), call.adopt(file, "sha")]
    assert list(tmp_path.iterdir()) == [file]
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left")))
    with pytest.raises(OSError, match="No space left"):
        small.tensors()
