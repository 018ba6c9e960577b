"""A coordinator that starts again without the package of a federation's method."""

from __future__ import annotations

from pathlib import Path

import pytest

from promptfed.shared.methods import METHODS
from tests.support.coordinators import in_thread
from tests.support.two_phase import TwoPhase


def test_its_federation_waits_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            waits = coordinator.create(name="waits", method={"name": "two_phase"}, rounds=1)
            other = coordinator.create(name="other")
            clients = coordinator.enrol(waits, "a", "b")
            coordinator.post(f"{waits}/start")
            coordinator.until(waits, state="running")
    with in_thread(tmp_path / "data") as coordinator:
        refused = coordinator.get(waits, status=503)
        assert refused["type"].endswith("/method-absent")
        assert "there is no method 'two_phase'" in refused["detail"]
        for client in clients:
            client.http = coordinator.http
            answer = client.task(0)
            assert (answer.status_code, answer.headers["Retry-After"]) == (503, "60")
            assert answer.json()["detail"] == (
                "waits waits for its method, which this coordinator lacks: ask its operator"
            )  # and no more: why may hold the machine's paths
        assert coordinator.get(other)["state"] == "enrolling"
        assert len(coordinator.get("/v1/federations")["federations"]) == 2
        coordinator.create(name="newcomer")
        elsewhere = coordinator.http.get(f"/v1/federations/{other}/task", headers=clients[0].headers)
        assert elsewhere.status_code == 404
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            for client in clients:
                client.http = coordinator.http
            tasks = coordinator.training(clients)
            assert [task["round"] for task in tasks] == [1, 1]
            assert coordinator.get(waits)["state"] == "running"


def test_it_can_be_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            waits = coordinator.create(name="waits", method={"name": "two_phase"})
    with in_thread(tmp_path / "data") as coordinator:
        coordinator.delete(f"/v1/federations/{waits}")
        assert coordinator.get("/v1/federations")["federations"] == []
        assert coordinator.get(waits, status=404)["type"].endswith("/not-found")


def test_a_constructor_that_raises_keeps_nobody_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(TwoPhase):
        def __init__(self, hyper: object):
            raise RuntimeError("not any more")

    with monkeypatch.context() as installed:
        installed.setitem(METHODS, "two_phase", TwoPhase)
        with in_thread(tmp_path / "data") as coordinator:
            waits = coordinator.create(name="waits", method={"name": "two_phase"})
    monkeypatch.setitem(METHODS, "two_phase", Broken)
    with in_thread(tmp_path / "data") as coordinator:
        assert "RuntimeError: not any more" in coordinator.get(waits, status=503)["detail"]
        coordinator.create(name="newcomer")
