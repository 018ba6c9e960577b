"""Class probabilities of one image, from the prompts of the last evaluation with the client's private part."""

from __future__ import annotations

import io
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.data.image_files import IMAGE_FORMATS
from promptfed.shared.data.pixels import GREY, UNREADABLE, Scale, Unfaithful, in_rgb
from promptfed.shared.methods import MULTI_LABEL, TASK
from promptfed.shared.methods.core.interface import Classifier, ClientContext, Mixes
from promptfed.shared.plain_text import scale_text

MAX_PIXELS = 16_000_000
DRAFT = 1024  # pixels of the shorter side below which a JPEG is not decoded: towers take less


class NoPrompts(Exception):
    """There is nothing to predict with yet."""


class BadImage(ValueError):
    """The bytes are no image that can be read."""


class TooManyPixels(ValueError):
    """The image would take too much memory."""


@dataclass(frozen=True)
class Served:
    """What predictions are made with: the prompts' classifier and, where the backbone reads texts, the template's.

    ``greys``: the scales by which the training data's grey pictures of more than 8 bits were read.
    """

    method: str
    round: int
    context: ClientContext
    classifier: Classifier
    template: Classifier | None
    greys: Sequence[Scale] = ()

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes among which the classifier chooses."""
        return self.context.class_names

    @property
    def several_labels(self) -> bool:
        """Whether each class is present or absent, instead of one being chosen."""
        return self.context.terms.method.get(TASK) == MULTI_LABEL


class OneImage:
    """A split that holds one image (``promptfed.shared.methods.core.interface.Split``)."""

    def __init__(self, backbone: Backbone, image: Image.Image):
        self.labels = torch.zeros(1, dtype=torch.int64)
        self._backbone = backbone
        self._pixels = backbone.preprocess(image).unsqueeze(0).to(backbone.device)

    def __len__(self) -> int:
        return 1

    def features(self) -> Tensor:
        """``(1, d_e)``."""
        return self._backbone.encode_images(self._pixels)

    def raw_features(self) -> Tensor:
        """``(1, d_e)``, not normalised."""
        return self._backbone.encode_images(self._pixels, normalize=False)

    def images(self, indices: Tensor) -> Tensor:
        """``(B, 3, H, W)``."""
        return self._pixels[indices]

    def patches(self, indices: Tensor) -> Tensor:
        """``(B, M, d_e)``, rounded as those of training images are."""
        return self._backbone.encode_patches(self._pixels[indices]).half().float()


class Predictor:
    """Predicts with the current prompts; ``predict`` may be called from any thread."""

    def __init__(self) -> None:
        self.served: Served | None = None
        self._one_at_a_time = threading.Lock()

    def predict(self, content: bytes) -> dict[str, Any]:
        """Probabilities of each class, highest first, with the template's (or None) beside them.

        Where an image may have several labels, ``present`` lists those above one half. With them go the shares of the
        domains that the image looks like, where the method has a mixture (else None).

        Raises:
            NoPrompts: no evaluation has brought prompts yet.
            BadImage: the bytes cannot be read as an image.
            TooManyPixels: more than ``MAX_PIXELS``.
        """
        served = self.served
        if served is None:
            raise NoPrompts("no prompts yet: they come with the federation's first evaluation")
        row = torch.zeros(1, dtype=torch.int64)
        # Decoding too: one image at a time has its pixels in memory.
        with self._one_at_a_time, torch.no_grad():
            split = OneImage(served.context.backbone, read_image(content, served.greys))
            several = served.several_labels
            learned = _probabilities(served.classifier, split, row, several)
            template = served.template and _probabilities(served.template, split, row, several)
            domains = _domains(served.classifier, split, row)
        zero_shot: Sequence[float | None] = template or [None] * len(learned)
        rows = sorted(zip(served.class_names, learned, zero_shot, strict=True), key=lambda row: -row[1])
        present = {"present": [name for name, p, _ in rows if p > 0.5]} if several else {}
        return {
            "method": served.method,
            "round": served.round,
            "class_name": rows[0][0],
            **present,
            "classes": [{"name": name, "probability": p, "zero_shot": z} for name, p, z in rows],
            "domains": domains,
        }


def _probabilities(classifier: Classifier, split: OneImage, row: Tensor, several: bool) -> list[float]:
    logits = classifier.logits(split, row)[0]
    probabilities: list[float] = (logits.sigmoid() if several else logits.softmax(-1)).tolist()
    return probabilities


def _domains(classifier: Classifier, split: OneImage, row: Tensor) -> list[dict[str, Any]] | None:
    """The shares of the domains that the image looks like, in the classifier's order; None if it mixes no domains."""
    if not isinstance(classifier, Mixes):
        return None
    shares = classifier.shares(split, row)[0].tolist()
    return [{"name": name, "share": share} for name, share in zip(classifier.domain_names, shares, strict=True)]


def read_image(content: bytes, greys: Sequence[Scale] = ()) -> Image.Image:
    """The image as `in_rgb` shows it, by the one scale of ``greys`` if there is one. Its size is looked at first."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="PIL")  # of large images, and of damaged notes
        try:
            with Image.open(io.BytesIO(content), formats=IMAGE_FORMATS) as image:
                if image.width * image.height > MAX_PIXELS:
                    raise TooManyPixels(f"the image has {image.width}x{image.height} pixels; {MAX_PIXELS} are allowed")
                if image.format == "JPEG":
                    image.draft("RGB", (DRAFT, DRAFT))
                shown = in_rgb(image, grey=greys[0] if len(greys) == 1 else None)
                if len(greys) > 1 and GREY in shown.info:
                    scales = " or as ".join(map(scale_text, greys))
                    raise Unfaithful(f"the training data read grey pictures as {scales}: send it with 8 bits")
                return shown
        except Image.DecompressionBombError:
            raise TooManyPixels(f"the image has too many pixels; {MAX_PIXELS} are allowed") from None
        except TooManyPixels:
            raise
        except Unfaithful as error:
            raise BadImage(f"the image cannot be shown faithfully: {error}") from error
        except UNREADABLE as error:
            kind = "the body cannot be read as an image: send the bytes of a PNG, JPEG or another common format"
            raise BadImage(kind) from error
