"""Two rounds of PLAN with two clients: worked out by hand from the equations, and over HTTP through both services."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, shape_of
from promptfed.shared.data import Source
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.data.source import Split, reader_of
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ServerContext
from promptfed.shared.methods.core.training import batches
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.spec.spec import TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.support import literal_visual as literal
from tests.support.equality import assert_gradients, assert_values
from tests.support.visual_clients import NAMES, small_backbone

CLIENTS = {"hospital-a": 7, "hospital-b": 5}  # training images
ROUNDS, SEED, RATE, MOMENTUM, DECAY, BATCH, ALPHA = 2, 5, 0.05, 0.9, 0.01, 4, 0.6
KINDS = ("text", "visual")
SPEC: dict[str, Any] = {
    "name": "by-hand",
    "method": {"name": "plan", "m": 2, "alpha": ALPHA},
    "class_names": list(NAMES),
    "rounds": ROUNDS,
    "training": {"learning_rate": RATE, "momentum": MOMENTUM, "weight_decay": DECAY, "batch_size": BATCH},
    "participation": {"min_clients": 2},
    "admission": {"max_update_norm": 100.0},  # the rate is 33 times PLAN's own, on a backbone with random weights
    "seed": SEED,
}


class CountedImages:
    """Counts how often each image is decoded."""

    def __init__(self, pixels: np.ndarray):
        self._read, self._count = reader_of(pixels), len(pixels)
        self.decoded: Counter[int] = Counter()

    def __len__(self) -> int:
        return self._count

    def __call__(self, row: int) -> Image.Image:
        self.decoded[row] += 1
        return self._read(row)


def source_of(client: str, made: list[CountedImages] | None = None) -> Source:
    draws = np.random.default_rng(len(client) + CLIENTS[client])

    def split(count: int) -> Split:
        pixels = draws.integers(0, 256, (count, 16, 16, 3), dtype=np.uint8)
        images = CountedImages(pixels)
        if made is not None:
            made.append(images)
        return Split(torch.from_numpy(draws.integers(0, len(NAMES), count)), images)

    return Source(client, NAMES, None, "a photo of a {}.", split(CLIENTS[client]), split(4))


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


@pytest.fixture(scope="module")
def images() -> list[CountedImages]:
    """What the federation's clients looked at."""
    return []


@pytest.fixture(scope="module")
def over_http(backbone: Backbone, images: list[CountedImages]) -> FederationResult:
    sources = SharedSources()
    for name in CLIENTS:
        sources.add(name, source_of(name, images))
    spec = SPEC | {"backbone": {"model": "small-both", "pretrained": None}}
    return simulate(spec, [Site(name, name) for name in CLIENTS], backbone=backbone, sources=sources)


