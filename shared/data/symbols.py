"""``symbols:`` pictographs rendered on the fly: ``symbols:sketch``, ``symbols:sketch?topic=weather&per_class=32``."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from promptfed.shared.data.classes import SYMBOLS, TOPIC_TEMPLATES, TOPICS, Symbol
from promptfed.shared.data.drawing import SIZE, glyph, hash_keys
from promptfed.shared.data.options import Options
from promptfed.shared.data.render import render
from promptfed.shared.data.source import DataError, Domain, Source, Split
from promptfed.shared.data.styles import STYLES

PER_CLASS = 16
TEST_PER_CLASS = 10
TEMPLATE = "a photo of a {}."
_AT_ONCE = 1024  # images whose glyphs are in memory together
OWN_OPTIONS = ("domain", "topic", "per_class", "test_per_class", "test_seed")


class RenderedImages:
    """Images that are drawn, all at once, when the first is asked for."""

    def __init__(self, codepoints: np.ndarray, style: str, keys: np.ndarray) -> None:
        self._codepoints = codepoints
        self._style = style
        self._keys = keys
        self._pixels: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self._keys)

    def image(self, index: int) -> Image.Image:
        """One image, RGB, 48 x 48."""
        return Image.fromarray(self.pixels()[index])

    def pixels(self) -> np.ndarray:
        """All images, (N, 48, 48, 3) uint8."""
        if self._pixels is None:
            parts = [self._draw(slice(start, start + _AT_ONCE)) for start in range(0, len(self), _AT_ONCE)]
            self._pixels = np.concatenate(parts) if parts else np.empty((0, SIZE, SIZE, 3), dtype=np.uint8)
        return self._pixels

    def _draw(self, rows: slice) -> np.ndarray:
        glyphs = torch.stack([glyph(chr(c)) for c in self._codepoints[rows].tolist()])
        images = render(glyphs, [self._style] * len(glyphs), self._keys[rows])
        return images.permute(0, 2, 3, 1).contiguous().numpy()

    def take(self, rows: torch.Tensor) -> RenderedImages:
        """The images at ``rows``; what is drawn already is not drawn again."""
        chosen = rows.numpy()
        part = RenderedImages(self._codepoints[chosen], self._style, self._keys[chosen])
        if self._pixels is not None:
            part._pixels = self._pixels[chosen]
        return part


def open_symbols(body: str, options: Options) -> Source:
    """The symbols in one domain. ``body`` is the domain, or empty if ``domain=`` names it (photo if neither does)."""
    options.check_names(OWN_OPTIONS)
    if body and options.text("domain") not in (None, body):
        raise DataError(f"{options.uri}: names two domains, {body} and {options.text('domain')}.")
    style = body or options.text("domain") or "photo"
    if style not in STYLES:
        raise DataError(f"{options.uri}: unknown domain {style}; symbols has {', '.join(STYLES)}.")
    topic = options.choice("topic", TOPICS)
    chosen = [s for s in SYMBOLS if topic is None or s.topic == topic]
    per_class = options.integer("per_class", PER_CLASS, least=1) or PER_CLASS
    test_per_class = options.integer("test_per_class", TEST_PER_CLASS, least=1) or TEST_PER_CLASS
    test_seed = options.integer("test_seed", 0)
    return Source(
        uri=options.uri,
        class_names=tuple(s.name for s in chosen),
        domain=Domain(style, STYLES[style].wording),
        template=TEMPLATE if topic is None else TOPIC_TEMPLATES[topic],
        train=symbols_split(chosen, style, per_class, "train"),
        test=symbols_split(chosen, style, test_per_class, f"test-{test_seed}" if test_seed else "test"),
    )


def symbols_split(symbols: list[Symbol], style: str, per_class: int, purpose: str) -> Split:
    """``per_class`` images of each symbol; ``purpose`` sets apart draws that must never coincide (train, test, ...)."""
    codepoints = np.repeat(np.array([s.codepoint for s in symbols], dtype=np.uint64), per_class)
    index = np.tile(np.arange(per_class, dtype=np.uint64), len(symbols))
    keys = hash_keys("symbols", purpose, style, codepoints, index)
    labels = torch.arange(len(symbols)).repeat_interleave(per_class)
    return Split(labels, RenderedImages(codepoints.astype(np.int64), style, keys))
