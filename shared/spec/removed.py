"""Names that earlier releases knew, so that a refusal can say in which one they were removed."""

from __future__ import annotations

RELEASE = "0.4.0"

_METHODS = "dpfpl fedclap fedgda fedmgp fedmvp fedpha fedplot fedprograd fedprolip fedtipf pfedmma tip_adapter"
_KEYS = """
aggregation.flame_noise aggregation.flame_of calibration class_descriptions compression.down held_out keep_rounds kind
loss method.pair participation.candidates participation.choice participation.cool_down participation.over_select
participation.preferred_seconds participation.require privacy.adaptive_clip privacy.colluding privacy.noise schedule
secure_aggregation.attempts secure_aggregation.colluding_share secure_aggregation.dropping_share
secure_aggregation.neighbours training.budget training.compile trial tuning
"""
METHODS = frozenset(_METHODS.split())
KEYS = frozenset(_KEYS.split())
"""Dotted paths of sections and fields of the spec; of a section that went as a whole its own path."""


def removed_key(path: str) -> str:
    """What a refusal of the unknown key at the dotted ``path`` adds; empty for one that there never was."""
    parts = path.split(".")
    gone = any(".".join(parts[:length]) in KEYS for length in range(1, len(parts) + 1))
    return f"; it was removed in {RELEASE}" if gone else ""


def removed_method(name: str) -> str:
    """What a refusal of an unknown method says of it; empty for one that there never was."""
    return f"it was removed in {RELEASE}; " if name in METHODS else ""
