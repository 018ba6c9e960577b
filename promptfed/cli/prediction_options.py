"""The options of `promptfed predict` for prediction sets."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True)
class SetOptions:
    """What the sets shall hold, and where the calibration scores are."""

    coverage: Annotated[
        float | None,
        typer.Option(
            min=0.5, max=0.999, help="answer with a set that holds the right class with this probability, or abstain"
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="with --coverage: score.json, pooled.json or validation.json; default: the export's own scores"
        ),
    ] = None
    by_class: Annotated[bool, typer.Option("--by-class", help="with --coverage: for each class by itself")] = False
    group: Annotated[
        str | None,
        typer.Option(help="with --coverage: for images of this subgroup, as in scanner=old"),
    ] = None
