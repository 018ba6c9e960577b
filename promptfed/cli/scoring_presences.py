"""Figures for `promptfed score` on images with several labels: each class by those images of which it is known."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from promptfed.cli.scoring_subgroups import SubgroupFigures, show_subgroups, subgroup_figures
from promptfed.client_service.serving.prediction import Served
from promptfed.client_service.training.data import LocalSplit
from promptfed.client_service.training.evaluation import presences
from promptfed.sdk.output import console, print_json, table
from promptfed.sdk.text import percent
from promptfed.shared.data import Split
from promptfed.shared.metrics.clinical import POOLED, ClassFigures, class_figures, interval_text, mean_average_precision
from promptfed.shared.plain_text import counted


class PresenceFigures(BaseModel):
    """Figures of one classifier; ``zero_shot``: the template's mean average precision. ``state``: the export's hash."""

    images: int
    state: str
    mean_average_precision: float | None = None
    zero_shot: float | None = None
    classes: list[ClassFigures]
    subgroups: list[SubgroupFigures] = []


def presence_figures(
    served: Served, split: LocalSplit, names: Sequence[str], images: Split, state: str
) -> PresenceFigures:
    """The figures of ``served`` on ``split``, which are all of ``images``."""
    labels, told = split.labels.numpy(), presences(served.classifier, split).numpy()

    def classes(rows: Sequence[int]) -> list[ClassFigures]:
        found = []
        for k, name in enumerate(names):
            known = [row for row in rows if labels[row, k] >= 0]
            if known:
                own = None if images.groups is None else [images.groups[row] for row in known]
                said = told[known, k]
                found.append(class_figures(name, labels[known, k] == 1, said, said > 0.5, own))
        return found

    return PresenceFigures(
        images=len(labels),
        state=state,
        mean_average_precision=mean_average_precision(labels, told),
        zero_shot=None
        if served.template is None
        else mean_average_precision(labels, presences(served.template, split).numpy()),
        classes=classes(range(len(labels))),
        subgroups=subgroup_figures(images, lambda rows: (None, classes(rows))),
    )


def show_presences(figures: PresenceFigures, uri: str, as_json: bool) -> None:
    """Print the figures as tables or as JSON."""
    if as_json:
        print_json(figures.model_dump(exclude_none=True))
        return
    row = ["mean average precision", percent(figures.zero_shot), percent(figures.mean_average_precision)]
    console.print(table(f"{counted(figures.images, 'image')} of {uri}", ["", "zero-shot", "adapted"], [row]))
    rows = [
        [one.name, str(one.positives), *(interval_text(getattr(one, key)) for key in POOLED)] for one in figures.classes
    ]
    console.print(table("Each class, 95 % intervals", ["class", "images", *POOLED.values()], rows))
    show_subgroups(figures.subgroups)
