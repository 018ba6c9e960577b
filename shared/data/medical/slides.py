"""One whole slide image: its tiles over tissue. Runs in a child process (`worker`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tiffslide
from PIL import Image

from promptfed.shared.data.medical.pictures import MOST_BYTES, MOST_FRAMES
from promptfed.shared.data.medical.unreadable import Unreadable
from promptfed.shared.files import open_file

ENDINGS = (".svs", ".tif", ".tiff", ".ndpi", ".scn", ".bif")
OVERVIEW = 2048  # pixels of the longer side of the overview in which tissue is looked for, at most about twice
ASPECT = 0.02  # by how much the proportions of a slide and of its mask may differ
COLORED, DARK = 20, 60  # differences of channels of tissue, and levels below which it is a border or a pen


def facts(path: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The left and upper edges of tiles over tissue, in pixels of level 0; None if the file has another ending."""
    if not path.name.lower().endswith(ENDINGS):
        return None
    with _opened(path) as slide:
        level, tile = settings["level"], settings["tile"]
        if level >= slide.level_count:
            raise Unreadable(f"it has no level {level}")
        step = round(tile * slide.level_downsamples[level])
        overview, scale = _overview(slide)
        tissue = is_tissue(overview)
        width, height = slide.dimensions
        if (width // step) * (height // step) > MOST_FRAMES:
            raise Unreadable(f"it has more than {MOST_FRAMES:,} tiles; choose larger tiles or a higher level")
        edges = [(x, y) for y in range(0, height - step + 1, step) for x in range(0, width - step + 1, step)]
        kept = [list(edge) for edge in edges if _share(tissue, edge, step, scale) >= settings["tissue"]]
    if "masks" in settings:
        mask = _mask(path, width, height, settings)
        found = ([*edge, _class(mask, edge, step, width / mask.shape[1], settings["mask_share"])] for edge in kept)
        kept = [place for place in found if place[2]]
    return {"frames": kept}


def _mask(path: Path, width: int, height: int, settings: Mapping[str, Any]) -> np.ndarray:
    """The slide's mask, ``(H, W)``: 0 is no class."""
    file = Path(settings["masks"]) / f"{path.stem}.png"
    if not file.is_file():
        raise Unreadable("it has no mask of its name, as a PNG")
    with open_file(file) as stream, Image.open(stream, formats=("PNG",)) as picture:
        if picture.mode not in ("L", "P", "1"):
            raise Unreadable("its mask is no PNG with one value of 8 bits for each pixel")
        if picture.width * picture.height > MOST_BYTES:
            raise Unreadable("its mask is too large; make it smaller")
        mask = np.asarray(picture).astype(np.uint8)
    if abs(mask.shape[1] / mask.shape[0] * height / width - 1) > ASPECT:
        raise Unreadable("its mask has another shape than the slide")
    if mask.max(initial=0) > settings["mask_classes"]:
        raise Unreadable(f"its mask has the value {mask.max()}, for which mask_classes names no class")
    return mask


def _class(mask: np.ndarray, edge: list[int], step: int, scale: float, least: float) -> int:
    """The value that most of a tile has, if its share is ``least`` or more; else 0. ``scale``: pixels of one of it."""
    left, top = round(edge[0] / scale), round(edge[1] / scale)
    side = max(1, round(step / scale))
    part = mask[top : top + side, left : left + side]
    shares = np.bincount(part.ravel(), minlength=2) / max(1, part.size)
    value = int(shares[1:].argmax()) + 1
    return value if shares[value] >= least else 0


def _opened(path: Path) -> Any:
    with open_file(path):  # no pipe and no device
        slide = tiffslide.TiffSlide(path)
    width, height = slide.dimensions
    if min(width, height) < 1:
        raise Unreadable("it has no pixels")
    return slide


def _overview(slide: Any) -> tuple[np.ndarray, float]:
    """The smallest level, RGB, and how many pixels of level 0 one of it stands for."""
    level = next((k for k, size in enumerate(slide.level_dimensions) if max(size) <= OVERVIEW), slide.level_count - 1)
    width, height = slide.level_dimensions[level]
    if 3 * width * height > MOST_BYTES:
        raise Unreadable("it has no small level in which tissue could be looked for")
    whole = np.asarray(slide.read_region((0, 0), level, (width, height)).convert("RGB"))
    every = max(1, -(-max(width, height) // OVERVIEW))
    return whole[::every, ::every], slide.level_downsamples[level] * every


def is_tissue(picture: np.ndarray) -> np.ndarray:
    """Where ``picture (H, W, 3)`` is colored, and neither a black border nor white glass: ``(H, W)`` bool."""
    least, most = picture.min(-1).astype(int), picture.max(-1).astype(int)
    found: np.ndarray = (most - least > COLORED) & (most > DARK)
    return found


def _share(tissue: np.ndarray, edge: tuple[int, int], step: int, scale: float) -> float:
    """The share of tissue in a tile."""
    left, top = int(edge[0] / scale), int(edge[1] / scale)
    side = max(1, round(step / scale))
    part = tissue[top : top + side, left : left + side]
    return float(part.mean()) if part.size else 0.0


def pixels(path: Path, place: list[int], settings: Mapping[str, Any]) -> np.ndarray:
    """The tile whose left and upper edge is ``place``, as uint8 ``(tile, tile, 3)``."""
    with _opened(path) as slide:
        tile = slide.read_region((place[0], place[1]), settings["level"], (settings["tile"], settings["tile"]))
        return np.asarray(tile.convert("RGB"))
