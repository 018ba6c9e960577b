"""The federations of ``promptfed demo``: three clients with their own data, and a domain that none of them has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from promptfed.shared.data.classes import SYMBOLS
from promptfed.shared.spec.spec import TEMPLATE


@dataclass(frozen=True)
class Demo:
    """One demonstration. ``clients`` and ``unseen`` are (name, data URI); ``backbone`` is a section of a spec.

    The settings and the method were chosen on held-out training images, never on the test images that the demo
    reports. ``others``: further methods with their mean gain over the clients' test images, in points.
    """

    clients: tuple[tuple[str, str], ...]
    unseen: tuple[str, str]
    batch_size: int
    template: str = TEMPLATE
    method: str = "fedtaskres"
    others: Mapping[str, int] = field(default_factory=dict)
    class_names: tuple[str, ...] | None = None  # None: those of the first client's data
    rounds: int = 8
    backbone: Mapping[str, str] = field(default_factory=dict)  # empty: the spec's own
    scans: tuple[str, ...] = ()  # sites whose DICOM files are drawn first; their URIs have {scans} for the folder

    def training(self, method: str) -> Mapping[str, int | float | str]:
        """The section ``training`` of a spec. Methods other than promptfl have their default rate."""
        rate = {"learning_rate": 0.05} if method == "promptfl" else {}
        return {"epochs": 1, "batch_size": self.batch_size, "schedule": "cosine", **rate}


# Gains on held-out training images, in points: fedtaskres 25.9, fedclipadapter 20.0, plan 16.8, fedlp 14.8, promptfl
# 9.4, fedclip 5.4 (`promptfed tune` with these methods on a run file of the same federation). By themselves with one
# seed: plan, and fedlora 23.3, which take seven and ten times as long.
# `others` is what `promptfed demo --method NAME --json` reports.
DEMOS: dict[str, Demo] = {
    "symbols": Demo(
        clients=(("architect", "symbols:blueprint"), ("doodler", "symbols:quickdraw"), ("signmaker", "symbols:neon")),
        unseen=("sketchbook", "symbols:sketch"),
        batch_size=64,
        others={"fedclipadapter": 24, "promptfl": 8},
        class_names=tuple(symbol.name for symbol in SYMBOLS),
    ),
    "emoji": Demo(
        clients=(("studio", "emoji:three"), ("cartoonist", "emoji:noto"), ("stencilmaker", "emoji:contrast")),
        unseen=("muralist", "emoji:fxemoji"),
        batch_size=16,
        backbone={"model": "promptfed-emoji", "pretrained": "embedded"},
    ),
    "dicom": Demo(
        clients=tuple((name, f"dicom:{{scans}}/{name}?index={{scans}}/index") for name in ("north", "south", "west")),
        unseen=("rural", "dicom:{scans}/rural?index={scans}/index"),
        batch_size=16,
        class_names=("clear", "line", "nodule", "stripes"),
        scans=("north", "south", "west", "rural"),
        backbone={"model": "promptfed-tiny", "pretrained": "embedded"},
    ),
    "solar": Demo(
        clients=tuple(
            (name, f"solar?domain=mono&per_class=150&partition=iid&clients=3&client={number}")
            for number, name in enumerate(("coast", "desert", "roof"))
        ),
        unseen=("poly", "solar?domain=poly&per_class=60"),
        batch_size=32,
        template="an electroluminescence photo of a {} solar cell.",
        class_names=("functional", "defective"),
    ),
    "digits": Demo(
        clients=(
            ("first", "digits?partition=iid&clients=3&client=0"),
            ("second", "digits?partition=iid&clients=3&client=1"),
            ("third", "digits?partition=iid&clients=3&client=2"),
        ),
        unseen=("negative", "digits?domain=inverted"),
        batch_size=32,
        template="a photo of the digit {}.",
    ),
}
