"""``symbols:`` pictographs rendered on the fly: ``symbols:sketch``, ``symbols:sketch?topic=weather&per_class=32``."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from promptfed.shared.data.classes import SYMBOLS, TOPIC_TEMPLATES, TOPICS, Symbol
from promptfed.shared.data.options import SymbolsOptions
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split
from promptfed.shared.files import write_whole
from promptfed.shared.machine import own_folder, user_cache
from promptfed.shared.spec.spec import TEMPLATE

SIZE = 48
"""Height and width of a rendered image, in pixels."""

FONT = Path(__file__).with_name("embedded") / "DejaVuSans.ttf"
_ATLAS = 96
_GLYPH = 66

_CHUNK = 256
_DIGEST, _MOST_KEPT = 32, 512  # bytes before the pixels of a file, and files: a batch takes 0.44 MB
_AT_ONCE = 64  # images drawn in one batch; more take more memory and no less time


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
def glyph(character: str, font: Path = FONT) -> Tensor:
    """(ATLAS, ATLAS) coverage in [0, 1] of one character, centred, scaled to a common extent."""
    left, top, right, bottom = ImageFont.truetype(font, 100).getbbox(character)
    size = round(100 * _GLYPH / max(right - left, bottom - top))
    face = ImageFont.truetype(font, size)
    left, top, right, bottom = face.getbbox(character)
    image = Image.new("L", (_ATLAS, _ATLAS), 0)
    position = ((_ATLAS - (right - left)) / 2 - left, (_ATLAS - (bottom - top)) / 2 - top)
    ImageDraw.Draw(image).text(position, character, font=face, fill=255)
    return torch.from_numpy(np.asarray(image, dtype=np.float32) / 255)


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


def _edge(mask: Tensor, radius: int = 1) -> Tensor:
    return (grow(mask, radius) - shrink(mask, radius)).clamp(0, 1)


def _waves(draws: Draws, frequency: float) -> Tensor:
    """Stripes in a random direction, in [-1, 1]."""
    x, y = grid()
    angle = draws.uniform(0, math.pi)
    return torch.sin(frequency * (torch.cos(angle) * x + torch.sin(angle) * y) + draws.uniform(0, 6.28))


def _photo(mask: Tensor, draws: Draws) -> Tensor:
    """A shaded thing on an uneven ground, with a soft shadow, noise, some blur and sometimes low contrast."""
    hue = draws.uniform()
    ground = hsv(hue, draws.uniform(0.1, 0.6), draws.uniform(0.25, 0.85)) + 0.14 * draws.cells(4, 3)
    ground = ground + 0.08 * draws.cells(12)
    thing = hsv((hue + draws.uniform(0.2, 0.8)) % 1, draws.uniform(0.2, 0.9), draws.uniform(0.1, 0.95))
    lift = torch.where(ground.mean((1, 2, 3), keepdim=True) > 0.5, -0.45, 0.45)
    thing = thing * 0.5 + (ground.mean((2, 3), keepdim=True) + lift) * 0.5 + 0.18 * draws.cells(2)
    shadow = blur(torch.roll(mask, (3, 2), (2, 3)), 2)
    ground = ground * (1 - draws.uniform(0, 0.6) * shadow)
    image = over(ground, thing, mask * draws.uniform(0.7, 1.0))
    image = over(image, blur(image, 1), draws.chance(0.4))
    return image + draws.uniform(0.02, 0.09) * draws.noise(channels=3)


def _clipart(mask: Tensor, draws: Draws) -> Tensor:
    """One saturated fill with a thin dark outline on nearly white ground."""
    fill = hsv(draws.uniform(), draws.uniform(0.6, 1), draws.uniform(0.5, 1))
    ground = draws.uniform(0.85, 1).expand(-1, 3, SIZE, SIZE)
    outlined = over(ground, draws.uniform(0, 0.3), grow(mask))
    return over(outlined, fill, mask)


def _cartoon(mask: Tensor, draws: Draws) -> Tensor:
    """Bright fill, thick black outline, halftone dots on a coloured ground."""
    x, y = grid()
    ground = hsv(draws.uniform(), draws.uniform(0.4, 0.9), draws.uniform(0.7, 1)).expand(-1, 3, SIZE, SIZE)
    dots = ((torch.sin(30 * x) * torch.sin(30 * y)) > 0.25).float()
    ground = ground * (1 - draws.uniform(0.1, 0.4) * dots)
    fill = hsv(draws.uniform(), draws.uniform(0.3, 1), draws.uniform(0.75, 1))
    return over(over(ground, draws.uniform(0, 0.15), grow(mask, 2)), fill, mask)


def _poster(mask: Tensor, draws: Draws) -> Tensor:
    """Two flat colours that swap across a slanted border."""
    x, y = grid()
    angle = draws.uniform(0, 2 * math.pi)
    side = (torch.cos(angle) * x + torch.sin(angle) * y > draws.uniform(-0.3, 0.3)).float()
    hue = draws.uniform()
    dark = hsv(hue, draws.uniform(0.5, 1), draws.uniform(0.1, 0.5))
    light = hsv((hue + draws.uniform(0.3, 0.7)) % 1, draws.uniform(0.1, 0.6), draws.uniform(0.8, 1))
    return over(dark, light, (mask - side).abs()) + 0.05 * draws.noise(channels=3)


def _stamp(mask: Tensor, draws: Draws) -> Tensor:
    """One ink on paper, worn off in patches, with a border."""
    x, y = grid()
    ink = hsv(draws.uniform(), draws.uniform(0.5, 1), draws.uniform(0.2, 0.7))
    paper = hsv(draws.uniform(0.08, 0.16), draws.uniform(0.05, 0.25), draws.uniform(0.8, 1))
    radius = torch.sqrt(x * x + y * y)
    ring = ((radius - draws.uniform(0.86, 0.96)).abs() < 0.05).float() * draws.chance(0.5)
    worn = (0.6 * draws.cells(10) + 0.6 * draws.noise() > draws.uniform(-0.1, 0.5)).float()
    ink_on = torch.maximum(mask, ring) * (1 - 0.8 * worn)
    return over(paper, ink, ink_on)


def _painting(mask: Tensor, draws: Draws) -> Tensor:
    """Brush strokes in one direction across the thing's border, patches of hue, canvas texture."""
    x, y = grid()
    angle = draws.uniform(0, math.pi)
    streak = _along(draws.noise(), angle, 4) * 2.2
    push = 0.08 * streak
    where = torch.stack(
        ((x + push * torch.cos(angle)).expand(-1, 1, SIZE, SIZE)[:, 0], (y + push * torch.sin(angle))[:, 0]), dim=-1
    )
    smeared = F.grid_sample(blur(mask, 1), where, mode="bilinear", padding_mode="zeros", align_corners=False)
    hue = draws.uniform()
    ground = hsv((hue + 0.12 * draws.cells(5)) % 1, draws.uniform(0.2, 0.7), draws.uniform(0.35, 0.9))
    thing_hue = (hue + draws.uniform(0.2, 0.8) + 0.15 * draws.cells(6)) % 1
    thing = hsv(thing_hue, draws.uniform(0.3, 0.9), draws.uniform(0.2, 0.95))
    lift = torch.where(ground.mean((1, 2, 3), keepdim=True) > 0.5, -0.3, 0.3)
    thing = thing * 0.6 + (ground.mean((2, 3), keepdim=True) + lift) * 0.4
    image = over(ground, thing, (smeared * 1.5).clamp(0, 1) * 0.9) + 0.13 * streak
    return image + 0.04 * _waves(draws, 70.0)


