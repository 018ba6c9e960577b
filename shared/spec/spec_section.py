"""What the sections of the federation spec, and other models, have in common."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.spec.versions import OLDEST, RELEASES, is_sent


class Section(BaseModel):
    """Base of all spec sections: unknown keys and non-finite numbers are refused, values are not coerced."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)


def left_out(at: object = None, *, since: int = OLDEST, **given: Any) -> Any:
    """A field that JSON leaves out where its value is ``at``, so that older readers and signatures stay valid.

    ``since``: the version of the protocol that brought it (`versions.RELEASES`). Older peers are not sent it; a spec
    that needs it is refused to clients that do not know it.
    """
    if since > OLDEST:
        given["json_schema_extra"] = {"since": RELEASES[since]}
    return Field(exclude_if=lambda value: value == at or not is_sent(since), **given)


def newest_needed(model: BaseModel) -> tuple[int, str]:
    """The newest version of the protocol of which ``model`` has a field that is not left out, and the field's path."""
    needed, path = OLDEST, ""
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        if field.exclude_if is not None and field.exclude_if(value):
            continue
        extra = field.json_schema_extra
        release = extra.get("since") if isinstance(extra, dict) else None
        versions = [version for version, known in RELEASES.items() if known == release]
        below = newest_needed(value) if isinstance(value, BaseModel) else (OLDEST, "")
        for version, place in (*((version, name) for version in versions), (below[0], f"{name}.{below[1]}")):
            if version > needed:
                needed, path = version, place
    return needed, path


def ceil_fraction(fraction: float, count: int) -> int:
    """⌈fraction·count⌉ with the fraction as it was written: 0.7 of 10 is 7, not the 8 of binary arithmetic."""
    return int((Decimal(repr(fraction)) * count).to_integral_value(ROUND_CEILING))
