"""The tables and the figure of docs/results/image.md, made from docs/results/image-*.json.

``python docs/image_results.py`` writes them; ``--check`` only says whether the page's tables are stale. `tests/docs`
does. The JSON files keep the runs of `promptfed bench` that the page names.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from promptfed.experiments.figures.plots import Point, name_points, scatter
from promptfed.sdk.text import size

DOCS = Path(__file__).parent
PAGE, FIGURE = DOCS / "results" / "image.md", DOCS / "images" / "image-methods.svg"
RATE, HEAD_RATE = (re.compile(rf"{key}=([\d.e-]+)") for key in (r"training\.learning_rate", "head_learning_rate"))
MARKED = re.compile(r"<!-- table: (\w+) (\w+) -->\n.*?<!-- end of table -->", re.DOTALL)
LEFT_OUT, PERSONAL = "leave-one-domain-out", "personalisation"
ON = {"symbols": "symbols", "names": "emoji, names", "emoji": "emoji, kinds"}
PANELS = (
    ("symbols", LEFT_OUT, "Symbols, a style that nobody trained on"),
    ("symbols", PERSONAL, "Symbols, a style for each client"),
    ("names", LEFT_OUT, "Emoji, names of things, a designer whom nobody trained on"),
    ("emoji", PERSONAL, "Emoji, kinds of things, a designer for each client"),
)
ALPHA = 0.05  # of Holm's procedure over all questions of the page
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "text prompts": ("#000000", ("promptfl", "fedapt", "diprompt", "fast_pt")),
    "visual prompts": ("#0072B2", ("fedvpt", "fedvpt_deep", "fedpr", "fedmvp", "singleset_vpt", "pfedpg")),
    "prompts in both towers": ("#009E73", ("fedmaple", "plan", "fedmgp")),
    "adapters, low rank": ("#E69F00", ("fedclip", "fedlora", "pfedmma")),
    "nothing trained": ("#CC79A7", ("tip_adapter", "fedgda")),
    "the image tower's own weights": (
        "#D55E00",
        ("fedavg", "fedprox", "singleset_full", "fedrep", "fedbabu", "fedrod", "perfedavg"),
    ),
}
_PERSONAL = "tip_adapter fedgda fedmgp pfedmma singleset_vpt pfedpg singleset_full fedrep fedbabu fedrod perfedavg"
OWN = frozenset(_PERSONAL.split())  # whose classifiers are each client's own
_HEADED = "fedavg, linear head;fedvpt, own head;singleset_vpt, own head;singleset_full, own head"
WITH_HEAD = frozenset(f"{_HEADED};pfedpg;fedrep;fedbabu;fedrod".split(";"))  # whose linear head starts from scratch
ONE_RATE = "†"  # at rows and questions of federations that gave such a head no rate of its own
Record = dict[str, Any]


def one_rate(record: Record, label: str) -> bool:
    """Whether the row's new head was trained at the rate of what stands beneath it."""
    row = label.partition(" (")[0]
    return row in WITH_HEAD and not HEAD_RATE.search(record["chosen"].get(row, ""))


def rates_of(text: str) -> str:
    """The rates in an entry, as a row's name tells them; empty without any."""
    found = [
        title + match[1] for title, pattern in (("", RATE), ("head ", HEAD_RATE)) if (match := pattern.search(text))
    ]
    return ", ".join(found)


def records() -> dict[str, Record]:
    """What was measured, by data set."""
    return {
        path.stem.partition("-")[2]: json.loads(path.read_text())
        for path in sorted((DOCS / "results").glob("image-*.json"))
    }


def rows_of(record: Record, protocol: str) -> dict[str, Record]:
    """The table's rows by label."""
    return {row["label"]: row for row in record[protocol]["table"]} if protocol in record else {}


def values(row: Record, column: str) -> list[float]:
    """Percent, of each seed that has the column."""
    return [100 * scores[column] for scores in row["scores"] if column in scores]


def seeds(record: Record, protocol: str = "") -> int:
    """How many seeds the row with most of them has."""
    tables = [record[each]["table"] for each in (protocol or PERSONAL, LEFT_OUT) if each in record]
    return max(len(row["seeds"]) for row in tables[0])


