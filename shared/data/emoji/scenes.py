"""Scenes of several emoji, whose images have several labels."""

from __future__ import annotations

import numpy as np
import torch
from PIL import Image

from promptfed.shared.data.emoji.pictures import SIZE, Drawn, read
from promptfed.shared.data.emoji.source import DEFAULT_STYLE, domain_of, kind_names, styles_of
from promptfed.shared.data.emoji.splits import splits
from promptfed.shared.data.options import ScenesOptions
from promptfed.shared.data.source import DataError, Source, Split
from promptfed.shared.seeds import derive_seed
from promptfed.shared.spec.spec import TEMPLATE

MOST = 5  # things in a scene
_SIDES = (22, 38)  # least and largest side of a thing in a scene of SIZE x SIZE pixels
_NOISE = 20.0  # standard deviation of a pixel's noise, of 255
Drawings = list[list[tuple[str, int]]]  # for each kind its drawings: a style and the index of a thing


def open_scenes(body: str, options: ScenesOptions) -> Source:
    """Draw scenes of the kinds of things in the given styles (default: flat). Things of test scenes are not trained on.

    ``count``, ``test_count``: number of scenes. ``seed`` draws other scenes. ``purpose=train``: test scenes
    show things of the training scenes instead, for choosing settings.
    """
    drawn = read()
    styles = styles_of(body or DEFAULT_STYLE, drawn, options)
    names = kind_names(drawn, splits())
    train, test = _drawings(drawn, styles, names, None), _drawings(drawn, styles, names, "test")
    if options.purpose == "train":
        test = train
    lacking = [name for name, own, tested in zip(names, train, test, strict=True) if not (own and tested)]
    if lacking:
        raise DataError(f"{options.uri}: {', '.join(styles)} has no {lacking[0]} to draw scenes of; add a style.")
    seed = derive_seed(options.seed, "emoji-scenes", "+".join(styles))
    return Source(
        uri=options.uri,
        class_names=names,
        domain=domain_of(styles),
        template=TEMPLATE,
        train=_scenes(drawn, train, options.count, derive_seed(seed, "train")),
        test=_scenes(drawn, test, options.test_count, derive_seed(seed, "test")),
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
