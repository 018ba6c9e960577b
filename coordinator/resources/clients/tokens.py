"""Tokens of enrolment: create, list and revoke them. Withdrawing a client also closes its token."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain import clock
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.recovery import token_of
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.resources.clients.operations import client_name, refused_enrolments
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow, TokenRow
from promptfed.coordinator.store.tokens import digest, new_token
from promptfed.shared.api.api_schemas import MintedToken, TokenPage, TokenRequest, TokenView
from promptfed.shared.service.invitation import Invitation


def mint(
    registry: Registry, id: str, request: TokenRequest, default_hours: float, authority: str | None = None
) -> MintedToken:
    """Create an enrolment token. Only this answer contains the token itself, and an invitation if there is an address.

    ``authority``: the fingerprint of the coordinator's certificate, for the invitation.

    Raises:
        NotFound: it is for a name that no client has.
        NameTaken: another token of the federation has its name.
        WrongState: it is for a name that was not reset.
    """
    token, token_id = new_token(), "tok-" + secrets.token_hex(8)
    expires = clock.later((request.hours if request.hours is not None else default_hours) * 3600)
    with registry.change(id) as change:
        federation = change.federation
        name = request.name or token_id
        if any(name in (other.name, other.id) for other in federation.tokens.values()):
            raise problems.NameTaken(f"{federation.name} has an enrolment token {name!r}: choose another name")
        client = _reset_name(federation, request.client) if request.client is not None else None
        row = TokenRow(
            digest=digest(token),
            federation_id=id,
            created_at=clock.now(),
            expires_at=expires,
            id=token_id,
            name=name,
            role=request.role,
            uses=request.uses,
            used=0,
            client=client,
            closed=False,
        )
        change.session.add(row)
        change.federation = replace(federation, tokens={**federation.tokens, row.digest: token_of(row)})
        change.emit("token-minted", token=name, uses=request.uses)
        change.note("token-minted", token=name, uses=request.uses, role=request.role, client=client)
    minted = MintedToken(
        token=token, expires_at=clock.parse(expires), id=token_id, name=name, uses=request.uses, role=request.role
    )
    if request.address is None:
        return minted
    return minted.model_copy(update={"invitation": _invitation(federation, request, minted, authority)})


def _invitation(federation: Federation, request: TokenRequest, minted: MintedToken, authority: str | None) -> str:
    address = request.address or ""
    invitation = Invitation(
        coordinator=address,
        federation=federation.name,
        token=minted.token,
        expires_at=minted.expires_at,
        authority=authority if address.startswith("https://") else None,
        client=(request.client or request.name) if request.uses == 1 else None,
        role=request.role,
    )
    return invitation.encoded()


def _reset_name(federation: Federation, name_or_id: str) -> str:
    name = client_name(federation, name_or_id)
    if federation.clients[name].secret_digest is not None:
        text = f"{name!r} has a secret: reset it first, then mint the token with which it enrols again"
        raise problems.WrongState(text, state=federation.run.state)
    return name


def page(session: Session, federation: Federation, limit: int, after: str | None) -> TokenPage:
    """Tokens in order of id, with the clients that enrolled with them."""
    query = select(TokenRow).where(TokenRow.federation_id == federation.id)
    shown, following = queries.page(session, query, TokenRow.id, limit, after)
    came: dict[str | None, list[str]] = {}
    by_token = queries.clients(federation.id).where(ClientRow.token_id.in_([row.id for row in shown]))
    for token_id, name in session.execute(
        by_token.with_only_columns(ClientRow.token_id, ClientRow.name).order_by(ClientRow.name)
    ):
        came.setdefault(token_id, []).append(name)
    refused = {entry["token"]: entry | {"at": at} for entry, at in reversed(refused_enrolments(session, federation.id))}
    views = [_view(row, came.get(row.id, []), refused.get(row.name), federation) for row in shown]
    return TokenPage(tokens=views, next=following)


def _view(row: TokenRow, clients: list[str], refused: dict[str, Any] | None, federation: Federation) -> TokenView:
    stored = {name: getattr(row, name) for name in TokenView.model_fields if name not in ("clients", "refused")}
    waits = refused is not None and refused["client"] not in federation.clients and refused["at"] >= row.created_at
    return TokenView.model_validate({**stored, "clients": clients, "refused": refused if waits else None})


def revoke(registry: Registry, id: str, token: str) -> None:
    """Revoke a token. Clients that enrolled with it stay. Raises NotFound."""
    with registry.change(id) as change:
        federation = change.federation
        keys = [key for key, candidate in federation.tokens.items() if token in (candidate.id, candidate.name)]
        if not keys:
            raise problems.NotFound(f"{federation.name} has no enrolment token {token[:100]!r}: check its name")
        name = federation.tokens[keys[0]].name
        change.session.delete(change.session.get_one(TokenRow, keys[0]))
        kept = {key: candidate for key, candidate in federation.tokens.items() if key != keys[0]}
        change.federation = replace(federation, tokens=kept)
        change.emit("token-revoked", token=name)
        change.note("token-revoked", token=name)
