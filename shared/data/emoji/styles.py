"""The styles of ``emoji:``, their designers, and which of them the backbone pre-trained on emoji saw."""

from __future__ import annotations

from dataclasses import dataclass

SIZE = 64
"""Side of a picture in pixels."""


@dataclass(frozen=True)
class Style:
    """One style of a designer. Styles whose drawings are derived from one another share a ``family``.

    ``form`` is the package's format: ``iconify`` (one JSON of SVG bodies by name), ``files`` (one picture per code
    point, in ``folder``) or ``font``. ``licence`` is the licence that the package must declare to be read.
    """

    name: str
    family: str
    wording: str
    package: str
    licence: str
    form: str = "iconify"
    folder: str = ""


STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("flat", "microsoft", "a flat colour icon of a {}", "@iconify-json/fluent-emoji-flat", "MIT"),
        Style("modern", "microsoft", "a soft gradient icon of a {}", "@iconify-json/fluent-emoji", "MIT"),
        Style("three", "microsoft", "a glossy 3d render of a {}", "@lobehub/fluent-emoji-3d", "MIT", "files", "assets"),
        Style(
            "contrast", "microsoft", "a black stencil icon of a {}", "@iconify-json/fluent-emoji-high-contrast", "MIT"
        ),
        Style("noto", "google", "a shaded cartoon of a {}", "@iconify-json/noto", "Apache-2.0"),
        Style("notov1", "google", "an old rounded cartoon of a {}", "@iconify-json/noto-v1", "Apache-2.0"),
        Style(
            "notomono", "google", "a thin black line icon of a {}", "@fontsource/noto-emoji", "OFL-1.1", "font", "files"
        ),
        Style("fxemoji", "mozilla", "a muted flat drawing of a {}", "@iconify-json/fxemoji", "Apache-2.0"),
        Style("twemoji", "twitter", "a bright flat sticker of a {}", "@iconify-json/twemoji", "CC-BY-4.0"),
        Style("emojione", "joypixels", "a simple colour drawing of a {}", "@iconify-json/emojione", "CC-BY-4.0"),
        Style("e1mono", "joypixels", "a black silhouette of a {}", "@iconify-json/emojione-monotone", "CC-BY-4.0"),
        Style("emojione1", "joypixels", "an old glossy drawing of a {}", "@iconify-json/emojione-v1", "CC-BY-SA-4.0"),
        Style(
            "streamline",
            "webalys",
            "a thick outlined icon of a {}",
            "@iconify-json/streamline-emojis",
            "CC-BY-4.0",
        ),
        Style("openmoji", "hfg", "a coloured line drawing of a {}", "openmoji", "CC-BY-SA-4.0", "files", "color/svg"),
        Style("openmono", "hfg", "a black line drawing of a {}", "openmoji", "CC-BY-SA-4.0", "files", "black/svg"),
    )
}
NAMES_PACKAGE = "emojibase-data"
"""Names, groups and kinds of the code points (MIT; from Unicode's CLDR)."""

EMBEDDED = ("flat", "three", "contrast", "noto", "notov1", "notomono", "fxemoji")
"""Shipped with promptfed, since their licences ask for no more than a notice."""

COMMON = ("flat", "modern", "three", "noto", "notov1", "twemoji", "emojione")
"""Of which the backbone read many pictures in pre-training."""

RARE = ("contrast", "notomono", "e1mono", "streamline")
"""Of which it read few, and none at all of a third of the things."""

UNREAD_FAMILIES = ("mozilla", "hfg")
"""Designers of whom it read nothing. OpenMoji and the first EmojiOne are share-alike, and never in the weights."""


def packages() -> list[str]:
    """The packages of the data set, without duplicates."""
    return list(dict.fromkeys([NAMES_PACKAGE, *(style.package for style in STYLES.values())]))
