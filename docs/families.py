"""The page of backbones' families: benchmarks/families.json as tables. `generate.py` writes it."""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable
from typing import Any

Cell = Callable[[Any], str]
BACKBONES = (
    """# Families of backbones

`promptfed doctor --backbone NAME` says for any model what your machine can do with it. This page has one model of each
family. [How to give weights](../explanation/backbone.md#weights-from-a-file).""",
    """## Speed and memory

With random weights, in seconds of one core with AVX-512 (`python -m benchmarks.families`): the features of four images,
a step that trains 16 context vectors before ten names, and one that trains four image prompts on four images. Memory is
the peak of the process so far. An empty cell: the tower takes no such prompts.""",
    """## Methods

All methods run with each family, but for these; a letter stands for the reason. A test runs each method with a narrow
model of each family.""",
)


def page(families: list[dict[str, Any]], cell: Cell, table: Callable[[list[str], list[list[str]]], str]) -> str:
    """The page as Markdown; ``cell`` writes text for a cell, ``table`` a table from its columns and rows."""
    columns = ["family", "model", "template", "pixels", "values", "resizing", "million weights"]
    uses = table(columns, [_use(one, cell) for one in families])
    parts = {"features": "features", "text_step": "text step", "image_step": "image step"}
    columns = ["family", *(f"{title}, s" for title in parts.values()), *(f"{title}, MiB" for title in parts.values())]
    costs = table(columns, [_costs(one, parts) for one in families])
    groups, why = _refused(families)
    about, measured, between = BACKBONES
    verdicts = [[one["name"], *(letters.get(one["name"], "yes") for letters in groups.values())] for one in families]
    methods = table(["family", *(", ".join(f"`{name}`" for name in names) for names in groups)], verdicts)
    reasons = "\n".join(f"- {letter}: {cell(reason)}" for reason, letter in why.items())
    return "\n\n".join([about, uses, measured, costs, between, methods, reasons]) + "\n"


def _costs(one: dict[str, Any], parts: Iterable[str]) -> list[str]:
    seconds, memory = one["facts"]["seconds"], one["facts"]["memory_mib"]
    times = [f"{seconds[part]:.3g}" if part in seconds else "" for part in parts]
    return [one["name"], *times, *(f"{memory[part]:,}" if part in memory else "" for part in parts)]


def _use(one: dict[str, Any], cell: Cell) -> list[str]:
    facts, prepared = one["facts"], one["facts"]["preparation"]
    size = prepared["size"] if isinstance(prepared["size"], int) else prepared["size"][0]
    values = "-1 to 1" if prepared["mean"][0] == 0.5 else "CLIP's mean and deviation"
    values = "0 to 1" if prepared["mean"][0] == 0 else values
    resizing = "squashed" if prepared.get("resize_mode") == "squash" else "cut to a square"
    shown = [str(size), values, f"{resizing}, {prepared.get('interpolation', 'bicubic')}"]
    return [one["name"], f"`{cell(one['model'])}`", cell(one["template"]), *shown, f"{facts['parameters'] / 1e6:.0f}"]


def _refused(families: list[dict[str, Any]]) -> tuple[dict[tuple[str, ...], dict[str, str]], dict[str, str]]:
    """By groups of methods with the same verdicts a letter for each family that is refused; and letters of reasons."""
    letters: dict[str, str] = {}
    verdicts: dict[str, dict[str, str]] = {}
    for one in families:
        for method, reason in one["facts"]["refused"].items():
            told = reason.removeprefix(method).lstrip(": ").rstrip(".")
            letter = letters.setdefault(told, string.ascii_lowercase[len(letters)])
            verdicts.setdefault(method, {})[one["name"]] = letter
    groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for method, found in sorted(verdicts.items()):
        groups.setdefault(tuple(found.items()), []).append(method)
    return {tuple(names): dict(found) for found, names in groups.items()}, letters
