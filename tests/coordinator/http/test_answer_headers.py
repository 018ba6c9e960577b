"""What every answer says about itself, and whose word counts for where a call comes from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.coordinators import InThread, in_thread


def test_answers_of_the_api_are_kept_by_nobody_and_guessed_at_by_nobody(coordinator: InThread) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    prompts = f"/v1/federations/{federation}/prompts"
    for path, status in (
        ("/v1/federations", 200),
        (prompts, 200),
        ("/v1/nothing", 404),
        (f"/v1/federations/{federation}/metrics?format=csv", 200),
    ):
        answer = coordinator.http.get(path, headers=coordinator.operator)
        assert answer.status_code == status
        assert answer.headers["cache-control"] == "no-store", path
        assert answer.headers["x-content-type-options"] == "nosniff", path
    refused = coordinator.http.get("/v1/federations")
    assert (refused.status_code, refused.headers["cache-control"]) == (401, "no-store")
    for path in ("/", "/healthz", "/openapi.json"):
        assert coordinator.http.get(path).headers["x-content-type-options"] == "nosniff", path


@pytest.mark.parametrize(
    ("options", "address"), [({}, "127.0.0.1"), ({"forwarded_allow_ips": "127.0.0.1"}, "203.0.113.9")]
)
def test_where_a_call_comes_from_is_a_proxy_s_word_only_where_asked_for(
    tmp_path: Path, options: dict[str, str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "*")  # the server library's own variable says nothing here
    with in_thread(tmp_path / "data", **options) as coordinator:
        coordinator.http.headers["X-Forwarded-For"] = "203.0.113.9"
        coordinator.create()
        [entry] = coordinator.get("/v1/audit-log")["entries"]
        assert entry["address"] == address
