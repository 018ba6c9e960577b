"""Suggestions for unknown keys of a spec, and what became of removed ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel


def meant(model: type[BaseModel], path: Sequence[str], whole: type[BaseModel] | None = None) -> str | None:
    """The key that was probably meant by the unknown one at ``path`` of ``model``; None where none is near.

    A key of the same section that is written alike, or whose initials these are (``lr``), is told by its name. Else it
    is one of this very name, or with these initials, elsewhere in ``whole`` (default: ``model``), by its dotted path:
    ``training.epochs``.
    """
    *parents, key = path
    section = _section(model, parents)
    if section is not None:
        near = get_close_matches(key, section.model_fields, n=1)
        near += [name for name in section.model_fields if key == _initials(name)]
        if near:
            return near[0]
    places = {place: place.rpartition(".")[2] for place in _paths(whole or model)}
    return next((place for place, name in places.items() if key in (name, _initials(name))), None)


def _initials(name: str) -> str | None:
    """``lr`` for ``learning_rate``; None for a single word."""
    words = name.split("_")
    return "".join(word[:1] for word in words) if len(words) > 1 else None


def _section(model: type[BaseModel] | None, path: Sequence[str]) -> type[BaseModel] | None:
    for part in path:
        model = _model_of(model, part) if model is not None and part in model.model_fields else None
    return model


def _model_of(model: type[BaseModel], name: str) -> type[BaseModel] | None:
    kind = model.model_fields[name].annotation
    return next(
        (part for part in (kind, *get_args(kind)) if isinstance(part, type) and issubclass(part, BaseModel)), None
    )


def _paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name in model.model_fields:
        yield prefix + name
        section = _model_of(model, name)
        if section is not None:
            yield from _paths(section, f"{prefix}{name}.")


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
