"""`promptfed pool`: several sites' scores of one export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from promptfed.cli.app import app
from promptfed.cli.common import Json
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import console, print_json, table
from promptfed.shared.service.reasons import why


@app.add(section="Use a result")
def pool(
    scores: Annotated[list[Path], typer.Argument(help="each site's score.json, or the folder that has it")],
    as_json: Json = False,
) -> None:
    """Pool what several sites have measured with `promptfed score`: random-effects means of accuracy and AUROCs."""
    from pydantic import TypeAdapter, ValidationError

    from promptfed.cli.scoring import SCORE_FILE, ScoreFigures
    from promptfed.cli.scoring_presences import PresenceFigures
    from promptfed.shared.metrics.clinical import Estimate, interval_text
    from promptfed.shared.metrics.pooling import pool_estimates

    sites: TypeAdapter[ScoreFigures | PresenceFigures] = TypeAdapter(ScoreFigures | PresenceFigures)
    known: dict[str, list[Estimate]] = {}
    states = set()
    for path in scores:
        file = path / SCORE_FILE if path.is_dir() else path
        try:
            site = sites.validate_json(file.read_bytes())
        except OSError as error:
            raise CommandError(f"cannot read {file}: {why(error)}", Exit.BAD_INPUT) from None
        except ValidationError:
            raise CommandError(f"{file} is not a {SCORE_FILE}: `promptfed score` writes one", Exit.BAD_INPUT) from None
        states.add(site.state)
        accuracy = getattr(site, "accuracy_interval", None)
        told = {"accuracy": accuracy, **{f"AUROC of {one.name}": one.auroc for one in site.classes}}
        for name, estimate in told.items():
            known.setdefault(name, []).extend([estimate] if estimate is not None else [])
    if len(scores) < 2 or len(states) > 1 or None in states:
        reason = "give two sites or more" if len(scores) < 2 else "the sites have not scored the same export"
        raise CommandError(f"{reason}: each runs `promptfed score` on the same export", Exit.BAD_INPUT)
    pooled = {name: mean for name, estimates in known.items() if (mean := pool_estimates(estimates)) is not None}
    if as_json:
        print_json({"state": states.pop(), "figures": {name: mean.model_dump() for name, mean in pooled.items()}})
        return
    rows = [
        [
            name,
            str(mean.sites),
            interval_text(Estimate(value=mean.mean, low=mean.low, high=mean.high)),
            "-" if mean.prediction is None else "{:.1f} to {:.1f}".format(*(100 * end for end in mean.prediction)),
            f"{100 * mean.i2:.0f} %",
        ]
        for name, mean in pooled.items()
    ]
    console.print(table(f"{len(scores)} sites", ["figure", "sites", "mean, 95 %", "next site", "I²"], rows))
