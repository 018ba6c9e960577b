"""Prediction sets for `promptfed predict --coverage`: the classes of which one is right with that probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from promptfed.cli.prediction_options import SetOptions
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.prediction_sets import PredictionSets, own_sets
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.metrics.conformal import Calibration
from promptfed.shared.service.reasons import why
from promptfed.shared.tensors.torch_tensors import state_hash

HOW = "`promptfed score` writes score.json on labelled images, and `promptfed pool` pooled.json over several sites"


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
        if options.calibration is not None or options.by_class:
            raise CommandError("--calibration and --by-class belong to --coverage: give it too", Exit.USAGE)
        return None
    if options.calibration is None:
        return own_sets(model, names, options.coverage, by_class=options.by_class, own_names=own_names)
    path = options.calibration
    try:
        found = _File.model_validate_json(path.read_bytes())
    except OSError as error:
        raise CommandError(f"cannot read {path}: {why(error)}", Exit.BAD_INPUT) from None
    except ValidationError:
        raise CommandError(f"{path} holds no figures of an export: {HOW}", Exit.BAD_INPUT) from None
    if found.state != state_hash(model.state):
        raise CommandError(f"{path} has the figures of another export: score this one", Exit.BAD_INPUT)
    if found.calibration is None:
        text = "has no calibration scores: it is of several labels per image, or of an earlier promptfed"
        raise CommandError(f"{path} {text}", Exit.BAD_INPUT)
    if set(found.calibration.by_class) != set(names):
        raise CommandError(f"{path} is about other classes than those to choose among: give the same", Exit.BAD_INPUT)
    by_class = found.calibration.thresholds(options.coverage) if options.by_class else None
    return PredictionSets(found.calibration.threshold(options.coverage), by_class)


def told(answer: Mapping[str, Any]) -> str:
    """The set in words."""
    return "abstains" if answer["abstains"] else "one of " + ", ".join(answer["set"])
