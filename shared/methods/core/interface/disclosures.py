"""Disclosures: what a method reveals about a client's data, shown to the data owner before joining."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Disclosed:
    """Information about a client's data that participation reveals: ``what`` (a clause), and to whom."""

    to: Literal["operator", "sites"]
    what: str


AGGREGATE = Disclosed("sites", "the aggregate of all updates, in which this client's has its share")
