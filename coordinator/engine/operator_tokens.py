"""Operators' tokens as the coordinator holds them in memory."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import cast

from promptfed.coordinator.domain import clock
from promptfed.coordinator.store.tables import OperatorRow
from promptfed.shared.api.access_schemas import OperatorRole


@dataclass(frozen=True)
class Operator:
    """An operator's token: whose it is, the role, until when.

    ``expired``: it was seen to have expired, whatever the clock says now.
    """

    id: str
    name: str
    role: OperatorRole
    expires: datetime
    expired: bool = False


def operator_of(row: OperatorRow) -> Operator:
    """A token's row as it is held in memory."""
    expires = clock.parse(row.expires_at)
    return Operator(row.id, row.name, cast(OperatorRole, row.role), expires, row.expired_at is not None)