def _along(x: Tensor, angle: Tensor, steps: int) -> Tensor:
    """x averaged along a direction, per image."""
    px, py = grid()
    total = torch.zeros_like(x)
    for step in range(-steps, steps + 1):
        offset = 2.0 * step / SIZE
        u = (px + offset * torch.cos(angle)).expand(-1, 1, SIZE, SIZE)
        v = (py + offset * torch.sin(angle)).expand(-1, 1, SIZE, SIZE)
        where = torch.stack((u[:, 0], v[:, 0]), dim=-1)
        total = total + F.grid_sample(x, where, mode="bilinear", padding_mode="reflection", align_corners=False)
    return total / (2 * steps + 1)


def _sketch(mask: Tensor, draws: Draws) -> Tensor:
    """Grey pencil outline drawn twice, with hatching inside, on paper."""
    line = _edge(mask) * draws.uniform(0.4, 0.9)
    again = torch.roll(_edge(mask), (1, -2), (2, 3)) * draws.uniform(0.1, 0.5)
    hatch = (_waves(draws, 38.0) > 0.2).float() * mask * draws.uniform(0.0, 0.5)
    grain = 0.75 + 0.5 * draws.noise()
    pencil = torch.maximum(torch.maximum(line, again), hatch) * grain
    paper = draws.uniform(0.8, 1.0) + 0.05 * draws.cells(6)
    return (paper - 0.75 * pencil.clamp(0, 1)).expand(-1, 3, SIZE, SIZE)


