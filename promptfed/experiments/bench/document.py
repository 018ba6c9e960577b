"""The document of the embedded benchmark, made from presets and results; no federation is run for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from promptfed.experiments.bench.presets import Preset, number_of
from promptfed.experiments.bench.provenance import ResultProvenance
from promptfed.experiments.bench.results import BenchRun, JsonObject
from promptfed.experiments.bench.runner import Bench
from promptfed.experiments.bench.tables import BELOW, Headroom, TableRow, caption, markdown_table, rooms_table, table_of
from promptfed.experiments.protocols.setting import Setting
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.plain_text import markdown_code
from promptfed.shared.service.reasons import why


class Origin(BaseModel):
    """The origin of one of a table's runs."""

    label: str
    seed: int
    trial: str
    state_hash: str
    backbone: str
    data: str
    wall_seconds: float


class PresetRecord(BaseModel):
    """The results of a preset in ``benchmark.json``: every row by seed, and the origin of each run.

    ``commit`` is the commit of the code that ran it. ``rooms`` are empty unless the protocol has ceilings.
    """

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
    commit: str | None = None
    rooms: list[Headroom] = []


class BenchmarkRecord(BaseModel):
    """``benchmark.json``."""

    panels: dict[str, PresetRecord]
    provenance: ResultProvenance


def record(
    preset: Preset, bench: Bench, rows: Sequence[TableRow], runs: Sequence[BenchRun], rooms: Sequence[Headroom] = ()
) -> PresetRecord:
    """The record of a preset that was run."""
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
        commit=_commit(runs),
        rooms=list(rooms),
    )


def chosen_panels(presets: Mapping[str, Preset], numbers: str) -> list[str]:
    """The presets with the numbers in a text such as ``1,7``; all presets if it is empty.

    Raises:
        CommandError: no preset has such a number.
    """
    by_number = {str(number_of(name)): name for name in presets}
    wanted = [number.strip() for number in numbers.split(",")] if numbers else list(by_number)
    for number in wanted:
        if number not in by_number:
            raise CommandError(f"--panels: there is no panel {number!r}; take {', '.join(by_number)}", Exit.BAD_INPUT)
    return [by_number[number] for number in wanted]


def kept_panels(path: Path) -> dict[str, PresetRecord]:
    """The panels of a ``benchmark.json``; none if there is no file.

    Raises:
        CommandError: it cannot be read.
    """
    try:
        return BenchmarkRecord.model_validate_json(path.read_bytes()).panels
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        text = why(error) if isinstance(error, OSError) else "it is none of `promptfed bench embedded`"
        raise CommandError(f"{path} cannot be read: {text}; move it away", Exit.BAD_INPUT) from None


def _commit(runs: Sequence[BenchRun]) -> str | None:
    """The commits of the code that made the runs, the newest last."""
    told = dict.fromkeys(str(run.provenance["commit"]) for run in runs if run.provenance.get("commit"))
    return ", ".join(told) or None


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
        f"torch {made.packages['torch']}. Figures by seed, specs and hashes are in `benchmark.json`. "
        "Panels were made with different commits, and defaults have changed between them.",
        "",
        "Tables show the accuracy in percent after the last round, mean ± standard deviation over seeds; the numbers "
        "that a client trains, and bytes and seconds of training per client and round. "
        f"{BELOW} marks figures below zero-shot. Rows, rates and settings are those of the panel's file in "
        "`promptfed/experiments/bench/embedded`.",
        "",
        *_overview(benchmark, presets),
    ]
    for name, kept in benchmark.panels.items():
        lines += ["", f"## {kept.title}", "", *table_of(kept.columns, kept.table), ""]
        if kept.rooms:
            lines += [*rooms_table(kept.rooms), ""]
        lines += [presets[name].notes.strip()]
    waiting = [preset.title for name, preset in presets.items() if name not in benchmark.panels]
    if waiting:
        lines += ["", "## Not measured yet", "", *(f"- {title}" for title in waiting)]
    return "\n".join(lines) + "\n"


def _overview(benchmark: BenchmarkRecord, presets: Mapping[str, Preset]) -> list[str]:
    """A table of the panels: protocol, data, seeds, commit and minutes."""
    rows = [
        [
            f"`{name}.yaml`",
            presets[name].protocol,
            ", ".join(map(markdown_code, kept.setting.data)),
            ", ".join(map(str, kept.seeds)),
            kept.commit or "-",
            f"{kept.seconds / 60:.0f}",
        ]
        for name, kept in benchmark.panels.items()
    ]
    header = ["panel", "protocol", "data", "seeds", "commit", "minutes"]
    return markdown_table(header, rows, text_columns=(0, 1, 2, 3, 4))
