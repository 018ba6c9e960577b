"""Prediction sets for `promptfed predict --coverage`: the classes of which one is right with that probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from promptfed.cli.prediction_options import SetOptions
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.prediction_sets import PredictionSets, own_scores
from promptfed.export.validation_reports import checked_report
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api.validation_report import scores_of
from promptfed.shared.canonical import parse_json
from promptfed.shared.metrics.conformal import Calibration
from promptfed.shared.metrics.score_sums import ScoreSums
from promptfed.shared.service.reasons import why
from promptfed.shared.tensors.torch_tensors import state_hash

HOW = (
    "`promptfed score` writes score.json on labelled images, `promptfed pool` pooled.json over several sites, and "
    "`promptfed validate` validation.json"
)


class _File(BaseModel):
    state: str
    calibration: Calibration | None = None


def sets_of(
    options: SetOptions, model: AdaptedModel, names: Sequence[str], *, own_names: bool = True
) -> PredictionSets | None:
    """The sets that ``options`` ask for; None without a coverage. ``own_names``: ``names`` are the federation's.

    Raises:
        CommandError: the file cannot be read, is of another export or of other classes, or has no calibration scores.
    """
    if options.coverage is None:
        if options.calibration is not None or options.by_class or options.group is not None:
            text = "--calibration, --by-class and --group belong to --coverage: give it too"
            raise CommandError(text, Exit.USAGE)
        return None
    scores: Calibration | ScoreSums
    if options.calibration is None:
        scores = own_scores(model, names, own_names=own_names)
    else:
        scores = _scores_in(options.calibration, state_hash(model.state), names)
    return PredictionSets.of(scores, options.coverage, by_class=options.by_class, group=options.group)


def _scores_in(path: Path, state: str, names: Sequence[str]) -> Calibration | ScoreSums:
    """The calibration scores of a file, about the classes ``names`` under ``state``. Raises as `sets_of`."""
    try:
        body = path.read_bytes()
    except OSError as error:
        raise CommandError(f"cannot read {path}: {why(error)}", Exit.BAD_INPUT) from None
    scores: Calibration | ScoreSums | None
    try:
        raw = parse_json(body)
        found = None if isinstance(raw, dict) and "report" in raw else _File.model_validate(raw)
    except (ValueError, ValidationError):
        raise CommandError(f"{path} holds no figures of an export: {HOW}", Exit.BAD_INPUT) from None
    if found is None:
        report = checked_report(body, None).report
        of_state, scores, classes = report.state, scores_of(report), report.class_names or []
    else:
        of_state, scores = found.state, found.calibration
        classes = [] if scores is None else list(scores.by_class)
    if of_state != state:
        raise CommandError(f"{path} has the figures of another export: score this one", Exit.BAD_INPUT)
    if scores is None:
        text = "has no calibration scores: it is of several labels per image, of an earlier promptfed, or of a "
        raise CommandError(f"{path} {text}validation without `calibration`", Exit.BAD_INPUT)
    if set(classes) != set(names):
        raise CommandError(f"{path} is about other classes than those to choose among: give the same", Exit.BAD_INPUT)
    return scores


def told(answer: Mapping[str, Any]) -> str:
    """The set in words."""
    return "abstains" if answer["abstains"] else "one of " + ", ".join(answer["set"])
