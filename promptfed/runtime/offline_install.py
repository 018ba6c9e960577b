"""Installs promptfed from the folder that this file is in, without network: `python install.py ENVIRONMENT`.

`promptfed bundle` packs it as ``install.py``. It needs Python alone.
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SUMS, LISTED, ABOUT = "SHA256SUMS", "requirements.txt", "bundle.json"
SELF_TEST = ("demo", "--data", "digits", "--method", "coop", "--rounds", "1")


def this_machine() -> str:
    """The system, processor and Python that wheels are made for."""
    return f"{platform.system()} {platform.machine()}, Python {sys.version_info.major}.{sys.version_info.minor}"


def check(folder: Path) -> None:
    """Compare each file with the list of sums. Raises ValueError if one is missing, altered or not listed."""
    listed = {}
    for line in (folder / SUMS).read_text().splitlines():
        digest, _, name = line.partition("  ")
        listed[name] = digest
    there = {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}
    if odd := sorted((there ^ set(listed)) - {SUMS, SUMS + ".sig"}):
        raise ValueError(f"{odd[0]} is {'missing' if odd[0] in listed else 'not part of the bundle'}")
    for name, digest in listed.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise ValueError(f"{name} is not the file that was packed")


def install(folder: Path, environment: Path) -> None:
    """Install into a virtual environment, which is made if it does not exist, and run the self-test.

    Raises:
        ValueError: a file is altered, or the bundle is for another kind of machine.
        subprocess.CalledProcessError: pip or the self-test ended with an error, which it has written.
    """
    check(folder)
    about = json.loads((folder / ABOUT).read_text())
    if about["machine"] != this_machine():
        raise ValueError(f"this bundle is for {about['machine']}, and this is {this_machine()}")
    if not (environment / "pyvenv.cfg").is_file():
        venv.create(environment, with_pip=True)
    scripts = environment / ("Scripts" if sys.platform == "win32" else "bin")
    pip: list[str | Path] = [scripts / "python", "-m", "pip", "--isolated", "--disable-pip-version-check"]
    offline: list[str | Path] = ["--no-index", "--no-deps", "--require-hashes", "--find-links", folder / "wheels"]
    subprocess.run([*pip, "install", "-q", *offline, "-r", folder / LISTED], check=True)  # noqa: S603
    subprocess.run([*pip, "check"], check=True)  # noqa: S603
    with tempfile.TemporaryDirectory() as elsewhere:
        promptfed = scripts / "promptfed"
        if "weights" in about:
            named = ["--model", about["model"], "--pretrained", about["pretrained"]]
            given = ["doctor", *named, "--backbone-file", folder / about["weights"]]
            subprocess.run([promptfed, *given], cwd=elsewhere, check=True)  # noqa: S603
        subprocess.run([promptfed, *SELF_TEST], cwd=elsewhere, check=True)  # noqa: S603


def main() -> int:
    """Install; the exit code is 1 after an error."""
    if len(sys.argv) != 2:
        print("usage: python install.py ENVIRONMENT", file=sys.stderr)
        return 2
    try:
        install(Path(__file__).resolve().parent, Path(sys.argv[1]).resolve())
    except (ValueError, OSError) as error:
        print(f"{error}: nothing was installed", file=sys.stderr)
        return 1
    except subprocess.CalledProcessError as error:
        print(f"{Path(error.cmd[0]).name} ended with code {error.returncode}: see above", file=sys.stderr)
        return 1
    print(f"promptfed is installed in {sys.argv[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
