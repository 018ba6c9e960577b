"""`tune --methods auto` on two drawn data sets that no sweep has seen, against every single run of the same methods.

    python -m benchmarks.unseen --json benchmarks/unseen.json

One set has twelve letters in four fonts, thin or bold, on noise; the other ten shapes, filled or outlined. Three sites
each draw in two colours. For each seed `choose` searches on held-out training images for 120 seconds of the
processor, which a quiet machine spends in as many seconds. Its choice, the default and every method of `auto` at every
rate of its grid then train for all rounds and are tested on the test images. Drawings of the seeds 0 to 2 were
looked at while the search was made: they are no test of it.
"""

from __future__ import annotations

import random
import string
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import cos, pi, sin
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from benchmarks.harness import integers, parser, table, write
from promptfed.experiments.simulation.simulation import simulate
from promptfed.experiments.tuning.choosing import AUTO, Plan, choose
from promptfed.experiments.tuning.trials import Candidate, Trials, has_diverged
from promptfed.runtime.run_file import RunFile
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.spec.halving import grid

SIZE, TRAIN, TEST, ROUNDS = 48, 8, 24, 8
COLOURS = (("crimson", "ivory"), ("navy", "khaki"), ("black", "lightgreen"))  # one pair for each site
LETTERS = tuple(f"letter {letter}" for letter in string.ascii_uppercase[:12])
CORNERS = {"triangle": 3, "square": 4, "pentagon": 5, "hexagon": 6, "octagon": 8}
SHAPES = ("circle", "ellipse", "cross", "star", "line", *CORNERS)


def letter(pen: ImageDraw.ImageDraw, name: str, colour: str, draw: random.Random) -> None:
    """A capital letter somewhere, in some size and thickness."""
    font = ImageFont.load_default(draw.randint(20, 34))
    place = (SIZE / 2 + draw.uniform(-6, 6), SIZE / 2 + draw.uniform(-6, 6))
    pen.text(place, name[-1], colour, font, anchor="mm", stroke_width=draw.choice((0, 1)))


def shape(pen: ImageDraw.ImageDraw, name: str, colour: str, draw: random.Random) -> None:
    """A shape somewhere, in some size, turned, filled or outlined."""
    x, y = SIZE / 2 + draw.uniform(-5, 5), SIZE / 2 + draw.uniform(-5, 5)
    radius, turn = draw.uniform(10, 18), draw.uniform(0, 2 * pi)
    fill, width = (colour, 1) if draw.random() < 0.5 else (None, 2)

    def at(angle: float, far: float = radius) -> tuple[float, float]:
        return x + far * cos(turn + angle), y + far * sin(turn + angle)

    if name in ("circle", "ellipse"):
        high = radius if name == "circle" else radius / 2
        pen.ellipse((x - radius, y - high, x + radius, y + high), fill, colour, width)
    elif name in ("cross", "line"):
        for angle in (0, pi / 2)[: 1 + (name == "cross")]:
            pen.line((*at(angle), *at(angle + pi)), colour, 3)
    else:
        count = CORNERS.get(name, 10)
        far = [radius if count != 10 or index % 2 else radius / 2 for index in range(count)]
        pen.polygon([at(2 * pi * index / count, far[index]) for index in range(count)], fill, colour, width)


WITHOUT_RATE = ("fedlp", "fedgda")
Sketch = Callable[[ImageDraw.ImageDraw, str, str, random.Random], None]
SETS: dict[str, tuple[tuple[str, ...], Sketch]] = {"letters": (LETTERS, letter), "shapes": (SHAPES, shape)}


def draw_set(folder: Path, name: str, seed: int) -> RunFile:
    """Draw a set into ``folder``, a folder for each site, and the run file of a federation over them."""
    names, sketch = SETS[name]
    for site, (ink, paper) in enumerate(COLOURS):
        for split, count in (("train", TRAIN), ("test", TEST)):
            for label in names:
                place = folder / f"site-{site}" / split / label
                place.mkdir(parents=True)
                for index in range(count):
                    draw = random.Random(f"{seed} {site} {split} {label} {index}")
                    image = Image.effect_noise((SIZE, SIZE), 20).convert("RGB")
                    image = Image.blend(Image.new("RGB", (SIZE, SIZE), paper), image, 0.2)
                    sketch(ImageDraw.Draw(image), label, ink, draw)
                    image.save(place / f"{index}.png")
    sites = tuple(Site(f"site-{site}", f"folder:{folder}/site-{site}") for site in range(len(COLOURS)))
    spec = {"name": name, "method": {"name": "promptfl"}, "rounds": ROUNDS, "training": {"batch_size": 32}}
    return RunFile(spec | {"template": "a photo of a {}.", "participation": {"min_clients": len(sites)}}, sites)


def measure(name: str, seed: int, seconds: float, single: Sequence[str]) -> dict[str, Any]:
    """The choice and the default on test images, and every run of the methods ``single`` with its test accuracy."""
    with TemporaryDirectory(prefix="promptfed-unseen-") as temporary:
        run = draw_set(Path(temporary) / "images", name, seed)
        run = replace(run, spec={**run.spec, "seed": seed})
        trials, sources = Trials(run, Path(temporary) / "features", 0.25), SharedSources()
        chosen = choose(trials, Plan(AUTO, seconds=seconds), clock=time.process_time)

        def tested(candidate: Candidate) -> float:
            raw = {**run.spec, **trials.changes(candidate.method, candidate.rate)}
            try:
                result = simulate(raw, run.sites, features=Path(temporary) / "features", sources=sources)
            except CommandError as error:
                if not has_diverged(error):
                    raise
                return 0.0
            return fmean(row.accuracy for row in result.final() if row.split == "test")

        candidates = [chosen.winner, chosen.default]
        for method in single:
            rates = grid(trials.spec(method).training.learning_rate)
            candidates += [Candidate(method, rate) for rate in rates[: 1 if method in WITHOUT_RATE else None]]
        reached = {candidate: tested(candidate) for candidate in dict.fromkeys(candidates)}
    best = max(reached, key=reached.__getitem__)
    return {
        "set": name,
        "seed": seed,
        "chosen": str(chosen.winner),
        "chosen_test": reached[chosen.winner],
        "default_test": reached[chosen.default],
        "best": str(best),
        "best_test": reached[best],
        "untried": chosen.untried,
        "at_edge": chosen.at_edge,
        "single": {str(candidate): accuracy for candidate, accuracy in reached.items()},
    }


def main() -> None:
    """Measure every set and seed, write the file after each, and print a table."""
    command = parser(__doc__)
    command.add_argument("--seeds", type=integers, default=[3, 4, 5])
    command.add_argument("--seconds", type=float, default=120, help="processor seconds of each search")
    command.add_argument("--single", default=",".join(AUTO), help="methods that run by themselves at every rate")
    options = command.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        for name in SETS:
            rows.append(measure(name, seed, options.seconds, options.single.split(",")))
            write(options.json, rows)
            print(rows[-1]["set"], seed, rows[-1]["chosen"], rows[-1]["chosen_test"], rows[-1]["best"], flush=True)
    cells = []
    for row in rows:
        chosen, default, best = (f"{100 * row[key]:.1f}" for key in ("chosen_test", "default_test", "best_test"))
        cells.append([row["set"], str(row["seed"]), row["chosen"], chosen, default, row["best"], best])
    print(table(["set", "seed", "chosen", "test", "default", "best single run", "test"], cells, texts=3))


if __name__ == "__main__":
    main()
