"""``.../enrolment``, ``.../clients``, ``.../enrolment-tokens``: enrolment, and what operators do about clients."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response, status

from promptfed.coordinator import problems
from promptfed.coordinator.engine import audit
from promptfed.coordinator.http import deps, openapi
from promptfed.coordinator.http.callers import address_of
from promptfed.coordinator.http.certificates import check_certificate, fingerprint
from promptfed.coordinator.http.receipts import Stored
from promptfed.coordinator.resources.clients import operations, tokens
from promptfed.coordinator.resources.clients.views import client_view
from promptfed.coordinator.store import queries
from promptfed.coordinator.store.tables import ClientRow
from promptfed.shared.api.api_schemas import ClientPage, ClientView, MintedToken, TokenPage, TokenRequest
from promptfed.shared.messages import EnrolmentInfo, EnrolRequest, EnrolResponse
from promptfed.shared.versions import RELEASE

router = openapi.router(prefix="/v1/federations/{federation}", tags=["enrolment"])


@router.get("/enrolment", responses=openapi.for_callers())
def get_enrolment(caller: deps.EnrollingBy) -> EnrolmentInfo:
    """What a client must know before it can enrol."""
    return operations.enrolment_info(caller.federation)


@router.post(
    "/clients",
    status_code=status.HTTP_201_CREATED,
    response_model=EnrolResponse,
    responses={
        200: {"model": EnrolResponse, "description": "the same name and secret again: the same identity"},
        **openapi.for_callers(
            problems.Withdrawn,
            problems.NameTaken,
            problems.TokenUsedUp,
            problems.OtherToken,
            problems.Starting,
            problems.SecretTaken,
            problems.OtherBackbone,
            operations.IdentityMissing,
            problems.PrivacyMissing,
            problems.PrivacyMismatch,
            operations.BadProof,
            operations.KeyTaken,
            operations.IdentityChanged,
            problems.WrongState,
            problems.CannotStart,
            problems.UnknownClass,
            problems.OtherClasses,
            problems.TooManyClassNames,
            problems.DomainMissing,
            problems.UnfitClient,
            problems.NoSamples,
            problems.PrivacyMismatch,
            problems.StorageFull,
        ),
    },
)
async def post_client(
    request: Request, registry: deps.RegistryOf, caller: deps.EnrollingBy, enrolment: EnrolRequest
) -> Response:
    """Enrol under a name, with a secret that the client has created. The secret is its bearer token from then on."""
    registry.committer.notice()
    request.state.newcomer = caller.federation.id, enrolment.name, caller.token  # whose refusal operators see
    check_certificate(request, enrolment.name)
    with registry.committer.coming():
        client, new = await operations.enrol(registry, caller.federation.id, enrolment, caller.token)
    receipt = EnrolResponse(client_id=client.id, federation_id=caller.federation.id, name=client.name, release=RELEASE)
    return Stored(receipt, new)


@router.get("/clients", responses=openapi.for_callers())
def list_clients(
    registry: deps.RegistryOf, federation: deps.Informed, limit: deps.Limit = 100, after: deps.After = None
) -> ClientPage:
    """The enrolled clients in order of name, with their last request and last refusal."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        rows, following = queries.page(session, queries.clients(federation.id), ClientRow.name, limit, after)
        return ClientPage(clients=[client_view(row) for row in rows], next=following)


@router.delete(
    "/clients/{client_id}",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=openapi.for_callers(problems.WrongState, problems.StorageFull, problems.UpdatesMasked),
)
def withdraw_client(
    registry: deps.RegistryOf,
    federation: deps.Operated,
    client_id: deps.ClientId,
    discard: Annotated[bool, Query(description="drop its accepted update of the open phase too")] = False,
) -> None:
    """Withdraw a client: its open task is cancelled, it gets no further tasks, and its requests are refused."""
    if discard:
        operations.expect_discardable(federation)
    operations.withdraw(registry, federation.id, client_id, discard)


@router.post(
    "/withdrawal",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=openapi.for_callers(problems.Withdrawn, problems.WrongState, problems.StorageFull),
)
def withdraw_itself(request: Request, registry: deps.RegistryOf, caller: deps.Calling) -> None:
    """Leave the federation: a withdrawal by the client itself. Its update of the open phase does not count."""
    audit.actor.set(audit.Actor(caller.client.name, "client", address_of(request)))
    operations.withdraw(registry, caller.federation.id, caller.client.id, discard=True)


@router.delete(
    "/clients/{client_id}/updates",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=openapi.for_callers(problems.WrongState, problems.StorageFull),
)
async def delete_updates(registry: deps.RegistryOf, federation: deps.Operated, client_id: deps.ClientId) -> None:
    """Delete the tensors that a client has sent, after its withdrawal or the federation's end. Reports stay.

    If the state has a part for this client alone, the part is removed.
    """
    await operations.delete_updates(registry, federation.id, client_id)


@router.post("/clients/{client_id}/reset", responses=openapi.for_callers(problems.StorageFull))
def reset_client(registry: deps.RegistryOf, federation: deps.Operated, client_id: deps.ClientId) -> ClientView:
    """Void the client's secret, so that its name can enrol again with a token for this name. Its id stays."""
    operations.reset(registry, federation.id, client_id)
    with registry.database.read() as session:
        return client_view(queries.client(session, federation.id, operations.client_name(federation, client_id)))


@router.post(
    "/enrolment-tokens",
    status_code=status.HTTP_201_CREATED,
    responses=openapi.for_callers(problems.NameTaken, problems.WrongState, problems.StorageFull),
)
def mint_token(
    registry: deps.RegistryOf, settings: deps.SettingsOf, federation: deps.Operated, request: TokenRequest | None = None
) -> MintedToken:
    """Create an enrolment token for one client, or for ``uses`` clients; with an address, also an invitation."""
    return tokens.mint(registry, federation.id, request or TokenRequest(), settings.token_hours, fingerprint(settings))


@router.get("/enrolment-tokens", responses=openapi.for_callers())
def list_tokens(
    registry: deps.RegistryOf, federation: deps.Viewed, limit: deps.Limit = 100, after: deps.After = None
) -> TokenPage:
    """Enrolment tokens without their secrets: their limits, and the clients that enrolled with them."""
    with registry.database.read() as session:
        return tokens.page(session, federation, limit, after)


@router.delete(
    "/enrolment-tokens/{token_id}",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=openapi.for_callers(problems.StorageFull),
)
def revoke_token(registry: deps.RegistryOf, federation: deps.Operated, token_id: deps.TokenId) -> None:
    """Revoke an enrolment token. Clients that enrolled with it stay."""
    tokens.revoke(registry, federation.id, token_id)
