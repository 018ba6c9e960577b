"""Remarks on a result: one sentence for each apparent problem, with advice."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from promptfed.sdk.result import FederationResult

NEAR_CHANCE = 0.05  # share of the range from chance to 100 %, below which the template hardly separates the classes
MOVED = 0.005  # change of accuracy that counts as none
LEARNED = 0.02  # share of the first round's loss by which it must fall if anything was learned
WORSE = 0.02  # accuracy below that of the template


def remarks(result: FederationResult) -> list[str]:
    """Remarks on the clients' own test images: zero-shot near chance, nothing learned, worse than the template."""
    own = [row for row in result.final() if row.role == "trainer" and row.split == "test"]
    judged = [(row.accuracy, row.zero_shot) for row in own if row.zero_shot is not None]
    if not judged:
        return []
    adapted, zero_shot = (fmean(column) for column in zip(*judged, strict=True))
    chance = near_chance(zero_shot, _classes(result), result.federation.spec.backbone.model)
    losses = [report.phases[0].metrics["loss"] for report in result.round_reports if _has_loss(report.phases)]
    rate = result.federation.spec.training.learning_rate
    return chance + movement(adapted - zero_shot, losses, rate, result.round)


def near_chance(zero_shot: float, classes: float | None, backbone: str) -> list[str]:
    """A remark if the template is hardly more accurate than chance among ``classes``."""
    if not classes or classes < 2:
        return []
    chance = 1 / classes
    if (zero_shot - chance) / (1 - chance) >= NEAR_CHANCE:
        return []
    measured = (
        f"Zero-shot is right in {100 * zero_shot:.1f} %, guessing among {classes:.0f} classes in {100 * chance:.1f} %"
    )
    why = f"{backbone} hardly knows these pictures, or these names"
    return [f"{measured}: {why}. Try class names in plain English words, a template that fits, or another backbone."]


def movement(gain: float, losses: Sequence[float], rate: float, rounds: int) -> list[str]:
    """A remark if training changed nothing or reduced the accuracy; ``losses`` by round (empty: unknown)."""
    if not losses:
        return []
    learned = 1 - losses[-1] / losses[0] if losses[0] > 0 else 0.0
    tune = "`promptfed tune RUN.yaml` finds a rate on held-out training images"
    if gain < -WORSE:
        return [
            f"Below zero-shot by {-100 * gain:.1f} points: try a lower training.learning_rate than {rate:g}; {tune}."
        ]
    if abs(gain) < MOVED and learned < LEARNED:
        fell = f"from {losses[0]:.3f} to {losses[-1]:.3f}"
        text = f"Nothing moved in {rounds} rounds (loss {fell}): try a higher training.learning_rate than {rate:g}"
        return [f"{text}, or more rounds; {tune}."]
    return []


def _has_loss(phases: Sequence[object]) -> bool:
    return bool(phases) and "loss" in getattr(phases[0], "metrics", {})


def _classes(result: FederationResult) -> float | None:
    """The mean number of classes of a trainer."""
    spec = result.federation.spec
    if spec.class_names is not None and spec.method.get("label_space") != "client":
        return float(len(spec.class_names))
    counts = [client.num_classes for client in result.clients if client.role == "trainer"]
    return fmean(counts) if counts else None
