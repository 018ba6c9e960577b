"""``.../rounds``, ``.../prompts``, ``.../metrics``, ``.../events``: reports, states, cards, replays. For operators.

``.../privacy`` and ``.../spends`` have privacy costs.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from itertools import chain
from typing import Annotated

from fastapi import Depends, Header, Path, Query, Request, Response, status
from fastapi.responses import StreamingResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel
from sqlalchemy import select

from promptfed.coordinator import problems
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine import audit
from promptfed.coordinator.engine.registry import EVENTS, Registry, Wait, wait
from promptfed.coordinator.http import deps, openapi
from promptfed.coordinator.http.tensors import TENSORS_TYPE, tensors_at
from promptfed.coordinator.http.uploads import CHUNK
from promptfed.coordinator.resources.federations import views
from promptfed.coordinator.resources.results import exports, numbers, rounds, states, verification
from promptfed.coordinator.resources.results.facts import known_of
from promptfed.coordinator.store.backend import DatabaseAway
from promptfed.coordinator.store.signing import Signer
from promptfed.coordinator.store.tables import EventRow
from promptfed.shared.api.api_schemas import CardSignature, PrivacyView, RemarkList, SpendList
from promptfed.shared.api.export_card import JSON_FILE, MARKDOWN_FILE, SIGNATURE_FILE, Facts
from promptfed.shared.api.report_schemas import ReplayReport, RoundPage, RoundReport
from promptfed.shared.canonical import SIGNATURE_HEADER, export_statement, statement
from promptfed.shared.messages import ENDED
from promptfed.shared.service import digests

router = openapi.router(prefix="/v1/federations/{federation}", tags=["results"])

Round = Annotated[int, Path(ge=0, le=1_000_000)]
RoundQuery = Annotated[str, Query(pattern=r"^(latest|\d{1,7})$", description="a round, or latest")]

CSV_TYPE = "text/csv; charset=utf-8"
WHOLE_CSV = 1 << 20  # bytes up to which the numbers go as a whole, and so with their digest
CARD_BODY = openapi.body("application/json", {"type": "object"}, "`card.json`, byte for byte as the export holds it")
BATCH = 500
LOOK_AGAIN_SECONDS = 60.0
MOST_STREAMS = 16  # of one operator
AWAY_SECONDS = 1.0


def _json(report: BaseModel) -> Response:
    # As it is: the framework would check a report of thousands of updates once more.
    return Response(report.model_dump_json(), media_type="application/json")


@router.get("/rounds", response_model=RoundPage, responses=openapi.for_callers())
def list_rounds(
    registry: deps.RegistryOf, federation: deps.Informed, limit: deps.Limit = 100, after: deps.After = None
) -> Response:
    """Reports of all rounds so far, from round 0 on. A page has fewer than ``limit`` rounds if many clients answer."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        numbers, following = rounds.numbers_of_page(session, federation.id, limit, after)
    return _json(rounds.page(registry.database, federation, numbers, following))


@router.get("/rounds/{round}", response_model=RoundReport, responses=openapi.for_callers())
def get_round(registry: deps.RegistryOf, federation: deps.Informed, round: Round) -> Response:
    """Report of one round: times, bytes, asked, answered, counted, verdicts, metrics, state hash."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        if not rounds.has_begun(session, federation.id, round):
            raise problems.NotFound(
                f"round {round} has not begun; {federation.name} is in round {federation.run.round}"
            )
        report = rounds.round_report(session, federation, round)
    return _json(report)


@router.get("/remarks", responses=openapi.for_callers())
def get_remarks(registry: deps.RegistryOf, federation: deps.Informed) -> RemarkList:
    """What looks wrong on the clients' own test images, and what to try."""
    with registry.database.read() as session:
        return RemarkList(remarks=rounds.remarks_of(session, federation))


