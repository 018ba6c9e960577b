"""Figures of `promptfed score` by subgroup: the images of each value of a column that the data name (`groups=`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pydantic import BaseModel

from promptfed.sdk.output import console, table
from promptfed.shared.data import Split
from promptfed.shared.metrics.clinical import ClassFigures, Estimate, interval_text

SHOWN = 30  # rows in a table on the terminal
Measured = tuple[Estimate | None, list[ClassFigures]]


class SubgroupFigures(BaseModel):
    """The images that have ``value`` in ``column``. ``accuracy_interval``: where each image has one label."""

    column: str
    value: str
    images: int
    accuracy_interval: Estimate | None = None
    classes: list[ClassFigures]


def subgroup_figures(images: Split, measured: Callable[[Sequence[int]], Measured]) -> list[SubgroupFigures]:
    """The figures of each subgroup of ``images``; ``measured`` gives those of the images at some rows."""
    found = []
    for column, values in images.subgroups.items():
        for value in sorted(set(values)):
            rows = [row for row, own in enumerate(values) if own == value]
            accuracy, classes = measured(rows)
            found.append(
                SubgroupFigures(
                    column=column, value=value, images=len(rows), accuracy_interval=accuracy, classes=classes
                )
            )
    return found


def _title(group: SubgroupFigures) -> str:
    return f"{group.column}={group.value}"


def show_subgroups(subgroups: Sequence[SubgroupFigures]) -> None:
    """Print accuracies, and the AUROC of each class, unless there are too many."""
    rows = [
        [_title(each), each_class.name, str(each_class.positives), interval_text(each_class.auroc)]
        for each in subgroups
        for each_class in each.classes
    ]
    if 0 < len(rows) <= SHOWN:
        console.print(table("Subgroups, 95 % intervals", ["subgroup", "class", "images", "AUROC"], rows))
