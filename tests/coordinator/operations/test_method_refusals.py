"""What a method may say of clients that enrol, and of a supplied state, before anything has started."""

from __future__ import annotations

from typing import ClassVar

import httpx
import pytest
import torch

from promptfed.coordinator.aggregation import global_state
from promptfed.shared.methods import METHODS
from promptfed.shared.methods.core.interface import ClientInfo, MethodError, Needs, ServerContext
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import spec
from tests.support.coordinators import InThread


class Picky(PromptFL):
    """Takes no two clients with the same number of samples, and none back with another number."""

    name = "picky"
    needs: ClassVar[Needs] = Needs(domain_descriptions=True)

    def admit(self, client: ClientInfo, former: ClientInfo | None, context: ServerContext) -> None:
        same = [other.name for other in context.clients if other.num_samples == client.num_samples]
        if same:
            raise MethodError(f"{same[0]} has {client.num_samples} samples too")
        if former is not None and former.num_samples != client.num_samples:
            raise MethodError(f"{client.name} had {former.num_samples} samples")

    def check_clients(self, context: ServerContext) -> None:
        if sum(client.num_samples for client in context.clients) > 100:
            raise MethodError("more than 100 samples")

    def adopt(self, state: Tensors, context: ServerContext) -> Tensors:
        return state | {"context": state["context"] + len(context.clients)}


DOMAIN = {"name": "sketch", "description": "a sketch of a {}"}


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "picky", Picky)


@pytest.mark.parametrize("name", ["pfedpg", "picky"])
def test_without_torch_a_method_that_needs_it_is_refused(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(global_state, "has_torch", lambda: False)
    for query in ("", "?dry_run=true"):
        refused = coordinator.post(f"/v1/federations{query}", spec(method={"name": name}), status=422)
        assert refused["type"].endswith("/invalid-spec")
        assert [error["path"] for error in refused["errors"]] == ["method.name"]
        text = refused["errors"][0]["detail"]
        assert text.startswith(
            f"{name} computes with torch on the coordinator, and this one has no torch: use an image"
        )
        assert "coordinator-torch" in text
        assert "pip install torch" in text
    assert coordinator.http.get(f"/v1/methods/{name}").json()["needs_torch"] is True
    assert coordinator.http.get("/v1/methods/promptfl").json()["needs_torch"] is False
    coordinator.create(method={"name": "promptfl"})
    monkeypatch.setattr(global_state, "has_torch", lambda: True)
    coordinator.create(name="torch", method={"name": name})


def refusal(response: httpx.Response) -> tuple[int, str, str]:
    return response.status_code, response.json()["type"].rsplit("/", 1)[-1], response.json()["detail"]


def test_a_method_may_refuse_a_client_beside_the_active_others(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "picky"})
    token = coordinator.token(federation)
    coordinator.enrol(federation, "a", domain=DOMAIN)
    second = coordinator.client(federation, "b")
    assert refusal(second.enrol(token, domain=DOMAIN)) == (409, "unfit-client", "a has 10 samples too")
    assert coordinator.get(federation)["clients"]["trainers"] == 1
    coordinator.delete(f"{federation}/clients/a")
    assert second.enrol(token, domain=DOMAIN).status_code == 201, "who was withdrawn is in nobody's way"


def test_a_method_hears_what_the_state_knows_of_a_client_that_comes_back(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "picky"})
    [a] = coordinator.enrol(federation, "a", domain=DOMAIN)
    coordinator.enrol(federation, "b", num_samples=20, domain=DOMAIN)
    coordinator.post(f"{federation}/clients/a/reset")
    token = coordinator.token(federation, client="a")
    assert a.enrol(token, num_samples=11, domain=DOMAIN).status_code == 201, "before the start no state knows it"
    coordinator.post(f"{federation}/start")
    coordinator.post(f"{federation}/clients/a/reset")
    token = coordinator.token(federation, client="a")
    assert refusal(a.enrol(token, num_samples=12, domain=DOMAIN))[1:] == ("unfit-client", "a had 11 samples")
    assert a.enrol(token, num_samples=11, domain=DOMAIN).status_code == 201


def test_an_evaluator_needs_no_description(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "picky"})
    token = coordinator.token(federation)
    assert refusal(coordinator.client(federation, "a").enrol(token))[:2] == (422, "domain-missing")
    coordinator.enrol(federation, "unseen", role="evaluator")


def test_a_supplied_state_is_fitted_to_the_clients(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "picky"})
    coordinator.enrol(federation, "a", domain=DOMAIN)
    path = f"/v1/federations/{federation}"
    body = encode({"context": torch.zeros(4, 8)})
    assert coordinator.http.put(f"{path}/initial-state", content=body, headers=coordinator.operator).is_success
    [b] = coordinator.enrol(federation, "b", num_samples=20, domain=DOMAIN)
    coordinator.post(f"{federation}/start")
    assert torch.equal(b.payload(coordinator.task(b))["context"], torch.full((4, 8), 2.0))


def test_a_method_may_refuse_to_start_with_these_clients(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "picky"})
    coordinator.enrol(federation, "a", domain=DOMAIN)
    coordinator.enrol(federation, "b", num_samples=99, domain=DOMAIN)
    answer = coordinator.http.post(f"/v1/federations/{federation}/start", headers=coordinator.operator)
    assert refusal(answer) == (409, "cannot-start", "more than 100 samples")
    assert coordinator.get(federation)["state"] == "enrolling"


def test_a_method_that_fails_as_it_starts_is_named_and_its_traceback_is_in_the_log(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def wrong_line(*given: object) -> Tensors:
        raise KeyError("of my own")

    monkeypatch.setattr(Picky, "initial_state", wrong_line, raising=False)
    federation = coordinator.create(method={"name": "picky"})
    coordinator.enrol(federation, "a", domain=DOMAIN)
    coordinator.enrol(federation, "b", num_samples=20, domain=DOMAIN)
    answer = coordinator.http.post(f"/v1/federations/{federation}/start", headers=coordinator.operator)
    told = "initial_state of picky failed (KeyError: 'of my own'): the coordinator's log has the traceback"
    assert refusal(answer) == (409, "cannot-start", told)
    assert "in wrong_line" in caplog.text
