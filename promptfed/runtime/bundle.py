"""`promptfed bundle`: one file with all that an installation without network needs."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Set
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from promptfed.runtime import offline_install
from promptfed.runtime.offline_install import ABOUT, LISTED, SUMS
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.spec.versions import RELEASE

NAMESPACE = "promptfed"  # of the signature, as of those of releases


def write_bundle(
    out: Path, wheel: Path, without: Set[str], backbone: tuple[str, str] | None, weights: Path | None, key: Path | None
) -> int:
    """Write the bundle ``out`` and return how many wheels it has, in the versions that are installed here.

    Args:
        out: a tar archive with one folder, of the name of the file.
        wheel: promptfed's own.
        without: distributions that the other machine has, with those that only they need.
        backbone: model and pretrained of ``weights``.
        weights: a file with the backbone's weights.
        key: an SSH key that signs the list of sums.

    Raises:
        CommandError: a wheel cannot be had, a file cannot be read, or the key does not sign.
    """
    for file in (wheel, weights, key):
        if file is not None and not file.is_file():
            raise CommandError(f"there is no file {file}; check the path", Exit.BAD_INPUT)
    with tempfile.TemporaryDirectory(prefix="promptfed-bundle-") as temporary:
        folder = Path(temporary) / out.stem
        wheels = folder / "wheels"
        wheels.mkdir(parents=True)
        _own(wheel, wheels)
        _collect(installed_versions(without), wheels, Path(temporary))
        (folder / LISTED).write_text(_requirements(wheels))
        shutil.copy(offline_install.__file__, folder / "install.py")
        about = {"release": RELEASE, "machine": offline_install.this_machine()}
        if backbone is not None and weights is not None:
            shutil.copy(weights, folder / weights.name)
            about |= {"model": backbone[0], "pretrained": backbone[1], "weights": weights.name}
        (folder / ABOUT).write_text(json.dumps(about, indent=1) + "\n")
        files = sorted(file for file in folder.rglob("*") if file.is_file())
        sums = [f"{_digest(file)}  {file.relative_to(folder).as_posix()}\n" for file in files]
        (folder / SUMS).write_bytes("".join(sums).encode())
        if key is not None:
            _sign(folder / SUMS, key)
        with tarfile.open(out, "w") as archive:
            archive.add(folder, folder.name)
        return len(list(wheels.iterdir()))


def installed_versions(without: Set[str]) -> dict[str, str]:
    """Name and version of each distribution that promptfed needs here, but ``without`` and what only they need."""
    left_out = {canonicalize_name(name) for name in without}
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name("promptfed"), "")]  # with an extra, or none
    while waiting:
        name, extra = waiting.pop()
        if name in left_out or (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name] = Version(metadata.version(name)).public
        for needed in map(Requirement, metadata.requires(name) or []):
            if needed.marker is None or needed.marker.evaluate({"extra": extra}):
                waiting += [(canonicalize_name(needed.name), inner) for inner in ("", *needed.extras)]
    del found["promptfed"]
    return found


def _own(wheel: Path, wheels: Path) -> None:
    """Copy promptfed's own wheel. Raises CommandError where it is another distribution or version."""
    try:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        fits = (name, str(version)) == ("promptfed", RELEASE)
    except InvalidWheelFilename:
        fits = False
    if not fits:
        text = f"{wheel.name} is not the wheel of promptfed {RELEASE}, which runs here: give the one of that release"
        raise CommandError(text, Exit.BAD_INPUT)
    shutil.copy(wheel, wheels)


def _collect(versions: dict[str, str], wheels: Path, temporary: Path) -> None:
    """Let pip find or build each wheel; its settings say where. Raises CommandError with pip's last error."""
    listed = temporary / "versions.txt"
    listed.write_text("".join(f"{name}=={version}\n" for name, version in sorted(versions.items())))
    _run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), "-r", str(listed)],
        "pip did not find all wheels",
    )


def _requirements(wheels: Path) -> str:
    """What pip reads in the mode that checks hashes: each wheel's name, version and hash."""
    lines = []
    for wheel in sorted(wheels.iterdir()):
        name, version, _, _ = parse_wheel_filename(wheel.name)
        lines.append(f"{name}=={version} --hash=sha256:{_digest(wheel)}\n")
    return "".join(lines)


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _sign(file: Path, key: Path) -> None:
    _run(["ssh-keygen", "-q", "-Y", "sign", "-f", str(key), "-n", NAMESPACE, str(file)], f"{key} does not sign")


def _run(command: list[str], failed: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)  # noqa: S603
    except FileNotFoundError:
        raise CommandError(f"{failed}: {command[0]} is not installed", Exit.BAD_INPUT) from None
    if done.returncode != 0:
        said = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        errors = [line for line in said if line.startswith("ERROR: ")] or said
        reason = errors[-1].removeprefix("ERROR: ") if errors else "no reason given"
        raise CommandError(f"{failed}: {reason}", Exit.BAD_INPUT)
