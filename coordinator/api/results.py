"""``.../rounds``, ``.../prompts``, ``.../metrics``: what has come of a federation. For operators."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path as FilePath
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Path, Query, Response, status
from fastapi.responses import JSONResponse, StreamingResponse

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import After, Informed, Limit, Operated, RegistryOf, SignerOf, Viewed
from promptfed.coordinator.http.blob_file import BlobFile
from promptfed.coordinator.reports import generation, metrics, rounds
from promptfed.coordinator.reports.pieces import json_pieces
from promptfed.shared.api.api_schemas import GenerateRequest, MetricList, PromptsView, TensorView
from promptfed.shared.api.report_schemas import RoundPage, RoundReport
from promptfed.shared.signatures import SIGNATURE_HEADER, statement
from promptfed.shared.tensors import Tensors, decode_place

router = APIRouter(prefix="/v1/federations/{federation}", tags=["results"])

WHOLE_BYTES = 64 << 10  # an answer up to here leaves in one piece, and with its length

RoundQuery = Annotated[str, Query(pattern=r"^(latest|\d{1,7})$", description="a round, or latest")]

MOST_JSON_NUMBERS = 1_000_000
TENSORS_TYPE = "application/octet-stream"
TENSOR_TYPES = (TENSORS_TYPE, "application/vnd.safetensors", "application/*", "*/*")


def streamed(pieces: Iterator[bytes], media_type: str = "application/json") -> Response:
    """An answer that is sent as it is made. What goes wrong before its first bytes is still answered as a problem."""
    begun = bytearray()
    for piece in pieces:
        begun += piece
        if len(begun) >= WHOLE_BYTES:
            return StreamingResponse(_gathered(begun, pieces), media_type=media_type)
    return Response(bytes(begun), media_type=media_type)


def _gathered(begun: bytearray, pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Each one costs a way through a thread and back."""
    for piece in pieces:
        begun += piece
        if len(begun) >= WHOLE_BYTES:
            yield bytes(begun)
            begun.clear()
    yield bytes(begun)


@router.get("/rounds", response_model=RoundPage, responses=described.for_callers())
def list_rounds(registry: RegistryOf, federation: Informed, limit: Limit = 100, after: After = None) -> Response:
    """Reports of all rounds so far, from round 0 on."""
    registry.last_seen.flush_if_possible()
    begin = int(after) + 1 if after is not None and after.isdecimal() else 0
    with registry.database.read() as session:
        numbers = rounds.rounds(session, federation.id)
        page = [number for number in numbers if number >= begin][:limit]
    following = str(page[-1]) if page and page[-1] != numbers[-1] else None
    return streamed(rounds.page(registry.database, federation, page, following))


@router.get("/rounds/{round}", response_model=RoundReport, responses=described.for_callers())
def get_round(registry: RegistryOf, federation: Informed, round: Annotated[int, Path(ge=0, le=1_000_000)]) -> Response:
    """Report of one round: times, bytes, asked, answered, counted, verdicts, metrics, state hash."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        if round not in rounds.rounds(session, federation.id):
            raise problems.NotFound(
                f"round {round} has not begun; {federation.name} is in round {federation.run.round}"
            )
        report = rounds.round_report(session, federation, round)
    return streamed(json_pieces(report))


@router.get(
    "/prompts",
    response_model=PromptsView,
    responses={
        200: {"content": {"application/octet-stream": {}}, "description": "safetensors, or JSON where Accept asks"},
        304: {"description": "the state has the hash of If-None-Match"},
        **described.for_callers(problems.NoState, problems.NotAcceptable),
    },
)
def get_prompts(
    registry: RegistryOf,
    signer: SignerOf,
    federation: Viewed,
    round: RoundQuery = "latest",
    accept: Annotated[str, Header()] = "*/*",
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The global state after a round. The ETag is its state hash, which `Promptfed-Signature` signs; `Repr-Digest` is
    the SHA-256 of the safetensors (RFC 9530).
    """
    with registry.database.read() as session:
        state = rounds.state_of(session, federation, round_number(round))
    signature = signer.sign(statement(federation.id, state.round, state.state_hash))
    headers = {"ETag": f'"{state.state_hash}"', "Vary": "Accept", SIGNATURE_HEADER: signature}
    known = [tag.strip().removeprefix("W/").strip('"') for tag in (if_none_match or "").split(",")]
    if state.state_hash in known or "*" in known:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    kinds = [part.split(";")[0].strip().lower() for part in accept.split(",")]
    place = registry.blobs.place(state.sha256)
    for kind in kinds:
        if kind in TENSOR_TYPES:
            digest = base64.b64encode(bytes.fromhex(state.sha256.removeprefix("sha256:"))).decode()
            return tensors_at(place, headers | {"Repr-Digest": f"sha-256=:{digest}:"})
        if kind == "application/json":
            return _as_json(state, decode_place(place)[0], headers)
    raise problems.NotAcceptable("the state comes as application/octet-stream (safetensors) or application/json")


def tensors_at(place: bytes | FilePath, headers: dict[str, str]) -> Response:
    """Tensors as they are kept, small ones whole: a file's way through four threads costs more than its bytes."""
    if isinstance(place, bytes):
        return Response(place, media_type=TENSORS_TYPE, headers=headers)
    return BlobFile(place, media_type=TENSORS_TYPE, headers=headers)


def round_number(round: str) -> int | None:
    """A round, or None for the latest."""
    return None if round == "latest" else int(round)


def _as_json(state: rounds.StoredState, tensors: Tensors, headers: dict[str, str]) -> JSONResponse:
    numbers = sum(tensor.numel() for tensor in tensors.values())
    if numbers > MOST_JSON_NUMBERS:
        text = f"the state has {numbers} numbers; JSON is given up to {MOST_JSON_NUMBERS}"
        raise problems.NotAcceptable(f"{text}: ask for application/octet-stream")
    view = PromptsView(
        round=state.round,
        state_hash=state.state_hash,
        tensors={name: TensorView.of(tensor) for name, tensor in sorted(tensors.items())},
    )
    return JSONResponse(view.model_dump(mode="json"), headers=headers)


@router.post(
    "/prompts/generate",
    responses=described.for_callers(problems.NotAGenerator, problems.NoState, problems.InvalidRequest),
)
def generate(
    registry: RegistryOf, federation: Operated, request: GenerateRequest, round: RoundQuery = "latest"
) -> PromptsView:
    """Prompts for classes, from their text features; for methods whose state holds a generator."""
    return generation.generate(registry, federation, request, round_number(round))


@router.get(
    "/metrics",
    response_model=MetricList,
    responses={200: {"content": {"text/csv": {}}, "description": "JSON or CSV"}, **described.for_callers()},
)
def get_metrics(
    registry: RegistryOf, federation: Informed, format: Annotated[Literal["json", "csv"], Query()] = "json"
) -> Response:
    """Every metric by round: what clients measured, accuracies, bytes, seconds."""
    registry.last_seen.flush_if_possible()
    if format == "csv":
        return streamed(metrics.as_csv(registry.database, federation), "text/csv; charset=utf-8")
    return streamed(metrics.as_json(registry.database, federation))
