"""The folder of a bench, which belongs to one protocol, setting and spec."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from promptfed.experiments.bench.runner import Bench, JsonObject
from promptfed.sdk.client import CommandError, Exit
from promptfed.shared.files import write_whole
from promptfed.shared.service.reasons import why

BENCH_FILE = "bench.json"
GROWS = ("targets",)  # fields of a setting that may grow later, as methods and seeds may


def identity(bench: Bench) -> JsonObject:
    """The settings that must be the same for all runs of a folder, so that one table can compare them."""
    setting = {name: value for name, value in asdict(bench.setting).items() if name not in GROWS}
    parts = {"protocol": bench.protocol.name, "setting": setting, "spec": dict(bench.base), "m": bench.m}
    plain: JsonObject = json.loads(json.dumps(parts))
    return plain


def claim(out: Path, bench: Bench) -> None:
    """Make ``out`` the bench's folder.

    Raises:
        CommandError: it belongs to another bench, with the differences, or cannot be written.
    """
    own, there = identity(bench), _identity_in(out)
    if there is not None:
        differs = [name for name in own if there.get(name) != own[name]]
        if differs:
            what = "; ".join(f"{name} was {_short(there.get(name))}, is {_short(own[name])}" for name in differs)
            text = f"{out} holds another bench ({what}): give --out another folder, or run that one again"
            raise CommandError(text, Exit.BAD_INPUT)
    text = json.dumps(own, indent=1, ensure_ascii=False)
    try:  # whole, since another bench may begin in this folder at the same time, or this one be killed
        (out / "runs").mkdir(parents=True, exist_ok=True)
        write_whole(out / BENCH_FILE, (text + "\n").encode(), synced=False)
    except OSError as error:
        raise CommandError(f"cannot write {out / BENCH_FILE}: {why(error)}", Exit.BAD_INPUT) from None


def _identity_in(out: Path) -> JsonObject | None:
    """The identity of the folder's bench; None for a new folder."""
    path = out / BENCH_FILE
    if not path.exists():
        return None
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise CommandError(f"{path} cannot be read: give --out another folder", Exit.BAD_INPUT) from None


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else text[:157] + "..."
