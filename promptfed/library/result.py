"""What a finished federation came to, to look at, classify with and take away; wherever it ran."""

from __future__ import annotations

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal, get_args

from promptfed.client_service.serving.prediction import BadImage, Predictor, TooManyPixels
from promptfed.export.adapted_model import Learned, predictor_of, weights_of
from promptfed.export.export import Asked, export, open_backbone_of
from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.sdk.output import percent
from promptfed.sdk.simulated import Accuracy, accuracies_of
from promptfed.sdk.snapshot import Taken
from promptfed.shared.clip import Backbone
from promptfed.shared.messages import Role
from promptfed.shared.tensors import Tensors, decode

if TYPE_CHECKING:
    from PIL.Image import Image

Column = Literal["adapted", "zero_shot"]


@dataclass(frozen=True)
class Prediction:
    """Classes of one image by falling probability, ``{name: probability}``; ``zero_shot`` is the template's answer.

    ``domains`` tells which domains the image looks like, where the method mixes prompts by them.
    """

    class_name: str
    probabilities: dict[str, float]
    zero_shot: dict[str, float] | None
    domains: dict[str, float] | None

    @classmethod
    def of(cls, found: dict[str, Any]) -> Prediction:
        """From what a predictor answers."""
        rows, domains = found["classes"], found["domains"]
        template = {row["name"]: row["zero_shot"] for row in rows}
        return cls(
            class_name=found["class_name"],
            probabilities={row["name"]: row["probability"] for row in rows},
            zero_shot=None if None in template.values() else template,
            domains={one["name"]: one["share"] for one in domains} if domains else None,
        )


