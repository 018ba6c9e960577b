"""Data by URI: ``open_source("symbols:sketch?shots=16")``, ``open_source("folder:/data/pets")``."""

from __future__ import annotations

from shared.data.registry import SCHEMES, open_source
from shared.data.source import DataError, Domain, Source, Split

__all__ = ["SCHEMES", "DataError", "Domain", "Source", "Split", "open_source"]
