"""Tokens of operators: create, list and revoke them.

An operator has a name, a role, and tokens that expire.
"""

from __future__ import annotations

import secrets

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.audit import Operator
from promptfed.coordinator.engine.registry import EVENTS, Registry
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import OperatorRow
from promptfed.coordinator.store.tokens import digest, new_token
from promptfed.shared.api.api_schemas import MintedOperator, OperatorPage, OperatorRequest, OperatorView


def mint(registry: Registry, request: OperatorRequest) -> MintedOperator:
    """Create a token for an operator. Only this answer contains the token itself."""
    token, expires = new_token(), clock.later(request.hours * 3600)
    row = OperatorRow(
        digest=digest(token),
        id="opr-" + secrets.token_hex(8),
        name=request.name,
        role=request.role,
        created_at=clock.now(),
        expires_at=expires,
    )
    with registry.exclusively():
        with registry.database.write() as session:
            session.add(row)
            audit.note(session, "operator-named", operator=row.name, role=row.role, token=row.id)
        operator = Operator(row.id, row.name, request.role, clock.parse(expires))
        registry.operators = {**registry.operators, row.digest: operator}
    return MintedOperator(token=token, id=row.id, name=row.name, role=request.role, expires_at=clock.parse(expires))


def page(session: Session, limit: int, after: str | None) -> OperatorPage:
    """Operators' tokens in order of id."""
    rows, following = queries.page(session, select(OperatorRow), OperatorRow.id, limit, after)
    views = [OperatorView.model_validate(row, from_attributes=True) for row in rows]
    return OperatorPage(operators=views, next=following)


def revoke(registry: Registry, operator: str) -> None:
    """Revoke the token with this id, or all tokens of the operator with this name. Raises NotFound."""
    with registry.exclusively():
        gone = {key: named for key, named in registry.operators.items() if operator in (named.id, named.name)}
        if not gone:
            raise problems.NotFound(f"there is no operator {operator[:100]!r}, and no token of this id: check the name")
        with registry.database.write() as session:
            for key, named in gone.items():
                session.delete(session.get_one(OperatorRow, key))
                audit.note(session, "operator-revoked", operator=named.name, token=named.id)
        registry.operators = {key: named for key, named in registry.operators.items() if key not in gone}
    registry.wake([(id, EVENTS) for id in registry.federations])  # whose streams end
