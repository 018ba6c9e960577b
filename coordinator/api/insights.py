"""``.../insights`` and ``.../lexicon``: insights into learned prompts. For operators."""

from __future__ import annotations

import asyncio
from typing import Annotated

from anyio.to_thread import run_sync
from fastapi import APIRouter, Depends, Request

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import Informed, Operated, RegistryOf, Viewed, of_app
from promptfed.coordinator.api.federations import TENSOR_BODY, TENSORS
from promptfed.coordinator.api.results import RoundQuery, round_number
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.http.uploads import Incoming
from promptfed.coordinator.operations import lexicon
from promptfed.coordinator.reports.insights import Insights
from promptfed.coordinator.store.lexicon import read_lexicon
from promptfed.shared.api.insight_schemas import InsightsView, LexiconView

router = APIRouter(prefix="/v1/federations/{federation}", tags=["insights"])


@router.get("/insights", responses=described.for_callers(problems.NoState))
async def get_insights(
    federation: Informed, insights: Annotated[Insights, Depends(of_app("insights"))], round: RoundQuery = "latest"
) -> InsightsView:
    """Drift of the prompts, similarity of clients' changes, nearest words, and clients in a plane."""
    return await insights.of(federation, round_number(round))


@router.get("/lexicon", responses=described.for_callers())
async def get_lexicon(registry: RegistryOf, federation: Viewed) -> LexiconView:
    """The size of the stored lexicon, and the class names that it should have."""
    return await asyncio.to_thread(_view, registry, federation)


@router.put("/lexicon", responses=described.for_callers(problems.WrongState, *TENSORS), openapi_extra=TENSOR_BODY)
async def put_lexicon(request: Request, registry: RegistryOf, federation: Operated) -> LexiconView:
    """Supply word embeddings and text features of class names as safetensors. It replaces an earlier lexicon."""
    async with request.app.state.uploads.receive(Incoming.of(request), lexicon.MOST_BYTES) as upload:
        if upload.too_large:
            raise problems.BodyTooLarge(
                f"a lexicon may have {lexicon.MOST_BYTES} bytes; this one has more: leave words out"
            )
        await run_sync(lambda: lexicon.supply(registry, federation.id, upload))
    return await asyncio.to_thread(_view, registry, registry.get(federation.id))


def _view(registry: Registry, federation: Federation) -> LexiconView:
    wanted = lexicon.wanted_names(federation)
    if federation.lexicon is None:
        return LexiconView(words=None, class_names=wanted, featureless=len(wanted))
    known = read_lexicon(registry.blobs, federation.lexicon)
    without = sum(name not in known.class_features for name in wanted)
    return LexiconView(words=len(known.words), class_names=wanted, featureless=without)
