"""Data by URI: ``open_source("symbols:sketch?shots=16")``, ``open_source("folder:/data/pets")``.

Names that need torch are imported when first used: ``promptfed.shared.data.registry`` can be read without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from promptfed.shared.data.errors import DataError
from promptfed.shared.data.schemes import SCHEMES

if TYPE_CHECKING:
    from promptfed.shared.data.registry import open_source
    from promptfed.shared.data.source import ImageDomain, Source, Split

__all__ = ["SCHEMES", "DataError", "ImageDomain", "Source", "Split", "open_source"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from promptfed.shared.data import registry, source

    return getattr(registry if hasattr(registry, name) else source, name)
