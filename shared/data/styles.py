"""The styles in which masks are drawn: masks (B, 1, SIZE, SIZE) -> RGB (B, 3, SIZE, SIZE) in [0, 1]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from promptfed.shared.data.drawing import SIZE, Draws, Style, blur, grid, grow, hsv, over, shrink


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