@router.get(
    "/prompts",
    response_class=Response,
    responses={
        200: {"content": {TENSORS_TYPE: {}}, "description": "safetensors"},
        304: {"description": "the state has the hash of If-None-Match"},
        **openapi.for_callers(problems.NoState),
    },
)
def get_prompts(
    registry: deps.RegistryOf,
    signer: deps.SignerOf,
    federation: deps.Viewed,
    round: RoundQuery = "latest",
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """The global state after a round. The ETag is its state hash, which `Promptfed-Signature` signs; `Repr-Digest` is
    the SHA-256 of the safetensors (RFC 9530).
    """
    with registry.database.read() as session:
        state = states.state_of(session, federation, round_number(round))
    signature = signer.sign(statement(federation.id, state.round, state.state_hash))
    headers = {"ETag": f'"{state.state_hash}"', SIGNATURE_HEADER: signature}
    tags = [tag.strip().removeprefix("W/").strip('"') for tag in (if_none_match or "").split(",")]
    if state.state_hash in tags or "*" in tags:
        return Response(status_code=status.HTTP_304_NOT_MODIFIED, headers=headers)
    return tensors_at(registry.blobs.place(state.sha256), state.sha256, headers)


def round_number(round: str) -> int | None:
    """A round, or None for the latest."""
    return None if round == "latest" else int(round)


@router.get(
    "/metrics",
    response_class=Response,
    responses={200: {"content": {"text/csv": {}}, "description": "CSV"}, **openapi.for_callers()},
)
def get_metrics(registry: deps.RegistryOf, federation: deps.Informed) -> Response:
    """All numbers by round: clients' metrics, accuracies, bytes, seconds."""
    registry.last_seen.flush_if_possible()
    with registry.database.read() as session:
        begun = rounds.rounds(session, federation.id)
    pieces, first = numbers.as_csv(registry.database, federation, begun), bytearray()
    for piece in pieces:  # what fails before the first of them is sent is answered as a problem
        first += piece
        if len(first) > WHOLE_CSV:
            return StreamingResponse(chain([bytes(first)], pieces), media_type=CSV_TYPE)
    return Response(bytes(first), media_type=CSV_TYPE)


async def _body(request: Request, _: deps.Operated) -> bytes:
    return await request.body()


@router.get("/rounds/{round}/card", responses=openapi.for_callers(problems.NoState))
def get_card(registry: deps.RegistryOf, federation: deps.Viewed, round: Round) -> Facts:
    """The facts of an export's card: everything except classes, files and their use."""
    return known_of(registry, federation, round).facts


@router.get(
    "/rounds/{round}/card.md",
    response_class=Response,
    responses={
        200: {"content": {"text/markdown": {}}, "description": "Markdown"},
        **openapi.for_callers(problems.NoState),
    },
)
def get_card_text(registry: deps.RegistryOf, federation: deps.Viewed, round: Round) -> Response:
    """The card of an export for people."""
    text = exports.made(known_of(registry, federation, round), federation)[MARKDOWN_FILE]
    return Response(text, media_type="text/markdown; charset=utf-8")


@router.get(
    "/rounds/{round}/export",
    response_class=StreamingResponse,
    responses={
        200: {"content": {"application/zip": {}}, "description": "ZIP"},
        **openapi.for_callers(problems.NoState, problems.StorageFull),
    },
)
def get_export(
    registry: deps.RegistryOf, signer: deps.SignerOf, federation: deps.Viewed, caller: deps.IsViewer, round: Round
) -> StreamingResponse:
    """The result as `promptfed export` writes it, in an archive, without class weights; signed for operators."""
    files = exports.made(known_of(registry, federation, round), federation)
    signs, card = deps.is_operator(caller), files[JSON_FILE]
    if signs and isinstance(card, bytes):
        files[SIGNATURE_FILE] = f"{_signed(registry, signer, federation, round, card)}\n".encode()
    archive = exports.zipped(files, registry.blobs.incoming)
    name = f"{federation.name}{'' if signs else '-unsigned'}.zip"
    digest = hashlib.file_digest(archive, "sha256").digest()
    archive.seek(0)
    headers = {"Content-Disposition": f'attachment; filename="{name}"', digests.WHOLE: digests.digest_field(digest)}
    return StreamingResponse(iter(lambda: archive.read(CHUNK), b""), media_type="application/zip", headers=headers)


@router.post(
    "/rounds/{round}/card/signature",
    responses=openapi.for_callers(problems.NoState, problems.ExportDiffers, problems.StorageFull),
    openapi_extra=CARD_BODY,
)
def sign_card(
    registry: deps.RegistryOf,
    signer: deps.SignerOf,
    federation: deps.Operated,
    round: Round,
    body: Annotated[bytes, Depends(_body)],
) -> CardSignature:
    """Sign an export's card if all its facts match the coordinator's. The card has the digests of the other files."""
    exports.check_card(registry, federation, round, body)
    signature = _signed(registry, signer, federation, round, body)
    return CardSignature(signature=signature, public_key=signer.public_key)


def _signed(registry: Registry, signer: Signer, federation: Federation, round: int, card: bytes) -> str:
    with registry.exclusively(), registry.database.write() as session:
        audit.note(session, "export-signed", federation, round=round, card_sha256=hashlib.sha256(card).hexdigest())
    return signer.sign(export_statement(card))


@router.post("/rounds/{round}/replay", responses=openapi.for_callers(problems.NoState, problems.UpdatesGone))
async def replay_round(registry: deps.RegistryOf, federation: deps.Operated, round: Round) -> ReplayReport:
    """Compute a completed round again from its kept updates. Changes nothing."""
    states = await registry.compute(lambda: verification.replay(registry, federation, round))
    return ReplayReport(round=round, states=states)


@router.get("/privacy", responses=openapi.for_callers())
def get_privacy(registry: deps.RegistryOf, federation: deps.Informed) -> PrivacyView:
    """Spent and planned ε by client, as clients report it; refused tasks; the smallest secure sum; warnings."""
    with registry.database.read() as session:
        return views.privacy_view(session, federation)


@router.get("/spends", responses=openapi.for_clients())
def get_spends(registry: deps.RegistryOf, caller: deps.Calling) -> SpendList:
    """The privacy cost that this client has reported. A ledger that lacks any of it is an old copy."""
    with registry.database.read() as session:
        return views.spends_of(session, caller.federation, caller.client)


@router.get("/events", response_class=EventSourceResponse, responses=openapi.for_callers())
async def get_events(
    registry: deps.RegistryOf,
    federation: deps.Informed,
    viewer: deps.IsViewer,
    last_event_id: Annotated[int | None, Header(ge=0, le=1 << 62, description="go on after this event")] = None,
    newest: Annotated[int, Query(ge=1, le=BATCH, description="begin with so many events; default: all")] | None = None,
) -> AsyncIterator[ServerSentEvent]:
    """All events so far (after Last-Event-ID, or only the ``newest``), then each new one.

    The stream ends after the federation's last event, when the caller's token expires or is revoked, or when it has
    begun 16 newer ones.
    """
    last = 0 if last_event_id is None and newest is None else last_event_id
    stream, streams = (federation.id, Wait()), registry.streams.setdefault(viewer.name, [])
    streams.append(stream)
    for id, older in streams[:-MOST_STREAMS]:
        older.over = True
        registry.wakeups.wake([(id, EVENTS)])
    registry.metrics.streams.inc()
    try:
        while not registry.wakeups.closed and not stream[1].over:
            wakeup = registry.wakeups.listen((federation.id, EVENTS))
            left = viewer.seconds_left(registry)
            if left <= 0:
                return
            now = registry.federations.get(federation.id)
            try:
                rows = await asyncio.to_thread(_after, registry, federation.id, last, newest)
            except DatabaseAway:
                await wait(wakeup, min(AWAY_SECONDS, left))
                continue
            for row in rows:
                last = row.id
                yield ServerSentEvent(id=str(row.id), event=row.kind, data={**row.data, "at": row.at})
            if rows:
                continue
            if now is None or now.run.state in ENDED:
                return
            await wait(wakeup, min(LOOK_AGAIN_SECONDS, left))
    finally:
        registry.metrics.streams.dec()
        streams.remove(stream)


def _after(registry: Registry, id: str, last: int | None, newest: int | None) -> list[EventRow]:
    """The next events after ``last``; None: the ``newest`` ones."""
    mine = select(EventRow).where(EventRow.federation_id == id)
    if last is None:
        query = mine.order_by(EventRow.id.desc()).limit(newest)
    else:
        query = mine.where(EventRow.id > last).order_by(EventRow.id).limit(BATCH)
    with registry.database.read() as session:
        rows = sorted(session.scalars(query), key=lambda row: row.id)
        session.expunge_all()
        return rows
