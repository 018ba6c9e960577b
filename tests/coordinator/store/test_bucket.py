"""Where requests to an object store go."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.coordinator.store.bucket import ENDPOINTS, Bucket

obstore = pytest.importorskip("obstore.store", reason="object stores: install promptfed[s3]")


@pytest.mark.parametrize("name", [None, *ENDPOINTS])
def test_the_endpoint_is_the_environment_s_or_amazon_s(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(obstore.S3Store, "from_url", lambda url, **options: asked.append((url, options["config"])))
    for known in ENDPOINTS:
        monkeypatch.setenv(known, "https://here.example" if known == name else "")
    Bucket("s3://bucket/prefix")
    config = {"endpoint": "https://here.example"} if name is not None else None
    assert asked == [("s3://bucket/prefix", config)] * 2
