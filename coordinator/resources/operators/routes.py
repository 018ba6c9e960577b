"""``/v1/operators`` and ``/v1/audit-log``: operators' tokens and the audit log. For admins."""

from __future__ import annotations

from fastapi import status

from promptfed.coordinator import problems
from promptfed.coordinator.engine import audit
from promptfed.coordinator.http import openapi
from promptfed.coordinator.http.deps import After, IsAdmin, Limit, OperatorId, RegistryOf
from promptfed.coordinator.resources.operators import tokens
from promptfed.shared.api.api_schemas import AuditPage, MintedOperator, OperatorPage, OperatorRequest

router = openapi.router(prefix="/v1", tags=["operators"])


@router.post("/operators", status_code=status.HTTP_201_CREATED, responses=openapi.for_callers(problems.StorageFull))
def mint_operator(registry: RegistryOf, _: IsAdmin, request: OperatorRequest) -> MintedOperator:
    """Create a token for an operator. Earlier tokens of the operator stay valid."""
    return tokens.mint(registry, request)


@router.get("/operators", responses=openapi.for_callers())
def list_operators(registry: RegistryOf, _: IsAdmin, limit: Limit = 100, after: After = None) -> OperatorPage:
    """Operators' tokens without their secrets. The data folder's token is not listed."""
    with registry.database.read() as session:
        return tokens.page(session, limit, after)


@router.delete(
    "/operators/{operator}", status_code=status.HTTP_204_NO_CONTENT, responses=openapi.for_callers(problems.StorageFull)
)
def revoke_operator(registry: RegistryOf, _: IsAdmin, operator: OperatorId) -> None:
    """Revoke one token by its id, or all tokens of an operator by name."""
    tokens.revoke(registry, operator)


@router.get("/audit-log", responses=openapi.for_callers())
def get_audit_log(registry: RegistryOf, _: IsAdmin, limit: Limit = 100, after: After = None) -> AuditPage:
    """Who did what, when and from where, in order. Entries of deleted federations are kept."""
    begin = int(after) if after is not None and after.isdecimal() else 0
    with registry.database.read() as session:
        entries = list(audit.entries(session, min(begin, 1 << 62), limit + 1))
    following = str(entries[limit - 1].number) if len(entries) > limit else None
    return AuditPage(entries=entries[:limit], next=following)
