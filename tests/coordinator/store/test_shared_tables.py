"""What test coordinators of one process share is empty tables: no row of one is in another."""

from __future__ import annotations

from pathlib import Path

from tests.support import once
from tests.support.coordinators import in_process


def names(folder: Path, *made: str) -> list[str]:
    """The federations of the store in ``folder``, after those ``made``."""
    with in_process(folder) as coordinator:
        for name in made:
            coordinator.create(name=name)
        return [federation["name"] for federation in coordinator.get("/v1/federations")["federations"]]


def test_a_store_that_is_opened_again_lends_its_rows_to_nobody(tmp_path: Path) -> None:
    assert names(tmp_path / "first", "eyes") == ["eyes"]
    once._tables.cache_clear()
    assert names(tmp_path / "first") == ["eyes"]
    assert names(tmp_path / "second") == []
    assert names(tmp_path / "second", "lungs") == ["lungs"]
    assert names(tmp_path / "third") == [], "its tables are a copy"
