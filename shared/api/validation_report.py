"""The report of a validation: what sites have measured of one export, pooled over them, and signed."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel, Field

from promptfed.shared.api.export_card import FederationName
from promptfed.shared.metrics.clinical import Estimate
from promptfed.shared.metrics.pooling import Pooled, PooledFigure
from promptfed.shared.metrics.site_figures import SiteFigures
from promptfed.shared.plain_text import csv_cell
from promptfed.shared.spec.spec import Origin

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


class SignedValidation(BaseModel):
    """``GET /v1/federations/{id}/validation``: the report and its Ed25519 signature, in hexadecimal."""

    report: ValidationReport
    signature: str
    public_key: str


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
