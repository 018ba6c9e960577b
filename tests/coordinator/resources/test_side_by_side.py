"""What is told of a federation is of it alone, whatever others on the same coordinator do."""

from __future__ import annotations

import re

from promptfed.testing.clients import drive
from tests.support.coordinators import InProcess
from tests.support.open_phases import completed

OF_A_MOMENT = ("/export", "/card", "/card.md")  # say when they were made
READ = [f"/v1/federations/{{federation}}{rest}" for rest in ("", "/clients", "/rounds", "/metrics", "/privacy")]
WAITING = ("/task", "/payload", "/events")


def told(coordinator: InProcess, federation: str, headers: dict[str, str]) -> dict[str, tuple[int, bytes]]:
    """All that can be read of it, by path, as an operator and as its client."""
    paths = coordinator.app.openapi()["paths"]
    named = [path for path in paths if path.startswith("/v1/federations/{federation}") and "get" in paths[path]]
    found = {}
    for path in named:
        if not path.endswith((*OF_A_MOMENT, *WAITING)):
            url = path.replace("{federation}", federation).replace("{round}", "1")
            for who in (coordinator.operator, headers):
                answer = coordinator.http.get(url, headers=who)
                found[f"{path} {who is headers}"] = (
                    answer.status_code,
                    re.sub(rb'"last_seen":"[^"]+"', b"", answer.content),
                )
    return found


def test_nothing_of_one_federation_shows_in_another(coordinator: InProcess) -> None:
    changes = {"rounds": 2, "participation": {"min_clients": 2}}
    first, (a, _) = completed(coordinator, "a", "b", name="first", **changes)
    before = told(coordinator, first, a.headers)
    assert len(before) == 2 * 11
    assert {path for path, (status, _) in before.items() if status == 200} >= {f"{path} False" for path in READ}
    second = coordinator.create(name="second", **changes)
    clients = coordinator.enrol(second, "a", "b", "c", num_samples=7)
    coordinator.post(f"{second}/start")
    for client in clients:
        url = f"{client.path}/tasks/{coordinator.task(client)['task_id']}/evaluation"
        answer = client.http.put(url, json={"splits": {}, "withheld": True}, headers=client.headers)
        assert answer.status_code == 201, answer.text
    drive(clients)
    assert told(coordinator, first, a.headers) == before
    assert told(coordinator, second, clients[0].headers) != before
