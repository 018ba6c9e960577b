"""Where a result comes from: versions, machine, commit, and a hash of the data."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from promptfed.shared.canonical import canonical_json
from promptfed.shared.data import Source

PACKAGES = ("promptfed", "torch", "open_clip_torch", "timm", "numpy", "pillow", "fastapi")


class ResultProvenance(BaseModel):
    """Versions of packages, and the machine without its owner's name or folders."""

    model_config = ConfigDict(extra="allow")

    python: str
    packages: dict[str, str]
    machine: dict[str, str | int | None]
    commit: str | None = None


def provenance() -> ResultProvenance:
    """The provenance of results that this process computes."""
    return ResultProvenance(
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        machine={"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()},
        commit=commit(),
    )


@cache
def commit() -> str | None:
    """The commit of the checkout of this code, with ``-dirty`` if it was changed; None outside a checkout."""
    top = Path(__file__).resolve().parents[3]
    if Path(_git(top, "rev-parse", "--show-toplevel")).resolve() != top:  # this is installed in another repository
        return None
    return _git(top, "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*") or None


def _git(folder: Path, *arguments: str) -> str:
    """The output of a git command; empty if it fails."""
    command = ["git", "-C", str(folder), *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return ""


def data_hash(sources: dict[str, Source]) -> str:
    """SHA-256 over class names, labels and pixels of both splits of all sources, in name order of the keys."""
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(canonical_json([name, list(source.class_names)]).encode())
        for split in (source.train, source.test):
            for row, label in enumerate(split.labels.tolist()):
                digest.update(f"{label}|{split.digest(row)}\n".encode())
    return "sha256:" + digest.hexdigest()
