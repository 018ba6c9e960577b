"""Figures for `promptfed score`: how well an export does on labelled images, and its confusion matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from pydantic import BaseModel
from rich.table import Table
from torch import Tensor

from promptfed.cli.predicting import model_of_export
from promptfed.client_service.serving.prediction import Served
from promptfed.client_service.training.data import TEST, ClientData, LocalSplit
from promptfed.client_service.training.evaluation import answers, presences, probabilities
from promptfed.export.export import open_backbone_of
from promptfed.sdk.client import CommandError, Exit
from promptfed.sdk.output import console, new_folder, percent, print_json, say, table, write_file
from promptfed.shared.clip import FeatureCache
from promptfed.shared.data import Split, open_source
from promptfed.shared.metrics import (
    BINS,
    POOLED,
    ClassFigures,
    Estimate,
    calibration_error,
    class_accuracies,
    class_figures,
    interval_text,
    macro_f1,
    mean_average_precision,
    proportion,
)
from promptfed.shared.plain_text import counted, csv_cell, plain
from promptfed.shared.spec.spec import AllowedBackbones
from promptfed.shared.tensors.torch_tensors import state_hash

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


SCORE_FILE, CONFUSION_FILE, PICTURE = "score.json", "confusion.csv", "confusion.png"
_NAMED = 40  # classes, beyond which a picture has no room for their names


def run_score(
    export: Path, uri: str, out: Path, allow_backbone: AllowedBackbones, as_json: bool, key: str | None = None
) -> None:
    """Score an export on all images of ``uri`` and write the figures and the confusion matrix into ``out``.

    With a coordinator's public ``key``, the export must have its signature.

    Raises:
        CommandError, DataError: the export, the data or the backbone cannot be used, or the data have classes that the
            export does not choose among.
    """
    source = open_source(uri, "evaluator")
    model, names = model_of_export(export, otherwise=source.class_names, key=key)
    _expect_known(source.class_names, names, uri)
    backbone = open_backbone_of(model, allow_backbone)
    served = model.serve(backbone, names)
    with new_folder(out, "--out") as folder, TemporaryDirectory(prefix="promptfed-score-") as features:
        split = ClientData(source, backbone, FeatureCache(Path(features))).split(TEST, names)
        _expect_kind(served, split.labels, uri)
        state = state_hash(model.state)
        if served.several_labels:
            several = presence_figures(served, split, names, source.test, state)
            write_file(folder / SCORE_FILE, (several.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
            show_presences(several, uri, as_json)
            return
        told = probabilities(served.classifier, split)
        confidence, predicted = told.max(dim=-1)
        figures = scores(split.labels, predicted, confidence, names)
        figures.state, figures.classes = state, by_class(split.labels, told, names, source.test.groups)
        figures.subgroups = subgroup_figures(
            source.test, lambda rows: _of_rows(split.labels, told, names, source.test, rows)
        )
        if served.template is not None:
            figures.zero_shot = scores(split.labels, *answers(served.template, split), names)
        matrix = confusion(split.labels, predicted, len(names))
        write_file(folder / SCORE_FILE, (figures.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
        write_file(folder / CONFUSION_FILE, _csv(matrix, names).encode())
        _draw(matrix, names).savefig(folder / PICTURE, dpi=150, bbox_inches="tight")
    if as_json:
        print_json(figures.model_dump(exclude_none=True))
        return
    _show(figures, uri)
    say(f"Wrote {SCORE_FILE}, {CONFUSION_FILE} and {PICTURE} in {out}.")


def _expect_known(classes: Sequence[str], names: Sequence[str], uri: str) -> None:
    unknown = [name for name in classes if name not in names]
    if unknown:
        shown = ", ".join(unknown[:5]) + (f" and {len(unknown) - 5} more" if len(unknown) > 5 else "")
        text = f"the export does not choose among the classes {shown} of {uri}: leave them out with only=NAME,NAME"
        raise CommandError(text, Exit.BAD_INPUT)


def _expect_kind(served: Served, labels: Tensor, uri: str) -> None:
    if served.several_labels != (labels.ndim == 2):
        one, many = "one label per image", "any number of labels per image"
        here, there = (one, many) if served.several_labels else (many, one)
        raise CommandError(f"the export is for {there}, and {uri} has {here}", Exit.BAD_INPUT)


def _show(figures: ScoreFigures, uri: str) -> None:
    rows = [[title, *(_cell(scored, key) for scored in (figures.zero_shot, figures))] for key, title in FIGURES.items()]
    console.print(table(f"{counted(figures.images, 'image')} of {uri}", ["", "zero-shot", "adapted"], rows))
    if len(figures.classes) <= SHOWN:
        console.print(_class_table(figures.classes))
    show_subgroups(figures.subgroups)


def _class_table(classes: Sequence[ClassFigures]) -> Table:
    rows = [[one.name, str(one.positives), *(interval_text(getattr(one, key)) for key in POOLED)] for one in classes]
    return table("Each class against the rest, 95 % intervals", ["class", "images", *POOLED.values()], rows)


FIGURES = {
    "accuracy": "accuracy",
    "ece": f"calibration error ({BINS} bins)",
    "macro_f1": "macro-F1",
    "worst_class_accuracy": "worst class",
}


class ScoreFigures(BaseModel):
    """Figures of one classifier on labelled images (fractions), with the template's if the backbone reads texts.

    ``state``: the hash of the export's state. ``classes`` that have images, each against the rest. ``subgroups``: the
    same by value of each column of the data (`groups=`).
    """

    images: int
    accuracy: float
    accuracy_interval: Estimate | None = None
    state: str | None = None
    classes: list[ClassFigures] = []
    subgroups: list[SubgroupFigures] = []
    ece: float
    macro_f1: float
    worst_class: str
    worst_class_accuracy: float
    zero_shot: ScoreFigures | None = None


def _cell(scores: ScoreFigures | None, name: str) -> str:
    return percent(getattr(scores, name)) if scores is not None else "-"


def scores(labels: Tensor, predicted: Tensor, confidence: Tensor, names: Sequence[str]) -> ScoreFigures:
    """Accuracy, expected calibration error, macro-F1 and the worst class of answers ``(N,)`` among ``names``."""
    right = (labels.cpu() == predicted).numpy()
    by_class = class_accuracies(labels.numpy(), predicted.numpy())
    worst = min(by_class, key=lambda label: (by_class[label], label))
    return ScoreFigures(
        images=len(labels),
        accuracy=float(right.mean()),
        accuracy_interval=proportion(int(right.sum()), len(right)),
        ece=calibration_error(confidence.numpy(), right),
        macro_f1=macro_f1(labels.numpy(), predicted.numpy()),
        worst_class=names[worst],
        worst_class_accuracy=by_class[worst],
    )


def by_class(
    labels: Tensor, told: Tensor, names: Sequence[str], groups: Sequence[str] | None = None
) -> list[ClassFigures]:
    """Figures of each class that has images, by labels ``(N,)`` and probabilities ``(N, C)``; ``groups``: patients."""
    predicted = told.argmax(dim=-1)
    return [
        class_figures(names[k], (labels == k).numpy(), told[:, k].numpy(), (predicted == k).numpy(), groups)
        for k in torch.unique(labels).tolist()
    ]


def _of_rows(
    labels: Tensor, told: Tensor, names: Sequence[str], images: Split, rows: Sequence[int]
) -> tuple[Estimate | None, list[ClassFigures]]:
    """The accuracy and the figures by class of some images, which have a class."""
    kept = torch.tensor([row for row in rows if labels[row] >= 0], dtype=torch.int64)
    right = told[kept].argmax(dim=-1) == labels[kept]
    groups = None if images.groups is None else [images.groups[row] for row in kept.tolist()]
    return proportion(int(right.sum()), len(right)), by_class(labels[kept], told[kept], names, groups)


def confusion(labels: Tensor, predicted: Tensor, classes: int) -> NDArray[np.int64]:
    """``(C, C)``: how many images of a class (row) were taken for which (column)."""
    pairs = labels.cpu() * classes + predicted
    counts: NDArray[np.int64] = torch.bincount(pairs, minlength=classes * classes).reshape(classes, classes).numpy()
    return counts


def _csv(matrix: NDArray[np.int64], names: Sequence[str]) -> str:
    import csv
    import io

    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *map(csv_cell, names)])
    writer.writerows([csv_cell(name), *row.tolist()] for name, row in zip(names, matrix, strict=True))
    return text.getvalue()


def _draw(matrix: NDArray[np.int64], names: Sequence[str]) -> Figure:
    """A picture of the confusion matrix, each row as shares of its class's images."""
    side = max(3.2, min(12.0, 0.22 * len(names) + 1.6))
    figure = Figure(figsize=(side, side))
    axes = figure.add_subplot()
    shares = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    shown = axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    axes.set_xlabel("taken for")
    axes.set_ylabel("class")
    if len(names) <= _NAMED:
        shown_names = [plain(name) for name in names]
        axes.set_xticks(range(len(names)), shown_names, rotation=90, fontsize=7, parse_math=False)  # a $ is no formula
        axes.set_yticks(range(len(names)), shown_names, fontsize=7, parse_math=False)
    figure.colorbar(shown, ax=axes, fraction=0.046, label="share of the class's images")
    return figure
