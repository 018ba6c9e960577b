"""The result of a federation, from a coordinator or a simulation: to inspect, classify with and export."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from PIL.Image import Image

from promptfed.client_service.serving.prediction import BadImage, Predictor, TooManyPixels
from promptfed.console.output import remarks
from promptfed.experiments.bench.tables import figures
from promptfed.export.adapted_model import AdaptedModel, class_names_of, predictor_of, weights_of
from promptfed.export.export import ExportOptions, export, open_backbone_of
from promptfed.sdk.arguments import all_checked
from promptfed.sdk.client import Coordinator
from promptfed.sdk.result import Accuracy, FederationResult, interval_of
from promptfed.shared.clip import Backbone
from promptfed.shared.data.pixels import UNREADABLE, in_rgb
from promptfed.shared.errors import BadInput
from promptfed.shared.files import open_file
from promptfed.shared.messages import Role
from promptfed.shared.plain_text import percent, with_interval
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import AllowedBackbones, check_class_names
from promptfed.shared.tensors import Tensors

Column = Literal["adapted", "zero_shot"]
METRICS = ("accuracy", "ece", "macro_f1", "worst_class")
HEAD = ["client", "role", "domain", "test set", "zero-shot", "adapted [95 %]"]


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
    def of(cls, answer: Mapping[str, Any]) -> Prediction:
        """From the answer of a predictor."""
        rows, domains = answer["classes"], answer["domains"]
        template = {row["name"]: row["zero_shot"] for row in rows}
        return cls(
            class_name=answer["class_name"],
            probabilities={row["name"]: row["probability"] for row in rows},
            zero_shot=None if None in template.values() else template,
            domains={domain["name"]: domain["share"] for domain in domains} if domains else None,
        )


@all_checked
@dataclass(repr=False)
class Result:
    """A federation after one round.

    Attributes:
        taken: everything that its coordinator answered: spec, clients, reports of rounds, state.
        backbone: the frozen model, where it is loaded already; else it is loaded when it is first needed.
        coordinator: it came from there; it signs exports.
    """

    taken: FederationResult
    backbone: Backbone | None = None
    allow_backbone: AllowedBackbones = False
    coordinator: Coordinator | None = None
    _predictors: dict[tuple[str, ...], Predictor] = field(default_factory=dict)

    @property
    def spec(self) -> dict[str, Any]:
        """The resolved spec."""
        return self.taken.spec

    @property
    def round(self) -> int:
        """The round after which this is the result."""
        return self.taken.round

    @property
    def state_hash(self) -> str:
        """``sha256:<hex>`` of the global state: the same spec, seed, data and machine give the same."""
        return self.taken.state_hash

    @property
    def state(self) -> Tensors:
        """The global state by name: prompts, aggregators, a generator."""
        return self.taken.state

    @property
    def reports(self) -> list[dict[str, Any]]:
        """A report of every round from 0, as ``GET /v1/federations/{id}/rounds`` answers."""
        return self.taken.reports

    def accuracies(self, round: int | None = None) -> list[Accuracy]:
        """Clients' accuracies (fractions) after ``round``, or in the last evaluation, by client and test set."""
        return self.taken.final() if round is None else self.taken.accuracies(round)

    def mean(self, role: Role = "trainer", column: Column = "adapted") -> float | None:
        """Mean over the clients of ``role`` on their own test images; None where there is none.

        Raises:
            PromptfedError: there is no such role or column.
        """
        return _mean(_own(self.accuracies(), role), column)

    def curve(self, role: Role = "trainer") -> dict[int, float]:
        """The mean of ``role`` after each evaluated round. Raises PromptfedError if there is no such role."""
        by_round: dict[int, list[Accuracy]] = {}
        for accuracy in _own(self.taken.accuracies(), role):
            by_round.setdefault(accuracy.round, []).append(accuracy)
        return {round: fmean(row.accuracy for row in rows) for round, rows in by_round.items()}

    def remarks(self) -> list[str]:
        """What looks wrong, in one sentence each, and what to try: zero-shot near chance, nothing learned."""
        return remarks(self.taken)

    def metrics(self, split: str = "test") -> dict[str, dict[str, float]]:
        """Calibration error (15 bins), macro-F1 and the worst class's accuracy of each client's classifier, by client.

        ``split`` is a test set, or ``test@variant``; the template's is ``test@zero-shot``. Of federations that ran in
        this process: no answer on a single image is ever sent to a coordinator.

        Raises:
            PromptfedError: there are no answers on that test set.
        """
        outcomes = [outcome for outcome in self.taken.outcomes if outcome.split == split]
        if not outcomes:
            splits = sorted({outcome.split for outcome in self.taken.outcomes})
            why = (
                f"there are {', '.join(splits)}"
                if splits
                else "only a federation in this process (promptfed.run) has any"
            )
            raise BadInput(f"there are no answers on {split!r}: {why}")
        rows = {outcome.client: figures([outcome]) for outcome in outcomes}
        return {client: {name: row[name] for name in METRICS} for client, row in rows.items()}

    def predict(self, image: Image | Path | str | bytes, class_names: Sequence[str] | None = None) -> Prediction:
        """Classify an image (a PIL image, a file, or its bytes) as an evaluator of the federation does.

        Raises:
            PromptfedError: it is no image, there are no class names, or the method classifies with what each client
                keeps to itself.
        """
        names = self._names(class_names)
        if names not in self._predictors:
            self._predictors[names] = predictor_of(self._model.serve(self._loaded(), names))
        try:
            answer = self._predictors[names].predict(_bytes(image))
        except (BadImage, TooManyPixels) as error:
            raise BadInput(str(error)) from None
        return Prediction.of(answer)

    def class_weights(self, class_names: Sequence[str] | None = None) -> Tensors | None:
        """Weights for plain open_clip code: ``class_weights (C, d_e)`` and ``zero_shot_weights``.

        FaST-PT's hard mixture has ``class_weights (k, C, d_e)``, ``domain_weight`` and ``domain_bias``. None where the
        method needs promptfed's own towers, or texts that depend on the image.
        """
        return weights_of(self._model.serve(self._loaded(), self._names(class_names)))

    def export(self, folder: Path | str, class_names: Sequence[str] | None = None, *, anonymous: bool = False) -> Path:
        """Write state, class weights and a card into a new ``folder``, as `promptfed export` does.

        The coordinator signs it where the result came from one, and the connection is still open.
        """
        options = ExportOptions(_listed(class_names), anonymous, self.allow_backbone)
        signer = None if self.coordinator is None or self.coordinator.is_closed else self.coordinator
        export(self.taken, Path(folder), options, self.backbone, signer)
        return Path(folder)

    def track(self, where: str) -> None:
        """Write all metrics to an experiment tracker: ``tensorboard:FOLDER`` or ``mlflow:URI``."""
        from promptfed.console.progress import open_tracker, record

        with open_tracker(where) as write:
            record(write, self.taken)

    @cached_property
    def _model(self) -> AdaptedModel:
        return AdaptedModel.of(self.taken.facts, self.taken.state)

    def _loaded(self) -> Backbone:
        if self.backbone is None:
            self.backbone = open_backbone_of(self._model, self.allow_backbone)
        return self.backbone

    def _names(self, given: Sequence[str] | None) -> tuple[str, ...]:
        names = _listed(given) or class_names_of(self.taken)
        if not names:
            raise BadInput("each client had its own classes: give class_names")
        return names

    def __repr__(self) -> str:
        return f"<Result {self._title()}>"

    def __str__(self) -> str:
        rows = [_cells(accuracy) for accuracy in self.accuracies()]
        widths = [max(len(row[place]) for row in [HEAD, *rows]) for place in range(len(HEAD))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in [HEAD, *rows]]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        """HTML for notebooks; names of clients are escaped."""
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in _cells(accuracy)) + "</tr>"
            for accuracy in self.accuracies()
        )
        head = "".join(f"<th>{name}</th>" for name in HEAD)
        return f"<p>{html.escape(self._title())}</p><table><tr>{head}</tr>{body}</table>"

    def _title(self) -> str:
        spec = self.spec
        return f"{spec['name']}: {spec['method']['name']} after round {self.round} of {spec['rounds']}"


