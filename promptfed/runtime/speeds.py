"""How fast clients are in virtual time: a run file's section ``clock``."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.seeds import derive_seed
from promptfed.shared.service.reasons import why

TRACE = "trace:"
COLUMNS = ["client", "seconds"]

Speeds = Mapping[str, Sequence[float]]
"""For each client the seconds of one optimizer step, of its tasks in turn."""


def _known(speeds: str) -> str:
    if speeds != "lognormal" and not (speeds.startswith(TRACE) and speeds != TRACE):
        raise ValueError("use lognormal, or trace:FILE")
    return speeds


class Clock(BaseModel):
    """Virtual time of a simulation: each task takes as many seconds as its client's speed says.

    With ``lognormal`` the median client needs a second for an optimizer step. ``trace:FILE`` names a CSV file with the
    columns client and seconds (of a step); several lines of one client are those of its tasks in turn.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    speeds: Annotated[str, AfterValidator(_known), Field(description="lognormal, or trace:FILE")]
    slowest: Annotated[
        float, Field(ge=1, le=1e6, description="lognormal: how many times as long as the fastest the slowest needs")
    ] = 20.0

    def of(self, clients: Sequence[str], seed: int) -> Speeds:
        """The speed of each client. Raises CommandError if the trace cannot be used."""
        if self.speeds.startswith(TRACE):
            return _traced(Path(self.speeds.removeprefix(TRACE)), clients)
        draws = np.random.default_rng(derive_seed(seed, "speeds")).standard_normal(len(clients))
        width = float(np.ptp(draws))
        scale = math.log(self.slowest) / width if width else 0.0
        seconds = np.exp((draws - np.median(draws)) * scale)
        return {name: [float(value)] for name, value in zip(clients, seconds, strict=True)}


def _traced(path: Path, clients: Sequence[str]) -> Speeds:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.reader(file))
    except (OSError, UnicodeDecodeError) as error:
        reason = why(error) if isinstance(error, OSError) else "it is not UTF-8 text"
        raise CommandError(f"clock.speeds: {path} cannot be read: {reason}", Exit.BAD_INPUT) from None
    if not rows or rows[0] != COLUMNS:
        raise CommandError(f"clock.speeds: {path} must begin with the line {','.join(COLUMNS)}", Exit.BAD_INPUT)
    told: dict[str, list[float]] = {}
    for number, row in enumerate(rows[1:], 2):
        seconds = _seconds(row)
        if seconds is None:
            text = f"clock.speeds: {path}, line {number}: write a client's name and a number of seconds above 0"
            raise CommandError(text, Exit.BAD_INPUT)
        told.setdefault(row[0], []).append(seconds)
    for name in clients:
        if name not in told:
            raise CommandError(f"clock.speeds: {path} has no line for client {name}; add one", Exit.BAD_INPUT)
    return {name: told[name] for name in clients}


def _seconds(row: Sequence[str]) -> float | None:
    try:
        _, text = row
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 < seconds < math.inf else None
