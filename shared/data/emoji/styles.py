"""The styles of ``emoji:``, their designers, and which of them the backbone pre-trained on emoji saw.

They are shipped with promptfed, since their licences ask for no more than a notice (``embedded/NOTICE.txt``).
"""

from __future__ import annotations

from dataclasses import dataclass

SIZE = 64
"""Side of a picture in pixels."""


@dataclass(frozen=True)
class Style:
    """One style of a designer. Styles whose drawings are derived from one another share a ``family``."""

    name: str
    family: str
    wording: str


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("flat", "microsoft", "a flat colour icon of a {}"),
        Style("three", "microsoft", "a glossy 3d render of a {}"),
        Style("contrast", "microsoft", "a black stencil icon of a {}"),
        Style("noto", "google", "a shaded cartoon of a {}"),
        Style("notov1", "google", "an old rounded cartoon of a {}"),
        Style("notomono", "google", "a thin black line icon of a {}"),
        Style("fxemoji", "mozilla", "a muted flat drawing of a {}"),
    )
}
COMMON = ("flat", "three", "noto", "notov1")
"""Of which the backbone read many pictures in pre-training."""

RARE = ("contrast", "notomono")
"""Of which it read few, and none at all of a third of the things."""

UNREAD_FAMILIES = ("mozilla",)
"""Designers of whom it read nothing."""
