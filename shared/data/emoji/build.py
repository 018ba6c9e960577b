"""Builds the data set from unpacked packages. Pictures are drawn once here; training only reads them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from PIL import Image

from promptfed.shared.data.emoji import packages, store
from promptfed.shared.data.emoji.render import SvgRenderer
from promptfed.shared.data.emoji.styles import NAMES_PACKAGE, STYLES
from promptfed.shared.data.emoji.things import read_things
from promptfed.shared.data.source import DataError

LICENCES = Path(__file__).parent / "licences"
_NOTICE = """\
Pictures of things in {count} styles, drawn from these packages of the npm registry as {size} pixels on white.
Nothing else was changed. Each style stays under the licence of those who drew it:

{styles}

Names, groups and kinds: {names} (MIT), made from data of Unicode's CLDR (Unicode License v3).
The texts of the licences are in the folder licences; the Creative Commons' are at creativecommons.org/licenses.
"""


def build(root: Path, out: Path, tell: Callable[[str], None] = print, fetch: bool = True) -> None:
    """Draw every style of the packages under ``root`` into the folder ``out``. Missing packages are fetched with npm.

    Raises:
        DataError: ``out`` is in use, a package is missing, or its licence is not the expected one.
    """
    if out.exists() and any(out.iterdir()):
        raise DataError(f"{out} is not empty; name a folder that is not there yet.")
    if fetch:
        packages.fetch(root)
    licences = {style.package: style.licence for style in STYLES.values()} | {NAMES_PACKAGE: "MIT"}
    sources = [packages.provenance(root, package, licence) for package, licence in licences.items()]
    things = read_things(packages.folder_of(root, NAMES_PACKAGE))
    place_of = {thing: place for place, thing in enumerate(things)}
    styles: dict[str, dict[int, bytes]] = {}
    with SvgRenderer() as renderer:
        for style in STYLES.values():
            drawn = packages.pictures(root, style, things, renderer)
            styles[style.name] = {place_of[thing]: store.encoded(image) for thing, image in drawn if _shows(image)}
            tell(f"{style.name}: {len(styles[style.name])} pictures")
    write(out, store.Drawn(tuple(things), styles), sources)


def write(out: Path, drawn: store.Drawn, sources: list[dict[str, str]]) -> None:
    """Write pictures, index, notice and licences into the folder ``out``."""
    used = {STYLES[name].package for name in drawn.styles} | {NAMES_PACKAGE}
    sources = [source for source in sources if source["package"] in used]
    store.write(out, drawn, sources)
    told = {source["package"]: source for source in sources}
    lines = [_line(name, told[STYLES[name].package]) for name in drawn.styles]
    notice = _NOTICE.format(count=len(lines), size="64 x 64", styles="\n".join(lines), names=NAMES_PACKAGE)
    (out / "NOTICE.txt").write_text(notice, encoding="utf-8")
    if LICENCES.resolve() != (out / "licences").resolve():
        shutil.copytree(LICENCES, out / "licences", dirs_exist_ok=True)


def _line(name: str, source: dict[str, str]) -> str:
    return f"- {name}: {source['package']} {source['version']}, by {source['author']}, {source['licence']}"


def _shows(image: Image.Image) -> bool:
    """Whether the picture is not blank."""
    box = image.getchannel("A").getbbox()
    return box is not None
