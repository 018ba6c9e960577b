"""The pace of a federation: a line for each finished round, and an estimate of the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean

from promptfed.sdk.summary import RoundSummary
from promptfed.sdk.text import percent

RECENT = 5  # rounds whose mean duration estimates that of the next rounds
LABELS = {"trainer": "accuracy", "evaluator": "unseen"}


class Pace:
    """Counts the finished rounds out of ``rounds`` and estimates the remaining time; ``clock`` returns seconds."""

    def __init__(self, rounds: int, clock: Callable[[], float] = time.monotonic):
        self._rounds, self._clock = rounds, clock
        self._seconds: list[float] = []
        self._seen = clock()
        self.last = -1

    def add(self, report: RoundSummary) -> None:
        """Count a finished round."""
        self.count(report.round, report.seconds)

    def count(self, round: int, seconds: float | None) -> None:
        """Count a finished round and its time, if it is known. Round 0 trains nothing, so its time does not count."""
        self.last = round
        self._seen = self._clock()
        if round > 0 and seconds is not None:
            self._seconds.append(seconds)

    def left(self) -> float | None:
        """Estimated seconds until the last round ends, from the mean of the newest rounds; None before the first."""
        if not self._seconds or self.last >= self._rounds:
            return None
        each = fmean(self._seconds[-RECENT:])
        # Even if the open round is late, the rounds after it take the mean time.
        return (self._rounds - self.last - 1) * each + max(0.0, each - (self._clock() - self._seen))


def describe_round(report: RoundSummary) -> str:
    """``round 3: loss 0.412, accuracy 61.2 % (zero-shot 33.4 %), unseen 40.0 %, 1.8 s``."""
    told = [] if report.loss is None else [f"loss {report.loss:.4g}"]
    for role, label in LABELS.items():
        measured = report.accuracy(role)
        if measured is not None:
            accuracy, template = measured
            told.append(f"{label} {percent(accuracy)}" + (f" (zero-shot {percent(template)})" if template else ""))
    if report.seconds is not None:
        told.append(f"{report.seconds:.1f} s")
    return f"round {report.round}: {', '.join(told) or 'over'}"


def duration(seconds: float) -> str:
    """``75`` as ``1 min 15 s``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
