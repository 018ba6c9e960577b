"""Figures for `promptfed score`: how well an export does on labelled images, and its confusion matrix.

Predictions for `promptfed predict`: classes of images under learned prompts, beside those of the template.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel
from rich.table import Table
from torch import Tensor

from promptfed.cli.predicting import _expect_names
from promptfed.client_service.serving.prediction import Served
from promptfed.client_service.state.trained_images import folders_of, read_trained
from promptfed.client_service.training.data import TEST, TRAIN, ClientData, LocalSplit
from promptfed.client_service.training.evaluation import answers, logits_of, presences, probabilities
from promptfed.console.files import new_folder, write_file
from promptfed.console.output import console, note, print_json, say, table
from promptfed.export.export import open_backbone_of
from promptfed.export.reading import open_export
from promptfed.shared.clip import FeatureCache
from promptfed.shared.data import Source, Split, open_source
from promptfed.shared.errors import BadInput
from promptfed.shared.metrics.estimates import ClassFigures, Estimate, class_figures, interval_text, proportion
from promptfed.shared.metrics.figures import (
    BINS,
    calibration_error,
    class_accuracies,
    fitted_temperature,
    largest_share,
    macro_f1,
    mean_auroc,
    mean_average_precision,
    nearly_one_class,
)
from promptfed.shared.metrics.pooling import POOLED
from promptfed.shared.plain_text import beside_known, counted, csv_cell, percent, shortened, with_interval
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones
from promptfed.shared.tensors.torch_tensors import state_hash

SHOWN = 30  # rows in a table on the terminal
Measured = tuple[Estimate | None, list[ClassFigures]]
SCORE_FILE, CONFUSION_FILE = "score.json", "confusion.csv"
FIGURES = {
    "accuracy": "accuracy",
    "majority": "most frequent class",
    "auroc": "AUROC, mean of classes",
    "ece": f"calibration error ({BINS} bins)",
    "macro_f1": "macro-F1",
    "worst_class_accuracy": "worst class",
}


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
    """Figures of one classifier; ``zero_shot``: the template's mean average precision. ``state``: the export's hash.

    ``tested`` and ``trained_on``: as of `ScoreFigures`.
    """

    images: int
    state: str
    tested: str | None = None
    trained_on: int | None = None
    mean_average_precision: float | None = None
    zero_shot: float | None = None
    classes: list[ClassFigures]
    subgroups: list[SubgroupFigures] = []


def presence_figures(
    served: Served, split: LocalSplit, names: Sequence[str], images: Split, state: str
) -> PresenceFigures:
    """The figures of ``served`` on ``split``, which are all of ``images``."""
    labels, present = split.labels.numpy(), presences(served.classifier, split).numpy()

    def classes(rows: Sequence[int]) -> list[ClassFigures]:
        found = []
        for k, name in enumerate(names):
            labelled = [row for row in rows if labels[row, k] >= 0]
            if labelled:
                patients = None if images.groups is None else [images.groups[row] for row in labelled]
                said = present[labelled, k]
                found.append(class_figures(name, labels[labelled, k] == 1, said, said > 0.5, patients))
        return found

    return PresenceFigures(
        images=len(labels),
        state=state,
        mean_average_precision=mean_average_precision(labels, present),
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
    console.print(_class_table("Each class, 95 % intervals", figures.classes))
    show_subgroups(figures.subgroups)


def run_score(
    export: Path,
    uri: str,
    out: Path,
    allow_backbone: AllowedBackbones,
    as_json: bool,
    key: str | None = None,
    state_dirs: Sequence[Path] = (),
    fit_on: str | None = None,
) -> None:
    """Score an export on the images of ``uri`` and write the figures and the confusion matrix into ``out``.

    With a coordinator's public ``key``, the export must have its signature. Images that the clients of ``state_dirs``
    have trained on are left out. ``fit_on``: data on whose training images a temperature is fitted first.

    Raises:
        PromptfedError: the export, the data or the backbone cannot be used, or the data have classes that the
            export does not choose among.
    """
    opened = open_export(export, key)
    source = open_source(uri, "evaluator", opened.model.greys)
    model, names = opened.model, _expect_names(tuple(opened.card.class_names or ()) or source.class_names)
    source, trained_on = _untrained(source, opened.card.federation.id, state_dirs)
    about = {"tested": _digest(source.test), "trained_on": trained_on}
    _expect_known(source.class_names, names, uri)
    backbone = open_backbone_of(model, allow_backbone)
    served = model.serve(backbone, names)
    temperature = 1.0
    with new_folder(out, "--out") as folder, TemporaryDirectory(prefix="promptfed-score-") as features:
        if fit_on is not None:
            fitting_data = ClientData(
                open_source(fit_on, "trainer", model.greys), backbone, FeatureCache(Path(features))
            )
            temperature = _temperature(served, fitting_data.split(TRAIN, names), fit_on)
            served = model.serve(backbone, names, temperature)
        split = ClientData(source, backbone, FeatureCache(Path(features))).split(TEST, names)
        _expect_kind(served, split.labels, uri)
        state = state_hash(model.state)
        if served.several_labels:
            several = presence_figures(served, split, names, source.test, state).model_copy(update=about)
            write_file(folder / SCORE_FILE, (several.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
            show_presences(several, uri, as_json)
            return
        shares = probabilities(served.classifier, split)
        confidence, predicted = shares.max(dim=-1)
        figures = scores(split.labels, predicted, confidence, shares, names).model_copy(
            update=about | {"temperature": temperature}
        )
        figures.state, figures.classes = state, by_class(split.labels, shares, names, source.test.groups)
        figures.subgroups = subgroup_figures(
            source.test, lambda rows: _of_rows(split.labels, shares, names, source.test, rows)
        )
        if served.template is not None:
            figures.zero_shot = scores(split.labels, *answers(served.template, split), names)
        matrix = confusion(split.labels, predicted, len(names))
        write_file(folder / SCORE_FILE, (figures.model_dump_json(indent=1, exclude_none=True) + "\n").encode())
        write_file(folder / CONFUSION_FILE, _csv(matrix, names).encode())
    if as_json:
        print_json(figures.model_dump(exclude_none=True))
        return
    _show(figures, uri)
    say(f"Wrote {SCORE_FILE} and {CONFUSION_FILE} in {out}.")


def _untrained(source: Source, federation: str, state_dirs: Sequence[Path]) -> tuple[Source, int | None]:
    """The source without the test images that clients have trained on, and how many these are; None: unknown.

    Raises:
        PromptfedError: a folder has no record of training images, or no image is left.
    """
    trained: set[str] = set()
    folders = [*state_dirs] or folders_of(federation)
    for folder in folders:
        try:
            digests = read_trained(folder)
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"{folder} cannot be read: {why(error)}") from None
        if digests is None:
            raise BadInput(f"{folder} records no training images: give a client's --state-dir")
        trained |= digests
    if not folders:
        note("Whether training has seen some of these images is not known: no client's folder is here (--state-dir).")
        return source, None
    left = [row for row in range(len(source.test)) if source.test.digest(row) not in trained]
    seen = len(source.test) - len(left)
    if not left:
        text = f"all {seen} images of {source.uri} were trained on: give images that were not"
        raise BadInput(text)
    of_all = f"{seen or 'None'} of the {counted(len(source.test), 'image')} of {source.uri}"
    note(f"{of_all} {'was' if seen < 2 else 'were'} trained on{' and left out' if seen else ''}.")
    return replace(source, test=source.test.select(torch.tensor(left))), seen


def _digest(images: Split) -> str:
    """SHA-256 over the images, whatever their order."""
    return hashlib.sha256("".join(sorted(images.digest(row) for row in range(len(images)))).encode()).hexdigest()


def _temperature(served: Served, split: LocalSplit, uri: str) -> float:
    if served.several_labels or split.labels.ndim == 2 or not len(split.labels):
        raise BadInput(f"--fit-on takes training images with one label each, and {uri} has none")
    logits = torch.cat(list(logits_of(served.classifier, split, lambda: False)))
    return round(fitted_temperature(split.labels.numpy(), logits.cpu().numpy()), 4)


def _expect_known(classes: Sequence[str], names: Sequence[str], uri: str) -> None:
    unknown = [name for name in classes if name not in names]
    if unknown:
        text = f"the export does not choose among the classes {shortened(unknown)} of {uri}"
        remedy = f"leave them out with only=NAME,NAME{beside_known(unknown, names)}"
        raise BadInput(f"{text}: {remedy}")


def _expect_kind(served: Served, labels: Tensor, uri: str) -> None:
    if served.several_labels != (labels.ndim == 2):
        one, many = "one label per image", "any number of labels per image"
        here, there = (one, many) if served.several_labels else (many, one)
        raise BadInput(f"the export is for {there}, and {uri} has {here}")


def _show(figures: ScoreFigures, uri: str) -> None:
    rows = [[title, *(_cell(scored, key) for scored in (figures.zero_shot, figures))] for key, title in FIGURES.items()]
    console.print(table(f"{counted(figures.images, 'image')} of {uri}", ["", "zero-shot", "adapted"], rows))
    if nearly_one_class(figures.one_answer, figures.majority):
        shifted = f"{percent(figures.one_answer)} of the answers are one class: these images are shifted as a whole"
        say(f"{shifted} against what was trained on, or unknown to the backbone. AUROC says what accuracy does not.")
    if len(figures.classes) <= SHOWN:
        console.print(_class_table("Each class against the rest, 95 % intervals", figures.classes))
    show_subgroups(figures.subgroups)


def _class_table(title: str, classes: Sequence[ClassFigures]) -> Table:
    rows = [[one.name, str(one.positives), *(interval_text(getattr(one, key)) for key in POOLED)] for one in classes]
    return table(title, ["class", "images", *POOLED.values()], rows)


class ScoreFigures(BaseModel):
    """Figures of one classifier on labelled images (fractions), with the template's if the backbone reads texts.

    ``state``: the hash of the export's state. ``tested``: a hash over the digests of the images. ``trained_on``: how
    many images training has seen, which were left out; None: unknown. ``classes`` that have images, each against the
    rest. ``subgroups``: the same by value of each column of the data (`groups=`).
    """

    images: int
    accuracy: float
    accuracy_interval: Estimate | None = None
    state: str | None = None
    classes: list[ClassFigures] = []
    subgroups: list[SubgroupFigures] = []
    tested: str | None = None
    trained_on: int | None = None
    ece: float
    macro_f1: float
    majority: float | None = None
    auroc: float | None = None
    one_answer: float | None = None
    temperature: float = 1.0
    worst_class: str
    worst_class_accuracy: float
    zero_shot: ScoreFigures | None = None


def _cell(scores: ScoreFigures | None, name: str) -> str:
    if scores is None:
        return "-"
    found = scores.accuracy_interval if name == "accuracy" else None
    return with_interval(getattr(scores, name), None if found is None else (found.low, found.high))


def scores(labels: Tensor, predicted: Tensor, confidence: Tensor, told: Tensor, names: Sequence[str]) -> ScoreFigures:
    """Accuracy and further figures of answers ``(N,)`` among ``names``, ``told (N, C)`` with these probabilities."""
    right = (labels.cpu() == predicted).numpy()
    by_class = class_accuracies(labels.numpy(), predicted.numpy())
    worst = min(by_class, key=lambda label: (by_class[label], label))
    return ScoreFigures(
        images=len(labels),
        accuracy=float(right.mean()),
        accuracy_interval=proportion(int(right.sum()), len(right)),
        ece=calibration_error(confidence.numpy(), right),
        macro_f1=macro_f1(labels.numpy(), predicted.numpy()),
        majority=largest_share(labels.numpy()),
        auroc=mean_auroc(labels.numpy(), told.numpy()),
        one_answer=largest_share(predicted.numpy()),
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
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["class", *map(csv_cell, names)])
    writer.writerows([csv_cell(name), *row.tolist()] for name, row in zip(names, matrix, strict=True))
    return text.getvalue()
