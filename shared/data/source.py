"""The interface of data sources: classes, a domain, a template, and a train and a test split."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from promptfed.shared.data.errors import DataError as DataError
from promptfed.shared.data.image_files import image_digest as image_digest
from promptfed.shared.data.pixels import GREY, Grey, Scale
from promptfed.shared.files import special_files
from promptfed.shared.plain_text import counted, scale_text
from promptfed.shared.service.reasons import why

_NAMED = 3  # special files that are listed; of further ones only the number


@dataclass(frozen=True)
class ImageDomain:
    """A domain's name and its description in words, with ``{}`` where a class name goes."""

    name: str
    description: str


def refuse_special_files(root: Path, uri: str) -> None:
    """Check a data folder before a library reads it.

    Raises:
        DataError: names pipes, sockets and devices in it, or a folder that cannot be listed.
    """
    try:
        special = sorted(str(path) for path in special_files(root)) if root.is_dir() else []
    except OSError as error:
        raise DataError(f"{uri}: {error.filename} cannot be listed ({why(error)}); make it readable.") from None
    if special:
        more = f" and {len(special) - _NAMED} more" if len(special) > _NAMED else ""
        names = ", ".join(special[:_NAMED]) + more
        raise DataError(f"{uri}: {names}: a pipe, a socket or a device cannot be read as data; remove it.")


def in_words(text: str) -> str:
    """A domain's description with ``{}`` for the class name. Words without ``{}`` are placed after the class name.

    Raises:
        DataError: the words are empty, or have several ``{}``.
    """
    words = " ".join(text.split())
    if not words:
        raise DataError("words for a domain must not be empty; write some, as in: a sketch of a {}")
    if words.count("{}") > 1:
        raise DataError(f"{words!r} must hold '{{}}' at most once, where the class name goes.")
    return words if "{}" in words else f"a {{}}, {words}"


class Split:
    """Labelled images. ``labels`` (N,) int64 are indices in the source's ``class_names``.

    With several labels per image, ``labels`` (N, C) int8 are 1 for a class that is present, 0 absent and -1 unknown.
    ``groups``: the group of each image, such as its patient; None if the data have no groups. ``subgroups``: the value
    of each image by column, such as a scanner, of which figures are told apart.
    """

    subgroups: Mapping[str, tuple[str, ...]] = {}
    grey: Scale | None = None
    """How all grey pictures of more than 8 bits are read; None if there are none."""

    def __init__(
        self,
        labels: torch.Tensor,
        read: Callable[[int], Image.Image],
        groups: Sequence[str] | None = None,
        *,
        digest: Callable[[int], str] | None = None,
        path: Callable[[int], Path | None] = lambda row: None,
        name: Callable[[int], str] | None = None,
    ) -> None:
        """read: returns the RGB image at a row of ``labels``; digest: its `image_digest` when the data were opened.

        path: the file from which `read_image` reads a row; name: what a row is called in errors, by default its path.
        """
        if groups is not None and len(groups) != len(labels):
            raise ValueError(f"{len(groups)} groups for {len(labels)} labels")
        self.labels = labels if labels.ndim == 2 else labels.long()
        self.groups = None if groups is None else tuple(groups)
        self._rows = torch.arange(len(labels))
        self._read = read
        self._path = path
        self._name = name or (lambda row: str(path(row) or f"image {row}"))
        self._given = digest
        self._first: dict[int, str] = {}  # digests of the first readings, where none is given

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """One image, RGB.

        Raises:
            DataError: it cannot be read, or is not the one that `digest` tells.
        """
        return self._checked(int(self._rows[index]))

    def _checked(self, row: int) -> Image.Image:
        """Under an image's digest others keep what they compute of it: no other image may take its place."""
        image = self._read(row)
        own = image_digest(image)
        scale = image.info.get(GREY)
        if scale not in (None, self.grey):
            text = f"is a grey picture that is read as {scale_text(scale)}, where others have 8 bits or another scale"
            raise DataError(f"{self._name(row)} {text}; say it for all in the URI, as in grey=12.")
        if own != (self._first.setdefault(row, own) if self._given is None else self._given(row)):
            text = "is not what it was when the data were opened; start again once nothing changes it any more"
            raise DataError(f"{self._name(row)} {text}.")
        return image

    def path(self, index: int) -> Path | None:
        """The file of one image, where `read_image` reads it as it is."""
        return self._path(int(self._rows[index]))

    def scale(self, index: int) -> Scale | None:
        """The scale by which `read_image` reads one image's file."""
        return self.grey

    def scales(self, indices: Iterable[int]) -> list[Scale | None]:
        """By which the images at ``indices`` are read, before it is known whether they have one."""
        return [self._read(int(self._rows[index])).info.get(GREY) for index in indices]

    def digest(self, index: int) -> str:
        """SHA-256 (hex) of one image, computed once for all selections of a split."""
        row = int(self._rows[index])
        if self._given is not None:
            return self._given(row)
        if row not in self._first:
            self._checked(row)
        return self._first[row]

    def select(self, rows: torch.Tensor) -> Split:
        """The images at ``rows`` (M,), in that order."""
        selected = copy(self)
        selected.labels, selected._rows = self.labels[rows], self._rows[rows]
        if self.groups is not None:
            selected.groups = tuple(self.groups[row] for row in rows.tolist())
        own = self.subgroups.items()
        selected.subgroups = {column: tuple(values[row] for row in rows.tolist()) for column, values in own}
        return selected

    def labelled(self, labels: torch.Tensor) -> Split:
        """The same images with other ``labels`` (N,)."""
        other = copy(self)
        other.labels = labels
        return other