def main_table(name: str) -> str:
    """Both protocols of a data set side by side, with what a round costs a client."""
    record = records()[name]
    unseen, personal = rows_of(record, LEFT_OUT), rows_of(record, PERSONAL)
    styles = styles_of(record)
    rates = {label: found for label, text in record["chosen"].items() if (found := rates_of(text))}
    head = ["method (rate)", *styles, "mean", "own styles"]
    head += ["personalisation", "worst client"] if personal else []
    lines = []
    for label in dict.fromkeys([*unseen, *personal]):
        first, second = unseen.get(label), personal.get(label)
        cells = [cell(first, column, unseen) for column in styles]
        cells += [cell(first, column, unseen, styles) for column in ("mean", "clients")]
        cells += [cell(second, column, personal) for column in ("mean", "worst client")] if personal else []
        measured = second or first
        few = "" if measured is None or len(measured["seeds"]) == seeds(record) else f" [{len(measured['seeds'])}]"
        title = f"{label} ({rates[label]})" if label in rates else label
        title += f" {ONE_RATE}" if one_rate(record, label) else ""
        lines.append([title + few, *cells, *_costs(second or first)])
    return _table([*head, "trained", "up", "down", "seconds"], lines)


def styles_of(record: Record) -> list[str]:
    """Those that are left out."""
    found: list[str] = record["setting"]["targets"] or record["setting"]["domains"]
    return found


def whole(row: Record, styles: Sequence[str]) -> bool:
    """Whether each style was left out for it."""
    return all(values(row, style) for style in styles)


def cell(row: Record | None, column: str, rows: dict[str, Record], styles: Sequence[str] = ()) -> str:
    """One accuracy, flagged where it lies below zero-shot of the same seeds.

    A mean over ``styles`` is none while one is missing; its spread is over seeds, where each has left out all of them.
    """
    found = [] if row is None or not whole(row, styles) else values(row, column)
    if row is None or not found:
        return "-"
    over_seeds = all(style in scores for scores in row["scores"] for style in styles)
    text = f"{fmean(found):.1f}" + (f" ± {stdev(found):.1f}" if len(found) > 1 and over_seeds else "")
    template = rows.get(row["zero_shot"])
    if template is None or template is row:
        return text
    same = [one for seed, one in zip(template["seeds"], template["scores"], strict=True) if seed in row["seeds"]]
    below = fmean(found) < fmean(values({"scores": same}, column))
    return f"{text} ▼" if below else text


def _costs(row: Record | None) -> list[str]:
    costs = (row or {}).get("costs")
    if not costs:
        return ["-"] * 4
    return [f"{costs['trained']:,.0f}", size(costs["bytes_up"]), size(costs["bytes_down"]), f"{costs['seconds']:.2f}"]


def questions_table(protocol: str) -> str:
    """What was asked of a protocol, on every data set, with Holm's verdict over all questions of the page."""
    asked, found_by_name = all_questions(), records()
    verdicts = holm([each["p_bootstrap"] for _, _, each in asked])
    by_question: dict[str, list[list[str]]] = {}
    for (name, own, each), holds in zip(asked, verdicts, strict=True):
        if own.replace("-", "_") == protocol:
            bounds = f"{100 * each['difference']:+.1f} [{100 * each['low']:+.1f}, {100 * each['high']:+.1f}]"
            mcnemar = "-" if each["p_mcnemar"] is None else _p(each["p_mcnemar"])
            said = ("**shown**" if each["difference"] > 0 else "**the other way round**") if holds else "not shown"
            mark = f" {ONE_RATE}" if any(one_rate(found_by_name[name], each[side]) for side in "ab") else ""
            line = [ON[name] + mark, bounds, f"{each['pictures']:,}", _p(each["p_bootstrap"]), mcnemar, said]
            by_question.setdefault(each["question"], []).append(line)
    lines = []
    for question, found in by_question.items():
        lines += [[question if number == 0 else "", *line] for number, line in enumerate(found)]
    return _table(["asked", "on", "difference, points [95 %]", "pairs", "p (bootstrap)", "p (McNemar)", ""], lines)


def all_questions() -> list[tuple[str, str, Record]]:
    """Data set, protocol and answer of every question of the page."""
    return [
        (name, protocol, each)
        for name, record in sorted(records().items(), key=lambda item: list(ON).index(item[0]))
        for protocol in (LEFT_OUT, PERSONAL)
        if protocol in record
        for each in record[protocol]["questions"]
    ]


