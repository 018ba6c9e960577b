"""A small backbone with random weights and a client with made-up features."""

from __future__ import annotations

import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.methods.core.interface import ClientContext
from tests.support.terms import training_terms

Make = Callable[..., ClientContext]
Wire = list[tuple[str, bytes, bytes]]
NAMES = ("sun", "chess knight", "umbrella", "pair of scissors", "hot air balloon")


@dataclass
class MadeUpSplit:
    """Random features on the sphere with labels."""

    values: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def features(self) -> Tensor:
        return self.values

    def raw_features(self) -> Tensor:
        return self.values * (10 + torch.arange(len(self.values)).unsqueeze(1))

    def images(self, indices: Tensor) -> Tensor:
        raise AssertionError("a method with cached features must not look at images")


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    """All that goes over the wire of a simulation either way, in order: "verb path" or "answer path", head, body.

    A payload within a task stands there too, as if it had been fetched.
    """
    passed: Wire = []
    handle = InProcess.handle_async_request

    async def recorded(self: InProcess, request: httpx.Request) -> httpx.Response:
        body, path = await request.aread(), request.url.path
        head = str(request.url).encode() + repr(request.headers.raw).encode()
        passed.append((f"{request.method} {path}", head, body))
        answer = await handle(self, request)
        content = await answer.aread()
        passed.append((f"answer {path}", repr(answer.headers.raw).encode(), content))
        if content and path.endswith(("/task", "/update", "/evaluation")):
            told = json.loads(content)
            payload = (told.get("next") or told).get("payload", {})
            passed.extend([(f"answer {payload['url']}", b"", b64decode(payload["data"]))] if "data" in payload else [])
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)

    monkeypatch.setattr(InProcess, "handle_async_request", recorded)
    return passed


@pytest.fixture(scope="session")
def backbone() -> Backbone:
    return load_backbone("promptfed-tiny", None)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


@pytest.fixture
def make_context(backbone: Backbone) -> Callable[..., ClientContext]:
    def make(count: int = 10, *, round: int = 1, rounds: int = 4, **training: Any) -> ClientContext:
        draws = torch.Generator().manual_seed(5)
        features = F.normalize(torch.randn(count, backbone.d_e, generator=draws), dim=-1)
        labels = torch.randint(len(NAMES), (count,), generator=draws)
        return ClientContext(
            backbone=backbone, class_names=NAMES, template="a photo of a {}.",
            terms=training_terms(training, rounds=rounds), client="hospital-a", domain=None, peers=(), round=round,
            phase="train", train=MadeUpSplit(features, labels),
        )  # fmt: skip

    return make
