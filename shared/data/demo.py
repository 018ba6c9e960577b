"""What ``promptfed demo`` runs: three clients with data of their own, and a domain that none of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Demo:
    """One demonstration. ``clients`` and ``unseen`` are (name, data URI); ``training`` and
    ``backbone`` are sections of a spec.
    """

    clients: tuple[tuple[str, str], ...]
    unseen: tuple[str, str]
    template: str
    rounds: int
    training: Mapping[str, int | float | str]
    backbone: Mapping[str, str] = field(default_factory=dict)  # the spec's own where it is empty


DEMOS: dict[str, Demo] = {
    "symbols": Demo(
        clients=(
            ("architect", "symbols:blueprint"),
            ("doodler", "symbols:quickdraw"),
            ("signmaker", "symbols:neon"),
        ),
        unseen=("sketchbook", "symbols:sketch"),
        template="a photo of a {}.",
        rounds=8,
        training={"epochs": 1, "batch_size": 64, "learning_rate": 0.05, "schedule": "cosine"},
    ),
    "emoji": Demo(
        clients=(
            ("studio", "emoji:three"),
            ("cartoonist", "emoji:noto"),
            ("stencilmaker", "emoji:contrast"),
        ),
        unseen=("muralist", "emoji:fxemoji"),
        template="a photo of a {}.",
        rounds=8,
        training={"epochs": 1, "batch_size": 16, "learning_rate": 0.05, "schedule": "cosine"},
        backbone={"model": "promptfed-emoji", "pretrained": "embedded"},
    ),
    "digits": Demo(
        clients=(
            ("first", "digits?partition=iid&clients=3&client=0"),
            ("second", "digits?partition=iid&clients=3&client=1"),
            ("third", "digits?partition=iid&clients=3&client=2"),
        ),
        unseen=("negative", "digits?domain=inverted"),
        template="a photo of the digit {}.",
        rounds=8,
        training={"epochs": 1, "batch_size": 128, "learning_rate": 0.05, "schedule": "cosine"},
    ),
}
"""Settings chosen on validation images, never on the test images that the demo reports."""
