"""``/v1/operators`` and ``/v1/audit-log``: who may operate this coordinator, and what was done. For admins."""

from __future__ import annotations

from fastapi import APIRouter, status

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import After, IsAdmin, Limit, OperatorId, RegistryOf
from promptfed.coordinator.engine import audit
from promptfed.coordinator.operations import operators
from promptfed.shared.api.access_schemas import AuditPage, MintedOperator, OperatorPage, OperatorRequest

router = APIRouter(prefix="/v1", tags=["operators"])


@router.post(
    "/operators",
    status_code=status.HTTP_201_CREATED,
    responses=described.for_callers(problems.StorageFull),
)
def mint_operator(registry: RegistryOf, _: IsAdmin, request: OperatorRequest) -> MintedOperator:
    """Give an operator a token; one that has another goes on with both."""
    return operators.mint(registry, request)


@router.get("/operators", responses=described.for_callers())
def list_operators(registry: RegistryOf, _: IsAdmin, limit: Limit = 100, after: After = None) -> OperatorPage:
    """Operators' tokens, without their texts; the data folder's is not among them."""
    with registry.database.read() as session:
        return operators.page(session, limit, after)


@router.delete(
    "/operators/{operator}",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=described.for_callers(problems.StorageFull),
)
def revoke_operator(registry: RegistryOf, _: IsAdmin, operator: OperatorId) -> None:
    """Take back one token by its id, or all of an operator by his name."""
    operators.revoke(registry, operator)


@router.get("/audit-log", responses=described.for_callers())
def get_audit_log(registry: RegistryOf, _: IsAdmin, limit: Limit = 100, after: After = None) -> AuditPage:
    """What was done, by whom and from where, in order; it is kept when a federation is deleted."""
    begin = int(after) if after is not None and after.isdecimal() else 0
    with registry.database.read() as session:
        entries = list(audit.entries(session, min(begin, 1 << 62), limit + 1))
    following = str(entries[limit - 1].number) if len(entries) > limit else None
    return AuditPage(entries=entries[:limit], next=following)
