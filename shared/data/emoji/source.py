"""``emoji:STYLE`` as a data source: ``emoji:flat``, ``emoji:noto+notov1?level=names&test=fxemoji``.

The styles are shipped with promptfed, since their licences ask for no more than a notice (``embedded/NOTICE.txt``).
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from collections import Counter
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from PIL import Image

from promptfed.shared.data.options import Options
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split, image_digest
from promptfed.shared.seeds import derive_seed

SIZE = 64
"""Side of a picture in pixels."""

COMMON = ("flat", "three", "noto", "notov1")
"""Of which the backbone read many pictures in pre-training."""

RARE = ("contrast", "notomono")
"""Of which it read few, and none at all of a third of the things."""

UNREAD_FAMILIES = ("mozilla",)
"""Designers of whom it read nothing."""

INDEX = "index.json"
FOLDER = Path(__file__).parent / "embedded"
FILE = Path(__file__).parent / "splits.json"

POOLS: dict[str, tuple[str, ...]] = {"first": ("microsoft", "google"), "second": ("twitter", "joypixels")}
"""Designers whose drawings of a thing were withheld together."""

PURPOSES = ("test", "validation")
LEVELS = ("kinds", "names")
TEMPLATE = "a photo of a {}."
_TRAIN_LEAST, _TEST_LEAST = 4, 2  # least things of a kind, for training and for tests in either pool
DEFAULT_STYLE = "flat"
_LONGEST_NAME = 64  # joins names of a domain; a client's domain may not contain +
Cell = tuple[str, int]  # one picture: a style and the index of a thing
COUNT, TEST_COUNT = 1000, 500
MOST_SCENES = 20_000  # of 12 kB each
MOST = 5  # things in a scene
_SIDES = (22, 38)  # least and largest side of a thing in a scene of SIZE x SIZE pixels
_NOISE = 20.0  # standard deviation of a pixel's noise, of 255
Drawings = list[list[tuple[str, int]]]  # for each kind its drawings: a style and the index of a thing


@dataclass(frozen=True)
class Style:
    """One style of a designer. Styles whose drawings are derived from one another share a ``family``."""

    name: str
    family: str
    wording: str


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("flat", "microsoft", "a flat colour icon of a {}"),
        Style("three", "microsoft", "a glossy 3d render of a {}"),
        Style("contrast", "microsoft", "a black stencil icon of a {}"),
        Style("noto", "google", "a shaded cartoon of a {}"),
        Style("notov1", "google", "an old rounded cartoon of a {}"),
        Style("notomono", "google", "a thin black line icon of a {}"),
        Style("fxemoji", "mozilla", "a muted flat drawing of a {}"),
    )
}


@dataclass(frozen=True)
class Thing:
    """One code point or sequence of code points, with its name and its kind in words.

    ``testable``: it is a thing, not a sign, and its drawing is not nearly equal to another one.
    """

    code: str
    name: str
    group: str
    kind: str
    testable: bool


@dataclass(frozen=True)
class Drawn:
    """All pictures: its things, and the encoded pictures of each style by the thing's index."""

    things: tuple[Thing, ...]
    styles: dict[str, dict[int, bytes]]

    def image(self, style: str, place: int) -> Image.Image:
        """One picture, RGB, on white."""
        with Image.open(io.BytesIO(self.styles[style][place])) as image:
            return image.convert("RGB")


@lru_cache(maxsize=1)
def read(folder: Path = FOLDER) -> Drawn:
    """Read and verify the pictures. Raises DataError if they are incomplete or changed."""
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        things = tuple(Thing(**thing) for thing in index["things"])
        styles = {name: _style(folder / f"{name}.webps", told) for name, told in index["styles"].items()}
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder} holds no emoji; install promptfed again.") from error
    return Drawn(things, styles)


