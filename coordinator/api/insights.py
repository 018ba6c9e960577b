"""``.../insights`` and ``.../lexicon``: what the prompts themselves tell. For operators."""

from __future__ import annotations

import asyncio
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request

from promptfed.coordinator.api.deps import EngineOf, Operated
from promptfed.coordinator.api.federations import TENSOR_BODY, TENSORS
from promptfed.coordinator.api.results import RoundQuery, round_number
from promptfed.coordinator.domain.federation import Live
from promptfed.coordinator.engine.registry import Engine
from promptfed.coordinator.operations import vocabulary
from promptfed.coordinator.problems import ANY_CALLER, BodyTooLarge, NoState, WrongState, documented
from promptfed.coordinator.reports.insights import Insights
from promptfed.shared.insight_schemas import InsightsView, LexiconView

router = APIRouter(prefix="/v1/federations/{federation}", tags=["insights"])


async def _insights(request: Request) -> Insights:
    found: Insights = request.app.state.insights
    return found


@router.get("/insights", responses=documented(*ANY_CALLER, NoState))
async def get_insights(
    live: Operated, insights: Annotated[Insights, Depends(_insights)], round: RoundQuery = "latest"
) -> InsightsView:
    """How far the prompts are from their start, whether clients agree, which words are near, clients in the plane."""
    return await insights.of(live, round_number(round))


@router.get("/lexicon", responses=documented(*ANY_CALLER))
async def get_lexicon(engine: EngineOf, live: Operated) -> LexiconView:
    """Which constants of the backbone are here, and which class names are wanted."""
    return await asyncio.to_thread(_view, engine, live)


@router.put("/lexicon", responses=documented(*ANY_CALLER, WrongState, *TENSORS), openapi_extra=TENSOR_BODY)
async def put_lexicon(request: Request, engine: EngineOf, live: Operated) -> LexiconView:
    """Supply word embeddings and class names' text features, as safetensors; any number of times."""
    async with request.app.state.uploads.receive(request, vocabulary.MOST_BYTES) as upload:
        if upload.too_large:
            raise BodyTooLarge(f"a lexicon may have {vocabulary.MOST_BYTES} bytes; this one has more: leave words out")
        await run_sync(lambda: vocabulary.supply(engine, live.id, upload))
    return await asyncio.to_thread(_view, engine, engine.live(live.id))


def _view(engine: Engine, live: Live) -> LexiconView:
    wanted = vocabulary.wanted_names(live)
    if live.lexicon is None:
        return LexiconView(words=None, class_names=wanted, featureless=len(wanted))
    known = vocabulary.read(engine.blobs, live.lexicon)
    without = sum(name not in known.class_features for name in wanted)
    return LexiconView(words=len(known.words), class_names=wanted, featureless=without)
