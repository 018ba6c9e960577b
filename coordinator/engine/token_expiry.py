"""Tokens that have expired, of operators and of enrolment: once marked they stay so, whatever the clock says later."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from sqlalchemy import bindparam, update

from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import EnrolmentToken
from promptfed.coordinator.engine.audit import Operator
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.store.tables import OperatorRow, TokenRow

Token = TypeVar("Token", Operator, EnrolmentToken)
_STATEMENTS = {
    table: update(table)
    .where(table.digest == bindparam("key"), table.expired_at.is_(None))
    .values(expired_at=bindparam("moment"))
    for table in (OperatorRow, TokenRow)
}


def has_expired(token: Operator | EnrolmentToken) -> bool:
    """Whether the token has expired: now by the wall clock, or earlier as a mark_expired says."""
    return token.expired or token.expires <= clock.utc()


def mark_expired(registry: Registry) -> None:
    """Mark newly expired tokens; without any, nothing is written. Raises SQLAlchemyError, DatabaseAway."""
    operators = _newly_expired(registry.operators)
    enrolment = {id: _newly_expired(federation.tokens) for id, federation in registry.federations.items()}
    enrolment = {id: digests for id, digests in enrolment.items() if digests}
    if not operators and not enrolment:
        return
    to_mark = ((OperatorRow, operators), (TokenRow, set().union(*enrolment.values())))
    with registry.exclusively():
        with registry.database.write() as session:
            for table, digests in to_mark:
                rows = [{"key": digest, "moment": clock.now()} for digest in sorted(digests)]
                if rows:
                    session.connection().execute(_STATEMENTS[table], rows)
        registry.operators = _with_marks(registry.operators, operators)
        for id, digests in enrolment.items():
            federation = registry.federations.get(id)
            if federation is not None:
                registry.note(id, tokens=_with_marks(federation.tokens, digests))


def _newly_expired(tokens: Mapping[str, Token]) -> set[str]:
    return {digest for digest, token in tokens.items() if not token.expired and has_expired(token)}


def _with_marks(tokens: Mapping[str, Token], expired: set[str]) -> dict[str, Token]:
    return {key: replace(token, expired=True) if key in expired else token for key, token in tokens.items()}