def _style(file: Path, told: dict[str, Any]) -> dict[int, bytes]:
    content = file.read_bytes()
    if hashlib.sha256(content).hexdigest() != told["sha256"]:
        raise DataError(f"{file} is not what its index says; install promptfed again.")
    places = [place for first, last in told["things"] for place in range(first, last + 1)]
    return dict(zip(places, _pictures(content), strict=True))


def _pictures(content: bytes) -> list[bytes]:
    """Split concatenated WebP files; each contains its length in the four bytes after ``RIFF``."""
    files, start = [], 0
    while start < len(content):
        end = start + 8 + struct.unpack_from("<I", content, start + 4)[0]
        files.append(content[start:end])
        start = end
    return files


@dataclass(frozen=True)
class Splits:
    """Names of things by purpose and pool."""

    names: dict[str, dict[str, frozenset[str]]]
    near_copies: frozenset[str]

    def purpose_of(self, name: str) -> str | None:
        """``test`` or ``validation`` for a thing in these lists, None for a training thing."""
        return next((p for p in PURPOSES if any(name in names for names in self.names[p].values())), None)

    def withheld(self, name: str) -> tuple[str, ...]:
        """The designers whose drawings of a thing were withheld from pre-training."""
        return next(
            (POOLS[pool] for by_pool in self.names.values() for pool, names in by_pool.items() if name in names), ()
        )

    def was_read(self, name: str, style: str) -> bool:
        """Whether the backbone pre-trained on emoji saw this thing in this style."""
        if style in RARE:
            return self.purpose_of(name) is None
        return style in COMMON and STYLES[style].family not in self.withheld(name)

    def family_was_read(self, name: str, style: str) -> bool:
        """Whether that backbone saw this thing in any style of the designer's family."""
        family = STYLES[style].family
        if family in UNREAD_FAMILIES:
            return False
        return any(self.was_read(name, other.name) for other in STYLES.values() if other.family == family)

    def testable(self, thing: Thing, style: str, purpose: str) -> bool:
        """Whether tests for this purpose may use the thing's picture in this style."""
        if not thing.testable or thing.name in self.near_copies or self.family_was_read(thing.name, style):
            return False
        own = self.purpose_of(thing.name)
        return own == purpose or (purpose == "test" and own is None)


@lru_cache(maxsize=1)
def splits() -> Splits:
    """The lists in ``splits.json``."""
    told = json.loads(FILE.read_text(encoding="utf-8"))
    names = {p: {pool: frozenset(told[p][pool]["names"]) for pool in POOLS} for p in PURPOSES}
    return Splits(names, frozenset(told["near_copies"]["names"]))


def open_emoji(body: str, options: Options) -> Source:
    """Open emoji of the given designers. ``body``: styles or designers joined by ``+`` (default: flat).

    ``level=kinds`` (the default): a class is a kind of thing. Test things are not trained on in any style.
    ``level=names``: a class is a thing. Each style has one picture of it, so test images come from the styles ``test=``
    of other designers; without ``test=`` the source has only test images. Test pictures are those that the backbone
    pre-trained on emoji has not seen (`splits`). ``purpose=validation`` uses the validation things instead.
    """
    drawn = read()
    styles = styles_of(body or DEFAULT_STYLE, drawn, options)
    level = options.choice("level", LEVELS, "kinds") or "kinds"
    purpose = options.choice("purpose", PURPOSES, "test") or "test"
    if level == "kinds":
        for name in ("test", "drawn_by"):
            if name in options.values:
                raise DataError(f"{options.uri}: {name} is for level=names.")
        return _kinds(drawn, styles, purpose, options)
    return _names(drawn, styles, purpose, options)


def styles_of(text: str, drawn: Drawn, options: Options) -> list[str]:
    """The styles in a text such as ``flat+noto``; a designer's name stands for all of the designer's styles."""
    styles: list[str] = []
    for word in re.split("[+, ]", text):  # a + in a query has become a space
        meant = [n for n in drawn.styles if word in (n, STYLES[n].family)] if word not in drawn.styles else [word]
        if not meant:
            raise DataError(f"{options.uri}: unknown style {word}; emoji has {', '.join(drawn.styles)}.")
        styles += [name for name in meant if name not in styles]
    return styles


