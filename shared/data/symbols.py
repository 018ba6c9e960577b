"""``symbols:`` pictographs rendered on the fly: ``symbols:sketch``, ``symbols:sketch?topic=weather&per_class=32``."""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from PIL import Image

from promptfed.shared.data.classes import SYMBOLS, TOPIC_TEMPLATES, TOPICS, Symbol
from promptfed.shared.data.drawing import glyph, hash_keys
from promptfed.shared.data.options import Options
from promptfed.shared.data.render import render
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split
from promptfed.shared.data.styles import STYLES

PER_CLASS = 16
TEST_PER_CLASS = 10
TEMPLATE = "a photo of a {}."
_AT_ONCE = 256  # images drawn in one batch
OWN_OPTIONS = ("domain", "topic", "per_class", "test_per_class", "test_seed")


def open_symbols(body: str, options: Options) -> Source:
    """Open the symbols in one domain: ``body``, or ``domain=`` if the body is empty (default: photo)."""
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
        domain=ImageDomain(style, STYLES[style].wording),
        template=TEMPLATE if topic is None else TOPIC_TEMPLATES[topic],
        train=symbols_split(chosen, style, per_class, "train"),
        test=symbols_split(chosen, style, test_per_class, f"test-{test_seed}" if test_seed else "test"),
    )


def symbols_split(symbols: list[Symbol], style: str, per_class: int, purpose: str) -> Split:
    """``per_class`` images of each symbol. Draws for different purposes (train, test, ...) never coincide.

    Images are drawn in batches on first access, and kept.
    """
    codepoints = np.repeat(np.array([s.codepoint for s in symbols], dtype=np.uint64), per_class)
    index = np.tile(np.arange(per_class, dtype=np.uint64), len(symbols))
    keys = hash_keys("symbols", purpose, style, codepoints, index)

    @cache
    def drawn(part: int) -> np.ndarray:
        rows = slice(part * _AT_ONCE, (part + 1) * _AT_ONCE)
        glyphs = torch.stack([glyph(chr(c)) for c in codepoints[rows].tolist()])
        images = render(glyphs, [style] * len(glyphs), keys[rows])
        return images.permute(0, 2, 3, 1).contiguous().numpy()

    def read(row: int) -> Image.Image:
        return Image.fromarray(drawn(row // _AT_ONCE)[row % _AT_ONCE])

    return Split(torch.arange(len(symbols)).repeat_interleave(per_class), read)
