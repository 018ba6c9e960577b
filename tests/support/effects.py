"""Another value for each option of a schema, to see whether it changes anything."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel


def leaves(schema: dict[str, Any], definitions: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The dotted path and the schema of each field that is no section."""
    for name, field in schema.get("properties", {}).items():
        inner = _resolved(field, definitions)
        if "properties" in inner:
            yield from leaves(inner, definitions, f"{path}{name}.")
        else:
            yield path + name, inner | {"default": field.get("default", inner.get("default"))}


def leaves_of(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """The same of a model."""
    schema = model.model_json_schema()
    return dict(leaves(schema, schema.get("$defs", {})))


def _resolved(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in field:
        return _resolved(definitions[field["$ref"].rpartition("/")[2]], definitions)
    several = field.get("allOf") or [one for one in field.get("anyOf", ()) if one.get("type") != "null"]
    return field | _resolved(several[0], definitions) if several else field


def another(schema: dict[str, Any]) -> Any:
    """A value that is not the default; KeyError where only its name says what it may be."""
    default = schema.get("default")
    if "enum" in schema:
        return next((value for value in schema["enum"] if value != default), None)
    kind = schema["type"]
    if kind == "boolean":
        return not default
    if kind not in ("integer", "number"):
        raise KeyError(kind)
    low, high = schema.get("minimum", schema.get("exclusiveMinimum", 0)), schema.get("maximum", 1 << 20)
    high = min(high, schema.get("exclusiveMaximum", high))
    if kind == "integer":
        return next(value for value in ((default or low) + 1, (default or low) - 1) if low <= value <= high)
    value = 0.37 * default if default else 0.37 * (low + min(high, 1))
    return value if low < value < high else (low + high) / 2


def nested(path: str, value: Any) -> dict[str, Any]:
    """``{"training": {"epochs": 3}}`` of ``training.epochs``."""
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}