class ByHand:
    """The clients' images, and the paper's algorithm 1 with loops and SGD written out."""

    def __init__(self, backbone: Backbone):
        self.backbone = backbone
        splits = {name: source_of(name).train for name in CLIENTS}
        self.images = {
            name: torch.stack([backbone.preprocess(split.image(row)) for row in range(len(split))])
            for name, split in splits.items()
        }
        self.labels = {name: split.labels for name, split in splits.items()}
        context = ServerContext(TrainingSpec(), shape_of(backbone), NAMES, (), SEED, ROUNDS)
        start = make_method(SPEC["method"]).initial_state(context, initial_draws(SEED))
        self.prompts = {kind: start[f"{kind}_prompts"] for kind in KINDS}
        self.aggregators = {name: tensor for name, tensor in start.items() if "aggregator" in name}
        self.shares: list[dict[str, Tensor]] = []

    def round(self, number: int) -> None:
        local = {name: self.local(name, number) for name in CLIENTS}
        parts = {kind: [local[name][row] for name in CLIENTS] for row, kind in enumerate(KINDS)}
        trained = [self.trained_aggregators(name, number, parts) for name in CLIENTS]
        self.aggregators = {name: sum(one[name] for one in trained) / len(CLIENTS) for name in self.aggregators}
        self.shares.append({kind: literal.shares(self.aggregators, kind, parts[kind]) for kind in KINDS})
        self.prompts = {kind: literal.aggregated(self.aggregators, kind, parts[kind]) for kind in KINDS}

    def local(self, client: str, number: int) -> list[Tensor]:
        images, labels = self.images[client], self.labels[client]
        reference = torch.stack([self.reference(image, number) for image in images])
        start = [self.prompts[kind] for kind in KINDS]

        def loss(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
            return literal.local_loss(
                self.backbone, *weights, list(NAMES), images[rows], labels[rows], reference[rows], ALPHA
            )

        return self.descend(client, number, "prompts", start, loss)

    def reference(self, image: Tensor, number: int) -> Tensor:
        """The global prediction's logits ``(C,)``: zero-shot CLIP at first."""
        if number > 1:
            with torch.no_grad():
                return literal.logits(self.backbone, self.prompts["text"], self.prompts["visual"], list(NAMES), image)
        text = self.backbone.encode_text([f"a photo of a {name.replace('_', ' ')}." for name in NAMES])
        return self.backbone.logit_scale * text @ self.backbone.encode_images(image.unsqueeze(0))[0]

    def trained_aggregators(self, client: str, number: int, parts: dict[str, list[Tensor]]) -> Tensors:
        images, labels, names = self.images[client], self.labels[client], list(self.aggregators)

        def loss(weights: Sequence[Tensor], rows: Tensor) -> Tensor:
            own = dict(zip(names, weights, strict=True))
            made = [literal.aggregated(own, kind, parts[kind]) for kind in KINDS]
            return literal.local_loss(self.backbone, *made, list(NAMES), images[rows], labels[rows], None, 0.0)

        trained = self.descend(client, number, "aggregators", list(self.aggregators.values()), loss)
        return dict(zip(names, trained, strict=True))

    def descend(
        self, client: str, number: int, phase: str, start: list[Tensor], loss: Callable[..., Tensor]
    ) -> list[Tensor]:
        """One epoch: v ← μ·v + g + λ·w, w ← w − η·v."""
        draws = generator(SEED, number, phase, client, "batches")
        weights, speeds = start, [torch.zeros_like(one) for one in start]
        for rows in batches(CLIENTS[client], BATCH, 1, draws):
            leaves = [one.detach().clone().requires_grad_() for one in weights]
            slopes = torch.autograd.grad(loss(leaves, rows), leaves)
            speeds = [
                MOMENTUM * speed + slope + DECAY * one.detach()
                for speed, slope, one in zip(speeds, slopes, leaves, strict=True)
            ]
            weights = [one.detach() - RATE * speed for one, speed in zip(leaves, speeds, strict=True)]
        return weights


def test_what_was_worked_out_by_hand_comes_over_http(backbone: Backbone, over_http: FederationResult) -> None:
    hand = ByHand(backbone)
    start = {**{f"{kind}_prompts": hand.prompts[kind] for kind in KINDS}, **hand.aggregators}
    for number in range(1, ROUNDS + 1):
        hand.round(number)
    found = over_http.state
    wanted = {**{f"{kind}_prompts": hand.prompts[kind] for kind in KINDS}, **hand.aggregators}
    assert set(wanted) < set(found)
    moved = {name for name, tensor in wanted.items() if float((tensor - start[name]).abs().max()) > 1e-4}
    assert moved >= {"text_prompts", "visual_prompts", "visual_aggregator.fa.w2", "text_aggregator.query"}
    for name, tensor in wanted.items():
        assert_values(found[name], tensor)
        if name in moved:
            assert_gradients(found[name] - start[name], tensor - start[name])
    for number, shares in enumerate(hand.shares, start=1):
        measured = over_http.reports[number]["phases"][1]["measured"]
        assert list(measured["clients"]) == list(CLIENTS)
        for kind in KINDS:
            for row, client in enumerate(CLIENTS):
                for block, gamma in enumerate(shares[kind][row]):
                    assert measured["clients"][client][f"gamma_{kind}_{block}"] == pytest.approx(float(gamma), rel=1e-4)


def test_what_travels(over_http: FederationResult) -> None:
    prompts = 2 * (2 * 24) + 3 * (2 * 32)
    aggregators = sum(blocks * (2 * d + 2 * (2 * d * (d // 8) + d // 8 + d)) for blocks, d in ((2, 24), (3, 32)))
    for report in over_http.reports[1:]:
        first, second = report["phases"]
        sizes = [(first["bytes_down"], prompts), (first["bytes_up"], prompts),
                 (second["bytes_down"], 2 * prompts + aggregators), (second["bytes_up"], aggregators)]  # fmt: skip
        for found, numbers in sizes:
            assert 0 < found / 2 - 4 * numbers < 3000, "the tensors and a header for each client"
        assert [one["weight"] for one in second["counted"]] == [0.5, 0.5], "uniform, whatever the numbers of images"
        assert first["state_hash"] != second["state_hash"] == report["state_hash"]


def test_rounds_and_phases_look_at_images_that_are_there(
    over_http: FederationResult, images: list[CountedImages]
) -> None:
    train = [one for one in images if len(one) in CLIENTS.values()]
    assert [len(one.decoded) for one in train] == [7, 5]
    # For its digest, for the frozen tower's feature, and for everything that comes after: not once a round or phase.
    assert {count for one in images for count in one.decoded.values()} == {3}
    assert over_http.round == ROUNDS
