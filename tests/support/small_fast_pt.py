"""A small FaST-PT with clients of three domains, payloads of drawn numbers, and comparisons of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.messages import Domain
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, ServerContext
from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.methods.fast_pt.method import FastPT
from promptfed.shared.methods.fast_pt.style_transfer import StyleTransfer
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES

Make = Callable[..., ClientContext]

SKETCH = Domain(name="sketch", description="a sketch of a {}")
NEON = Domain(name="neon", description="a neon sign of a {}")
CHALK = Domain(name="chalk", description="a chalk drawing of a {}")
ROWS = (NEON, SKETCH)  # in order of name
QUICK = {"mst_epochs": 2, "mst_hidden": 6, "mst_batch_size": 4, "mst_learning_rate": 0.01}


def fast_pt(**settings: Any) -> FastPT:
    """The method with three tokens and quick transforms."""
    method = make_method({"name": "fast_pt", "m": 3} | QUICK | settings)
    assert isinstance(method, FastPT)
    return method


def client(name: str, domain: Domain | None, role: Any = "trainer", samples: int = 10) -> ClientInfo:
    """A client as the server half knows it, with the classes of the federation."""
    return ClientInfo(name, role, samples, (), domain)


A, B, C = client("a", SKETCH), client("b", NEON), client("c", CHALK)
UNSEEN = client("unseen", CHALK, "evaluator")


def server(*clients: ClientInfo, d_t: int | None = 112, d_e: int = 96) -> ServerContext:
    """What the server half is handed; the sizes are the embedded backbone's."""
    return ServerContext(TrainingSpec(), BackboneShape(d_t=d_t, d_e=d_e), NAMES, clients, seed=3, rounds=4)


def keys(*domains: Domain) -> Tensor:
    """``(k,)`` int64, by which the state tells the domains apart."""
    return torch.tensor([domain_key(domain.description) for domain in domains], dtype=torch.int64)


def drawn(seed: int, *shape: int, scale: float = 0.02) -> Tensor:
    """Normal numbers of standard deviation ``scale``."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def payload_of(backbone: Backbone, *, listed: Iterable[Domain] = (), rows: tuple[Domain, ...] = ROWS) -> Tensors:
    """A payload whose classifier tells ``rows`` apart, with drawn prompts for the domains ``listed``."""
    listed = tuple(listed)
    return {
        "global_prompt": drawn(1, 3, backbone.d_t), "classifier_weight": drawn(2, len(rows), backbone.d_e, scale=2.0),
        "classifier_bias": drawn(3, len(rows), scale=0.5), "domains": keys(*rows),
        "domain_prompts": drawn(4, len(listed), 3, backbone.d_t), "listed_domains": keys(*listed),
    }  # fmt: skip


def count_transforms(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of each domain that a transform is trained to from now on, in order."""
    trained: list[str] = []
    train = StyleTransfer.train

    def counted(self: StyleTransfer, target: Domain) -> Tensors:
        trained.append(target.name)
        return train(self, target)

    monkeypatch.setattr(StyleTransfer, "train", counted)
    return trained
