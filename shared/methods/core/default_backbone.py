"""The backbone of a spec that names none. Whoever knows the data decides by them, everybody by the method."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from promptfed.shared.clip.embedded import EMBEDDED, photo, tiny
from promptfed.shared.clip.sizes import shape_by_name
from promptfed.shared.data.schemes import all_drawn
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.spec.spec import BackboneShape


def refusal_of(method: Method, shape: BackboneShape | None) -> str | None:
    """Why a backbone of ``shape`` does not suit ``method``; None if it does."""
    assert shape is not None
    try:
        method.check_backbone(shape)
    except Exception as error:  # our methods raise MethodError; a package's method may raise anything
        return str(error)
    return None


def suitable(method: Method) -> list[str]:
    """The embedded backbones that suit ``method``."""
    return [name for name in EMBEDDED if refusal_of(method, shape_by_name(name)) is None]


def default_backbone(method: Method | None, data: Collection[str] = ()) -> tuple[str, str]:
    """The name of an embedded backbone, and why it is this one.

    ``method``: None for any; ``data``: the URIs of all images, if they are known.
    """
    if data and all_drawn(data):
        return tiny.MODEL, "all images are embedded drawings"
    refusal = None if method is None else refusal_of(method, shape_by_name(photo.MODEL))
    if method is not None and refusal is not None and tiny.MODEL in suitable(method):
        return tiny.MODEL, f"{photo.MODEL} does not suit the method: {refusal}"
    reason = "not all images are embedded drawings" if data else "it knows photographs"
    return photo.MODEL, reason


def data_in(clients: Any) -> list[str]:
    """The data URIs below ``clients`` of a run file, as far as it is well formed."""
    entries = [entry for entry in (clients if isinstance(clients, list) else [clients]) if isinstance(entry, Mapping)]
    tests = [entry.get("tests") for entry in entries]
    found = [entry.get("data") for entry in entries]
    found += [uri for named_tests in tests if isinstance(named_tests, Mapping) for uri in named_tests.values()]
    return [uri for uri in found if isinstance(uri, str)]
