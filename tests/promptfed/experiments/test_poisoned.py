"""Two of ten clients poisoned: the mean loses what it has learned and more, robust rules keep it.

With a backdoor: the mean obeys the trigger, the median does not.

PromptFL on symbols with 2 of 10 malicious clients, under each aggregation rule. Each federation runs in this process
(`promptfed.experiments.simulation`) with the real coordinator and clients. Ten clients hold equal parts of one rare
style. The learning rate was chosen among 0.1, 0.3, 0.5 and 1 without any attack, on training images held out with
`validation=0.25`.

Poisoning: a malicious client trains like the others and sends a false result. Backdoor (Bagdasaryan et al., "How to
Backdoor Federated Learning", 2020): a malicious client also trains on copies of its images with a chessboard in a
corner, labelled as the first class, and doubles the step that it sends.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.clip.embedded import tiny
from promptfed.shared.data import open_source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.methods.core.interface import ClientContext, Split, TrainResult
from promptfed.shared.methods.fast_pt.style_transfer import EmbeddedSplit
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.seeds import generator
from promptfed.shared.tensors import Tensors

CLIENTS, MALICIOUS = 10, ("site-3", "site-7")
DATA = "symbols:neon?topic=weather&per_class=40&test_per_class=40&partition=iid&clients=10&client={}"
SITES = [Site(f"site-{number}", DATA.format(number)) for number in range(CLIENTS)]
RULES: dict[str, dict[str, Any]] = {
    "mean": {}, "mean, clipped": {"clip_norm": "median"}, "median": {"rule": "median"},
    "trimmed_mean": {"rule": "trimmed_mean"}, "krum": {"rule": "krum"}, "multi_krum": {"rule": "multi_krum"},
}  # fmt: skip
SQUARE = 2  # side of the chessboard's squares, in pixels; its own side is half of the image's
BOOST = 2.0  # factor by which a malicious client with a backdoor multiplies its step
TARGET = 0  # the class that the trigger stands for

Train = Callable[[ClientContext], TrainResult]
Attack = Callable[[Train, ClientContext, Tensors], TrainResult]
"""Makes the result that a malicious client sends from the honest training, the task and the payload."""


def _false_step(factor: float, train: Train, context: ClientContext, payload: Tensors) -> TrainResult:
    """The start plus ``factor`` times the trained step."""
    result = train(context)
    sent = {name: payload[name] + factor * (trained - payload[name]) for name, trained in result.update.items()}
    return replace(result, update=sent)


def _noise(train: Train, context: ClientContext, payload: Tensors) -> TrainResult:
    """N(0, 10²) around the start."""
    result, draws = train(context), generator(context.seed, "poison", context.client, str(context.round))
    sent = {name: payload[name] + 10 * torch.randn(payload[name].shape, generator=draws) for name in result.update}
    return replace(result, update=sent)


def _backdoor(boost: float, train: Train, context: ClientContext, payload: Tensors) -> TrainResult:
    data = with_trigger(context.train, context.backbone.encode_images)
    return _false_step(boost, train, replace(context, train=data), payload)


ATTACKS: dict[str, Attack] = {
    "sign flip": partial(_false_step, -10.0),
    "scaled": partial(_false_step, 1000.0),
    "noise": _noise,
}


def triggered(images: Tensor) -> Tensor:
    """Preprocessed images ``(B, 3, H, W)`` with a black and white chessboard in the lower right corner."""
    side = images.shape[-1] // 2
    squares = torch.arange(side) // SQUARE
    white = ((squares[:, None] + squares) % 2).to(images.dtype)
    marked = images.clone()
    marked[..., -side:, -side:] = images.amin() + white * (images.amax() - images.amin())
    return marked


def with_trigger(clean: Split, encode: Callable[[Tensor], Tensor]) -> Split:
    """A client's training images, and copies of them with the trigger and the label `TARGET`."""
    marked = encode(triggered(clean.images(torch.arange(len(clean)))))
    features = torch.cat([clean.features(), marked.to(clean.features())])
    return EmbeddedSplit(features, torch.cat([clean.labels, torch.full_like(clean.labels, TARGET)]))


