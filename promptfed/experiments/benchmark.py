"""The embedded benchmark: panels of ``experiments/embedded``, run one after another and told in one document.

A panel is a protocol, data that everybody has, methods under the names that its table shows, and, below the table,
what one reads in it. The document is made of the panels and of the results alone, so that whoever has these can make it
again without a run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from promptfed.experiments.entries import Entry, parse_entry
from promptfed.experiments.protocols import PROTOCOLS, Setting
from promptfed.experiments.runner import Bench
from promptfed.experiments.tables import ZERO_SHOT, TableRow, caption, table_of

FOLDER = Path(__file__).parent / "embedded"
SEEDS, REDUCED_SEEDS = (0, 1, 2), (0,)


class Panel(BaseModel):
    """One table. ``methods``: entries by the label that the table shows; ``reduced_targets``: the targets of a
    reduced run, all by default."""

    model_config = ConfigDict(extra="forbid")

    title: str
    protocol: str
    setting: Setting
    methods: dict[str, str]
    spec: dict[str, Any]
    m: int | None = None
    reduced_targets: tuple[str, ...] = ()
    reading: str

    def bench(self, seeds: Sequence[int], reduced: bool) -> Bench:
        """What runs it."""
        entries = [_labelled(label, text) for label, text in self.methods.items()]
        targets = self.reduced_targets if reduced else self.setting.targets
        return Bench(
            PROTOCOLS[self.protocol], entries, replace(self.setting, targets=targets), seeds, self.spec, self.m
        )


def panels() -> dict[str, Panel]:
    """All panels by name, in the document's order."""
    return {path.stem: Panel.model_validate(yaml.safe_load(path.read_text())) for path in sorted(FOLDER.glob("*.yaml"))}


def summary(
    panel: Panel, bench: Bench, rows: Sequence[TableRow], results: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What of a panel's runs is kept beside the document: every row by seed, and where each run came from."""
    return {
        "title": panel.title,
        "caption": caption(bench),
        "columns": list(bench.protocol.columns(bench.setting)),
        "seeds": list(bench.seeds),
        "setting": asdict(bench.setting),
        "spec": panel.spec,
        "methods": panel.methods,
        "table": [asdict(row) for row in rows],
        "seconds": round(sum(one["wall_seconds"] + one["setup_seconds"] for one in results)),
        "runs": [
            {key: one[key] for key in ("label", "seed", "trial", "state_hash", "backbone", "data", "wall_seconds")}
            for one in results
        ],
    }


def document(found: Mapping[str, Any], described: Mapping[str, Panel]) -> str:
    """The benchmark as Markdown: of what `summary` keeps, and each panel's reading."""
    seconds = sum(one["seconds"] for one in found["panels"].values())
    made = found["provenance"]
    lines = [
        "# The embedded benchmark",
        "",
        "`promptfed bench embedded --out results` makes this document and its figures again, and goes on where it was "
        "interrupted; `--reduced` takes one seed and fewer targets. All federations of this run took "
        f"{seconds / 60:.0f} minutes on {made['machine']['cores']} cores that other work shared, one thread each, "
        f"torch {made['packages']['torch']}. Figures by seed, specs and hashes stand beside it in `benchmark.json`.",
    ]
    for name, one in found["panels"].items():
        panel = described[name]
        rows = [
            TableRow(row["label"], tuple(row["scores"]), row["costs"], row.get("zero_shot", ZERO_SHOT))
            for row in one["table"]
        ]
        lines += ["", f"## {one['title']}", "", one["caption"], "", *table_of(one["columns"], rows), ""]
        lines += [panel.reading.strip()]
        lines += ["", "Settings: " + _settings(one) + "."]
    return "\n".join(lines) + "\n"


def _settings(one: Mapping[str, Any]) -> str:
    entries = "; ".join(f"{label} = `{text}`" for label, text in one["methods"].items() if label != text)
    return f"`{json.dumps(one['spec'])}`" + (f"; {entries}" if entries else "")


def _labelled(label: str, text: str) -> Entry:
    return replace(parse_entry(text), label=label)
