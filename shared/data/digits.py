"""``digits``: 1,797 handwritten digits (UCI, CC BY 4.0; ``embedded/NOTICE.txt``), dark on light or inverted."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from promptfed.shared.data.options import DigitsOptions
from promptfed.shared.data.partition import train_test
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split, reader_of

DIGIT_NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
TEMPLATE = "a photo of the digit {}."
DOMAINS = {"plain": "a photo of the digit {}", "inverted": "an inverted photo of the digit {}"}
_INK = 40
_SIZE = 48


@lru_cache(maxsize=1)
def digit_images() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 48, 48) uint8, dark ink on white, and labels (1797,) int64."""
    table = np.loadtxt(Path(__file__).with_name("embedded") / "digits.csv.gz", delimiter=",")
    grey, target = table[:, :-1].reshape(-1, 8, 8), table[:, -1].astype(np.int64)
    margin = (_SIZE - _INK) // 2
    images = np.full((len(target), _SIZE, _SIZE), 255, dtype=np.uint8)
    for image, ink in zip(images, grey, strict=True):
        small = Image.fromarray((255 - ink * (255 / 16)).round().astype(np.uint8))
        large = small.resize((_INK, _INK), Image.Resampling.BICUBIC)
        image[margin:-margin, margin:-margin] = np.asarray(large)
    return images, target


def open_digits(body: str, options: DigitsOptions) -> Source:
    """The digits; ``domain=inverted`` gives white on black. Both domains have the same split."""
    if body:
        raise DataError(f"{options.uri}: digits takes nothing before its options, as in digits?domain=inverted.")
    pixels, target = digit_images()
    if options.domain == "inverted":
        pixels = 255 - pixels
    labels = torch.from_numpy(target)
    images = Split(labels, reader_of(pixels))
    train, test = train_test(labels, options.split_seed)
    return Source(
        uri=options.uri,
        class_names=DIGIT_NAMES,
        domain=ImageDomain(options.domain, DOMAINS[options.domain]),
        template=TEMPLATE,
        train=images.select(train),
        test=images.select(test),
    )
