"""The embedded benchmark's document, made of its presets and its results alone: it can be made again without a run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from pydantic import BaseModel

from promptfed.experiments.presets import Preset
from promptfed.experiments.provenance import Provenance
from promptfed.experiments.results import JsonObject, Run
from promptfed.experiments.runner import Bench
from promptfed.experiments.setting import Setting
from promptfed.experiments.tables import TableRow, caption, table_of


class Origin(BaseModel):
    """Where one of a table's runs came from."""

    label: str
    seed: int
    trial: str
    state_hash: str
    backbone: str
    data: str
    wall_seconds: float


class PresetRecord(BaseModel):
    """What of a preset's runs is kept beside the document: every row by seed, and where each run came from."""

    title: str
    caption: str
    columns: list[str]
    seeds: list[int]
    setting: Setting
    spec: JsonObject
    methods: dict[str, str]
    table: list[TableRow]
    seconds: int
    runs: list[Origin]


class BenchmarkRecord(BaseModel):
    """``benchmark.json``."""

    panels: dict[str, PresetRecord]
    provenance: Provenance


def record(preset: Preset, bench: Bench, rows: Sequence[TableRow], runs: Sequence[Run]) -> PresetRecord:
    """What is kept of a preset that was run."""
    return PresetRecord(
        title=preset.title,
        caption=caption(bench),
        columns=list(bench.columns),
        seeds=list(bench.seeds),
        setting=bench.setting,
        spec=preset.spec,
        methods=preset.methods,
        table=list(rows),
        seconds=round(sum(run.wall_seconds + run.setup_seconds for run in runs)),
        runs=[Origin.model_validate(run, from_attributes=True) for run in runs],
    )


def document(benchmark: BenchmarkRecord, presets: Mapping[str, Preset]) -> str:
    """The benchmark as Markdown: its tables, and each preset's notes."""
    seconds = sum(table.seconds for table in benchmark.panels.values())
    made = benchmark.provenance
    lines = [
        "# The embedded benchmark",
        "",
        "`promptfed bench embedded --out results` makes this document and its figures again, and goes on where it was "
        "interrupted; `--reduced` takes one seed and fewer targets. All federations of this run took "
        f"{seconds / 60:.0f} minutes on {made.machine['cores']} cores that other work shared, one thread each, "
        f"torch {made.packages['torch']}. Figures by seed, specs and hashes stand beside it in `benchmark.json`.",
    ]
    for name, kept in benchmark.panels.items():
        lines += ["", f"## {kept.title}", "", kept.caption, "", *table_of(kept.columns, kept.table), ""]
        lines += [presets[name].notes.strip(), "", f"Settings: {_settings(kept)}."]
    waiting = [preset.title for name, preset in presets.items() if name not in benchmark.panels]
    if waiting:
        lines += ["", "## Not measured yet", "", *(f"- {title}" for title in waiting)]
    return "\n".join(lines) + "\n"


def _settings(kept: PresetRecord) -> str:
    entries = "; ".join(f"{label} = `{text}`" for label, text in kept.methods.items() if label != text)
    return f"`{json.dumps(kept.spec)}`" + (f"; {entries}" if entries else "")