@dataclass(repr=False)
class Result:
    """A federation after one round.

    Attributes:
        taken: everything that its coordinator told: spec, clients, reports of rounds, state.
        backbone: the frozen model, where it is loaded already; else it is loaded when it is first needed.
    """

    taken: Taken
    backbone: Backbone | None = None
    allow_backbone: bool = False
    _predictors: dict[tuple[str, ...], Predictor] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        """The spec as it ran, nothing left open."""
        return self.taken.spec

    @property
    def round(self) -> int:
        """The round after which this is."""
        return self.taken.round

    @property
    def state_hash(self) -> str:
        """``sha256:<hex>`` of the global state: the same spec, seed, data and machine give the same."""
        return self.taken.state_hash

    @cached_property
    def state(self) -> Tensors:
        """The global state by name: prompts, aggregators, a generator."""
        return decode(self.taken.body)[0]

    @property
    def reports(self) -> list[dict[str, Any]]:
        """A report of every round from 0, as ``GET /v1/federations/{id}/rounds`` answers."""
        return self.taken.reports

    def accuracies(self, round: int | None = None) -> list[Accuracy]:
        """What clients measured after ``round``, or in the last evaluation, by client and test set (fractions)."""
        if round is None:
            found = self.taken.evaluation()
            round = found[0] if found is not None else None
        return [one for report in self.reports if report["round"] == round for one in accuracies_of(report)]

    def mean(self, role: Role = "trainer", column: Column = "adapted") -> float | None:
        """Mean over the clients of ``role`` on their own test images; None where there is none.

        Raises:
            CommandError: there is no such role or column.
        """
        _check(role, get_args(Role))
        _check(column, get_args(Column))
        return _mean([one for one in self.accuracies() if one.role == role and one.split == "test"], column)

    def curve(self, role: Role = "trainer") -> dict[int, float]:
        """The mean of ``role`` after each evaluated round. Raises CommandError where there is no such role."""
        _check(role, get_args(Role))
        found = {}
        for report in self.reports:
            rows = [one for one in accuracies_of(report) if one.role == role and one.split == "test"]
            mean = _mean(rows, "adapted")
            if mean is not None:
                found[int(report["round"])] = mean
        return found

    def predict(self, image: Image | Path | str | bytes, class_names: Sequence[str] | None = None) -> Prediction:
        """Classify an image (a PIL image, a file, or its bytes) as an evaluator of the federation does.

        Raises:
            CommandError: it is no image, there are no class names, or the method classifies with what each client keeps
                to itself.
        """
        names = self._names(class_names)
        if names not in self._predictors:
            self._predictors[names] = predictor_of(self._learned.serve(self._loaded(), names))
        try:
            return Prediction.of(self._predictors[names].predict(_bytes(image)))
        except (BadImage, TooManyPixels) as error:
            raise CommandError(str(error), Exit.BAD_INPUT) from None

    def class_weights(self, class_names: Sequence[str] | None = None) -> Tensors | None:
        """What plain open_clip code classifies with: ``class_weights (C, d_e)`` and ``zero_shot_weights``.

        FaST-PT's hard mixture has ``class_weights (k, C, d_e)``, ``domain_weight`` and ``domain_bias``. None where the
        method needs promptfed's own towers, or texts that depend on the image.
        """
        return weights_of(self._learned.serve(self._loaded(), self._names(class_names)))

    def export(self, folder: Path | str, class_names: Sequence[str] | None = None, *, anonymous: bool = False) -> Path:
        """Write state, class weights and a card into a new ``folder``, as `promptfed export` does."""
        names = tuple(class_names) if class_names is not None else None
        export(self.taken, Path(folder), Asked(names, anonymous, self.allow_backbone), self.backbone)
        return Path(folder)

    def track(self, where: str) -> None:
        """Write all metrics to an experiment tracker: ``tensorboard:FOLDER`` or ``mlflow:URI``."""
        from promptfed.sdk.trackers import open_tracker, record

        with open_tracker(where) as tracker:
            record(tracker, self.taken)

    @cached_property
    def _learned(self) -> Learned:
        return Learned.of(self.taken, self.state)

    def _loaded(self) -> Backbone:
        if self.backbone is None:
            self.backbone = open_backbone_of(self._learned, self.allow_backbone)
        return self.backbone

    def _names(self, given: Sequence[str] | None) -> tuple[str, ...]:
        names = given if given is not None else self.spec["class_names"]
        if not names:
            raise CommandError("the spec names no classes: give class_names", Exit.BAD_INPUT)
        return tuple(names)

    def __repr__(self) -> str:
        return f"<Result {self._title()}>"

    def __str__(self) -> str:
        rows = [_cells(one) for one in self.accuracies()]
        widths = [max(len(row[place]) for row in [HEAD, *rows]) for place in range(len(HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [HEAD, *rows]]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        """As a notebook shows it; names of clients are text."""
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(one)) + "</tr>"
            for one in self.accuracies()
        )
        head = "".join(f"<th>{name}</th>" for name in HEAD)
        return f"<p>{html.escape(self._title())}</p><table><tr>{head}</tr>{body}</table>"

    def _title(self) -> str:
        return f"{self.spec['name']}: {self.spec['method']['name']} after round {self.round} of {self.spec['rounds']}"


HEAD = ["client", "role", "domain", "test set", "zero-shot", "adapted"]


def _cells(one: Accuracy) -> list[str]:
    return [one.client, one.role, one.domain or "-", one.split, percent(one.zero_shot), percent(one.accuracy)]


def _mean(rows: Sequence[Accuracy], column: Column) -> float | None:
    values = [one.accuracy if column == "adapted" else one.zero_shot for one in rows]
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _check(given: str, known: Sequence[str]) -> None:
    if given not in known:
        raise CommandError(f"{given!r} is not known here: give {' or '.join(map(repr, known))}", Exit.BAD_INPUT)


def _bytes(image: Image | Path | str | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, Path)):
        try:
            return Path(image).read_bytes()
        except OSError as error:
            raise CommandError(f"cannot read {image}: {error.strerror}", Exit.BAD_INPUT) from None
    file = io.BytesIO()
    image.convert("RGB").save(file, "PNG")
    return file.getvalue()
