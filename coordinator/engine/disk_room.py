"""The disk space that a federation of large updates needs."""

from __future__ import annotations

import shutil

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.shared.api.api_schemas import DiskView
from promptfed.shared.methods.core.checks import needed_bytes
from promptfed.shared.methods.core.interface import MethodError, ServerContext
from promptfed.shared.plain_text import counted


def disk_of(registry: Registry, federation: Federation, context: ServerContext) -> DiskView | None:
    """Disk space for the enrolled trainers, or as many as the spec asks for; None if it is small.

    Raises MethodError as ``dims`` does.
    """
    trainers = max(len(federation.run.trainers()), federation.spec.participation.min_clients)
    needed = needed_bytes(federation.spec, federation.method, context, trainers)
    if not needed:
        return None
    return DiskView(needed=needed, trainers=trainers, free=shutil.disk_usage(registry.blobs.incoming).free)


def no_room(disk: DiskView) -> str:
    """Why a federation does not fit, and what to do."""
    trainers = counted(disk.trainers, "trainer needs", "trainers need")
    text = f"{trainers} about {disk.needed:,} bytes of disk at once, and {disk.free:,} are free"
    return f"{text}: make room, train less, or send transport: bfloat16 where the method has it"


def disk_told(registry: Registry, federation: Federation) -> DiskView | None:
    """As ``disk_of``; None while the backbone's shape is unknown."""
    if federation.shape is None or federation.absent is not None:
        return None
    try:
        return disk_of(registry, federation, federation.context())
    except MethodError:
        return None  # The start says why it cannot run.
