"""The packages, named with their folders: `coordinator/` is promptfed.coordinator, and likewise the other two.

The build does not follow the links under promptfed/. A zip archive, or a checkout on Windows, has none.
"""

import os
from pathlib import Path

from setuptools import find_namespace_packages, setup
from setuptools.command.build_py import build_py

FOLDERS = {
    "promptfed.client_service": "client_service",
    "promptfed.coordinator": "coordinator",
    "promptfed.shared": "shared",
}
LINKED = tuple(pattern for name in FOLDERS.values() for pattern in (name, f"{name}.*"))
COMPILED = ("__pycache__", "*.__pycache__")


def packages() -> list[str]:
    """Every package with its full name; an error if a folder is missing, since the wheel would be incomplete.

    Folders of data are among them: setuptools warns at length of each one that is not.
    """
    found = [
        "promptfed",
        *(f"promptfed.{name}" for name in find_namespace_packages("promptfed", exclude=LINKED + COMPILED)),
    ]
    for package, folder in FOLDERS.items():
        below = find_namespace_packages(folder, exclude=COMPILED)
        if not below:
            raise SystemExit(f"{folder}/ holds no packages: build promptfed from a complete source tree")
        found += [package, *(f"{package}.{name}" for name in below)]
    return found


class WithCommit(build_py):
    """Writes the commit that PROMPTFED_COMMIT names into the package, for `promptfed --version`."""

    def run(self) -> None:
        """Build, then write."""
        super().run()
        commit = os.environ.get("PROMPTFED_COMMIT")
        if commit and not self.editable_mode:
            (Path(self.build_lib) / "promptfed" / "shared" / "commit.txt").write_text(commit + "\n")


setup(packages=packages(), package_dir=FOLDERS, cmdclass={"build_py": WithCommit})
