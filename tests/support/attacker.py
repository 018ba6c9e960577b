"""An attacker who puts together all that left a site, to find counts below its floor, by linear programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product

import numpy as np
from scipy.optimize import linprog

from promptfed.shared.metrics.disclosure import UNKNOWN, Range, share
from promptfed.shared.metrics.site_figures import GroupFigures, SiteFigures

Row = tuple[np.ndarray, float, float]  # low ≤ coefficients·cells ≤ high
Goal = Row  # coefficients·cells should be able to reach both ends
TOLERANCE = 1e-6
FRACTIONS = {"sensitivity": ("tp", "fn"), "specificity": ("tn", "fp")}
MOST = 3000  # images that the attacker thinks possible


def chosen_of(values: Sequence[str | None], classes: int, value: str | None, name: str, k: int) -> np.ndarray:
    """Which cells (subgroup, class, answer) a count adds up."""
    chosen = np.zeros((len(values), classes, classes))
    part = chosen if value is None else chosen[values.index(value) : values.index(value) + 1]
    rest = [c for c in range(classes) if c != k]
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
        for c in range(classes):
            part[:, c, c] = 1
        if name == "wrong":
            part[:] = 1 - part
    return chosen.ravel()


class Attacker:
    """Knows the floor, the rules and that images are of one class; cells: (subgroup, class, answer)."""

    def __init__(self, figures: SiteFigures, classes: int):
        self.floor, self.classes = figures.floor, classes
        self.values = [group.value for group in figures.groups if group.column is not None] or [None]
        self.rows: list[Row] = self.known()
        for group in figures.groups:
            self.learn(group)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the cells."""
        return len(self.values), self.classes, self.classes

    def known(self) -> list[Row]:
        """What holds of the cells before anything is told."""
        return []

    def cells(self, value: str | None, name: str, k: int = 0) -> np.ndarray:
        """Which cells a count adds up."""
        return chosen_of(self.values, self.classes, value, name, k)

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
        goal = self.cells(value, name, k)
        solve = self._solver()
        return float(goal @ solve(goal)), float(goal @ solve(-goal))

    def narrowed(self, goals: Sequence[Goal]) -> list[int]:
        """The goals that cannot be as low or as high as they should.

        A point that one program finds often serves other goals too, and those need no program of their own.
        """
        if not goals:
            return []
        solve = self._solver()
        together = np.sum([cells for cells, _, _ in goals], axis=0)
        points, found = [solve(together), solve(-together)], []
        for place, (cells, low, high) in enumerate(goals):
            for side, end in ((1, low), (-1, high)):
                if all(side * (cells @ point - end) > TOLERANCE for point in points):
                    points.append(solve(side * cells))
                    if side * (cells @ points[-1] - end) > TOLERANCE:
                        found.append(place)
        return found

    def _solver(self) -> Callable[[np.ndarray], np.ndarray]:
        """Finds the possible cells that make a sum of them least."""
        rows = np.array([cells for cells, _, _ in self.rows]).reshape(len(self.rows), -1)
        limits = np.array([[-low, high] for _, low, high in self.rows]).reshape(-1, 2)
        matrix, most = np.concatenate([-rows, rows]), np.concatenate([limits[:, 0], limits[:, 1]])

        def solve(goal: np.ndarray) -> np.ndarray:
            given = {"A_ub": matrix, "b_ub": most} if len(rows) else {}
            solved = linprog(goal, bounds=(0, MOST), method="highs", **given)
            assert solved.status == 0, solved.message
            found: np.ndarray = solved.x
            return found

        return solve


class SeveralAttacker(Attacker):
    """Knows that an image may have several classes; cells: (subgroup, class, whether it has it, the answer)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the cells."""
        return len(self.values), self.classes, 2, 2

    def known(self) -> list[Row]:
        """The cells of each class add up to the same images."""
        rows = []
        for value, k in product(self.values, range(1, self.classes)):
            equal = self.cells(value, "images", k) - self.cells(value, "images", 0)
            rows.append((equal, 0.0, 0.0))
        return rows

    def cells(self, value: str | None, name: str, k: int = 0) -> np.ndarray:
        """Which cells a count adds up."""
        chosen = np.zeros(self.shape)
        places = range(len(self.values)) if value is None else [self.values.index(value)]
        has, said = {"tp": (1, 1), "fn": (1, 0), "fp": (0, 1), "tn": (0, 0)}.get(name, (1, slice(None)))
        for place in places:
            chosen[place, k, slice(None) if name == "images" else has, said] = 1
        return chosen.ravel()


def small_tables(tables: np.ndarray, floor: int) -> Iterator[tuple[int | None, str, int]]:
    """As `small_counts`, of tables (G, C, 2, 2): subgroup, class, whether an image has it, the answer."""
    parts: Sequence[tuple[int | None, np.ndarray]] = [(None, tables.sum(axis=0)), *enumerate(tables)]
    for place, table in parts:
        for k, ((tn, fp), (fn, tp)) in enumerate(table):
            named = {"tp": tp, "fn": fn, "fp": fp, "tn": tn, "positives": tp + fn}
            yield from ((place, name, k) for name, count in named.items() if count < floor)
        if table[0].sum() < floor:
            yield place, "images", 0


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
