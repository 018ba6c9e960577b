"""Forest plots: figures of several sites, or of the subgroups of one, with their intervals."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from promptfed.shared.metrics.pooling import PooledFigure
from promptfed.shared.metrics.site_figures import POOLED
from promptfed.shared.plain_text import plain


def forest(figures: Sequence[PooledFigure]) -> Figure:
    """A panel for each figure: the sites' intervals; where there is a mean, a diamond on the next site's line.

    The ``sites`` may also be the subgroups of one.
    """
    rows = [len(each.sites) + 1 + (each.pooled is not None) for each in figures]
    picture = Figure(figsize=(6.4, 0.5 + 0.24 * sum(rows)))
    panels = picture.subplots(len(figures), 1, squeeze=False, sharex=True, height_ratios=rows)[:, 0]
    for axes, each in zip(panels, figures, strict=True):
        names = list(map(plain, each.sites))
        for row, estimate in enumerate(each.sites.values()):
            axes.plot([100 * estimate.low, 100 * estimate.high], [row, row], color="tab:blue", linewidth=1)
            axes.plot(100 * estimate.value, row, "s", color="tab:blue", markersize=4)
        if (mean := each.pooled) is not None:
            last, across = len(names), [100 * mean.low, 100 * mean.mean, 100 * mean.high, 100 * mean.mean]
            if mean.prediction is not None:
                axes.plot([100 * end for end in mean.prediction], [last, last], color="black", linewidth=1)
            axes.fill(across, [last, last - 0.35, last, last + 0.35], color="black")
            names.append("mean, next site")
        axes.set_yticks(range(len(names)), names, fontsize=7, parse_math=False)  # a $ is no formula
        axes.set_ylim(len(names) - 0.3, -0.7)
        title = POOLED.get(each.figure, each.figure) + (f" of {plain(each.class_name)}" if each.class_name else "")
        axes.set_title(title, fontsize=8, loc="left", parse_math=False)
    panels[-1].set_xlabel("percent")
    picture.tight_layout()
    return picture
