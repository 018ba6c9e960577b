"""Figures of `promptfed score` by subgroup: the images of each value of a column that the data name (`groups=`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import BaseModel

from promptfed.cli.forest_plot import forest
from promptfed.sdk.output import console, table
from promptfed.shared.data import Split
from promptfed.shared.metrics.clinical import ClassFigures, Estimate, interval_text
from promptfed.shared.metrics.pooling import PooledFigure

SHOWN = 30  # rows in a table on the terminal
SUBGROUPS_PICTURE = "subgroups.png"
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


def draw_subgroups(subgroups: Sequence[SubgroupFigures], folder: Path) -> None:
    """Write a forest plot of the accuracy and of the classes' AUROCs by subgroup, where the data name any."""
    names = list(dict.fromkeys(one.name for each in subgroups for one in each.classes))
    found: list[tuple[str, str | None, dict[str, Estimate | None]]] = []
    found.append(("accuracy", None, {_title(each): each.accuracy_interval for each in subgroups}))
    for name in names:
        classes = {_title(each): {one.name: one for one in each.classes}.get(name) for each in subgroups}
        found.append(("auroc", name, {title: one.auroc if one else None for title, one in classes.items()}))
    figures = [
        PooledFigure(figure=figure, class_name=name, sites=known, pooled=None)
        for figure, name, of_groups in found
        if (known := {title: estimate for title, estimate in of_groups.items() if estimate is not None})
    ]
    if figures:
        forest(figures).savefig(folder / SUBGROUPS_PICTURE, dpi=150, bbox_inches="tight")


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
