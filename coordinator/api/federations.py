"""``/v1/federations``: create, look at, steer, delete. For operators."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import APIRouter, Body, Header, Query, Request, Response, status
from fastapi.responses import JSONResponse

from promptfed.coordinator.api.deps import After, EngineOf, IsOperator, Limit, Operated, SettingsOf
from promptfed.coordinator.operations import federations
from promptfed.coordinator.problems import (
    ANY_CALLER,
    BodyTooLarge,
    CannotStart,
    InitialStateMismatch,
    InitialStateMissing,
    InvalidSpec,
    KeyReused,
    NameTaken,
    NotEnoughClients,
    StorageFull,
    WrongState,
    documented,
)
from promptfed.coordinator.reports.federations import federation_view
from promptfed.coordinator.task_problems import (
    BadMetadata,
    HeaderTooLarge,
    IncompleteBody,
    MissingTensor,
    NotFinite,
    NotSafetensors,
    TooManyUploads,
    UnknownTensor,
    WrongDtype,
    WrongShape,
)
from promptfed.shared.api_schemas import (
    DryRun,
    FederationPage,
    FederationView,
    MintedToken,
    SuppliedState,
    TokenRequest,
)

router = APIRouter(prefix="/v1/federations", tags=["federations"])

SPEC_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/FederationSpec"}}},
    }
}
TENSOR_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
TENSORS = (
    BodyTooLarge,
    NotSafetensors,
    HeaderTooLarge,
    BadMetadata,
    UnknownTensor,
    MissingTensor,
    WrongShape,
    WrongDtype,
    NotFinite,
    IncompleteBody,
    TooManyUploads,
    StorageFull,
)


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    response_model=FederationView,
    responses={
        200: {"model": DryRun, "description": "with `dry_run`: the spec is good"},
        **documented(*ANY_CALLER, InvalidSpec, NameTaken, KeyReused, StorageFull),
    },
    openapi_extra=SPEC_BODY,
)
def create(
    engine: EngineOf,
    _: IsOperator,
    response: Response,
    spec: Annotated[dict[str, Any], Body()],
    dry_run: Annotated[bool, Query(description="only check the spec")] = False,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Any:
    """Create a federation from a spec; what it leaves out takes the method's defaults."""
    if dry_run:
        return JSONResponse(DryRun(spec=federations.resolve(spec)).model_dump(mode="json"))
    live = federations.create(engine, spec, idempotency_key)
    response.headers["Location"] = f"/v1/federations/{live.id}"
    with engine.database.read() as session:
        return federation_view(session, live)


@router.get("", responses=documented(*ANY_CALLER))
def list_federations(engine: EngineOf, _: IsOperator, limit: Limit = 100, after: After = None) -> FederationPage:
    """All federations, oldest first."""
    lives = list(engine.lives.values())
    ids = [live.id for live in lives]
    begin = ids.index(after) + 1 if after in ids else 0
    page = lives[begin : begin + limit]
    following = page[-1].id if page and begin + limit < len(lives) else None
    with engine.database.read() as session:
        return FederationPage(federations=[federation_view(session, live) for live in page], next=following)


@router.get("/{federation}", responses=documented(*ANY_CALLER))
def get_federation(engine: EngineOf, live: Operated) -> FederationView:
    """One federation: resolved spec, state and reason, round and phase, who has answered, who is awaited until when."""
    with engine.database.read() as session:
        return federation_view(session, live)


@router.delete("/{federation}", status_code=status.HTTP_204_NO_CONTENT, responses=documented(*ANY_CALLER, StorageFull))
def delete_federation(engine: EngineOf, live: Operated) -> None:
    """Delete it with all its data."""
    federations.delete(engine, live.id)


def _steer(engine: EngineOf, live: Operated, verb: str) -> FederationView:
    federations.steer(engine, live.id, verb)
    with engine.database.read() as session:
        return federation_view(session, engine.live(live.id))


@router.post(
    "/{federation}/start",
    responses=documented(
        *ANY_CALLER, WrongState, NotEnoughClients, InitialStateMissing, InitialStateMismatch, CannotStart, StorageFull
    ),
)
def start(engine: EngineOf, live: Operated) -> FederationView:
    """Start the rounds; confirms the backbone that the first client enrolled with."""
    return _steer(engine, live, "start")


@router.post("/{federation}/pause", responses=documented(*ANY_CALLER, WrongState, StorageFull))
def pause(engine: EngineOf, live: Operated) -> FederationView:
    """Ask nobody until it is resumed; updates of open tasks are still taken."""
    return _steer(engine, live, "pause")


@router.post("/{federation}/resume", responses=documented(*ANY_CALLER, WrongState, StorageFull))
def resume(engine: EngineOf, live: Operated) -> FederationView:
    """Go on; an open phase gets its full deadline again. After a missed quorum, those who failed are asked again."""
    return _steer(engine, live, "resume")


@router.post("/{federation}/cancel", responses=documented(*ANY_CALLER, WrongState, StorageFull))
def cancel(engine: EngineOf, live: Operated) -> FederationView:
    """End it for good."""
    return _steer(engine, live, "cancel")


@router.put(
    "/{federation}/initial-state",
    responses=documented(*ANY_CALLER, WrongState, *TENSORS),
    openapi_extra=TENSOR_BODY,
)
async def put_initial_state(request: Request, engine: EngineOf, live: Operated) -> SuppliedState:
    """Supply the state of round 0, as safetensors; before the start, any number of times."""
    limit = live.spec.admission.max_bytes
    async with request.app.state.uploads.receive(request, limit) as upload:
        if upload.too_large:
            raise BodyTooLarge(f"a body may have {limit} bytes (admission.max_bytes); this one has more")
        found = await run_sync(lambda: federations.supply_state(engine, live.id, upload.path.read_bytes()))
        return SuppliedState(state_hash=found, bytes=upload.size)


@router.post(
    "/{federation}/enrolment-tokens",
    status_code=status.HTTP_201_CREATED,
    responses=documented(*ANY_CALLER, StorageFull),
    tags=["enrolment"],
)
def mint_token(
    engine: EngineOf, settings: SettingsOf, live: Operated, request: TokenRequest | None = None
) -> MintedToken:
    """Mint a token with which clients enrol; any number of times."""
    hours = request.hours if request is not None and request.hours is not None else settings.token_hours
    token, expires = federations.mint_token(engine, live.id, hours)
    return MintedToken(token=token, expires_at=expires)
