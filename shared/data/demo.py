"""The federations of ``promptfed demo``: three clients with their own data, and a domain that none of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Demo:
    """One demonstration. ``clients`` and ``unseen`` are (name, data URI); ``backbone`` is a section of a spec.

    The settings were chosen on validation images, never on the test images that the demo reports.
    """

    clients: tuple[tuple[str, str], ...]
    unseen: tuple[str, str]
    batch_size: int
    template: str = "a photo of a {}."
    rounds: int = 8
    backbone: Mapping[str, str] = field(default_factory=dict)  # empty: the spec's own

    @property
    def training(self) -> Mapping[str, int | float | str]:
        """The section ``training`` of a spec."""
        return {"epochs": 1, "batch_size": self.batch_size, "learning_rate": 0.05, "schedule": "cosine"}


DEMOS: dict[str, Demo] = {
    "symbols": Demo(
        clients=(
            ("architect", "symbols:blueprint"),
            ("doodler", "symbols:quickdraw"),
            ("signmaker", "symbols:neon"),
        ),
        unseen=("sketchbook", "symbols:sketch"),
        batch_size=64,
    ),
    "emoji": Demo(
        clients=(
            ("studio", "emoji:three"),
            ("cartoonist", "emoji:noto"),
            ("stencilmaker", "emoji:contrast"),
        ),
        unseen=("muralist", "emoji:fxemoji"),
        batch_size=16,
        backbone={"model": "promptfed-emoji", "pretrained": "embedded"},
    ),
    "digits": Demo(
        clients=(
            ("first", "digits?partition=iid&clients=3&client=0"),
            ("second", "digits?partition=iid&clients=3&client=1"),
            ("third", "digits?partition=iid&clients=3&client=2"),
        ),
        unseen=("negative", "digits?domain=inverted"),
        batch_size=128,
        template="a photo of the digit {}.",
    ),
}
