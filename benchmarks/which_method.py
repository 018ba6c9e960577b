"""Accuracy, bytes, seconds, privacy, an unseen domain and new classes by method, on the embedded data sets.

    python -m benchmarks.which_method --json benchmarks/which_method.json
    python -m benchmarks.which_method --json benchmarks/which_method.json --table

A run continues where the last one with the same file ended. Two sites train six rounds on half of the classes, with at
most eight images of each; an evaluator has the unseen domain, and the sites are also tested on the other classes.
Methods have their defaults. ``--table`` writes the table into docs/guides/compare-methods.md.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.defaults import EMOJI, THINGS, TINY
from benchmarks.harness import DOCS, fill_tables, integers, parser, table, write
from promptfed.experiments.bench.runner import costs
from promptfed.experiments.protocols.setting import with_options
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.services import Site
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError
from promptfed.sdk.text import size
from promptfed.shared.data import open_source
from promptfed.shared.methods import METHODS, method_class

ROUNDS, SEEDS = 6, 3
KINDS = ("test", "unseen", "novel")
ONCE = ("fedgda",)  # exchanges once
WITHOUT_TEXT = ("fedbabu", "fedrep", "pfedpg")  # their heads know no other classes
SIGNS, TOOLS = (f"symbols:{{}}?topic={topic}&per_class=8" for topic in ("signs", "tools"))
NAMES = f"emoji:{{}}?level=names&test=fxemoji&validation=0.34&only={THINGS}"  # two styles train, the third is tested
DIGITS = "digits?shots=8&partition=iid&clients=2&client={}"
SCENES = "emoji-scenes:{}?count=60&test_count=100"


class Data(NamedTuple):
    """Two sites' data and the unseen domain.

    ``domains`` describe sites whose data do not, for fast_pt. ``scenes`` have several labels, and their accuracy is the
    mean average precision.
    """

    model: str
    sites: tuple[str, str]
    unseen: str
    domains: tuple[str | None, str | None] = (None, None)
    scenes: bool = False


DATA = {
    "signs": Data(TINY, (SIGNS.format("neon"), SIGNS.format("blueprint")), SIGNS.format("sketch")),
    "tools": Data(TINY, (TOOLS.format("chalk"), TOOLS.format("stamp")), TOOLS.format("quickdraw")),
    "digits": Data(
        TINY,
        (DIGITS.format(0), DIGITS.format(1)),
        "digits?domain=inverted",
        ("a photo of the digit {}", "a scan of the digit {}"),
    ),
    "kinds": Data(EMOJI, ("emoji:noto", "emoji:contrast"), "emoji:fxemoji"),
    "names": Data(
        EMOJI,
        (NAMES.format("noto+notov1+notomono"), NAMES.format("flat+three+contrast")),
        f"emoji:fxemoji?level=names&only={THINGS}",
        ("a drawing of a {} by Google", "a drawing of a {} by Microsoft"),
    ),
    "scenes": Data(EMOJI, (SCENES.format("flat"), SCENES.format("notomono")), SCENES.format("fxemoji"), scenes=True),
}


def run(method: str, data: str, seed: int, features: Path) -> dict[str, Any]:
    """One federation: means over the sites (fractions), and costs of a site and round."""
    setting, kind = DATA[data], method_class(method)
    base = [with_options(uri, {"classes": "base"}) for uri in setting.sites]
    spec = {
        "name": "which",
        "method": {"name": method},
        "backbone": {"model": setting.model, "pretrained": "embedded"},
        "class_names": list(open_source(base[0]).class_names),
        "template": None,
        "rounds": 1 if method in ONCE else ROUNDS,
        "participation": {"min_clients": len(base)},
        "evaluation": {"every": 1 if method in ONCE else ROUNDS},
        "seed": seed,
    }
    if setting.scenes:
        spec |= {"task": "multi_label", "method": {"name": method, "label_space": "federation"}}
    others = {} if method in WITHOUT_TEXT else {"classes": "novel"}
    sites = [
        Site(f"site-{index}", own, tests={"novel": with_options(uri, others)} if others else {}, domain=domain)
        for index, (own, uri, domain) in enumerate(zip(base, setting.sites, setting.domains, strict=True))
    ]
    if kind.takes_evaluators:
        sites.append(Site("unseen", with_options(setting.unseen, {"classes": "base"}), "evaluator"))
    resolved = resolve(spec)
    backbone = open_backbone(resolved.backbone, allow_backbone=False)
    result = simulate(resolved, sites, backbone=backbone, features=features)
    groups: dict[str, list[float]] = {}
    for row in result.final():
        groups.setdefault("unseen" if row.role == "evaluator" else row.split, []).append(row.accuracy)
    price = costs(result.reports)
    found = {split: fmean(values) for split, values in groups.items() if split in KINDS}
    return found | {"bytes": price["bytes_up"] + price["bytes_down"], "seconds": price["seconds"]}


def protected(method: str) -> str:
    """The units that differential privacy can protect: single images, whole clients."""
    units = {
        "images": {"level": "sample", "clip": 0.3},
        "clients": {"level": "client", "clip": 1, "accept_noise": True},
    }
    found = []
    for unit, privacy in units.items():
        spec = {
            "name": "x",
            "method": {"name": method},
            "class_names": ["a", "b"],
            "rounds": 1 if method in ONCE else 2,
            "aggregation": {"weighting": "uniform"},
            "participation": {"min_clients": 3},
            "privacy": privacy | {"noise_multiplier": 1.0},
        }
        with suppress(CommandError):
            resolve(spec)
            found.append(unit)
    return ", ".join(found) or "-"


def markdown(runs: Mapping[str, Any]) -> str:
    """A row for each method of which all is finished, the most accurate first: means without scenes, and of scenes."""
    rows = []
    for method in dict.fromkeys(key.split()[0] for key in runs):
        own = {tuple(key.split()[1:]): run for key, run in runs.items() if key.split()[0] == method and "test" in run}
        single = [run for (data, _), run in own.items() if not DATA[data].scenes]
        scenes = [run for (data, _), run in own.items() if DATA[data].scenes]
        if len(single) < SEEDS * sum(not data.scenes for data in DATA.values()):
            continue

        def mean(kind: str, found: Sequence[Mapping[str, float]]) -> float | None:
            values = [run[kind] for run in found if kind in run]
            return fmean(values) if values else None

        accuracies = [mean(kind, single) for kind in KINDS] + [mean(kind, scenes) for kind in KINDS[:2]]
        cells = ["-" if value is None else f"{100 * value:.1f}" for value in accuracies]
        costs = [size(mean("bytes", single) or 0), f"{mean('seconds', single) or 0:.2f}"]
        rows.append((-(accuracies[0] or 0), [f"`{method}`", protected(method), str(len(single)), *cells, *costs]))
    columns = [
        "method",
        "privacy",
        "runs",
        "accuracy",
        "unseen domain",
        "new classes",
        "scenes",
        "unseen",
        "bytes",
        "s",
    ]
    return table(columns, [row for _, row in sorted(rows)], texts=2)


def main() -> None:
    """Run what is missing, by seed, data set and method, and write the table."""
    command = parser(__doc__)
    command.add_argument("--methods", help="names by commas; default: all")
    command.add_argument("--seeds", type=integers, default=list(range(SEEDS)))
    command.add_argument("--table", action="store_true", help="only write the table of the file")
    options = command.parse_args()
    methods = options.methods.split(",") if options.methods else METHODS.own()
    runs: dict[str, Any] = json.loads(options.json.read_text()) if options.json.exists() else {}
    with TemporaryDirectory(prefix="promptfed-which-") as features:
        for seed, method, data in product(options.seeds, methods, DATA) if not options.table else ():
            key = f"{method} {data} {seed}"
            if key in runs:
                continue
            try:
                runs[key] = run(method, data, seed, Path(features))
            except CommandError as error:
                runs[key] = {"refused": str(error)}
            write(options.json, runs)
            print(key, runs[key], flush=True)
    page = DOCS / "guides/compare-methods.md"
    page.write_text(fill_tables(page.read_text(), "which", {"": markdown(runs)}))


if __name__ == "__main__":
    main()
