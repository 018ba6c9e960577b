"""Values of a scan as grey levels."""

from __future__ import annotations

import numpy as np

from promptfed.shared.data.medical.unreadable import Unreadable

MOST_BYTES = 1 << 29  # of one image, uncompressed
MOST_FRAMES = 100_000


def in_eight_bits(shown: np.ndarray) -> np.ndarray:
    """0 to 1 as uint8; what is no number is black."""
    levels: np.ndarray = np.floor(np.clip(np.nan_to_num(shown), 0, 1) * 255 + 0.5).astype(np.uint8)
    return levels


def windowed(values: np.ndarray, center: float, width: float, function: str = "LINEAR") -> np.ndarray:
    """Values through a window onto 0 to 1 (DICOM PS3.3, C.11.2.1.2 and C.11.2.1.3)."""
    if width < (1 if function == "LINEAR" else 1e-12):
        raise Unreadable("its window has no width; give another with window=center,width")
    if function == "SIGMOID":
        shown: np.ndarray = 1 / (1 + np.exp(np.clip(-4 * (values - center) / width, -700, 700)))
        return shown
    if function == "LINEAR":
        center, width = center - 0.5, width - 1
    if width == 0:
        return np.where(values > center, 1.0, 0.0)
    clipped: np.ndarray = np.clip((values - center) / width + 0.5, 0, 1)
    return clipped


def stretched(values: np.ndarray, counted: np.ndarray) -> np.ndarray:
    """Values from the least to the largest finite one of those that are ``counted``, onto 0 to 1."""
    inside = values[counted & np.isfinite(values)]
    if not inside.size:
        return np.zeros(values.shape)
    least, most = float(inside.min()), float(inside.max())
    shown: np.ndarray = np.clip(
        (np.nan_to_num(values, nan=least).astype(float) - least) / ((most - least) or 1.0), 0, 1
    )
    return shown
