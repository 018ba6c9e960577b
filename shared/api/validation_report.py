"""The report of a validation: what sites have measured of one export, pooled over them, and signed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
from pydantic import BaseModel, Field

from promptfed.shared.api.export_card import FederationName
from promptfed.shared.metrics.clinical import Estimate
from promptfed.shared.metrics.pooling import Pooled, PooledFigure
from promptfed.shared.metrics.score_sums import ScoreSums
from promptfed.shared.metrics.site_figures import SiteFigures
from promptfed.shared.plain_text import csv_cell
from promptfed.shared.spec.calibration import CalibrationSpec
from promptfed.shared.spec.spec import Origin
from promptfed.shared.spec.spec_section import left_out

FORMAT = 1
COLUMNS = ("subgroup", "value", "class", "figure", "site", "estimate", "low", "high", "positives", "i2", "next_site")


class ValidationReport(BaseModel):
    """What is signed. ``sites``: null where a site has kept its figures."""

    format: int = FORMAT
    federation: FederationName
    export: Origin | None = Field(description="the export by its card")
    state: str = Field(description="the hash of the export's state, which was tested")
    method: dict[str, Any]
    backbone: str | None = Field(description="the fingerprint of the weights")
    class_names: list[str] | None
    sites: dict[str, SiteFigures | None]
    figures: list[PooledFigure] = Field(description="by class and subgroup: each site's, and their random-effects mean")
    calibration: CalibrationSpec | None = left_out(default=None, description="whose `scores` the sites have counted")


class SignedValidation(BaseModel):
    """``GET /v1/federations/{id}/validation``: the report and its Ed25519 signature, in hexadecimal."""

    report: ValidationReport
    signature: str
    public_key: str


def scores_of(report: ValidationReport) -> ScoreSums | None:
    """The sum of the sites' calibration scores of the shape that was asked for; None if no site has told any."""
    asked = report.calibration
    if asked is None:
        return None
    names = tuple(report.class_names or ())
    layout = asked.histograms(names)
    counts, slack, sites = np.zeros((layout.rows, layout.bins), dtype=np.int64), 0, 0
    for figures in report.sites.values():
        scores = [] if figures is None or figures.scores is None else figures.scores
        if figures is not None and [len(row) for row in scores] == [layout.bins] * layout.rows:
            counts, slack, sites = counts + np.array(scores), slack + figures.floor - 1, sites + 1
    classes = names if asked.by_class else ()
    return ScoreSums(counts, sites, slack, None, classes, layout.column, layout.values) if sites else None


def as_csv(report: ValidationReport) -> str:
    """A row for each figure of each site, and one for each mean."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    positives = {
        (site, group.column, group.value, each.name): each.positives
        for site, figures in report.sites.items()
        if figures is not None
        for group in figures.groups
        for each in group.classes
    }
    for figure in report.figures:
        about = [figure.column or "", figure.value or "", figure.class_name or "", figure.figure]
        for site, estimate in figure.sites.items():
            count = positives.get((site, figure.column, figure.value, figure.class_name or ""))
            own = [site, *_cells(estimate), "" if count is None else str(count), "", ""]
            writer.writerow([csv_cell(cell) for cell in [*about, *own]])
        if figure.pooled is not None:
            writer.writerow([csv_cell(cell) for cell in [*about, "(mean)", *_mean(figure.pooled)]])
    return text.getvalue()


def _cells(estimate: Estimate) -> Iterator[str]:
    return (f"{number:.4f}" for number in (estimate.value, estimate.low, estimate.high))


def _mean(pooled: Pooled) -> list[str]:
    ahead = "" if pooled.prediction is None else "{:.4f} to {:.4f}".format(*pooled.prediction)
    return [*(f"{number:.4f}" for number in (pooled.mean, pooled.low, pooled.high)), "", f"{pooled.i2:.4f}", ahead]
