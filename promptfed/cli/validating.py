"""`promptfed validate` and the check of its report by `promptfed verify`."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import ValidationError
from rich.table import Table

from promptfed.cli.pooling import FOREST_FILE, forest, mean_cells
from promptfed.export.continuing import continued
from promptfed.sdk import operations
from promptfed.sdk.client import Coordinator
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.files import expect_new, new_folder, write_file, write_private
from promptfed.sdk.follow import follow
from promptfed.sdk.output import console, print_json, say, table
from promptfed.shared.api.validation_report import SignedValidation, ValidationReport, as_csv
from promptfed.shared.canonical import canonical_json, parse_json
from promptfed.shared.metrics.pooling import PooledFigure, pooled_sites
from promptfed.shared.metrics.site_figures import POOLED
from promptfed.shared.plain_text import counted, plain
from promptfed.shared.service.reasons import why
from promptfed.shared.signatures import is_signed, validation_statement

REPORT_FILE, CSV_FILE = "validation.json", "validation.csv"
MOST_BYTES = 256 << 20


def run_validate(
    api: Coordinator,
    export: Path | None,
    federation: str | None,
    name: str | None,
    sites: int,
    token_out: Path | None,
    out: Path,
    key: str | None,
    as_json: bool,
) -> None:
    """Create the federation (or wait for the given one), and write its report into ``out``.

    Raises:
        CommandError: the export cannot be validated, the federation ended badly, or the report is not signed rightly.
    """
    if (export is None) == (federation is None):
        raise CommandError("give the folder of an export, or --federation", Exit.USAGE)
    expect_new(token_out, "--token-out")
    with new_folder(out, "--out") as folder:
        if export is not None:
            federation = _created(api, export, name, sites, token_out, key)
        assert federation is not None
        *_, last = follow(api, federation)
        if last.state != "finished":
            raise CommandError(f"{federation} is {last.state}: no report is written", Exit.FEDERATION_ENDED_BADLY)
        answer = api.send(operations.get_validation(federation))
        body = (json.dumps(answer.json, indent=1, ensure_ascii=False) + "\n").encode()
        signed = checked_report(body, None)
        write_report(signed.report, body, folder)
    if as_json:
        print_json(answer.json)
        return
    console.print(_table(signed.report))
    say(f"Wrote {REPORT_FILE}, {CSV_FILE} and {FOREST_FILE} in {out}; `promptfed verify {out}` checks the signature.")


def _created(
    api: Coordinator, export: Path, name: str | None, sites: int, token_out: Path | None, key: str | None
) -> str:
    """Create the federation and mint its token; its id."""
    given = {"participation": {"min_clients": sites}, "start": "when_ready"}
    asked, state = continued(export, given, key, "validation")
    asked["name"] = name or f"{str(asked['name'])[:50]}-validation"
    created = api.run(operations.create(asked, state)).view
    minted = api.send(operations.mint_token(created.id, sites, role="evaluator"))
    say(f"Created {created.name} ({created.id}). It starts once {counted(sites, 'site')} have enrolled.")
    if token_out is None:
        say(f"Their enrolment token: {minted.view.token}")
    else:
        write_private(token_out, minted.view.token)
    return created.id


def write_report(report: ValidationReport, body: bytes, folder: Path) -> None:
    """Write the report's bytes, its CSV, and the forest plot where two sites share a figure."""
    write_file(folder / REPORT_FILE, body)
    write_file(folder / CSV_FILE, as_csv(report).encode())
    drawn = [each for each in report.figures if each.column is None and each.figure in ("accuracy", "auroc")]
    if any(each.pooled is not None for each in drawn):
        forest(drawn).savefig(folder / FOREST_FILE, dpi=150, bbox_inches="tight")


def _table(report: ValidationReport) -> Table:
    def title(each: PooledFigure) -> list[str]:
        of = f"{each.column}={each.value}" if each.column is not None else "all"
        return [of, each.class_name or "all", POOLED.get(each.figure, each.figure)]

    rows = [[*title(each), *mean_cells(each.pooled)] for each in report.figures if each.pooled is not None]
    told = sum(figures is not None for figures in report.sites.values())
    head = f"{counted(told, 'site')}, random-effects means in percent"
    return table(head, ["images", "class", "figure", "sites", "mean", "next site", "I²"], rows)


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


def verify_report(path: Path, key: str | None) -> None:
    """Check a report's signature and its means, and say what it is of. Raises CommandError."""
    report = checked_report(read_report(path), key).report
    signer = (
        f"signed by {key}" if key is not None else "signed by the key that it names: give --key to know whose it is"
    )
    export = f"the export with card {report.export.card}" if report.export is not None else f"state {report.state}"
    sites = counted(len(report.sites), "site")
    say(plain(f"{path}: the validation of {export} by {sites} in {report.federation.name}, {signer}."))
    say("The means are those of the sites' figures.")
