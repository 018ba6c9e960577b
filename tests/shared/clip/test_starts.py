"""Trainings from the same context share a forward pass, and get the bits of a pass of their own."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from promptfed.shared.clip import Backbone, SharedStarts
from tests.shared.clip.conftest import CLASS_NAMES, PLAIN_ONLY_MODELS, PREFIX_MODELS, SHORT_MODELS, noise

M = 4


def trained(encode: Callable[[Any], Any], context: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and gradient of a loss that also reads the context itself, as a penalty does."""
    leaf = context.clone().requires_grad_()
    text = encode(leaf)
    value = (text * noise(*text.shape, seed=seed)).sum() + (leaf**2).sum()
    value.backward()
    assert leaf.grad is not None
    return text.detach(), leaf.grad


@pytest.mark.parametrize("name", [PREFIX_MODELS[0], SHORT_MODELS[-1], PLAIN_ONLY_MODELS[0]])
def test_the_bits_are_those_of_a_pass_of_its_own(name: str, small: Callable[..., Backbone]) -> None:
    backbone, starts, passes = small(name), SharedStarts(), []
    prompts = backbone.class_prompts(CLASS_NAMES, M)

    def encode(context: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return backbone.encode_prompts(context, prompts)

    for start, expected in ((noise(M, backbone.d_t), 1), (noise(M, backbone.d_t, seed=1), 2)):
        for seed in range(3):
            text, gradient = trained(lambda leaf: starts.features(leaf, prompts, encode), start, seed)
            own_text, own_gradient = trained(lambda leaf: backbone.encode_prompts(leaf, prompts), start, seed)
            assert torch.equal(text, own_text)
            assert torch.equal(gradient, own_gradient)
            text.zero_()  # what one does to its features reaches nobody else
        assert len(passes) == expected
    other = backbone.class_prompts(CLASS_NAMES[:2], M)
    assert len(starts.features(noise(M, backbone.d_t, seed=1), other, encode)) == len(CLASS_NAMES)
    assert len(passes) == 3, "other prompts have another pass"


def test_each_thread_has_its_own_pass(small: Callable[..., Backbone]) -> None:
    backbone, starts, passes = small(PREFIX_MODELS[0]), SharedStarts(), []
    prompts, start = backbone.class_prompts(CLASS_NAMES, M), noise(M, backbone.d_t)

    def encode(context: torch.Tensor) -> torch.Tensor:
        passes.append(1)
        return backbone.encode_prompts(context, prompts)

    def gradient(seed: int) -> torch.Tensor:
        return trained(lambda leaf: starts.features(leaf, prompts, encode), start, seed)[1]

    alone = [gradient(seed) for seed in range(8)]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(gradient, range(8)))
    assert all(map(torch.equal, alone, together))
    assert len(passes) in (2, 3)
