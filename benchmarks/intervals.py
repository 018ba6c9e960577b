"""How often 95 % intervals of a site's figures hold the truth, by AUROC, images and share of positives.

    python -m benchmarks.intervals --json benchmarks/intervals.json

Scores of positives are normal around √2·Φ⁻¹(AUROC), those of negatives around 0. Each row has 1,000 sites.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import integrate, stats

from benchmarks.harness import machine, parser, table, write
from promptfed.shared.metrics.clinical import auroc_estimate, precision_estimate, proportion

AREAS = (0.7, 0.8, 0.9, 0.97)
SITES = ((300, 0.5), (300, 0.2), (1000, 0.05), (300, 0.05), (100, 0.2))  # images, share of positives
CUT = 0.25  # of the decisions, between the means of negatives and positives
FIGURES = ("AUROC", "average precision", "sensitivity")


def true_precision(distance: float, share: float) -> float:
    """The average precision of a site without end."""
    cuts = np.linspace(-9, 9 + distance, 20_001)[::-1]
    recall, false = stats.norm.sf(cuts - distance), stats.norm.sf(cuts)
    return float(integrate.trapezoid(share * recall / (share * recall + (1 - share) * false), recall))


def coverage(area: float, images: int, share: float, sites: int) -> dict[str, float]:
    """The share of sites whose interval holds the truth, of each figure, among sites with both kinds of images."""
    draws, distance = np.random.default_rng(7), math.sqrt(2) * float(stats.norm.ppf(area))
    truths = (area, true_precision(distance, share), float(stats.norm.sf(CUT - distance)))
    held = np.zeros(3)
    done = 0
    while done < sites:
        truth = draws.random(images) < share
        if truth.all() or not truth.any():
            continue
        scores = draws.normal(truth * distance, 1)
        sensitivity = proportion(int((scores[truth] > CUT).sum()), int(truth.sum()))
        assert sensitivity is not None
        found = (auroc_estimate(truth, scores), precision_estimate(truth, scores), sensitivity)
        held += [one.low <= value <= one.high for one, value in zip(found, truths, strict=True)]
        done += 1
    return dict(zip(FIGURES, (held / sites).tolist(), strict=True))


def main() -> None:
    """Measure every regime, and print a table."""
    command = parser(__doc__)
    command.add_argument("--sites", type=int, default=1000)
    options = command.parse_args()
    rows = []
    for images, share in SITES:
        for area in AREAS:
            about = {"images": images, "positives": round(images * share), "auroc": area}
            rows.append(about | coverage(area, images, share, options.sites))
            write(options.json, {"sites": options.sites, "machine": machine(), "rows": rows})
    cells = [
        [str(row["images"]), str(row["positives"]), str(row["auroc"]), *(f"{100 * row[name]:.1f}" for name in FIGURES)]
        for row in rows
    ]
    print(table(["images", "positives", "true AUROC", *FIGURES], cells, texts=0))


if __name__ == "__main__":
    main()
