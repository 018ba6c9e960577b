"""A site's figures of one classifier as they leave it: by class and by subgroup, under the disclosure floor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, Field

from promptfed.shared.metrics.clinical import Estimate, class_figures
from promptfed.shared.metrics.disclosure import (
    Answers,
    Range,
    Table,
    coded,
    exclusive_answers,
    parts_may_leave,
    several_answers,
    share,
    total,
)

EMPTY = Range(low=0, high=0)
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
MOST_VALUES = 50  # of a column of subgroups
Fraction = Annotated[float, Field(ge=0, le=1)]
POOLED = {
    "auroc": "AUROC",
    "average_precision": "average precision",
    "sensitivity": "sensitivity",
    "specificity": "specificity",
}
"""Figures of a class that are pooled over sites, with their titles."""


def _sound(told: Estimate) -> Estimate:
    if not all(0 <= number <= 1 for number in (told.value, told.low, told.high)):
        raise ValueError("is no figure between 0 and 1 with its interval")
    if told.se is not None and not 0 <= told.se < math.inf:
        raise ValueError("its standard error is no number from 0 on")
    return told


Told = Annotated[Estimate, AfterValidator(_sound)]
"""A figure as a site says it."""


class SiteClass(BaseModel):
    """One class against the rest. None: there are too few cases, or the figure would tell of too few."""

    name: str
    positives: Range | None = None
    tp: Range | None = None
    fn: Range | None = None
    fp: Range | None = None
    tn: Range | None = None
    auroc: Told | None = None
    average_precision: Told | None = None
    sensitivity: Told | None = None
    specificity: Told | None = None
    balanced_accuracy: Fraction | None = None


class GroupFigures(BaseModel):
    """Figures of all images, or of those that have ``value`` in ``column``."""

    column: str | None = None
    value: str | None = None
    images: Range | None = None
    right: Range | None = None
    wrong: Range | None = None
    accuracy: Told | None = None
    classes: Annotated[list[SiteClass], Field(max_length=100_000)]


class SiteFigures(BaseModel):
    """What a site tells of a classifier: first of all its images, then of its subgroups; by ``floor``."""

    floor: Annotated[int, Field(ge=1)]
    groups: Annotated[list[GroupFigures], Field(min_length=1, max_length=1000)]


@dataclass(frozen=True)
class Answered:
    """Answers to N images among C classes.

    Attributes:
        names: the classes.
        truth, decided: (N, C), what each image is, and what it is taken for.
        scores: (N, C), probabilities.
        patients: (N,), the patient of each image, where the data name them.
        subgroups: (N,) values by column.
        exclusive: whether each image is of one class.
    """

    names: Sequence[str]
    truth: Bools
    decided: Bools
    scores: Floats
    patients: tuple[str, ...] | None = None
    subgroups: Mapping[str, Sequence[str]] = field(default_factory=dict)
    exclusive: bool = True

    def among(self, rows: Bools) -> Answered:
        """The answers to some of the images."""
        kept = np.flatnonzero(rows)
        patients = None if self.patients is None else tuple(self.patients[row] for row in kept)
        subgroups = {column: tuple(values[int(row)] for row in kept) for column, values in self.subgroups.items()}
        arrays = {name: getattr(self, name)[rows] for name in ("truth", "decided", "scores")}
        return replace(self, **arrays, patients=patients, subgroups=subgroups)

    def count(self, rows: Bools, floor: int) -> Range:
        """How many images ``rows`` has, as it leaves."""
        patients = None
        if self.patients is not None:
            patients = len({self.patients[row] for row in np.flatnonzero(rows)})
        return coded(int(rows.sum()), floor, patients)


def site_figures(answered: Answered, floor: int) -> SiteFigures:
    """The figures of a site under its ``floor``; 1 or less: of every case.

    Raises:
        ValueError: a column has more than `MOST_VALUES` values.
    """
    floor = max(1, floor)
    whole = _Part(answered, floor)
    groups = [whole.own_figures()]
    for column, values in answered.subgroups.items():
        distinct = sorted(set(values))
        if len(distinct) > MOST_VALUES:
            raise ValueError(f"the column {column} has {len(distinct)} values; subgroups may be {MOST_VALUES} at most")
        parts = [_Part(answered.among(np.array([each == value for each in values])), floor) for value in distinct]
        for value, part, tables in zip(distinct, parts, whole.tables_of(parts), strict=True):
            groups.append(part.figures_in(tables).model_copy(update={"column": column, "value": value}))
    return SiteFigures(floor=floor, groups=groups)


class _Part:
    """Answers with what may leave of them."""

    def __init__(self, answered: Answered, floor: int):
        self.answered, self.floor = answered, floor
        truth, decided = answered.truth, answered.decided
        hit, missed, alarm, passed = truth & decided, truth & ~decided, ~truth & decided, ~truth & ~decided
        classes = range(len(answered.names))
        if answered.exclusive:
            confusion = [[answered.count(cells[:, k], floor) for cells in (hit, missed, alarm)] for k in classes]
            right: Bools = np.asarray(hit.any(axis=1))
            self.answers = exclusive_answers(
                confusion, answered.count(right, floor), answered.count(~right, floor), floor
            )
        else:
            cells = (hit, missed, alarm, passed)
            tables = [Table(*(answered.count(each[:, k], floor) for each in cells)) for k in classes]
            self.answers = Answers(several_answers(tables, floor), EMPTY, EMPTY)

    def tables_of(self, parts: Sequence[_Part]) -> list[list[Table | None]]:
        """What may leave of disjoint ``parts`` of these images: hits and misses, and of two classes all answers."""
        told = [list(part.answers.tables) for part in parts]
        for k, whole in enumerate(self.answers.tables):
            own = [part[k] for part in told]
            known = [table for table in own if table is not None]
            fits = whole is None or len(known) < len(own) or parts_may_leave(whole, known, self.floor)
            for part, table in zip(told, own, strict=True):
                part[k] = Table(table.tp, table.fn) if fits and table is not None else None
        if not self.answered.exclusive or len(self.answers.tables) != 2:
            return told
        return [_of_two(*part) for part in told]

    def figures(self, tables: Sequence[Table | None], right: Range, wrong: Range) -> GroupFigures:
        """The figures of what may leave."""
        classes = [_class_figures(self.answered, k, table, self.floor) for k, table in enumerate(tables)]
        if not self.answered.exclusive:
            return GroupFigures(classes=classes)
        accuracy = share(right, wrong, self.floor)
        return GroupFigures(images=total([right, wrong]), right=right, wrong=wrong, accuracy=accuracy, classes=classes)

    def own_figures(self) -> GroupFigures:
        """The figures of all images."""
        return self.figures(self.answers.tables, self.answers.right, self.answers.wrong)

    def figures_in(self, tables: Sequence[Table | None]) -> GroupFigures:
        """The figures of a part of the images: its right and wrong answers are those of its classes."""
        known = [table for table in tables if table is not None]
        if len(known) < len(tables):
            classes = [_class_figures(self.answered, k, table, self.floor) for k, table in enumerate(tables)]
            return GroupFigures(classes=classes)
        return self.figures(tables, total(table.tp for table in known), total(table.fn for table in known))


def _of_two(one: Table | None, other: Table | None) -> list[Table | None]:
    """Both tables of a pair of classes, whose false alarms are each other's misses."""
    if one is None or other is None:
        return [one, other]
    return [Table(one.tp, one.fn, other.fn, other.tp), Table(other.tp, other.fn, one.fn, one.tp)]


