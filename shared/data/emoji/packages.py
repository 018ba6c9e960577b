"""Unpacked packages of drawings: their folders, the check of their licences, and the pictures in them."""

from __future__ import annotations

import json
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from promptfed.shared.data.emoji.render import SvgRenderer, fitted
from promptfed.shared.data.emoji.styles import NAMES_PACKAGE, SIZE, Style, packages
from promptfed.shared.data.emoji.things import Thing, spellings, squeezed
from promptfed.shared.data.source import DataError
from promptfed.shared.service.reasons import why

SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
    'viewBox="{left} {top} {width} {height}" width="256" height="256">{body}</svg>'
)
_FONT_FILES = "noto-emoji-*-400-normal.woff2"
_TIMEOUT_S = 600
_NOT_IT = frozenset({("fxemoji", "bow and arrow"), ("fxemoji", "keyboard")})  # a ribbon, a piano: found by looking


def folder_of(root: Path, package: str) -> Path:
    """The folder of a package, named like npm's archives: ``iconify-json-noto`` for ``@iconify-json/noto``."""
    return root / package.removeprefix("@").replace("/", "-")


def fetch(root: Path) -> None:
    """Fetch the packages that emoji need and that are missing in ``root`` with npm, and unpack them.

    Raises:
        DataError: npm fails or is missing; without npm, the text lists the packages to unpack by hand.
    """
    missing = [package for package in packages() if not (folder_of(root, package) / "package.json").is_file()]
    if not missing:
        return
    npm = shutil.which("npm")
    if npm is None:
        listed = "; ".join(f"{package} as {folder_of(root, package).name}" for package in missing)
        raise DataError(f"npm is not here, so put these packages of its registry, unpacked, into {root}: {listed}.")
    root.mkdir(parents=True, exist_ok=True)
    for package in missing:
        done = subprocess.run(  # noqa: S603  fixed names from `styles`
            [npm, "pack", "--silent", package], cwd=root, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
        if done.returncode:
            raise DataError(f"npm cannot fetch {package}: {(done.stderr or done.stdout).strip()[-300:]}")
        archive = root / done.stdout.split()[-1]
        _unpack(archive, folder_of(root, package))
        archive.unlink()


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack the archive's single folder as ``folder``, completely or not at all."""
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    with tarfile.open(archive) as content:
        content.extractall(part, filter="data")
    [inner] = part.iterdir()
    shutil.rmtree(folder, ignore_errors=True)
    inner.rename(folder)
    part.rmdir()


def provenance(root: Path, package: str, licence: str) -> dict[str, str]:
    """A package's statement of origin. Raises DataError if it is missing or its licence is not the expected one."""
    folder = folder_of(root, package)
    told = _json(folder / "package.json")
    licences = {str(told.get("license"))}
    info: dict[str, Any] = {}
    if (folder / "info.json").is_file():
        info = _json(folder / "info.json")
        licences.add(str(info["license"]["spdx"]))
    if licences != {licence}:
        raise DataError(f"{folder} says it is under {' and '.join(sorted(licences))}, not {licence}: look at it first.")
    author = info.get("author", told.get("author"))
    if isinstance(author, dict):
        author = author["name"]
    return {"package": package, "version": str(told["version"]), "licence": licence, "author": str(author)}


def shortcodes(root: Path) -> dict[str, list[str]]:
    """Short names of each code point, from the package of names."""
    names_of: dict[str, list[str]] = {}
    for file in sorted((folder_of(root, NAMES_PACKAGE) / "en" / "shortcodes").glob("*.json")):
        for code, names in _json(file).items():
            names_of.setdefault(code, []).extend([names] if isinstance(names, str) else names)
    return names_of


def pictures(
    root: Path, style: Style, things: list[Thing], renderer: SvgRenderer
) -> Iterator[tuple[Thing, Image.Image]]:
    """The things of a style with their pictures (SIZE, SIZE) RGBA, without those that cannot be drawn."""
    folder = folder_of(root, style.package)
    things = [thing for thing in things if (style.name, thing.name) not in _NOT_IT]
    if style.form == "iconify":
        yield from _iconify(folder, things, shortcodes(root), renderer)
    elif style.form == "files":
        yield from _files(folder / style.folder, things, renderer)
    else:
        yield from _font(folder / style.folder, things)


def _iconify(
    folder: Path, things: list[Thing], codes: dict[str, list[str]], renderer: SvgRenderer
) -> Iterator[tuple[Thing, Image.Image]]:
    whole = _json(folder / "icons.json")
    icons = whole["icons"]
    by_spelling = {squeezed(name): name for name in icons}
    for alias, target in whole.get("aliases", {}).items():
        if set(target) == {"parent"}:  # neither rotated nor mirrored
            by_spelling.setdefault(squeezed(alias), target["parent"])
    by_code = {_code(code): name for code, name in _json(folder / "chars.json").items()}
    for thing in things:
        name = by_code.get(_code(thing.code)) or next(
            (by_spelling[word] for word in spellings(thing, codes) if word in by_spelling), None
        )
        if name is None or name not in icons:
            continue
        icon = icons[name]
        box = {
            side: icon.get(side, whole.get(side, default))
            for side, default in (("left", 0), ("top", 0), ("width", 16), ("height", 16))
        }
        image = renderer.draw(SVG.format(body=icon["body"], **box))
        if image is not None:
            yield thing, image


def _files(folder: Path, things: list[Thing], renderer: SvgRenderer) -> Iterator[tuple[Thing, Image.Image]]:
    by_code = {_code(file.stem): file for file in sorted(folder.iterdir())}
    for thing in things:
        file = by_code.get(_code(thing.code))
        if file is None:
            continue
        if file.suffix == ".svg":
            image = renderer.draw(file.read_text(encoding="utf-8"))
        else:
            with Image.open(file) as raster:
                image = fitted(raster)
        if image is not None:
            yield thing, image


def _font(folder: Path, things: list[Thing]) -> Iterator[tuple[Thing, Image.Image]]:
    """Pictures from a web font. It is divided into files; each character is drawn from the file that contains it."""
    fonts = [ImageFont.truetype(str(file), 4 * SIZE) for file in sorted(folder.glob(_FONT_FILES))]
    nothing = [_mask(font, "\U0010fffd").tobytes() for font in fonts]
    for thing in things:
        text = thing.text.replace("\ufe0f", "")
        if len(text) != 1:
            continue
        for font, blank in zip(fonts, nothing, strict=True):
            mask = _mask(font, text)
            if mask.getbbox() is None or mask.tobytes() == blank:
                continue
            image = Image.new("RGBA", mask.size, (0, 0, 0, 0))
            image.putalpha(mask)
            yield thing, fitted(image)
            break


def _mask(font: ImageFont.FreeTypeFont, text: str) -> Image.Image:
    side = 5 * SIZE
    mask = Image.new("L", (side, side), 0)
    ImageDraw.Draw(mask).text((side / 2, side / 2), text, fill=255, font=font, anchor="mm")
    return mask


def _code(text: str) -> str:
    """The common spelling of a code point: upper case, without the variation selector."""
    return "-".join(part for part in text.upper().split("-") if part != "FE0F")


def _json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read; unpack its package again ({why(error)}).") from error