def _quickdraw(mask: Tensor, draws: Draws) -> Tensor:
    """A hasty thin outline on white, wobbling, with gaps."""
    x, y = grid()
    wobble = 0.09 * draws.cells(7, 2)
    where = torch.stack(((x + wobble[:, :1])[:, 0], (y + wobble[:, 1:])[:, 0]), dim=-1)
    bent = F.grid_sample(mask, where, mode="bilinear", padding_mode="zeros", align_corners=False)
    line = (grow(bent) - bent).clamp(0, 1)
    gaps = (draws.cells(9) > draws.uniform(0.45, 0.8)).float()
    return (1 - line * (1 - gaps)).expand(-1, 3, SIZE, SIZE)


def _neon(mask: Tensor, draws: Draws) -> Tensor:
    """A glowing tube along the outline in the dark."""
    tube = _edge(mask)
    hue = draws.uniform()
    glow = hsv(hue, torch.ones_like(hue), torch.ones_like(hue)) * (blur(tube, 3) * 0.6 + tube * 0.6)
    wall = 0.10 + 0.08 * draws.cells(8, 3)
    flicker = 1 - draws.uniform(0.3, 1) * (draws.cells(5) > 0.35).float()
    return wall + glow * flicker + 0.6 * tube * tube * draws.uniform(0.2, 1) * flicker


def _chalk(mask: Tensor, draws: Draws) -> Tensor:
    """Broken chalk outline and a dusty fill on a board."""
    board = hsv(draws.uniform(0.33, 0.5), draws.uniform(0.1, 0.5), draws.uniform(0.15, 0.35))
    dust = 0.06 * draws.cells(6) + 0.05 * draws.noise()
    grain = (draws.noise() > draws.uniform(-0.8, -0.1)).float()
    stroke = torch.maximum(_edge(mask) * grain, mask * draws.uniform(0.1, 0.4) * grain)
    return over(board + dust, draws.uniform(0.8, 1), stroke * draws.uniform(0.6, 1))


def _mosaic(mask: Tensor, draws: Draws) -> Tensor:
    """Square tiles of uneven colour with joints between them."""
    tile = 3
    coarse = F.avg_pool2d(mask, tile)
    n = SIZE // tile
    hue = draws.uniform()
    light = draws.noise(n)
    ground = hsv((hue + 0.05 * draws.noise(n)) % 1, draws.uniform(0.2, 0.7), draws.uniform(0.55, 0.9) + 0.15 * light)
    thing = hsv((hue + draws.uniform(0.25, 0.75)) % 1, draws.uniform(0.4, 0.9), draws.uniform(0.15, 0.5) + 0.15 * light)
    image = F.interpolate(over(ground, thing, coarse), scale_factor=tile, mode="nearest")
    joint = torch.zeros(1, 1, SIZE, SIZE)
    joint[..., ::tile, :] = 1
    joint[..., :, ::tile] = 1
    return over(image, draws.uniform(0.2, 0.9), joint * 0.45)


