"""The papers' settings: ``paper:plan-pacs`` and its like are files of ``experiments/papers``, with the papers' figures.

A file names a protocol, data under ``{root}``, methods, what of the spec the paper sets, the table's columns and what
the paper prints in them (percent; null where it prints a slip). ``each`` runs one panel for each of several data sets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field

from promptfed.experiments.entries import parse_entries
from promptfed.experiments.protocols import PROTOCOLS, Setting
from promptfed.experiments.runner import Bench
from promptfed.experiments.tables import PAPER, TableRow
from promptfed.sdk.client import CommandError
from promptfed.sdk.exit_codes import Exit
from promptfed.shared.spec import merged

FOLDER = Path(__file__).parent / "papers"
PREFIX = "paper:"
ALL = "all"  # the only panel of a preset without ``each``

Figures = dict[str, list[float | None]]


class Preset(BaseModel):
    """One table of a paper."""

    model_config = ConfigDict(extra="forbid")

    title: str
    protocol: str
    data: list[str]
    methods: list[str]
    spec: dict[str, Any]
    columns: list[str]
    paper: dict[str, Figures]
    each: Annotated[dict[str, list[str]], Field(max_length=1)] = {}
    domains: list[str] = []
    targets: list[str] = []
    clients: int | dict[str, int] = 10
    classes_per_client: int | None = None
    partition: str = "pathological"
    alpha: float = 0.1
    shots: int | None = None
    m: int | None = None
    notes: str = ""

    def panels(self) -> tuple[str, ...]:
        """The data sets of ``each``, or the one panel ``all``."""
        return tuple(next(iter(self.each.values()))) if self.each else (ALL,)

    def setting(self, panel: str, root: str) -> Setting:
        """The data of a panel, with its files under ``root``."""
        values = {"root": root, **dict.fromkeys(self.each, panel)}
        uris = tuple(_filled(uri, values) for uri in self.data)
        clients = self.clients[panel] if isinstance(self.clients, dict) else self.clients
        return Setting(
            data=uris,
            domains=tuple(self.domains),
            targets=tuple(self.targets),
            clients=clients,
            classes_per_client=self.classes_per_client,
            partition=self.partition,
            alpha=self.alpha,
            shots=self.shots,
        )

    def bench(self, panel: str, root: str, seeds: Sequence[int], changes: Mapping[str, Any]) -> Bench:
        """What runs a panel; ``changes`` are laid over the paper's spec."""
        entries = parse_entries(",".join(self.methods))
        spec = merged(self.spec, dict(changes))
        return Bench(PROTOCOLS[self.protocol], entries, self.setting(panel, root), seeds, spec, self.m)

    def figures(self, panel: str) -> list[TableRow]:
        """The paper's rows of a panel, ours and those of methods that we do not have."""
        rows = []
        for label, values in self.paper[panel].items():
            known = {name: value / 100 for name, value in zip(self.columns, values, strict=True) if value is not None}
            rows.append(TableRow(label + PAPER, (known,)))
        return rows


def preset_names() -> list[str]:
    """All presets, as they are asked for."""
    return sorted(PREFIX + path.stem for path in FOLDER.glob("*.yaml"))


def read_preset(name: str) -> Preset:
    """The preset ``paper:NAME``.

    Raises:
        CommandError: there is none of that name.
    """
    path = FOLDER / f"{name.removeprefix(PREFIX)}.yaml"
    if path.parent != FOLDER or not path.is_file():
        raise CommandError(f"there is no preset {name!r}: use one of {', '.join(preset_names())}", Exit.BAD_INPUT)
    return Preset.model_validate(yaml.safe_load(path.read_text()))


def interleaved(ours: Sequence[TableRow], paper: Sequence[TableRow]) -> list[TableRow]:
    """Our rows, each followed by the paper's of the same label, then the paper's that we have none for."""
    theirs = {row.label.removesuffix(PAPER): row for row in paper}
    rows: list[TableRow] = []
    for row in ours:
        rows.append(row)
        if row.label in theirs:
            rows.append(theirs.pop(row.label))
    return [*rows, *theirs.values()]


def _filled(text: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    return text