def _listed(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """The class names of a caller. Raises PromptfedError for a bad list."""
    if names is None:
        return None
    try:
        return tuple(check_class_names(list(names)))
    except ValueError as error:
        raise BadInput(f"class_names {error}") from None


def _cells(row: Accuracy) -> list[str]:
    figure = with_interval(row.accuracy, interval_of([row]))
    return [row.client, row.role, row.domain or "-", row.split, percent(row.zero_shot), figure]


def _own(accuracies: Sequence[Accuracy], role: Role) -> list[Accuracy]:
    """Those of the clients of ``role`` on their own test images."""
    return [accuracy for accuracy in accuracies if accuracy.role == role and accuracy.split == "test"]


def _mean(rows: Sequence[Accuracy], column: Column) -> float | None:
    values = [row.accuracy if column == "adapted" else row.zero_shot for row in rows]
    numbers = [value for value in values if value is not None]
    return fmean(numbers) if numbers else None


def _bytes(image: Image | Path | str | bytes) -> bytes:
    if isinstance(image, bytes):
        return image
    if isinstance(image, (str, Path)):
        try:
            with open_file(Path(image)) as file:
                return file.read()
        except OSError as error:
            raise BadInput(f"cannot read {image}: {why(error)}") from None
    made = io.BytesIO()
    try:
        in_rgb(image).save(made, "PNG")
    except UNREADABLE as error:
        raise BadInput(f"the image cannot be read: {why(error)}") from None
    return made.getvalue()