def _blueprint(mask: Tensor, draws: Draws) -> Tensor:
    """White outline on blue squared paper."""
    x, y = grid()
    squares = ((torch.sin(40 * x) > 0.93) | (torch.sin(40 * y) > 0.93)).float()
    paper = hsv(draws.uniform(0.55, 0.65), draws.uniform(0.7, 1), draws.uniform(0.3, 0.6))
    paper = over(paper, torch.ones(1), squares * draws.uniform(0.05, 0.25))
    return over(paper, torch.ones(1), _edge(mask) * draws.uniform(0.6, 1))


@dataclass(frozen=True)
class StyleInfo:
    """A style: its renderer, its words in captions, its bending of things, and whether it is rare in pre-training."""

    draw: Style
    wording: str
    wobble: float = 0.05
    rare: bool = False


STYLES: dict[str, StyleInfo] = {
    "photo": StyleInfo(_photo, "a photo of a {}", 0.06),
    "clipart": StyleInfo(_clipart, "a clip art of a {}", 0.05),
    "cartoon": StyleInfo(_cartoon, "a cartoon of a {}", 0.10),
    "poster": StyleInfo(_poster, "a poster of a {}", 0.05),
    "stamp": StyleInfo(_stamp, "a stamp of a {}", 0.05),
    "painting": StyleInfo(_painting, "a painting of a {}", 0.06, rare=True),
    "sketch": StyleInfo(_sketch, "a sketch of a {}", 0.06, rare=True),
    "quickdraw": StyleInfo(_quickdraw, "a quick drawing of a {}", 0.10, rare=True),
    "neon": StyleInfo(_neon, "a neon sign of a {}", 0.05, rare=True),
    "chalk": StyleInfo(_chalk, "a chalk drawing of a {}", 0.08, rare=True),
    "blueprint": StyleInfo(_blueprint, "a blueprint of a {}", 0.05, rare=True),
    "mosaic": StyleInfo(_mosaic, "a mosaic of a {}", 0.05, rare=True),
}
"""Every style by the name that a data URI uses."""

COMMON = tuple(name for name, info in STYLES.items() if not info.rare)
RARE = tuple(name for name, info in STYLES.items() if info.rare)


def render(glyphs: Tensor, styles: Sequence[str], keys: np.ndarray, pose: float = 1.0) -> Tensor:
    """Images (B, 3, SIZE, SIZE) uint8 of glyph masks (B, ATLAS, ATLAS) in their styles, with random keys (B,).

    ``pose`` in [0, 1] scales rotation, shift and bending.
    """
    images = torch.empty(len(glyphs), 3, SIZE, SIZE, dtype=torch.uint8)
    names = np.asarray(styles)
    for style in sorted(set(styles)):
        rows = np.flatnonzero(names == style)
        for start in range(0, len(rows), _CHUNK):
            part = rows[start : start + _CHUNK]
            images[part] = _render_style(glyphs[part], style, keys[part], pose)
    return images


def _render_style(glyphs: Tensor, style: str, keys: np.ndarray, pose: float) -> Tensor:
    info = STYLES[style]
    # Pose and style have separate streams, so that the same pose can be drawn in two styles.
    mask = place(glyphs, Draws(hash_keys("pose", keys)), info.wobble, pose)
    image = info.draw(mask, Draws(hash_keys("style", style, keys)))
    return (image.clamp(0, 1) * 255).round().to(torch.uint8)


