"""Where a result comes from: versions, machine, and a hash of the data that was looked at."""

from __future__ import annotations

import hashlib
import os
import platform
from importlib import metadata
from typing import Any

from promptfed.shared.data import Source
from promptfed.shared.tensors import canonical_json

PACKAGES = ("promptfed", "torch", "open_clip_torch", "timm", "numpy", "pillow", "fastapi")


def provenance() -> dict[str, Any]:
    """Versions of what computes, and the machine: nothing that names its owner or its folders."""
    return {
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
        "machine": {"system": platform.system(), "architecture": platform.machine(), "cores": os.cpu_count()},
    }


def data_hash(sources: dict[str, Source]) -> str:
    """SHA-256 over class names, labels and pixels of both splits of all sources, in name order of the keys."""
    whole = hashlib.sha256()
    for name, source in sorted(sources.items()):
        whole.update(canonical_json([name, list(source.class_names)]).encode())
        for split in (source.train, source.test):
            for row, label in enumerate(split.labels.tolist()):
                whole.update(f"{label}|{split.digest(row)}\n".encode())
    return "sha256:" + whole.hexdigest()
