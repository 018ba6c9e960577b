"""One client's answers on a test set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

ZERO_SHOT = "zero-shot"  # the template's answers stand as a further classifier's, split@zero-shot


@dataclass(frozen=True)
class Outcomes:
    """One client's answers on one test set after ``round``; ``split`` is ``split@variant`` of a further classifier.

    ``labels`` and ``predicted`` are indices in ``class_names``, ``confidence`` is the probability of what was
    predicted; ``auroc`` is the mean over the classes; ``images`` is a hash of the images in order: lists with the same
    hash can be paired image by image.
    """

    round: int
    client: str
    split: str
    class_names: tuple[str, ...]
    labels: tuple[int, ...]
    predicted: tuple[int, ...]
    confidence: tuple[float, ...]
    images: str
    auroc: float | None = None


Record = Callable[[Outcomes], None]
