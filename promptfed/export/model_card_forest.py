"""The forest plot of a card: the sites' accuracies with intervals and their random-effects mean, in text."""

from __future__ import annotations

from promptfed.shared.api.export_card import Accuracies, Card
from promptfed.shared.metrics.clinical import Estimate, interval_text, proportion
from promptfed.shared.metrics.pooling import pool_estimates
from promptfed.shared.plain_text import markdown_cell

WIDTH = 41  # characters from 0 to 100 %
SITE, MEAN = "■", "◆"


def forest(card: Card) -> list[list[str]]:
    """The rows of `rows_of`; none where accuracies are noisy counts, or means over several labels per image."""
    noisy = card.privacy is not None and card.privacy.evaluation == "noisy"
    return [] if card.accuracy is None or noisy or "task" in card.method else rows_of(card.accuracy)


def rows_of(measured: Accuracies) -> list[list[str]]:
    """A row for each trainer (without any, each evaluator), and for the mean, if there are two sites or more."""
    sites = _sites(measured)
    pooled = pool_estimates(list(sites.values()))
    if pooled is None:
        return []
    mean = Estimate(value=pooled.mean, low=pooled.low, high=pooled.high)
    rows = [[markdown_cell(name), interval_text(one), f"`{_bar(one, SITE)}`"] for name, one in sites.items()]
    rows.append([f"mean, I² {100 * pooled.i2:.0f} %", interval_text(mean), f"`{_bar(mean, MEAN)}`"])
    if pooled.prediction is not None:
        low, high = pooled.prediction
        ahead = Estimate(value=pooled.mean, low=low, high=high)
        rows.append(["next site", f"{100 * low:.1f} to {100 * high:.1f}", f"`{_bar(ahead, '─')}`"])
    return rows


def _sites(measured: Accuracies) -> dict[str, Estimate]:
    """The accuracies on the sites' own test images, with Wilson's intervals."""
    found: dict[str, dict[str, Estimate]] = {"trainer": {}, "evaluator": {}}
    for row in measured.clients:
        if row.split == "test" and row.num_samples:
            estimate = proportion(round(row.adapted * row.num_samples), row.num_samples)
            assert estimate is not None
            found[row.role][row.client] = estimate
    return found["trainer"] or found["evaluator"]


def _bar(one: Estimate, mark: str) -> str:
    """The interval as a line from 0 to 100 %, with a mark at the value."""
    low, value, high = (round(share * (WIDTH - 1)) for share in (one.low, one.value, one.high))
    line = [("─" if low <= place <= high else "·") for place in range(WIDTH)]
    line[value] = mark
    return "".join(line)
