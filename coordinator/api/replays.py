"""``.../rounds/{round}/replay``: a round computed again, as it was or as one phase would have been. For operators."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Response

from promptfed.coordinator import problems
from promptfed.coordinator.api import described
from promptfed.coordinator.api.deps import Operated, RegistryOf
from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.operations import replay
from promptfed.shared.api.replay_schemas import ReplayReport, ReplayRequest
from promptfed.shared.spec.spec_aggregation import AggregationSpec
from promptfed.shared.tensors import encode

router = APIRouter(prefix="/v1/federations/{federation}", tags=["results"])

TENSORS = "application/octet-stream"
ONLY_THIS_PHASE = (
    "only these phases are computed again, each from the state that was: had the state been another one, clients would "
    "have trained differently afterwards"
)


@router.post(
    "/rounds/{round}/replay",
    response_model=ReplayReport,
    responses={
        200: {"content": {TENSORS: {}}, "description": "the report, or the round's last state where Accept asks"},
        **described.for_callers(
            problems.NoState,
            problems.NotAMean,
            problems.TooFewUpdates,
            problems.UpdatesGone,
            problems.UpdatesMasked,
            replay.PrivacyProtected,
        ),
    },
)
async def replay_round(
    registry: RegistryOf,
    federation: Operated,
    round: Annotated[int, Path(ge=0, le=1_000_000)],
    request: ReplayRequest,
    accept: Annotated[str, Header()] = "*/*",
) -> ReplayReport | Response:
    """Compute a completed round again from its kept updates. Changes nothing."""
    without = tuple(sorted(set(request.without)))
    what_if = replay.WhatIf(_aggregation(federation, request.aggregation), without)
    as_tensors = accept.split(";")[0].strip().lower() == TENSORS

    def job() -> tuple[list[replay.Replayed], bytes | None]:
        states = replay.replay(registry, federation, round, what_if)
        return states, encode(states[-1].tensors) if as_tensors and states else None

    states, content = await registry.compute(job)
    if as_tensors and not states:
        raise problems.NoState(f"{_note(round, states, what_if)}, so there are no tensors to answer with")
    if content is not None:
        headers = {"ETag": f'"{states[-1].report.replayed_hash}"', "Vary": "Accept"}
        return Response(content, media_type=TENSORS, headers=headers)
    return ReplayReport(
        round=round,
        aggregation=what_if.aggregation or federation.spec.aggregation,
        without=list(without),
        states=[state.report for state in states],
        note=_note(round, states, what_if),
    )


def _note(round: int, states: list[replay.Replayed], what_if: replay.WhatIf) -> str | None:
    if not states:
        why = "no update was aggregated in it" if what_if else "it has no state"
        return f"nothing of round {round} was computed again: {why}"
    return ONLY_THIS_PHASE if what_if else None


def _aggregation(federation: Federation, given: AggregationSpec | None) -> AggregationSpec | None:
    if given is None or "max_weight_share" in given.model_fields_set:
        return given
    return given.model_copy(update={"max_weight_share": federation.spec.aggregation.max_weight_share})