def _kinds(drawn: Drawn, styles: list[str], purpose: str, options: Options) -> Source:
    known = splits()
    names = kind_names(drawn, known)
    train: list[Cell] = []
    test: list[Cell] = []
    for style in styles:
        for place in sorted(drawn.styles[style]):
            thing = drawn.things[place]
            if not thing.testable or thing.kind not in names:
                continue
            of = known.purpose_of(thing.name)
            if of is None:
                train.append((style, place))
            elif of == purpose and known.testable(thing, style, purpose):
                test.append((style, place))
    label = {name: k for k, name in enumerate(names)}

    def split(cells: list[Cell]) -> Split:
        labels = torch.tensor([label[drawn.things[place].kind] for _, place in cells], dtype=torch.long)
        return Split(labels, lambda row: drawn.image(*cells[row]))

    return Source(options.uri, names, domain_of(styles), TEMPLATE, split(train), split(test))


def kind_names(drawn: Drawn, known: Splits) -> tuple[str, ...]:
    """The kinds, sorted, that have enough things for training and for tests in every style."""
    things = [thing for thing in drawn.things if thing.testable]
    train = Counter(thing.kind for thing in things if known.purpose_of(thing.name) is None)
    pools = [
        Counter(thing.kind for thing in things if thing.name in known.names["test"][pool]) for pool in sorted(POOLS)
    ]
    return tuple(sorted(k for k in train if train[k] >= _TRAIN_LEAST and min(c[k] for c in pools) >= _TEST_LEAST))


def _names(drawn: Drawn, styles: list[str], purpose: str, options: Options) -> Source:
    given = options.text("test")
    tested = styles if given is None else styles_of(given, drawn, options)
    shared = {STYLES[s].family for s in styles} & {STYLES[s].family for s in tested}
    if given is not None and shared:
        raise DataError(f"{options.uri}: the styles of {sorted(shared)[0]} share drawings; test on another designer's.")
    also = options.text("drawn_by")
    needed = {*styles, *tested, *([] if also is None else styles_of(also, drawn, options))}
    known = splits()
    places = [
        place
        for place, thing in enumerate(drawn.things)
        if all(place in drawn.styles[s] for s in needed) and all(known.testable(thing, s, purpose) for s in tested)
    ]
    if not places:
        raise DataError(
            f"{options.uri}: no thing that all of {', '.join(sorted(needed))} draw may be tested in "
            f"{' and '.join(tested)}; take fewer styles."
        )
    places.sort(key=lambda place: drawn.things[place].name)

    def cells(of: list[str]) -> list[Cell]:
        return [(style, place) for style in of for place in places]

    def labels(of: list[str]) -> torch.Tensor:
        return torch.arange(len(places)).repeat(len(of))

    shown, held_out = cells(styles), cells(tested)
    test = Split(labels(tested), lambda row: drawn.image(*held_out[row]))
    if given is None:
        train = Split(
            labels(styles),
            lambda row: _refuse(shown[row]),
            digest=cache(lambda row: image_digest(drawn.image(*shown[row]))),  # for the record of a run's data
        )
    else:
        train = Split(labels(styles), lambda row: drawn.image(*shown[row]))
    names = tuple(drawn.things[place].name for place in places)
    return Source(options.uri, names, domain_of(styles), TEMPLATE, train, test)


def _refuse(cell: Cell) -> NoReturn:
    """Refuse a test picture as a training image."""
    raise DataError(
        f"at level=names each designer drew a thing once, and {cell[0]} is what this source is tested on; to train, "
        "name another designer to test on, as in emoji:flat?level=names&test=fxemoji."
    )


def domain_of(styles: list[str]) -> ImageDomain:
    """The domain of one style or of a mixture of styles."""
    if len(styles) == 1:
        return ImageDomain(styles[0], STYLES[styles[0]].wording)
    return ImageDomain("-".join(styles)[:_LONGEST_NAME], "an icon of a {}")