def _class_figures(answered: Answered, k: int, table: Table | None, floor: int) -> SiteClass:
    name = answered.names[k]
    if table is None:
        return SiteClass(name=name)
    truth, decided = answered.truth[:, k], answered.decided[:, k]
    figures: dict[str, Any] = {"tp": table.tp, "fn": table.fn, "fp": table.fp, "tn": table.tn}
    figures |= {"positives": table.positives, "sensitivity": share(table.tp, table.fn, floor)}
    if table.fp is not None and table.tn is not None:
        figures["specificity"] = share(table.tn, table.fp, floor)
        if figures["sensitivity"] is not None and figures["specificity"] is not None:
            figures["balanced_accuracy"] = (figures["sensitivity"].value + figures["specificity"].value) / 2
    positives, negatives = answered.count(truth, floor), answered.count(~truth, floor)
    if min(table.positives.low, positives.low, negatives.low) < floor:
        return SiteClass(name=name, **figures)
    own = class_figures(name, truth, answered.scores[:, k], decided, answered.patients)
    figures |= {at: _rounded(getattr(own, at), floor) for at in ("auroc", "average_precision")}
    return SiteClass(name=name, **figures)


def _rounded(estimate: Estimate | None, floor: int) -> Estimate | None:
    if estimate is None or floor <= 1:
        return estimate
    se = None if estimate.se is None else float(f"{estimate.se:.2g}")
    low, high = round(estimate.low, 3), round(estimate.high, 3)
    return Estimate(value=round(estimate.value, 3), low=low, high=high, se=se)