def holm(p: Sequence[float], alpha: float = ALPHA) -> list[bool]:
    """Which hypotheses Holm's procedure rejects ("A simple sequentially rejective multiple test procedure", 1979)."""
    order = sorted(range(len(p)), key=lambda k: p[k])
    rejected = [False] * len(p)
    for place, k in enumerate(order):
        if p[k] > alpha / (len(p) - place):
            break
        rejected[k] = True
    return rejected


def _p(value: float) -> str:
    return f"{value:.0e}" if value < 1e-4 else f"{value:.4f}" if value < 0.01 else f"{value:.2f}"


def rates_table(name: str) -> str:
    """Accuracy on held-out images by rate; the chosen one is bold, ! where it is the grid's first or last."""
    lines = []
    for row in records()[name]["rates"]:
        cells = []
        for rate, value in row["by_rate"].items():
            text = f"{float(rate):g}: {100 * value:.1f}"
            cells.append(f"**{text}**{' !' if row['at_edge'] else ''}" if float(rate) == row["chosen"] else text)
        lines.append([row["label"], "; ".join(cells)])
    return _table(["method", "rate: accuracy"], lines)


def points(record: Record, protocol: str) -> list[Point]:
    """A point for each method that was measured with every seed, or with every style left out."""
    found = []
    styles = styles_of(record) if protocol == LEFT_OUT else ()
    for row in record[protocol]["table"]:
        if row["costs"] is None or row["label"].endswith(")"):  # the template, or a variant of a method
            continue
        if not whole(row, styles) or len(row["seeds"]) < seeds(record, protocol):
            continue
        name = row["label"].partition(",")[0]
        [colour] = [colour for colour, methods in FAMILIES.values() if name in methods]
        marker = "^" if name in OWN or "own head" in row["label"] else "o"
        accuracies = values(row, "mean")
        over_seeds = len(accuracies) > 1 and all(style in scores for scores in row["scores"] for style in styles)
        spread = stdev(accuracies) if over_seeds else 0.0
        spent = row["costs"]["bytes_up"] + row["costs"]["bytes_down"]
        found.append(Point(row["label"], spent, fmean(accuracies), spread, colour, marker))
    return found


def figure() -> Figure:
    """Accuracy over bytes, a panel for each data set and protocol."""
    found = records()
    with matplotlib.rc_context({"font.size": 9, "svg.hashsalt": "promptfed", "svg.fonttype": "none"}):
        whole = Figure(figsize=(13, 11.8))
        panels = whole.subplots(2, 2).flat
        whole.subplots_adjust(left=0.05, right=0.99, bottom=0.11, top=0.96, wspace=0.1, hspace=0.22)
        for axes, (name, protocol, title) in zip(panels, PANELS, strict=True):
            own = points(found[name], protocol)
            scatter(axes, own, fmean(values(rows_of(found[name], protocol)["zero-shot"], "mean")))
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_ylabel("accuracy (%)")
            name_points(whole, axes, own)
        handles = [
            Line2D([], [], color=colour, marker="s", linestyle="", label=name) for name, (colour, _) in FAMILIES.items()
        ]
        handles += [
            Line2D([], [], color="#6E6E6E", marker=marker, linestyle="", label=words)
            for marker, words in (("o", "one classifier for all"), ("^", "each client its own"))
        ]
        whole.legend(handles=handles, loc="lower center", ncols=4, frameon=False)
    return whole


TABLES: dict[str, Callable[[str], str]] = {"main": main_table, "questions": questions_table, "rates": rates_table}


def renewed(text: str) -> str:
    """The page with all its tables made anew."""

    def make(match: re.Match[str]) -> str:
        kind, name = match.groups()
        return f"<!-- table: {kind} {name} -->\n{TABLES[kind](name)}\n<!-- end of table -->"

    return MARKED.sub(make, text)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(head) - 1)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in (head, rule, *lines))


def main() -> int:
    """Write the page's tables and the figure, or with ``--check`` say whether the tables are stale."""
    text = PAGE.read_text(encoding="utf-8")
    fresh = renewed(text)
    if "--check" in sys.argv:
        if fresh != text:
            print(f"{PAGE.name} is stale: run python docs/image_results.py")
        return int(fresh != text)
    PAGE.write_text(fresh, encoding="utf-8")
    with matplotlib.rc_context({"svg.hashsalt": "promptfed", "svg.fonttype": "none"}):
        figure().savefig(FIGURE, metadata={"Date": None})
    return 0


if __name__ == "__main__":
    sys.exit(main())