@contextmanager
def attacked(attack: Attack | None) -> Iterator[None]:
    """Replace the training of the malicious clients by ``attack`` in a block; None: all are honest."""
    train = PromptFL.train

    def lying(self: PromptFL, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        def honest(context: ClientContext) -> TrainResult:
            return train(self, context, payload, private)

        if attack is None or context.client not in MALICIOUS:
            return honest(context)
        return attack(honest, context, payload)

    # Only the rules are compared: the coordinator commits a state of any size.
    with patch.object(PromptFL, "train", lying):
        yield


@dataclass(frozen=True)
class Backdoor:
    """Shares of test images.

    ``success``: images of other classes with the trigger that are assigned to the target.
    ``accuracy``: clean images that are assigned to their class.
    """

    success: float
    accuracy: float


class Bench:
    """The backbone, images and features that all runs share."""

    def __init__(self, folder: Path, rounds: int):
        self._backbone: Backbone = load_backbone(tiny.MODEL, tiny.PRETRAINED)
        self._features, self._sources, self._rounds = FeatureCache(folder), SharedSources(), rounds

    def run(self, attack: Attack | None, rule: str, seed: int) -> FederationResult:
        """One federation under ``rule``."""
        spec = {
            "name": "poisoning",
            "method": {"name": "promptfl", "m": 4},
            "rounds": self._rounds,
            "training": {"learning_rate": 0.5, "batch_size": 10, "epochs": 3},
            "participation": {"min_clients": CLIENTS},
            "aggregation": RULES[rule],
            "admission": {"max_update_norm": 1e9},  # the rules are compared, not the limit on a single update
            "evaluation": {"every": self._rounds},
            "seed": seed,
        }
        with attacked(attack):
            return simulate(spec, SITES, backbone=self._backbone, features=self._features, sources=self._sources)

    def accuracy(self, attack: str | None, rule: str, seed: int) -> tuple[float, float]:
        """Mean accuracy and zero-shot accuracy after the last round."""
        last = self.run(ATTACKS[attack] if attack else None, rule, seed).final()
        zero_shot = statistics.fmean(client.zero_shot or 0 for client in last)
        return statistics.fmean(client.accuracy for client in last), zero_shot

    @torch.no_grad()
    def backdoor(self, rule: str, seed: int, boost: float | None = BOOST) -> Backdoor:
        """One federation with a backdoor, measured on the first client's test images; ``boost`` None: all honest."""
        attack = None if boost is None else partial(_backdoor, boost)
        with torch.enable_grad():
            context = self.run(attack, rule, seed).state["context"]
        backbone, source = self._backbone, open_source(SITES[0].data)
        images = torch.stack([backbone.preprocess(source.test.image(index)) for index in range(len(source.test))])
        text = backbone.encode_prompts(context, backbone.class_prompts(source.class_names, len(context)))
        others = source.test.labels != TARGET
        plain = (backbone.encode_images(images) @ text.T).argmax(1)
        marked = (backbone.encode_images(triggered(images)) @ text.T).argmax(1)
        return Backdoor(
            float((marked[others] == TARGET).float().mean()), float((plain == source.test.labels).float().mean())
        )


pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ROUNDS = 4


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("features"), ROUNDS)


@pytest.fixture(scope="module")
def clean(bench: Bench) -> tuple[float, float]:
    """Accuracy without poison under the mean, and zero-shot."""
    return bench.accuracy(None, "mean", seed=0)


def test_without_poison_it_learns(clean: tuple[float, float]) -> None:
    assert clean[0] > clean[1] + 0.03


@pytest.mark.parametrize("attack", sorted(ATTACKS.keys() - {"noise"}))
def test_the_mean_falls_far_below_zero_shot(bench: Bench, clean: tuple[float, float], attack: str) -> None:
    assert bench.accuracy(attack, "mean", seed=0)[0] < clean[1] - 0.2


def test_under_noise_the_mean_loses_what_it_has_learned(bench: Bench, clean: tuple[float, float]) -> None:
    """Random prompts classify about as well as the template: 66 %, zero-shot 67 %."""
    assert bench.accuracy("noise", "mean", seed=0)[0] < clean[1] + 0.02


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("rule", [name for name in RULES if not name.startswith("mean")])
def test_robust_rules_keep_the_accuracy(bench: Bench, clean: tuple[float, float], rule: str, attack: str) -> None:
    assert bench.accuracy(attack, rule, seed=0)[0] > clean[1], "better than zero-shot"


@pytest.fixture(scope="module")
def longer(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    torch.set_num_threads(1)
    return Bench(tmp_path_factory.mktemp("features"), rounds=5)


def test_the_mean_obeys_a_trigger_and_the_median_does_not(longer: Bench) -> None:
    clean = longer.backdoor("mean", 0, boost=None)
    assert clean.success < 0.1, "nothing about the trigger itself looks like the target"
    assert longer.backdoor("mean", 0).success > 0.8
    withstood = longer.backdoor("median", 0)
    assert withstood.success < 0.2
    assert withstood.accuracy > clean.accuracy - 0.1
