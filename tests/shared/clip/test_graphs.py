"""Compiled passes are the same passes: values and gradients, with each kind of prompts, each in one whole graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.clip.towers import graphs
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import NAMES, small_backbone

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


@pytest.fixture
def backbone(shared: Backbone, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backbone]:
    """Without a compiler: torch's backend that only takes the graph and its derivative apart."""
    monkeypatch.setattr(graphs, "BACKEND", "aot_eager")
    yield shared
    shared.graphs = graphs.Graphs()
    torch.compiler.reset()


def noise(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def text(backbone: Backbone, **options: Any) -> Any:
    prompts = backbone.class_prompts(NAMES, 4)
    return lambda context: backbone.encode_prompts(context, prompts, **options)


CASES = {
    "text": (lambda b: text(b), lambda b: noise(4, b.d_t)),
    "batch of contexts": (lambda b: text(b), lambda b: noise(2, 4, b.d_t)),
    "a context for each class": (lambda b: text(b, per_class=True), lambda b: noise(3, 4, b.d_t)),
    "deep": (lambda b: text(b, deep=noise(1, 4, b.d_t, seed=2)), lambda b: noise(4, b.d_t)),
    "image": (lambda b: lambda p: b.encode_images_prompted(noise(2, 3, 16, 16), p), lambda b: noise(2, 3, b.d_v)),
}


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_pass_is_the_same(backbone: Backbone, case: str) -> None:
    make, start = CASES[case]
    encode, told = make(backbone), []
    for used in (False, True, True):
        backbone.graphs.used = used
        leaf = start(backbone).requires_grad_()
        features = encode(leaf)
        weight = noise(*features.shape, seed=5)
        told.append((features, *torch.autograd.grad((features * weight).sum(), leaf)))
    for features, gradient in told[1:]:
        assert_values(features, told[0][0])
        assert_gradients(gradient, told[0][1])


@pytest.mark.parametrize("case", CASES)
def test_a_pass_is_one_graph(backbone: Backbone, case: str) -> None:
    make, start = CASES[case]
    told = torch._dynamo.explain(make(backbone))(start(backbone).requires_grad_())
    assert (told.graph_count, told.graph_break_count) == (1, 0)
