"""Benches described in files: the papers' tables and suites of several.

A file names a protocol, a setting with data below ``{root}``, the methods, and the spec that they share. Files in
``papers`` (``paper:plan-pacs``) also hold the figures that the paper prints in the table's columns (percent; null for a
misprint). Files in ``embedded`` use data that come with promptfed, those in ``photos`` photographs that others publish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict

from promptfed.experiments.bench.entries import RawSpec, parse_entry
from promptfed.experiments.bench.protocols import PROTOCOLS, Setting
from promptfed.experiments.bench.runner import Bench
from promptfed.experiments.bench.tables import PAPER, TableRow
from promptfed.shared.errors import BadInput
from promptfed.shared.spec.spec import merged

PAPERS = Path(__file__).parent / "papers"
SUITES = {name: Path(__file__).with_name(name) for name in ("embedded", "photos")}
"""Folders of presets that run one after another, by the name on the command line."""
PREFIX = "paper:"
ALL = "all"  # the only panel of a preset without ``each``
SEEDS, REDUCED_SEEDS = (0, 1, 2), (0,)  # of a suite

_DOMAIN_SETS = "the links in github.com/facebookresearch/DomainBed (domainbed/scripts/download.py)"
SOURCES = {
    "pacs": _DOMAIN_SETS,
    "vlcs": _DOMAIN_SETS,
    "office_home": "hemanthdv.org/officeHomeDataset.html",
    "office_home_10": "hemanthdv.org/officeHomeDataset.html, ten classes of it",
    "domainnet": "ai.bu.edu/M3SDA",
    "office31": "the links in github.com/jindongwang/transferlearning (data)",
    "office_caltech_10": "the links in github.com/jindongwang/transferlearning (data)",
    "ucf101": "the middle frames of UCF101's videos, as github.com/KaiyangZhou/CoOp (DATASETS.md) links them",
    "imagenetv2": "github.com/modestyachts/ImageNetV2",
    "imagenet_sketch": "github.com/HaohanWang/ImageNet-Sketch",
    "imagenet_a": "github.com/hendrycks/natural-adv-examples",
    "imagenet_r": "github.com/hendrycks/imagenet-r",
    "dermoscopic_fl": "the data sets that pFedPG's paper names",
}
"""Where folders of the papers' data sets come from."""

Figures = dict[str, list[float | None]]


def _labelled(methods: object) -> object:
    return {text: text for text in methods} if isinstance(methods, list) else methods


class Preset(BaseModel):
    """One table. ``methods`` are entries by their label in the table; in a list, each entry is its own label.

    ``each`` names several data sets and runs one panel for each: the name replaces ``{data}``, and ``clients`` holds
    numbers of clients that differ from the setting's. ``paper`` has the printed figures by panel and label, in the
    order of ``columns``; an average that is not that of its row within rounding is null, and the notes name it.
    ``reduced_targets`` are the targets of a reduced run, all by default. ``notes`` are printed below the table.
    """

    model_config = ConfigDict(extra="forbid")

    title: str
    protocol: str
    setting: Setting
    methods: Annotated[dict[str, str], BeforeValidator(_labelled)]
    spec: RawSpec
    m: int | None = None
    each: tuple[str, ...] = ()
    clients: dict[str, int] = {}
    columns: tuple[str, ...] = ()
    paper: dict[str, Figures] = {}
    reduced_targets: tuple[str, ...] = ()
    notes: str = ""

    def panels(self) -> tuple[str, ...]:
        """The data sets of ``each``, or the one panel ``all``."""
        return self.each or (ALL,)

    def setting_of(self, panel: str, root: str, reduced: bool = False) -> Setting:
        """The setting of a panel, with its data below the folder ``root``."""
        # The root last: what stands in it is the user's own.
        uris = [uri.replace("{data}", panel) if self.each else uri for uri in self.setting.data]
        return replace(
            self.setting,
            data=tuple(uri.replace("{root}", root) for uri in uris),
            targets=self.reduced_targets if reduced else self.setting.targets,
            clients=self.clients.get(panel, self.setting.clients),
        )

    def bench(
        self,
        seeds: Sequence[int],
        *,
        panel: str = ALL,
        root: str = "",
        reduced: bool = False,
        changes: Mapping[str, Any] | None = None,
    ) -> Bench:
        """The bench of a panel; ``changes`` are applied to the preset's spec."""
        entries = [parse_entry(text, label) for label, text in self.methods.items()]
        spec = merged(self.spec, dict(changes or {}))
        return Bench(PROTOCOLS[self.protocol], entries, self.setting_of(panel, root, reduced), seeds, spec, self.m)

    def wanted(self, root: str) -> str:
        """A sentence for people: the folders below ``root`` that the preset reads, their layout, and their sources."""
        sources: list[str] = []
        for panel in self.panels():
            setting = self.setting_of(panel, root)
            for uri in setting.data:
                scheme, _, body = uri.partition("?")[0].partition(":")
                if scheme == "torchvision":
                    where = uri.partition("root=")[2].partition("&")[0]
                    sources.append(f"{body} as torchvision's {body}({where!r}, download=True) leaves it")
                else:
                    domains = f" (each of {', '.join(setting.domains)})" if "{domain}" in uri else ""
                    inner = "DOMAIN/CLASS" if domains else "CLASS"
                    source = SOURCES.get(Path(body).name, "see the paper")
                    sources.append(f"{body}/{inner}/*.jpg{domains}, from {source}")
        return f"this table wants below --root {root}: {'; '.join(dict.fromkeys(sources))}"

    def figures(self, panel: str) -> list[TableRow]:
        """The paper's rows of a panel, including methods that promptfed does not have."""
        rows = []
        for label, values in self.paper.get(panel, {}).items():
            printed = {name: value / 100 for name, value in zip(self.columns, values, strict=True) if value is not None}
            rows.append(TableRow(label + PAPER, (printed,)))
        return rows


def preset_names() -> list[str]:
    """The names of the papers' presets on the command line."""
    return sorted(PREFIX + path.stem for path in PAPERS.glob("*.yaml"))


def read_preset(name: str) -> Preset:
    """The preset ``paper:NAME``.

    Raises:
        PromptfedError: there is no such preset.
    """
    if name not in preset_names():
        raise BadInput(f"there is no preset {name!r}: use one of {', '.join(preset_names())}")
    return _read(PAPERS / f"{name.removeprefix(PREFIX)}.yaml")


def presets_of(suite: str) -> dict[str, Preset]:
    """The presets of one of `SUITES` by name, in the order of their numbers."""
    files = sorted(SUITES[suite].glob("*.yaml"), key=lambda path: number_of(path.stem))
    return {path.stem: _read(path) for path in files}


def number_of(name: str) -> int:
    """The number of a preset of a suite: 2 for ``2-leave-one-domain-out``."""
    return int(name.partition("-")[0])


def _read(path: Path) -> Preset:
    return Preset.model_validate(yaml.safe_load(path.read_text()))
