"""``emoji:STYLE`` as a data source: ``emoji:flat``, ``emoji:noto+notov1?level=names&test=fxemoji``.

The styles are shipped with promptfed, since their licences ask for no more than a notice (``embedded/NOTICE.txt``).
"""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from typing import NoReturn

import torch

from promptfed.shared.data.emoji.pictures import STYLES, Drawn, read
from promptfed.shared.data.emoji.splits import POOLS, Splits, splits
from promptfed.shared.data.options import EmojiOptions, Options
from promptfed.shared.data.source import DataError, ImageDomain, Source, Split, image_digest
from promptfed.shared.spec.spec import TEMPLATE

_TRAIN_LEAST, _TEST_LEAST = 4, 2  # least things of a kind, for training and for tests in either pool
DEFAULT_STYLE = "flat"
_LONGEST_NAME = 64  # joins names of a domain; a client's domain may not contain +
Cell = tuple[str, int]  # one picture: a style and the index of a thing


def open_emoji(body: str, options: EmojiOptions) -> Source:
    """Open emoji of the given designers. ``body``: styles or designers joined by ``+`` (default: flat).

    ``level=kinds`` (the default): a class is a kind of thing. Test things are not trained on in any style.
    ``level=names``: a class is a thing. Each style has one picture of it, so test images come from the styles ``test=``
    of other designers; without ``test=`` the source has only test images. Test pictures are those that the backbone
    pre-trained on emoji has not seen (`splits`). ``purpose=validation`` uses the validation things instead.
    """
    drawn = read()
    styles = styles_of(body or DEFAULT_STYLE, drawn, options)
    if options.level == "kinds":
        for name in options.given(("test", "drawn_by")):
            raise DataError(f"{options.uri}: {name} is for level=names.")
        return _kinds(drawn, styles, options)
    return _names(drawn, styles, options)


def styles_of(text: str, drawn: Drawn, options: Options) -> list[str]:
    """The styles in a text such as ``flat+noto``; a designer's name stands for all of the designer's styles."""
    styles: list[str] = []
    for word in re.split("[+, ]", text):  # a + in a query has become a space
        meant = [n for n in drawn.styles if word in (n, STYLES[n].family)] if word not in drawn.styles else [word]
        if not meant:
            raise DataError(f"{options.uri}: unknown style {word}; emoji has {', '.join(drawn.styles)}.")
        styles += [name for name in meant if name not in styles]
    return styles


def _kinds(drawn: Drawn, styles: list[str], options: EmojiOptions) -> Source:
    known, purpose = splits(), options.purpose
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
            elif known.testable(thing, style, purpose):
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
    pools = [Counter(thing.kind for thing in things if thing.name in known.names["test"][pool]) for pool in POOLS]
    return tuple(sorted(k for k in train if train[k] >= _TRAIN_LEAST and min(c[k] for c in pools) >= _TEST_LEAST))


def _names(drawn: Drawn, styles: list[str], options: EmojiOptions) -> Source:
    given = options.test
    tested = styles if given is None else styles_of(given, drawn, options)
    shared = {STYLES[s].family for s in styles} & {STYLES[s].family for s in tested}
    if given is not None and shared:
        raise DataError(f"{options.uri}: the styles of {sorted(shared)[0]} share drawings; test on another designer's.")
    also = [] if options.drawn_by is None else styles_of(options.drawn_by, drawn, options)
    needed, known = {*styles, *tested, *also}, splits()
    places = [
        place
        for place, thing in enumerate(drawn.things)
        if all(place in drawn.styles[s] for s in needed)
        and all(known.testable(thing, s, options.purpose) for s in tested)
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