def open_scenes(body: str, options: Options) -> Source:
    """Draw scenes of the kinds of things in the given styles (default: flat). Things of test scenes are not trained on.

    ``count``, ``test_count``: number of scenes. ``seed`` draws other scenes. ``purpose=train``: test scenes
    show things of the training scenes instead, for choosing settings.
    """
    drawn = read()
    styles = styles_of(body or DEFAULT_STYLE, drawn, options)
    names = kind_names(drawn, splits())
    train, test = _drawings(drawn, styles, names, None), _drawings(drawn, styles, names, "test")
    if options.choice("purpose", ("test", "train"), "test") == "train":
        test = train
    lacking = [name for name, own, tested in zip(names, train, test, strict=True) if not (own and tested)]
    if lacking:
        raise DataError(f"{options.uri}: {', '.join(styles)} has no {lacking[0]} to draw scenes of; add a style.")
    seed = derive_seed(options.integer("seed", 0) or 0, "emoji-scenes", "+".join(styles))
    count = options.integer("count", COUNT, 1, MOST_SCENES) or COUNT
    test_count = options.integer("test_count", TEST_COUNT, 1, MOST_SCENES) or TEST_COUNT
    return Source(
        uri=options.uri,
        class_names=names,
        domain=domain_of(styles),
        template=TEMPLATE,
        train=_scenes(drawn, train, count, derive_seed(seed, "train")),
        test=_scenes(drawn, test, test_count, derive_seed(seed, "test")),
    )


def _drawings(drawn: Drawn, styles: list[str], names: tuple[str, ...], purpose: str | None) -> Drawings:
    """The pictures of each kind; of training things if ``purpose`` is None."""
    known = splits()
    by_kind: Drawings = [[] for _ in names]
    for style in styles:
        for place in sorted(drawn.styles[style]):
            thing = drawn.things[place]
            usable = thing.testable if purpose is None else known.testable(thing, style, purpose)
            if usable and thing.kind in names and known.purpose_of(thing.name) == purpose:
                by_kind[names.index(thing.kind)].append((style, place))
    return by_kind


def _scenes(drawn: Drawn, drawings: Drawings, count: int, seed: int) -> Split:
    """``count`` scenes. Images are drawn when they are read."""
    kinds_of = len(drawings)
    labels, evenly = torch.zeros(count, kinds_of, dtype=torch.int8), np.full(kinds_of, 1 / kinds_of)
    shown = []
    for scene in range(count):
        draws = np.random.default_rng(derive_seed(seed, "kinds", scene))
        kinds = draws.choice(kinds_of, draws.integers(1, MOST + 1), replace=False, p=evenly)
        labels[scene, kinds] = 1
        shown.append([drawings[kind][draws.integers(len(drawings[kind]))] for kind in kinds])

    def read(row: int) -> Image.Image:
        return _scene(drawn, shown[row], np.random.default_rng(derive_seed(seed, "scene", row)))

    return Split(labels, read)


def _scene(drawn: Drawn, things: list[tuple[str, int]], draws: np.random.Generator) -> Image.Image:
    """The things one over the other, at random places and sizes, on a noisy background of one colour."""
    scene = Image.new("RGB", (SIZE, SIZE), tuple(draws.integers(200, 256, 3).tolist()))
    for style, place in things:
        side = int(draws.integers(*_SIDES))
        thing = drawn.image(style, place).resize((side, side), Image.Resampling.BICUBIC)
        # Pictures are on white paper: what is white is seen through.
        mask = Image.fromarray(((np.asarray(thing).min(axis=2) < 245) * 255).astype(np.uint8))
        left, top = draws.integers(0, SIZE - side + 1, 2).tolist()
        scene.paste(thing, (left, top), mask)
    noisy = np.asarray(scene) + draws.normal(0, _NOISE, (SIZE, SIZE, 3))
    return Image.fromarray(noisy.round().clip(0, 255).astype(np.uint8))
