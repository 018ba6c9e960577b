"""The key of a spec that was probably meant by an unknown one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from typing import get_args

from pydantic import BaseModel

from promptfed.shared.service.reasons import NAME_PATTERN as NAME_PATTERN


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