def joined(*parts: Split) -> Split:
    """The images of ``parts``, one after the other; labels must have the same meaning in all parts."""
    places = [(part, row) for part in parts for row in range(len(part))]
    groups = None
    if all(part.groups is not None for part in parts):
        groups = [group for part in parts for group in part.groups or ()]

    def image(row: int) -> Image.Image:
        part, index = places[row]
        return part.image(index)

    def digest(row: int) -> str:
        part, index = places[row]
        return part.digest(index)

    def path(row: int) -> Path | None:
        part, index = places[row]
        return part.path(index)

    labels = torch.cat([part.labels for part in parts])
    whole = Split(labels, image, groups, digest=digest, path=path)
    whole.grey = parts[0].grey
    shared = set.intersection(*(set(part.subgroups) for part in parts))
    whole.subgroups = {
        name: tuple(value for part in parts for value in part.subgroups[name]) for name in sorted(shared)
    }
    return whole


def reader_of(pixels: np.ndarray) -> Callable[[int], Image.Image]:
    """A function that reads images in memory: (N, H, W) grey or (N, H, W, 3) RGB, uint8."""
    return lambda row: Image.fromarray(pixels[row]).convert("RGB")


@dataclass(frozen=True)
class Source:
    """A client's data, opened from a URI.

    ``left_out``: a sentence for each file that cannot be read and that the owner allowed to leave out; it names the
    file, and is for the owner's eyes only.
    """

    uri: str
    class_names: tuple[str, ...]
    domain: ImageDomain | None
    template: str
    train: Split
    test: Split
    left_out: tuple[str, ...] = ()

    @property
    def grey(self) -> Scale | None:
        """How the grey pictures of more than 8 bits are read; None if there are none."""
        return self.train.grey or self.test.grey


def one_scale(scales: Iterable[Scale | None], uri: str, given: Grey | None) -> Scale | None:
    """The scale of a source's grey pictures of more than 8 bits, of which ``scales`` has each one's (None: of others).

    ``given``: what the URI says in ``grey=``.

    Raises:
        DataError: they have several, of which nobody has said which is right; or what is given does not fit.
    """
    counts = Counter(scale for scale in scales if scale is not None)
    if given and not counts:
        raise DataError(f"{uri}: grey= is for grey pictures of more than 8 bits, and there is none; leave it out.")
    if given and given not in [scale[-len(given) :] for scale in counts] and given[0] not in range(1, 17):
        text = f"grey={given[0]:g} is no number of bits of whole numbers, which is 1 to 16"
        raise DataError(f"{uri}: {text}; give both ends, as in grey=0,100000.")
    if len(counts) < 2:
        return next(iter(counts), None)
    most, (first, *rest) = 5, sorted(counts.items())
    told = [f"{counted(first[1], 'file')} as {scale_text(first[0])}"]
    told += [f"{count} as {scale_text(scale)}" for scale, count in rest[: most - 1]]
    more = f", and {counted(len(counts) - most, 'further scale')}" if len(counts) > most else ""
    text = "say it for all in the URI: grey=12 for whole numbers of 12 bits, grey=1 for fractions of at most 1"
    raise DataError(
        f"{uri}: its grey pictures of more than 8 bits have no common scale by their largest numbers: "
        f"{', '.join(told)}{more}; {text}, grey=-1000,3000 for both ends."
    )
