"""Who takes part under Poisson sampling: what each class of readers learns of it, channel by channel.

Whoever knows the rounds faces the epsilon without amplification, which is the one that is stated. The amplified one is
stated beside it, for those who learn nothing of who took part; so nothing is told to those who need not know.
"""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from promptfed.coordinator.engine.metrics import UNTELLING
from promptfed.shared.privacy.accounting import Event, epsilon_of, replace_one_epsilon
from promptfed.testing.clients import bearer
from tests.coordinator.test_client_level import NAMES, POISSON, PRIVACY, created, finish
from tests.support.coordinators import InThread

FEDERATION = "/v1/federations/{federation}"
OF_VIEWERS = {
    FEDERATION: "without who is asked, awaited or has answered, and without the phase's deadline",
    f"{FEDERATION}/prompts": "the noised states, which the amplified epsilon covers",
    f"{FEDERATION}/rounds/{{round}}/card": "a card, without bytes and counted updates",
    f"{FEDERATION}/enrolment-tokens": "who has enrolled, which is public",
}
OF_CLIENTS = {
    f"{FEDERATION}/task": "a client's own task",
    f"{FEDERATION}/tasks/{{task_id}}/payload": "its own",
    f"{FEDERATION}/spends": "its own spends",
}


@pytest.fixture
def viewer(coordinator: InThread) -> dict[str, str]:
    made = coordinator.post("/v1/operators", {"name": "otto", "role": "viewer", "hours": 1}, status=201)
    return bearer(made["token"])


def routes(coordinator: InThread, kind: str) -> set[str]:
    """What a caller of this kind may read of a federation."""
    paths = coordinator.get("/openapi.json")["paths"]
    return {
        path
        for path, verbs in paths.items()
        if path.startswith(FEDERATION) and {"get", "head"} & verbs.keys()
        for verb in {"get", "head"} & verbs.keys()
        if any(kind in scheme for scheme in verbs[verb].get("security", []))
    }


def read(coordinator: InThread, path: str, federation: str, headers: dict[str, str]) -> httpx.Response:
    place = path.format(federation=federation, round=1, task_id="none")
    return coordinator.http.get(place, headers=headers)


def test_every_channel_of_a_viewer_is_closed_or_tells_nothing_of_who_took_part(
    coordinator: InThread, viewer: dict[str, str]
) -> None:
    federation, clients = created(coordinator, rounds=2, participation=POISSON)
    finish(coordinator, federation, clients)
    telling = {path: read(coordinator, path, federation, viewer) for path in routes(coordinator, "viewer")}
    assert telling.keys() >= OF_VIEWERS.keys()
    for path, answer in sorted(telling.items()):
        if path in OF_VIEWERS:
            assert answer.status_code in (200, 404), (path, answer.text)
        else:
            assert answer.status_code == 403, f"{path} is a new channel: does it tell who took part?"
            assert "samples its clients in secret" in answer.json()["detail"]
        assert read(coordinator, path, federation, coordinator.operator).status_code in (200, 404), path
    card = read(coordinator, f"{FEDERATION}/rounds/{{round}}/card", federation, viewer).json()
    assert card["bytes"] is None
    assert {one["updates_counted"] for one in card["participants"]} == {None}
    assert card["privacy"]["epsilon_if_secret"] < card["privacy"]["epsilon_max"]
    other, _ = created(coordinator, ("p", "q"), name="open", participation={"min_clients": 2})
    assert read(coordinator, f"{FEDERATION}/rounds", other, viewer).status_code == 200


def test_a_viewer_does_not_see_whom_an_open_round_asks(coordinator: InThread, viewer: dict[str, str]) -> None:
    everybody = POISSON | {"fraction": 1.0, "quorum": 1.0}
    federation, clients = created(coordinator, rounds=1, participation=everybody)
    coordinator.post(f"{federation}/start")
    coordinator.training(clients)
    seen = coordinator.get(federation)
    assert seen["asked"] == list(NAMES)
    for hidden in (
        coordinator.get(federation, headers=viewer),
        *coordinator.get("/v1/federations", headers=viewer)["federations"],
    ):
        kept = {key: hidden[key] for key in ("asked", "answered", "failed", "awaited", "stage", "disk")}
        assert kept == {"asked": [], "answered": [], "failed": [], "awaited": [], "stage": None, "disk": None}
        assert hidden["privacy"] == seen["privacy"]


def test_a_client_learns_of_its_own_tasks_alone(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=2, participation=POISSON)
    assert routes(coordinator, "client") == OF_CLIENTS.keys(), "a new channel: does it tell who took part?"
    finish(coordinator, federation, clients)


def families(text: str) -> set[str]:
    return set(re.findall(r"^(promptfed_\w+?)(?:_created)?(?:\{.*)? ", text, re.MULTILINE))


def test_open_figures_count_and_time_nothing_of_clients(coordinator: InThread) -> None:
    before = families(coordinator.http.get("/metrics").text)
    assert "promptfed_answers_counted_total" in before
    federation, clients = created(coordinator, rounds=1, participation=POISSON)
    finish(coordinator, federation, clients)
    assert families(coordinator.http.get("/metrics").text) <= {*UNTELLING, "promptfed_event_streams"}
    coordinator.delete(federation)
    assert families(coordinator.http.get("/metrics").text) <= set(UNTELLING), "what was counted stays in the sums"


def test_both_epsilons_are_stated_and_the_stated_one_is_of_who_knows_the_rounds(coordinator: InThread) -> None:
    federation, clients = created(coordinator, rounds=4, participation=POISSON, privacy=PRIVACY)
    view = finish(coordinator, federation, clients)["privacy"]
    z, delta = 1.0, view["delta"]
    expected: dict[str, Any] = {
        "epsilon": epsilon_of([Event("gaussian", 1.0, z, 4)], delta),
        "epsilon_replace_one": replace_one_epsilon([Event("gaussian", 1.0, z, 4)], delta),
        "epsilon_if_secret": epsilon_of([Event("gaussian", 0.5, z, 4)], delta),
    }
    assert {key: view[key] for key in expected} == expected
    assert {key: view[key.replace("epsilon", "epsilon_planned")] for key in expected} == expected
    last = coordinator.get(f"{federation}/rounds")["rounds"][-1]["phases"][-1]["privacy"]
    assert {key: last[key] for key in expected} == expected
