"""Figures for `promptfed score` on images with several labels: each class by those images of which it is known."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from promptfed.client_service.serving.prediction import Served
from promptfed.client_service.training.data import LocalSplit
from promptfed.client_service.training.evaluation import presences
from promptfed.sdk.output import console, print_json, table
from promptfed.sdk.text import percent
from promptfed.shared.metrics.clinical import ClassFigures, class_figures, interval_text, mean_average_precision
from promptfed.shared.metrics.site_figures import POOLED
from promptfed.shared.plain_text import counted


class PresenceFigures(BaseModel):
    """Figures of one classifier; ``zero_shot``: the template's mean average precision. ``state``: the export's hash."""

    images: int
    state: str
    mean_average_precision: float | None
    zero_shot: float | None = None
    classes: list[ClassFigures]


def presence_figures(
    served: Served, split: LocalSplit, names: Sequence[str], groups: Sequence[str] | None, state: str
) -> PresenceFigures:
    """The figures of ``served`` on all images of ``split``; ``groups``: the patient of each image."""
    labels, told = split.labels.numpy(), presences(served.classifier, split).numpy()
    classes = []
    for k, name in enumerate(names):
        known = labels[:, k] >= 0
        if known.any():
            own = None if groups is None else [group for group, kept in zip(groups, known, strict=True) if kept]
            said = told[known, k]
            classes.append(class_figures(name, labels[known, k] == 1, said, said > 0.5, own))
    return PresenceFigures(
        images=len(labels),
        state=state,
        mean_average_precision=mean_average_precision(labels, told),
        zero_shot=None
        if served.template is None
        else mean_average_precision(labels, presences(served.template, split).numpy()),
        classes=classes,
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
