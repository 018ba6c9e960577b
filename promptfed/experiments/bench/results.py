"""Stored results of a bench: one file for each federation. Tables, plots and documents are made from them."""

from __future__ import annotations

import json
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.result import Accuracy
from promptfed.shared.files import write_whole
from promptfed.shared.metrics.outcomes import Outcomes
from promptfed.shared.service.reasons import why
from promptfed.shared.spec.spec import SpecError

JsonObject = dict[str, JsonValue]
VARIANT = "@"  # between the name of a test set and that of a further classifier


class BenchRun(BaseModel):
    """One federation: its entry, its clients' accuracies, its costs (of a client and round), and its provenance.

    Files of earlier versions may lack fields that have a default, and may hold more fields.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    label: str
    seed: int
    trial: str
    spec: JsonObject = {}
    clients: list[JsonObject] = []
    accuracies: list[Accuracy]
    rounds: int
    costs: dict[str, float]
    measured: list[JsonObject] = []
    wall_seconds: float
    setup_seconds: float
    state_hash: str = ""
    backbone: str = ""
    data: str = ""
    provenance: JsonObject = {}
    outcomes: list[Outcomes] = []

    def last(self) -> list[Accuracy]:
        """The accuracies after the last round."""
        return [accuracy for accuracy in self.accuracies if accuracy.round == self.rounds]


def row_label(run: BenchRun, split: str) -> str:
    """The label of the table's row: the entry's, followed by the variant that the test set's name holds."""
    variant = split.partition(VARIANT)[2]
    return f"{run.label} ({variant})" if variant else run.label


def read_run(path: Path) -> BenchRun:
    """The run in a file. Raises CommandError if the file holds no run."""
    try:
        return BenchRun.model_validate(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
        reason = SpecError.from_validation(error) if isinstance(error, ValidationError) else error
        raise CommandError(f"{path} cannot be read: remove it to run it again ({reason})", Exit.BAD_INPUT) from None


def write_json(path: Path, value: BaseModel) -> None:
    """Write the fields that were set, whole or not at all. Raises CommandError if that fails."""
    text = json.dumps(value.model_dump(exclude_unset=True), indent=1, ensure_ascii=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (text + "\n").encode(), synced=False)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {why(error)}", Exit.BAD_INPUT) from None
