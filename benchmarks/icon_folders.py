"""Icons of four themes as class folders, for a test on foreign pictures: ``python -m benchmarks.icon_folders``.

``--out DIR`` gets DIR/THEME/CLASS/*.png, for ``folder:DIR/{domain}``: everything that all four themes draw under the
same name and more than once (outlined, filled, bold). The packages come from npm; none of their
pictures is shipped.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from PIL import Image

from promptfed.shared.data.emoji.packages import SVG, fetch, folder_of
from promptfed.shared.data.emoji.render import SvgRenderer

# Package and licence of each theme; all are permissive.
THEMES = {
    "bootstrap": ("@iconify-json/bi", "MIT"),
    "material": ("@iconify-json/mdi", "Apache-2.0"),
    "phosphor": ("@iconify-json/ph", "MIT"),
    "tabler": ("@iconify-json/tabler", "MIT"),
}
VARIANTS = frozenset({"bold", "duotone", "fill", "filled", "light", "outline", "sharp", "thin"})
LEAST = 2  # pictures of a class in a theme, so that one can be tested on


def by_class(icons: Iterable[str]) -> dict[str, list[str]]:
    """The icons of each name that has several: ``bell-fill`` and ``bell`` are both of a bell."""
    classes: dict[str, list[str]] = defaultdict(list)
    for icon in sorted(icons):
        words = icon.split("-")
        while len(words) > 1 and words[-1] in VARIANTS:
            words.pop()
        classes[" ".join(words)].append(icon)
    return {name: variants for name, variants in classes.items() if len(variants) >= LEAST}


def draw(theme: dict[str, Any], icon: str, renderer: SvgRenderer) -> Image.Image | None:
    """One icon, black on white, (64, 64) RGB."""
    drawn = theme["icons"][icon]
    defaults = {"left": 0, "top": 0, "width": 16, "height": 16}
    box = {side: drawn.get(side, theme.get(side, default)) for side, default in defaults.items()}
    image = renderer.draw(SVG.format(body=drawn["body"].replace("currentColor", "#000"), **box))
    if image is None:
        return None
    paper = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(paper, image).convert("RGB")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", type=Path, default=Path("icon-packages"), help="where npm's packages lie")
    args = parser.parse_args()
    fetch(args.packages, [package for package, _ in THEMES.values()])
    themes: dict[str, dict[str, Any]] = {}
    for name, (package, licence) in THEMES.items():
        folder = folder_of(args.packages, package)
        declared = json.loads((folder / "info.json").read_text())["license"]["spdx"]
        if declared != licence:
            raise SystemExit(f"{folder} declares the licence {declared}, not {licence}: check it first")
        themes[name] = json.loads((folder / "icons.json").read_text())
    classes = {name: by_class(theme["icons"]) for name, theme in themes.items()}
    common = sorted(set.intersection(*(set(names) for names in classes.values())))
    with SvgRenderer() as renderer:
        for name, theme in themes.items():
            count = 0
            for label in common:
                for icon in classes[name][label]:
                    image = draw(theme, icon, renderer)
                    if image is not None:
                        folder = args.out / name / label
                        folder.mkdir(parents=True, exist_ok=True)
                        image.save(folder / f"{icon}.png")
                        count += 1
            print(f"{name}: {len(common)} classes, {count} pictures")


if __name__ == "__main__":
    main()
