"""``.../enrolment`` and ``.../clients``: how clients come in, and how operators see and remove them."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Response, status
from sqlalchemy import select

from promptfed.coordinator.api.deps import After, ClientId, EngineOf, EnrollingAt, Limit, Operated
from promptfed.coordinator.operations import federations
from promptfed.coordinator.operations.enrolment import enrol, enrolment_info
from promptfed.coordinator.problems import (
    ANY_CALLER,
    CannotStart,
    DomainMissing,
    LateJoin,
    NameTaken,
    NoSamples,
    OtherBackbone,
    ProtocolVersion,
    SecretTaken,
    StorageFull,
    UnfitClient,
    UnknownClass,
    Withdrawn,
    WrongState,
    documented,
)
from promptfed.coordinator.reports.federations import client_view
from promptfed.coordinator.store.tables import ClientRow
from promptfed.shared.api_schemas import ClientPage, ClientView
from promptfed.shared.messages import EnrolmentInfo, EnrolRequest, EnrolResponse

router = APIRouter(prefix="/v1/federations/{federation}", tags=["enrolment"])


@router.get("/enrolment", responses=documented(*ANY_CALLER))
def get_enrolment(live: EnrollingAt) -> EnrolmentInfo:
    """What a client must know before it can enrol."""
    return enrolment_info(live)


@router.post(
    "/clients",
    status_code=status.HTTP_201_CREATED,
    response_model=EnrolResponse,
    responses={
        200: {"model": EnrolResponse, "description": "the same name and secret again: the same identity"},
        **documented(
            *ANY_CALLER,
            Withdrawn,
            NameTaken,
            SecretTaken,
            OtherBackbone,
            ProtocolVersion,
            LateJoin,
            WrongState,
            CannotStart,
            UnknownClass,
            DomainMissing,
            UnfitClient,
            NoSamples,
            StorageFull,
        ),
    },
)
def post_client(engine: EngineOf, live: EnrollingAt, request: EnrolRequest, response: Response) -> EnrolResponse:
    """Enrol under a name, with a secret of the client's own making; from then on it is its bearer token."""
    client, new = enrol(engine, live.id, request)
    if not new:
        response.status_code = status.HTTP_200_OK
    return EnrolResponse(client_id=client.id, federation_id=live.id, name=client.name)


@router.get("/clients", responses=documented(*ANY_CALLER))
def list_clients(engine: EngineOf, live: Operated, limit: Limit = 100, after: After = None) -> ClientPage:
    """Who has enrolled, in order of name, with last-seen and last refusal."""
    engine.activity.flush_if_possible()
    query = select(ClientRow).where(ClientRow.federation_id == live.id).order_by(ClientRow.name).limit(limit + 1)
    with engine.database.read() as session:
        rows = list(session.scalars(query.where(ClientRow.name > after) if after is not None else query))
        following = rows[limit - 1].name if len(rows) > limit else None
        return ClientPage(clients=[client_view(row) for row in rows[:limit]], next=following)


@router.delete(
    "/clients/{client_id}",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(*ANY_CALLER, WrongState, StorageFull),
)
def withdraw_client(
    engine: EngineOf,
    live: Operated,
    client_id: ClientId,
    discard: Annotated[bool, Query(description="drop its accepted update of the open phase too")] = False,
) -> None:
    """Take a client out: its open task is cancelled, it is not asked again, and it is refused from now on."""
    federations.withdraw(engine, live.id, client_id, discard)


@router.delete(
    "/clients/{client_id}/updates",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=documented(*ANY_CALLER, WrongState, StorageFull),
)
def delete_updates(engine: EngineOf, live: Operated, client_id: ClientId) -> None:
    """Delete the tensors that a client has sent, once it is withdrawn or all is over; reports keep their figures."""
    federations.delete_updates(engine, live.id, client_id)


@router.post("/clients/{client_id}/reset", responses=documented(*ANY_CALLER, StorageFull))
def reset_client(engine: EngineOf, live: Operated, client_id: ClientId) -> ClientView:
    """Free the client's name for a new secret; its identity stays, the old secret is void."""
    federations.reset(engine, live.id, client_id)
    with engine.database.read() as session:
        name = federations.client_name(live, client_id)
        mine = (ClientRow.federation_id == live.id, ClientRow.name == name)
        return client_view(session.scalars(select(ClientRow).where(*mine)).one())
