"""``/v1/federations``: create, list, start, pause, resume, cancel and delete federations. For operators."""

from __future__ import annotations

from typing import Annotated, Any

from anyio.to_thread import run_sync
from fastapi import Body, Header, Query, Request, Response, status
from fastapi.responses import JSONResponse
from sqlalchemy.orm import Session

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import jobs, recovery, retention
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http import deps, openapi
from promptfed.coordinator.http.callers import OperatorCaller
from promptfed.coordinator.http.tensors import TENSOR_BODY, TENSORS
from promptfed.coordinator.http.uploads import Incoming, announced_digest, expect_digest
from promptfed.coordinator.resources.federations import operations
from promptfed.coordinator.resources.federations.views import federation_view, without_participation
from promptfed.shared.api.api_schemas import (
    Awaited,
    DryRun,
    FederationPage,
    FederationView,
    RunContent,
    RunText,
    SuppliedState,
)
from promptfed.shared.service import digests

router = openapi.router(prefix="/v1/federations", tags=["federations"])

SPEC_BODY = openapi.body("application/json", {"$ref": "#/components/schemas/FederationSpec"})


@router.post(
    "",
    status_code=status.HTTP_201_CREATED,
    response_model=FederationView,
    responses={
        200: {"model": DryRun, "description": "with `dry_run`: the spec is good"},
        **openapi.for_callers(problems.InvalidSpec, problems.NameTaken, problems.KeyReused, problems.StorageFull),
    },
    openapi_extra=SPEC_BODY,
)
def create(
    registry: deps.RegistryOf,
    _: deps.IsOperator,
    response: Response,
    spec: Annotated[dict[str, Any], Body()],
    dry_run: Annotated[bool, Query(description="only check the spec")] = False,
    idempotency_key: Annotated[str | None, Header(min_length=1, max_length=200)] = None,
) -> Any:
    """Create a federation from a spec. Missing fields take the method's defaults."""
    if dry_run:
        return JSONResponse(DryRun(spec=operations.resolve(spec)).model_dump(mode="json"))
    federation = operations.create(registry, spec, idempotency_key)
    response.headers["Location"] = f"/v1/federations/{federation.id}"
    with registry.database.read() as session:
        return _view(session, registry, federation)


@router.post("/run-file", responses=openapi.for_callers(problems.InvalidSpec))
def read_run_file(_: deps.IsOperator, run_file: RunText) -> RunContent:
    """Read a run file in YAML or JSON. Nothing is created."""
    return RunContent(content=operations.read_run(run_file.text))


def _view(
    session: Session, registry: Registry, federation: Federation, caller: OperatorCaller | None = None
) -> FederationView:
    """The view of a federation for ``caller``; None: an operator who may change it."""
    view = federation_view(session, federation)
    if caller is not None and federation.spec.participation.is_secret and not deps.is_operator(caller):
        return without_participation(view)
    awaited = [_with_progress(registry, federation, one) for one in view.awaited]
    return view.model_copy(update={"awaited": awaited})


def _with_progress(registry: Registry, federation: Federation, awaited: Awaited) -> Awaited:
    task = federation.tasks.get(awaited.name)
    progress = None if task is None else registry.last_seen.progress(task.id)
    return awaited.model_copy(update={"progress": progress})


def _listed(session: Session, registry: Registry, federation: Federation, caller: OperatorCaller) -> FederationView:
    """A federation's view in a list. If its rows are damaged, the view says so, and the list stays complete."""
    try:
        return _view(session, registry, federation, caller)
    except recovery.DAMAGE as error:
        return _view(session, registry, recovery.unreadable(federation, error), caller)


@router.get("", responses=openapi.for_callers())
def list_federations(
    registry: deps.RegistryOf, caller: deps.IsViewer, limit: deps.Limit = 100, after: deps.After = None
) -> FederationPage:
    """All federations, oldest first."""
    with registry.database.read() as session:
        federations = list(registry.federations.values())
        begin = next((k for k, federation in enumerate(federations, 1) if federation.id == after), 0)
        page = federations[begin : begin + limit]
        following = page[-1].id if page and begin + limit < len(federations) else None
        views = [_listed(session, registry, federation, caller) for federation in page]
        return FederationPage(federations=views, next=following)


@router.get("/{federation}", responses=openapi.for_callers())
def get_federation(registry: deps.RegistryOf, federation: deps.Viewed, caller: deps.IsViewer) -> FederationView:
    """One federation: resolved spec, state and reason, round and phase, clients that answered or are awaited."""
    with registry.database.read() as session:
        return _view(session, registry, federation, caller)


@router.delete(
    "/{federation}",
    status_code=status.HTTP_204_NO_CONTENT,
    responses=openapi.for_callers(problems.StorageFull, problems.WrongState),
)
def delete_federation(registry: deps.RegistryOf, federation: deps.OperatedAny) -> None:
    """Delete a federation with all its data."""
    retention.delete_federation(registry, federation.id)


def _steer(registry: deps.RegistryOf, federation: deps.Operated, verb: str) -> FederationView:
    if verb == "start":
        jobs.start(registry, federation.id)
    else:
        operations.steer(registry, federation.id, verb)
    with registry.database.read() as session:
        return _view(session, registry, registry.get(federation.id))


@router.post(
    "/{federation}/start",
    responses=openapi.for_callers(
        problems.WrongState,
        problems.NotEnoughClients,
        problems.InitialStateMissing,
        problems.InitialStateMismatch,
        problems.OtherClasses,
        problems.CannotStart,
        problems.StorageFull,
    ),
)
def start(registry: deps.RegistryOf, federation: deps.Operated) -> FederationView:
    """Start the rounds. This confirms the backbone of the first enrolment."""
    return _steer(registry, federation, "start")


@router.post("/{federation}/pause", responses=openapi.for_callers(problems.WrongState, problems.StorageFull))
def pause(registry: deps.RegistryOf, federation: deps.Operated) -> FederationView:
    """Pause: no new tasks until it is resumed. Updates of open tasks are still accepted."""
    return _steer(registry, federation, "pause")


@router.post("/{federation}/resume", responses=openapi.for_callers(problems.WrongState, problems.StorageFull))
def resume(registry: deps.RegistryOf, federation: deps.Operated) -> FederationView:
    """Resume: an open phase gets its full deadline again. After a missed quorum, failed clients are asked again."""
    return _steer(registry, federation, "resume")


@router.post("/{federation}/cancel", responses=openapi.for_callers(problems.WrongState, problems.StorageFull))
def cancel(registry: deps.RegistryOf, federation: deps.Operated) -> FederationView:
    """End the federation; it cannot be resumed."""
    return _steer(registry, federation, "cancel")


@router.put(
    "/{federation}/initial-state",
    responses=openapi.for_callers(problems.WrongState, problems.InitialStateMismatch, *TENSORS),
    openapi_extra=TENSOR_BODY,
)
async def put_initial_state(request: Request, registry: deps.RegistryOf, federation: deps.Operated) -> SuppliedState:
    """Supply the state of round 0 as safetensors. Before the start it can be replaced."""
    limit = federation.spec.admission.max_bytes
    async with request.app.state.uploads.receive(Incoming.of(request), limit) as upload:
        if upload.too_large:
            raise problems.BodyTooLarge(f"a body may have {limit} bytes (admission.max_bytes); this one has more")
        if digests.CONTENT in request.headers:
            expect_digest(upload, announced_digest(request.headers[digests.CONTENT]))
        state_hash = await run_sync(lambda: operations.supply_state(registry, federation.id, upload.read()))
        return SuppliedState(state_hash=state_hash, bytes=upload.size)
