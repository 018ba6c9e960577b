"""Every protocol by the name that it is asked for."""

from __future__ import annotations

from promptfed.experiments.ceilings import CEILINGS
from promptfed.experiments.combined import CombinedMetric
from promptfed.experiments.protocols import PROTOCOLS, Protocol
from promptfed.experiments.robustness import CORRUPTED

KNOWN: dict[str, Protocol] = PROTOCOLS | {CombinedMetric.name: CombinedMetric()} | CEILINGS | CORRUPTED
