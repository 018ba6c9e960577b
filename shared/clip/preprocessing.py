"""Images before a backbone's preprocessing."""

from __future__ import annotations

from typing import Any

MOST_RATIO = 100  # of an image's longer side to its shorter one


def middle(image: Any) -> Any:
    """An image of PIL, without the ends of one that is longer than `MOST_RATIO`.

    Most preprocessings scale the shorter side and keep the middle: of a line of a million pixels they would make a
    billion, and then use the middle.
    """
    most = MOST_RATIO * min(image.size)
    if max(image.size) <= most:
        return image
    left, top = (max(0, size - most) // 2 for size in image.size)
    return image.crop((left, top, left + min(image.width, most), top + min(image.height, most)))
