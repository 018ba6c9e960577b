"""``/v1/methods``, ``/v1/signing-key``, ``/v1/authority``, ``/v1/probe``: answers for everyone, without a token."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import PlainTextResponse, StreamingResponse

from promptfed.coordinator.api.deps import RegistryOf, SettingsOf, SignerOf
from promptfed.coordinator.api.described import documented
from promptfed.coordinator.engine.wakeups import wait
from promptfed.coordinator.http.certificates import authority
from promptfed.coordinator.problems import NotFound
from promptfed.shared import methods
from promptfed.shared.api.access_schemas import SigningKey
from promptfed.shared.api.api_schemas import Health, MethodList, MethodView
from promptfed.shared.spec.spec import SpecError

PROBE = "probe"  # that is only woken when the coordinator ends

router = APIRouter(prefix="/v1")


@router.get("/methods", responses=documented(), tags=["methods"])
def list_methods() -> MethodList:
    """All methods of this coordinator."""
    return MethodList(methods=[MethodView.model_validate(methods.describe(name)) for name in sorted(methods.METHODS)])


@router.get("/methods/{name}", responses=documented(NotFound), tags=["methods"])
def get_method(name: Annotated[str, Path(max_length=100)]) -> MethodView:
    """One method by its name."""
    try:
        return MethodView.model_validate(methods.describe(name))
    except SpecError as error:
        raise NotFound(error.errors[0]["detail"]) from None


@router.get("/signing-key", responses=documented(), tags=["results"])
async def get_signing_key(signer: SignerOf) -> SigningKey:
    """The public key that verifies this coordinator's signatures. Keep a copy from a coordinator that you trust."""
    return SigningKey(public_key=signer.public_key)


@router.get("/authority", responses=documented(NotFound), response_class=PlainTextResponse, tags=["enrolment"])
def get_authority(settings: SettingsOf) -> str:
    """The last certificate of this coordinator's TLS chain, in PEM. Trust it only by its fingerprint."""
    certificate = authority(settings)
    if certificate is None:
        raise NotFound("this coordinator serves no TLS: there is no certificate")
    return certificate


@router.get(
    "/probe",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/event-stream": {}}, "description": "two events"}, **documented()},
    tags=["health"],
)
async def probe(
    registry: RegistryOf, quiet: Annotated[float, Query(ge=0, le=60, description="seconds between the events")] = 0
) -> StreamingResponse:
    """An event at once and another after a pause: shows what a network does to idle connections and to streams."""

    async def events() -> AsyncIterator[str]:
        yield "data: begin\n\n"
        await wait(registry.wakeups.listen(PROBE), quiet)
        yield "data: end\n\n"

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # as of any stream of events
    return StreamingResponse(events(), media_type="text/event-stream", headers=headers)


@router.post("/probe", responses=documented(), tags=["health"])
async def probe_body(request: Request) -> Health:
    """Reads a body of up to 2 MiB and forgets it: shows whether a network limits bodies."""
    async for _ in request.stream():
        pass
    return Health(status="ok")
