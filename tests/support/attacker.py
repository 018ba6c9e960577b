"""An attacker who puts together all that left a site, to find counts below its floor, by linear programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import numpy as np
from scipy.optimize import linprog

from promptfed.shared.metrics.disclosure import UNKNOWN, Range, share
from promptfed.shared.metrics.site_figures import GroupFigures, SiteFigures

Row = tuple[np.ndarray, float, float]  # low ≤ coefficients·cells ≤ high
FRACTIONS = {"sensitivity": ("tp", "fn"), "specificity": ("tn", "fp"), "ppv": ("tp", "fp"), "npv": ("tn", "fn")}
MOST = 3000  # images that the attacker thinks possible


class Attacker:
    """Knows the floor, the rules and that images are of one class; cells: (subgroup, class, answer)."""

    def __init__(self, figures: SiteFigures, classes: int):
        self.floor, self.classes = figures.floor, classes
        self.values = [group.value for group in figures.groups if group.column is not None] or [None]
        self.shape = (len(self.values), classes, classes)
        self.rows: list[Row] = []
        for group in figures.groups:
            self.learn(group)

    def cells(self, value: str | None, name: str, k: int = 0) -> np.ndarray:
        """Which cells a count adds up."""
        chosen = np.zeros(self.shape)
        part = chosen if value is None else chosen[self.values.index(value) : self.values.index(value) + 1]
        rest = [c for c in range(self.classes) if c != k]
        if name == "tp":
            part[:, k, k] = 1
        elif name == "fn":
            part[:, k, rest] = 1
        elif name == "fp":
            part[:, rest, k] = 1
        elif name == "tn":
            for c, d in product(rest, rest):
                part[:, c, d] = 1
        elif name == "positives":
            part[:, k, :] = 1
        elif name == "images":
            part[:] = 1
        else:
            for c in range(self.classes):
                part[:, c, c] = 1
            if name == "wrong":
                part[:] = 1 - part
        return chosen.ravel()

    def learn(self, group: GroupFigures) -> None:
        """Take down every range of a group; all its fractions were computed from them."""
        for name in ("images", "right", "wrong"):
            self.note(group.value, name, 0, getattr(group, name))
        if group.accuracy is not None:
            assert group.right is not None
            assert group.wrong is not None
            assert group.accuracy == share(group.right, group.wrong, self.floor)
        for k, one in enumerate(group.classes):
            for name in ("tp", "fn", "fp", "tn", "positives"):
                self.note(group.value, name, k, getattr(one, name))
            for name, (hits, misses) in FRACTIONS.items():
                told = getattr(one, name)
                assert told is None or told == share(getattr(one, hits), getattr(one, misses), self.floor)

    def note(self, value: str | None, name: str, k: int, told: Range | None) -> None:
        """A count lies in a range."""
        if told is not None and told.high < UNKNOWN:
            self.rows.append((self.cells(value, name, k), told.low, told.high))

    def bounds(self, value: str | None, name: str, k: int) -> tuple[float, float]:
        """Between which numbers a count must lie."""
        above = [(-cells, -low) for cells, low, _ in self.rows] + [(cells, high) for cells, _, high in self.rows]
        matrix, limits = (None, None) if not above else (np.array([a for a, _ in above]), [b for _, b in above])
        goal = self.cells(value, name, k)
        ends = []
        for side in (1, -1):
            solved = linprog(side * goal, A_ub=matrix, b_ub=limits, bounds=(0, MOST), method="highs")
            assert solved.status == 0, solved.message
            ends.append(side * solved.fun)
        return ends[0], ends[1]


def small_counts(confusion: np.ndarray, floor: int) -> Iterator[tuple[int | None, str, int]]:
    """The counts below the floor of confusion matrices (G, C, C): which part (None: all), which count, which class."""
    parts: Sequence[tuple[int | None, np.ndarray]] = [(None, confusion.sum(axis=0)), *enumerate(confusion)]
    for place, matrix in parts:
        total, right = int(matrix.sum()), int(np.trace(matrix))
        named = {("images", 0): total, ("right", 0): right, ("wrong", 0): total - right}
        for k in range(len(matrix)):
            tp, of, said = int(matrix[k, k]), int(matrix[k].sum()), int(matrix[:, k].sum())
            named |= {("tp", k): tp, ("fn", k): of - tp, ("fp", k): said - tp, ("positives", k): of}
            named[("tn", k)] = total - of - said + tp
        yield from ((place, name, k) for (name, k), count in named.items() if count < floor)
