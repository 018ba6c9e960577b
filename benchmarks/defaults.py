"""Default learning rates against a sweep of four decades: each method on held-out training images of six data sets.

    python -m benchmarks.defaults --json benchmarks/defaults.json --methods fedclip,fedlora
    python -m benchmarks.defaults --json benchmarks/defaults.json --table

A run continues where the last one with the same file ended. Rates are multiples of the method's default: 0.01 to 100 in
decades, further ones while the best is at an edge, then half a decade around the best. The best is that of the mean
over the data sets. A federation has two sites, about six images of each class, and as many steps as four rounds with
batches of 32.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.harness import DOCS, fill_tables, integers, parser, table, write
from promptfed.experiments.tuning.trials import Candidate, Trials, mean_of
from promptfed.runtime.run_file import RunFile
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.spec.halving import beyond, grid

ROUNDS, BATCH = 4, 32
TINY, EMOJI = "promptfed-tiny", "promptfed-emoji"
DRAWN = "symbols:{}?topic={}&per_class=12&shots=6"
THINGS = (
    "ant,bear,cat,chicken,cow,crocodile,dog,elephant,frog,goat,koala,monkey,octopus,panda,penguin,pig,snail,tiger,"
    "banana,bread,cherries,grapes,lemon,mushroom,peach,pineapple,pizza,strawberry,tomato,watermelon"
)
NAMED = f"emoji:{{}}?level=names&test=fxemoji&only={THINGS}"
# A backbone, the share of training images that is held out, and the sites.
DATA: dict[str, tuple[str, float, tuple[str, ...]]] = {
    "signs": (TINY, 0.5, (DRAWN.format("neon", "signs"), DRAWN.format("blueprint", "signs"))),
    "weather": (TINY, 0.5, (DRAWN.format("sketch", "weather"), DRAWN.format("chalk", "weather"))),
    "tools": (TINY, 0.5, (DRAWN.format("quickdraw", "tools"), DRAWN.format("stamp", "tools"))),
    "digits": (TINY, 0.1, tuple(f"digits?shots=6&partition=iid&clients=2&client={index}" for index in range(2))),
    "kinds": (EMOJI, 0.3, ("emoji:fxemoji", "emoji:notomono")),
    "names": (EMOJI, 0.5, (NAMED.format("notomono+contrast"), NAMED.format("notov1+contrast"))),
}
LARGEST = 1e4  # multiple of a default that is tried


class Sweep:
    """Accuracies by method, data set and multiple of the default rate, kept in a file after each federation."""

    def __init__(self, path: Path, features: Path, seeds: Sequence[int] = (7,)):
        self.path, self.features, self.seeds = path, features, seeds
        self.runs: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        self._trials: dict[str, Trials] = {}

    def trials(self, data: str) -> Trials:
        """The trials on a data set, opened once."""
        if data not in self._trials:
            model, share, uris = DATA[data]
            spec = {
                "name": "sweep",
                "method": {"name": "zero_shot"},
                "backbone": {"model": model, "pretrained": "embedded"},
                "template": None,
                "rounds": ROUNDS,
                "participation": {"min_clients": len(uris)},
            }
            sites = tuple(Site(f"site-{index}", uri) for index, uri in enumerate(uris))
            self._trials[data] = Trials(RunFile(spec, sites), self.features, share)
        return self._trials[data]

    def measure(self, method: str, multiples: Sequence[float]) -> None:
        """Run the multiples of the default that are missing, on every data set. A method that refuses has a reason."""
        for data in DATA:
            entry = self.runs.setdefault(method, {}).setdefault(data, {"accuracy": {}, "seconds": {}})
            for multiple in multiples:
                if "refused" in entry or f"{multiple:g}" in entry["accuracy"]:
                    continue
                try:
                    self._measure(method, data, entry, multiple)
                except CommandError as error:
                    entry["refused"] = str(error)
                write(self.path, self.runs)

    def _measure(self, method: str, data: str, entry: dict[str, Any], multiple: float) -> None:
        trials = self.trials(data)
        training = trials.spec(method).training
        candidate = Candidate(method, float(f"{entry.setdefault('default', training.learning_rate) * multiple:.3g}"))
        rounds = ROUNDS * max(1, training.batch_size // BATCH)
        done = [trials.run(candidate, rounds, seed) for seed in self.seeds]
        accuracy, seconds = fmean(trial.accuracy for trial in done), fmean(trial.seconds for trial in done)
        entry["accuracy"][f"{multiple:g}"] = accuracy
        entry["seconds"][f"{multiple:g}"] = round(seconds, 2)
        if all(trial.template for trial in done):
            zero_shot = fmean(mean_of(trial.template) for trial in done)
            entry.update(zero_shot=zero_shot, bytes_round=done[0].bytes_round, seeds=len(done))
        print(f"{method} {data} ×{multiple:g}: {100 * accuracy:.1f}, {seconds:.1f} s", flush=True)

    def means(self, method: str) -> dict[float, float]:
        """The mean gain over the template by multiple, over the data sets that have it."""
        entries = [entry for entry in self.runs.get(method, {}).values() if "zero_shot" in entry]
        common = set.intersection(*(set(entry["accuracy"]) for entry in entries)) if entries else set()
        return {
            float(key): fmean(entry["accuracy"][key] - entry["zero_shot"] for entry in entries)
            for key in sorted(common, key=float)
        }

    def has_rate(self, method: str) -> bool:
        """Whether another rate gave another accuracy anywhere."""
        return any(len(set(entry["accuracy"].values())) > 1 for entry in self.runs[method].values())

    def sweep(self, method: str, coarse: bool) -> None:
        """All decades, further ones while the best is at an edge, then the half decades around the best."""
        self.measure(method, (1.0, 100.0))
        if not self.has_rate(method):
            return
        self.measure(method, (10.0, 0.1, 0.01))
        while means := self.means(method):
            best = max(means, key=means.__getitem__)
            step = beyond(means, best)
            if step is None or not 1 / LARGEST <= step <= LARGEST:
                if coarse:
                    break
                self.measure(method, [multiple for multiple in grid(best, 1, 2) if multiple != best])
                break
            self.measure(method, [step])


def default_gain(runs: Mapping[str, Any], method: str) -> float | None:
    """The mean gain at today's default rates; None if one of them was not swept.

    Multiples are of the defaults at the time of the sweep, which has changed them.
    """
    gains = []
    for data, entry in runs[method].items():
        if "zero_shot" in entry:
            backbone = {"model": DATA[data][0], "pretrained": "embedded"}
            spec = {
                "name": "x",
                "method": {"name": method},
                "backbone": backbone,
                "class_names": ["a", "b"],
                "rounds": 1,
            }
            multiple = f"{resolve_spec(spec).training.learning_rate / entry['default']:.3g}"
            if multiple not in entry["accuracy"]:
                return None
            gains.append(entry["accuracy"][multiple] - entry["zero_shot"])
    return fmean(gains) if gains else None


def markdown(sweep: Sweep) -> str:
    """The gains of the default and of the best multiple, in points, over the data sets that are complete."""
    rows = []
    for method in sorted(sweep.runs):
        means = sweep.means(method)
        default = default_gain(sweep.runs, method)
        if len(means) < 2 or default is None:
            continue
        best = max(means, key=means.__getitem__)
        edge = sweep.has_rate(method) and best in (min(means), max(means))
        entries = [entry for entry in sweep.runs[method].values() if "zero_shot" in entry]
        runs = f"{len(entries)} × {min(entry.get('seeds', 1) for entry in entries)}"
        most = max(default, means[best])
        share = f"{default / most:.0%}" if most > 0 else "-"
        at = f"×{best:g}" + (" (edge)" if edge else "") if sweep.has_rate(method) else "no rate"
        at = "default" if default > means[best] else at
        rows.append([f"`{method}`", runs, f"{100 * default:+.1f}", f"{100 * most:+.1f}", at, share])
    return table(["method", "sets × seeds", "default", "best", "at", "share"], rows)


def main() -> None:
    """Sweep the methods in the order given, and write the table into docs/reference/methods.md."""
    command = parser(__doc__)
    command.add_argument("--methods", help="names by commas; default: all")
    command.add_argument("--seeds", type=integers, default=[7], help="seeds of a method's runs, by commas")
    command.add_argument("--coarse", action="store_true", help="whole decades only")
    command.add_argument("--table", action="store_true", help="only write the table of the file")
    options = command.parse_args()
    with TemporaryDirectory(prefix="promptfed-defaults-") as features:
        sweep = Sweep(options.json, Path(features), options.seeds)
        if not options.table:
            for method in options.methods.split(",") if options.methods else METHODS.own():
                sweep.sweep(method, options.coarse)
        page = DOCS / "reference/methods.md"
        page.write_text(fill_tables(page.read_text(), "defaults", {"": markdown(sweep)}))


if __name__ == "__main__":
    main()
