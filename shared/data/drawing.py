"""Drawing helpers in batched torch. Every image depends only on its 64-bit key, never on its batch."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

SIZE = 48
"""Height and width of a rendered image, in pixels."""

_ATLAS = 96
_GLYPH = 66


def hash_keys(*parts: str | int | np.ndarray) -> np.ndarray:
    """Make a 64-bit key for each image, shape (B,) uint64, from constants and integer arrays of shape (B,)."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        if isinstance(part, np.ndarray):
            word = part.astype(np.uint64)
        else:
            digest = hashlib.sha256(str(part).encode()).digest()
            word = np.frombuffer(digest[:8], dtype="<u8").astype(np.uint64)
        key = _mix(key ^ word)
    return key


def _mix(x: np.ndarray) -> np.ndarray:
    """Add SplitMix64's increment and apply its finaliser: a bijection of 64-bit words that scatters neighbours."""
    with np.errstate(over="ignore"):
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ (x >> np.uint64(31)))


class Draws:
    """Random numbers for a batch of keys. Each call gives new ones, which do not depend on other keys in the batch."""

    def __init__(self, keys: np.ndarray) -> None:
        self.keys = keys
        self._calls = 0

    def __len__(self) -> int:
        return len(self.keys)

    def _words(self, count: int) -> np.ndarray:
        self._calls += 1
        start = _mix(self.keys + np.uint64(self._calls))
        return _mix(start[:, None] + np.arange(count, dtype=np.uint64)[None, :])

    def uniform(self, low: float = 0.0, high: float = 1.0, count: int = 1) -> Tensor:
        """(B, count, 1, 1) uniform in [low, high), ready to broadcast over channels and pixels."""
        unit = (self._words(count) >> np.uint64(40)).astype(np.float32) / np.float32(1 << 24)
        return torch.from_numpy(low + (high - low) * unit)[:, :, None, None]

    def chance(self, p: float) -> Tensor:
        """(B, 1, 1, 1) ones with probability p, else zeros."""
        return (self.uniform() < p).float()

    def noise(self, size: int = SIZE, channels: int = 1) -> Tensor:
        """(B, channels, size, size) uniform in [-1, 1)."""
        per_word = 4
        n = channels * size * size
        words = self._words((n + per_word - 1) // per_word)
        parts = words.view(np.uint16).reshape(len(words), -1)[:, :n]
        values = parts.astype(np.float32) / np.float32(1 << 15) - np.float32(1)
        return torch.from_numpy(values).view(len(words), channels, size, size)

    def cells(self, cells: int, channels: int = 1) -> Tensor:
        """(B, channels, SIZE, SIZE) smooth noise in [-1, 1): a grid of cells x cells values, interpolated."""
        coarse = self.noise(cells, channels)
        return F.interpolate(coarse, size=(SIZE, SIZE), mode="bilinear", align_corners=False)


def grid() -> tuple[Tensor, Tensor]:
    """x and y of every pixel in [-1, 1], each of shape (1, 1, SIZE, SIZE)."""
    line = (torch.arange(SIZE, dtype=torch.float32) * 2 + 1) / SIZE - 1
    return line.view(1, 1, 1, SIZE), line.view(1, 1, SIZE, 1)


def blur(x: Tensor, radius: int) -> Tensor:
    """Box blur with a (2 radius + 1) window; borders repeat."""
    return F.avg_pool2d(F.pad(x, (radius,) * 4, mode="replicate"), 2 * radius + 1, stride=1)


def grow(x: Tensor, radius: int = 1) -> Tensor:
    """Morphological dilation with a (2 radius + 1) square."""
    return F.max_pool2d(x, 2 * radius + 1, stride=1, padding=radius)


def shrink(x: Tensor, radius: int = 1) -> Tensor:
    """Morphological erosion with a (2 radius + 1) square."""
    return 1 - grow(1 - x, radius)


def hsv(hue: Tensor, saturation: Tensor, value: Tensor) -> Tensor:
    """(B, 3, ...) RGB in [0, 1] of hue, saturation and value in [0, 1], each (B, 1, ...)."""
    offsets = torch.tensor([5.0, 3.0, 1.0]).view(1, 3, 1, 1)
    k = (offsets + hue * 6) % 6
    return value - value * saturation * torch.clamp(torch.minimum(k, 4 - k), 0, 1)


def over(background: Tensor, colour: Tensor, alpha: Tensor) -> Tensor:
    """``colour`` painted on ``background`` with opacity ``alpha``."""
    return background + (colour - background) * alpha


@lru_cache(maxsize=512)
def glyph(character: str, font: str = "DejaVuSans.ttf") -> Tensor:
    """(ATLAS, ATLAS) coverage in [0, 1] of one character, centred, scaled to a common extent."""
    path = _font_path(font)
    left, top, right, bottom = ImageFont.truetype(path, 100).getbbox(character)
    size = max(8, round(100 * _GLYPH / max(right - left, bottom - top, 1)))
    face = ImageFont.truetype(path, size)
    left, top, right, bottom = face.getbbox(character)
    image = Image.new("L", (_ATLAS, _ATLAS), 0)
    position = ((_ATLAS - (right - left)) / 2 - left, (_ATLAS - (bottom - top)) / 2 - top)
    ImageDraw.Draw(image).text(position, character, font=face, fill=255)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)


def _font_path(name: str) -> str:
    import matplotlib

    return f"{matplotlib.get_data_path()}/fonts/ttf/{name}"


def place(glyphs: Tensor, draws: Draws, wobble: float, amount: float = 1.0) -> Tensor:
    """The glyphs' masks, each turned, scaled, sheared, shifted and bent: (B, ATLAS, ATLAS) -> (B, 1, SIZE, SIZE).

    ``wobble`` is the largest bend as a fraction of half the image's width; ``amount`` in [0, 1] scales all changes.
    """
    x, y = grid()
    angle = amount * draws.uniform(-0.45, 0.45)
    scale = 0.85 + amount * draws.uniform(-0.1, 0.45)
    stretch = 1 + amount * draws.uniform(-0.18, 0.22)
    shear = amount * draws.uniform(-0.25, 0.25)
    shift = amount * draws.uniform(-1, 1, 2) * 0.28 * (scale - 0.55).clamp(0.2, 0.75)
    dx, dy = _bend(draws, x, y)
    u = x + shift[:, :1] + amount * wobble * dx
    v = y + shift[:, 1:] + amount * wobble * dy
    cos, sin = torch.cos(angle), torch.sin(angle)
    su = (cos * u + sin * v) * scale * stretch
    sv = (cos * v - sin * u) * scale / stretch + shear * su
    where = torch.stack((su[:, 0], sv[:, 0]), dim=-1)
    return F.grid_sample(glyphs[:, None], where, mode="bilinear", padding_mode="zeros", align_corners=False)


def _bend(draws: Draws, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    fields = []
    for _ in range(2):
        f = draws.uniform(-5, 5, 6)
        p = draws.uniform(0, 2 * math.pi, 3)
        wave = torch.sin(f[:, :3] * x + f[:, 3:] * y + p)
        fields.append(wave.mean(dim=1, keepdim=True) * 1.7)
    return fields[0], fields[1]


Style = Callable[[Tensor, Draws], Tensor]
"""A style: masks (B, 1, SIZE, SIZE) in [0, 1] and random draws -> RGB (B, 3, SIZE, SIZE) in [0, 1]."""
