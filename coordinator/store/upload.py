"""A body that was received and is not kept yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Upload:
    """A body on disk: where, how long, its digest; ``too_large`` where it was cut off at the limit."""

    path: Path
    size: int
    sha256: str
    too_large: bool = False
