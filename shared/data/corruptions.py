"""Image corruptions as in ImageNet-C: noise, blur, contrast and JPEG at three strengths (its severities 1, 3 and 5).

Source: Hendrycks and Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations",
ICLR 2019. The paper's strengths are for images 224 pixels wide; the width of the blur is scaled to the image.
"""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image, ImageEnhance, ImageFilter

from promptfed.shared.data.source import DataError, Split
from promptfed.shared.seeds import generator

STRENGTHS = (1, 2, 3)
_WIDTH = 224  # width of the images for which the paper gives strengths
_NOISE = (0.08, 0.18, 0.38)  # standard deviation, of values in [0, 1]
_BLUR = (1.0, 3.0, 6.0)  # standard deviation, pixels
_CONTRAST = (0.4, 0.2, 0.05)  # remaining fraction of the distance from the mean
_QUALITY = (25, 15, 7)


def _noise(image: Image.Image, strength: int, digest: str) -> Image.Image:
    drawn = torch.randn((image.height, image.width, 3), generator=generator(0, digest, "noise", strength)).numpy()
    pixels = np.asarray(image, dtype=np.float32) / 255 + _NOISE[strength - 1] * drawn
    return Image.fromarray(np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8))


def _blur(image: Image.Image, strength: int, digest: str) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(_BLUR[strength - 1] * image.width / _WIDTH))


def _contrast(image: Image.Image, strength: int, digest: str) -> Image.Image:
    return ImageEnhance.Contrast(image).enhance(_CONTRAST[strength - 1])


def _jpeg(image: Image.Image, strength: int, digest: str) -> Image.Image:
    packed = io.BytesIO()
    image.save(packed, "JPEG", quality=_QUALITY[strength - 1])
    with Image.open(packed, formats=["JPEG"]) as again:
        return again.convert("RGB")


CORRUPTIONS: dict[str, Callable[[Image.Image, int, str], Image.Image]] = {
    "noise": _noise,
    "blur": _blur,
    "contrast": _contrast,
    "jpeg": _jpeg,
}


def corrupted(split: Split, text: str, uri: str) -> Split:
    """The images of ``split`` under the corruption ``text``, such as ``noise:2``. Each image is always corrupted alike.

    Raises:
        DataError: the corruption or strength does not exist; the text names ``uri``.
    """
    kind, _, strength = text.partition(":")
    if kind not in CORRUPTIONS or strength not in map(str, STRENGTHS):
        known = f"{', '.join(CORRUPTIONS)} with a strength of {STRENGTHS[0]} to {STRENGTHS[-1]}"
        raise DataError(f"{uri}: corrupt={text} is not known; choose one of {known}, as corrupt=noise:2.")
    corrupt = CORRUPTIONS[kind]
    changed = Split(split.labels, lambda row: corrupt(split.image(row), int(strength), split.digest(row)), split.groups)
    changed.subgroups = split.subgroups
    return changed