def open_symbols(body: str, options: SymbolsOptions) -> Source:
    """Open the symbols in one domain: ``body``, or ``domain=`` if the body is empty (default: photo)."""
    if body and options.domain not in (None, body):
        raise DataError(f"{options.uri}: names two domains, {body} and {options.domain}.")
    style = body or options.domain or "photo"
    if style not in STYLES:
        raise DataError(f"{options.uri}: unknown domain {style}; symbols has {', '.join(STYLES)}.")
    topic = options.topic
    if topic not in (None, *TOPICS):
        raise DataError(f"{options.uri}: topic={topic} is not known; choose one of {', '.join(TOPICS)}.")
    chosen = [s for s in SYMBOLS if topic is None or s.topic == topic]
    tests = f"test-{options.test_seed}" if options.test_seed else "test"
    return Source(
        uri=options.uri,
        class_names=tuple(s.name for s in chosen),
        domain=ImageDomain(style, STYLES[style].wording),
        template=TEMPLATE if topic is None else TOPIC_TEMPLATES[topic],
        train=symbols_split(chosen, style, options.per_class, "train"),
        test=symbols_split(chosen, style, options.test_per_class, tests),
    )


def _kept(style: str, codepoints: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """`_drawn`, as this machine has drawn it before. It is drawn where its file is absent, damaged or out of reach."""
    named = hashlib.sha256(b"".join((_drawing(), style.encode(), codepoints.tobytes(), keys.tobytes())))
    try:
        file = own_folder(user_cache("symbols")) / named.hexdigest()
    except (RuntimeError, OSError):  # there is no home, or what lies there is not ours
        return _drawn(style, codepoints, keys)
    with suppress(OSError):
        content = file.read_bytes()
        if hashlib.sha256(content[_DIGEST:]).digest() == content[:_DIGEST]:
            return np.frombuffer(content, np.uint8, offset=_DIGEST).reshape(-1, SIZE, SIZE, 3)
    images = _drawn(style, codepoints, keys)
    with suppress(OSError):
        write_whole(file, hashlib.sha256(images.tobytes()).digest() + images.tobytes(), mode=0o600, synced=False)
        ours = file.parent.glob("[0-9a-f]" * len(file.name))
        for old in sorted(ours, key=lambda path: path.stat().st_mtime)[:-_MOST_KEPT]:
            old.unlink(missing_ok=True)
    return images


@cache
def _drawing() -> bytes:
    """All that pixels depend on besides what is drawn: this file, the font, the libraries' versions, the CPU."""
    versions = [f"{name} {version(name)}" for name in ("torch", "numpy", "pillow")]
    told = "\n".join([*versions, torch.backends.cpu.get_cpu_capability()])
    return hashlib.sha256(Path(__file__).read_bytes() + FONT.read_bytes() + told.encode()).digest()


def _drawn(style: str, codepoints: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Images (B, SIZE, SIZE, 3) uint8 of the symbols (B,)."""
    glyphs = torch.stack([glyph(chr(c)) for c in codepoints.tolist()])
    with _one_thread():
        images = render(glyphs, [style] * len(glyphs), keys)
    return images.permute(0, 2, 3, 1).contiguous().numpy()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Compute in one thread within the block: several wait for each other, and take five times as long."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def symbols_split(symbols: list[Symbol], style: str, per_class: int, purpose: str) -> Split:
    """``per_class`` images of each symbol. Draws for different purposes (train, test, ...) never coincide.

    Images are drawn in batches on first access, and kept, also in the user's cache.
    """
    codepoints = np.repeat(np.array([s.codepoint for s in symbols], dtype=np.uint64), per_class)
    index = np.tile(np.arange(per_class, dtype=np.uint64), len(symbols))
    keys = hash_keys("symbols", purpose, style, codepoints, index)

    @cache
    def drawn(part: int) -> np.ndarray:
        rows = slice(part * _AT_ONCE, (part + 1) * _AT_ONCE)
        return _kept(style, codepoints[rows], keys[rows])

    def read(row: int) -> Image.Image:
        return Image.fromarray(drawn(row // _AT_ONCE)[row % _AT_ONCE])

    return Split(torch.arange(len(symbols)).repeat_interleave(per_class), read)
