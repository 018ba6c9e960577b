"""Wheels of what is installed here, packed again, so that a test needs no package index."""

from __future__ import annotations

import zipfile
from importlib import metadata
from pathlib import Path

from packaging.tags import sys_tags

NOT_PACKED = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}


def pack(name: str, folder: Path) -> Path:
    """The wheel of an installed distribution, without the programs that entry points make again."""
    distribution = metadata.distribution(name)
    packed = {
        file.as_posix(): Path(str(distribution.locate_file(file)))
        for file in distribution.files or []
        if ".." not in file.parts and file.suffix != ".pyc" and file.name not in NOT_PACKED
    }
    [info] = {file.partition("/")[0] for file in packed if file.endswith(".dist-info/WHEEL")}
    tags = [line.split()[1] for line in (distribution.read_text("WHEEL") or "").splitlines() if line.startswith("Tag:")]
    tag = next(str(tag) for tag in sys_tags() if str(tag) in tags)
    wheel = folder / f"{info.removesuffix('.dist-info')}-{tag}.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for place, file in packed.items():
            archive.write(file, place)
        archive.writestr(f"{info}/RECORD", "".join(f"{place},,\n" for place in (*packed, f"{info}/RECORD")))
    return wheel


def link(names: set[str], folder: Path) -> None:
    """Links in ``folder`` to the modules of installed distributions: another environment may add it to its path."""
    folder.mkdir()
    for name in names:
        for place in {file.parts[0] for file in metadata.files(name) or [] if ".." not in file.parts}:
            target = Path(str(metadata.distribution(name).locate_file(place)))
            if target.exists() and not (folder / place).exists():
                (folder / place).symlink_to(target)
