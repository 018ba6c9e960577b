"""Where a result comes from: versions, machine, and a hash of the data that was looked at."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata

from pydantic import BaseModel, ConfigDict

from promptfed.shared.data import Source
from promptfed.shared.tensors import canonical_json

PACKAGES = ("promptfed", "torch", "open_clip_torch", "timm", "numpy", "pillow", "fastapi")


class Provenance(BaseModel):
    """Versions of what computes, and the machine: nothing that names its owner or its folders."""

    model_config = ConfigDict(extra="allow")

    python: str
    packages: dict[str, str]
    machine: dict[str, str | int | None]


def provenance() -> Provenance:
    """Of what runs here."""
    return Provenance(
        python=platform.python_version(),
        packages={name: metadata.version(name) for name in PACKAGES},
        machine={"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()},
    )


def data_hash(sources: dict[str, Source]) -> str:
    """SHA-256 over class names, labels and pixels of both splits of all sources, in name order of the keys."""
    digest = hashlib.sha256()
    for name, source in sorted(sources.items()):
        digest.update(canonical_json([name, list(source.class_names)]).encode())
        for split in (source.train, source.test):
            for row, label in enumerate(split.labels.tolist()):
                digest.update(f"{label}|{split.digest(row)}\n".encode())
    return "sha256:" + digest.hexdigest()
