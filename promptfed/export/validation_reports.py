"""Reads the signed report of a validation, and checks it."""

from __future__ import annotations

from pathlib import Path

from pydantic import ValidationError

from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.api.validation_report import SignedValidation
from promptfed.shared.canonical import canonical_json, parse_json
from promptfed.shared.metrics.pooling import PooledFigure, pooled_sites
from promptfed.shared.service.reasons import why
from promptfed.shared.signatures import is_signed, validation_statement

REPORT_FILE = "validation.json"
MOST_BYTES = 256 << 20


def read_report(path: Path) -> bytes:
    """The bytes of a report, of its file or folder. Raises CommandError."""
    path = path / REPORT_FILE if path.is_dir() else path
    try:
        with path.open("rb") as file:
            body = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CommandError(f"cannot read {path}: {why(error)}", Exit.BAD_INPUT) from None
    if len(body) > MOST_BYTES:
        raise CommandError(f"{path} is larger than any report", Exit.BAD_INPUT)
    return body


def checked_report(body: bytes, key: str | None) -> SignedValidation:
    """The report of ``body``, signed by ``key`` (None: by the key that it names), with the means of its sites' figures.

    Raises:
        CommandError: it is no report, or one of these does not hold.
    """
    try:
        raw = parse_json(body)
        signed = SignedValidation.model_validate(raw)
        said = validation_statement(canonical_json(raw["report"]))
    except (ValueError, ValidationError, KeyError, TypeError):
        text = "this is neither an export's folder nor the report of a validation"
        raise CommandError(
            f"{text}: give what `promptfed export` or `promptfed validate` has written", Exit.BAD_INPUT
        ) from None
    if not is_signed(key or signed.public_key, signed.signature, said):
        text = f"the report is not signed by the key {(key or signed.public_key)[:200]}"
        raise CommandError(f"{text}: it was changed, or comes from elsewhere", Exit.REFUSED)
    report = signed.report
    known = pooled_sites({site: figures for site, figures in report.sites.items() if figures is not None})
    if not _same(known, report.figures):
        raise CommandError("the report's means are not those of its sites' figures", Exit.REFUSED)
    return signed


def _same(ours: list[PooledFigure], theirs: list[PooledFigure]) -> bool:
    """Whether the figures are equal up to the rounding of another machine."""
    return [_numbers(each) for each in ours] == [_numbers(each) for each in theirs]


def _numbers(figure: PooledFigure) -> dict[str, object]:
    told = figure.model_dump(exclude={"pooled"})
    pooled = figure.pooled
    if pooled is not None:
        numbers = [pooled.mean, pooled.low, pooled.high, pooled.tau2, pooled.i2, *(pooled.prediction or ())]
        told["pooled"] = [pooled.sites, *(round(number, 6) for number in numbers)]
    return told
