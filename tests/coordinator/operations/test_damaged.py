"""A disk that lies: damaged bytes are noticed and named, and the federation waits until they are put back."""

from __future__ import annotations

import pytest
from sqlalchemy import delete, select

from promptfed.coordinator.store import blobs
from promptfed.coordinator.store.tables import BlobRow, UpdateRow
from promptfed.testing.clients import drive
from tests.support.coordinators import InThread
from tests.support.open_phases import paused_phase

PLACES = ("rows", "files")
HOWS = ("flipped", "truncated", "missing")


@pytest.fixture(params=PLACES)
def kept_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Whether blobs are rows or files."""
    if request.param == "files":
        monkeypatch.setattr(blobs, "SMALL_BYTES", -1)
    return str(request.param)


def damage(coordinator: InThread, digest: str, how: str = "flipped") -> None:
    """What a disk may do to a blob."""
    blobs = coordinator.registry.blobs
    content = blobs.read(digest)
    middle = len(content) - 3
    changed = {
        "flipped": content[:middle] + bytes([content[middle] ^ 16]) + content[middle + 1 :],
        "truncated": content[:middle],
        "missing": None,
    }[how]
    path = blobs.path(digest)
    if path.exists() and changed is not None:
        path.write_bytes(changed)
    elif path.exists():
        path.unlink()
    else:
        with coordinator.registry.database.write() as session:
            here = BlobRow.digest == digest
            session.execute(delete(BlobRow).where(here))
            if changed is not None:
                session.add(BlobRow(digest=digest, content=changed))
    blobs._remembered.forget([digest])


def put_back(coordinator: InThread, digest: str, content: bytes) -> None:
    """As from a backup."""
    path = coordinator.registry.blobs.path(digest)
    if coordinator.registry.blobs.is_small(len(content)):
        with coordinator.registry.database.write() as session:
            session.execute(delete(BlobRow).where(BlobRow.digest == digest))
            session.add(BlobRow(digest=digest, content=content))
    else:
        path.write_bytes(content)


@pytest.mark.both_databases
@pytest.mark.parametrize("how", HOWS)
def test_a_damaged_update_is_named_and_waits_until_it_is_put_back(
    coordinator: InThread, kept_as: str, how: str
) -> None:
    federation, clients = paused_phase(coordinator, rounds=2)
    with coordinator.registry.database.read() as session:
        digest = session.scalars(select(UpdateRow.sha256).order_by(UpdateRow.task_id)).first()
    assert digest is not None
    content = coordinator.registry.blobs.read(digest)
    damage(coordinator, digest, how)
    for _ in range(2):  # as long as it is damaged, a resume comes to the same end
        coordinator.post(f"{federation}/resume")
        reason = coordinator.until(federation, state="paused")["reason"]
        assert reason.startswith(f"damaged: {digest} ")
        assert {"flipped": "has changed", "truncated": "has changed", "missing": "is missing"}[how] in reason
    put_back(coordinator, digest, content)
    coordinator.post(f"{federation}/resume")
    drive(clients)
    assert coordinator.get(federation)["state"] == "finished"
