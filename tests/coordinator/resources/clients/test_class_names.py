"""What is refused when a federation is created, or when a client brings it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from promptfed.coordinator.aggregation import global_state
from promptfed.coordinator.domain.federation import new_federation
from promptfed.runtime.processes import Site
from promptfed.runtime.run_file import with_own_classes
from promptfed.shared.methods import METHODS, resolve_spec
from promptfed.shared.methods.core.interface import ClientInfo, MethodError, Needs, ServerContext
from promptfed.shared.methods.promptfl import PromptFL
from promptfed.shared.spec.spec import SpecError
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import encode
from promptfed.testing.clients import spec
from tests.support.coordinators import InThread
from tests.support.open_phases import refusal, supply

ONLY, SAME = "the only class", "these class names are the same: 'Chess_Knight', 'chess  knight'"


@pytest.mark.parametrize("method", ["zero_shot", "coop", "promptfl", "fedpgp", "fedtpg", "fedcocoop"])
@pytest.mark.parametrize(("names", "says"), [(["sun"], ONLY), (["sun", "Chess_Knight", "chess  knight"], SAME)])
def test_in_a_spec(method: str, names: list[str], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "eyes", "method": {"name": method}, "class_names": names})
    (error,) = caught.value.errors
    assert error["path"] == "class_names"
    assert says in error["detail"]


SUM: dict[str, Any] = {"secure_aggregation": {}, "participation": {"min_clients": 3}}
CLIENT = {"privacy": {"level": "client", "clip": 0.3, "noise_multiplier": 1.0}}
UNIFORM = {"weighting": "uniform", "max_weight_share": 1}
INT8 = {"compression": {"up": "int8"}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"round": 3}, "round", "unknown key"),
    ({"method": {"name": "nonsense"}}, "method.name", "there is no method 'nonsense'"),
    ({"backbone": {"shape": {"d_e": 8}}}, "backbone.shape", "needs a text tower"),
    ({"class_names": ["sun", "a b c d e " * 8 + "f"]}, "class_names", "tokens"),
    ({"class_names": None, "template": "a very long " * 40 + "{}"}, "template", "tokens"),
    (INT8 | SUM, "compression", "its own grid"),
    (INT8 | {"method": {"name": "plan"}}, "compression", "mean"),
    (SUM | {"aggregation": {"rule": "median"}}, "secure_aggregation", "only their sum is known: take rule mean"),
    (SUM | {"aggregation": {"clip_norm": 1.0}}, "secure_aggregation", "clip_norm needs each update"),
    (SUM | {"participation": {"min_clients": 2000}}, "secure_aggregation", "1024 clients at most"),
    (SUM | {"method": {"name": "pfedpg"}}, "secure_aggregation", "does not combine its updates by a mean"),
    (SUM | {"method": {"name": "plan"}}, "secure_aggregation", "does not combine its updates by a mean"),
    (SUM | {"method": {"name": "promptfl_amp"}}, "secure_aggregation", "only their sum is known"),
    (SUM | {"method": {"name": "zero_shot"}}, "secure_aggregation", "nothing to sum"),
    (SUM | {"secure_aggregation": {"threshold": 0.5}}, "secure_aggregation.threshold", "greater than 0.5"),
    (SUM | CLIENT | {"aggregation": UNIFORM}, "secure_aggregation, privacy", "take level sample"),
]


def test_a_wrong_spec_is_refused_by_path(coordinator: InThread) -> None:
    for changes, path, words in WRONG:
        for query in ("", "?dry_run=true"):
            problem = coordinator.post(f"/v1/federations{query}", spec() | changes, status=422)
            assert problem["type"].endswith("/invalid-spec")
            assert ", ".join(error["path"] for error in problem["errors"]) == path
            assert all(words in error["detail"] for error in problem["errors"]), problem
    assert coordinator.get("/v1/federations")["federations"] == []


def test_of_a_client(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "fedpgp"}, class_names=None)
    token = coordinator.token(federation)
    for names, says in [(["sun"], ONLY), (["sun", "Chess_Knight", "chess  knight"], SAME)]:
        refused = coordinator.client(federation, "a").enrol(token, class_names=names)
        assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (409, "unfit-client")
        assert says in refused.json()["detail"]
    assert coordinator.get(federation)["clients"]["trainers"] == 0


def test_a_client_may_have_one_class_of_the_federations_label_space(coordinator: InThread) -> None:
    federation = coordinator.create(method={"name": "fedpgp"}, class_names=["sun", "moon"])
    coordinator.enrol(federation, "a", class_names=["sun"])


@pytest.mark.parametrize("shape", [{"d_t": 8, "d_e": 8, "context_length": 18}])
def test_a_context_that_leaves_no_room_for_a_name(coordinator: InThread, shape: dict[str, Any]) -> None:
    federation = coordinator.create(method={"name": "fedpgp", "m": 16})
    refused = coordinator.client(federation, "a").enrol(coordinator.token(federation), backbone_shape=shape)
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (409, "cannot-start")
    assert "use at most m = 15" in refused.json()["detail"]
    raw = {"name": "narrow", "method": {"name": "fedpgp", "m": 16}, "backbone": {"shape": shape}}
    answer = coordinator.post("/v1/federations", raw, status=422)
    assert answer["errors"][0]["path"] == "backbone.shape"


@pytest.mark.extended
def test_the_class_names_of_all_clients_together_have_a_bound(coordinator: InThread) -> None:
    federation = coordinator.create(class_names=None)
    token = coordinator.token(federation)
    many = [f"{k:05d}{'x' * 191}" for k in range(100_000)]
    refused = coordinator.client(federation, "a").enrol(token, class_names=many)
    assert refused.status_code in (413, 422), refused.text
    half = many[:3000]
    assert coordinator.client(federation, "a").enrol(token, class_names=half).status_code == 201
    assert coordinator.client(federation, "b").enrol(token, class_names=half).status_code == 201, "the same names"
    other = coordinator.client(federation, "c").enrol(token, class_names=many[3000:6000])
    assert (other.status_code, other.json()["type"].rsplit("/", 1)[-1]) == (422, "too-many-class-names")
    assert "1,176,000 bytes" in other.json()["detail"]
    for name in ("a", "b"):
        coordinator.delete(f"{federation}/clients/{name}")
    assert coordinator.client(federation, "c").enrol(token, class_names=many[3000:6000]).status_code == 409
    fresh = coordinator.token(federation)
    assert coordinator.client(federation, "c").enrol(fresh, class_names=many[3000:6000]).status_code == 201


def test_a_federation_that_lists_its_classes_takes_as_many_as_it_lists(coordinator: InThread) -> None:
    names = [f"{k:05d}{'x' * 191}" for k in range(6000)]
    federation = coordinator.create(class_names=names)
    coordinator.enrol(federation, "a", class_names=names)


LETTERS = ["letter A", "letter B", "sun"]


def test_trainers_with_other_names_do_not_start_together(coordinator: InThread) -> None:
    federation = coordinator.create(class_names=None)
    coordinator.enrol(federation, "a", "c", class_names=LETTERS)
    assert "class_differences" not in coordinator.get(federation)
    coordinator.enrol(federation, "b", class_names=["Letter_A", "Letter_B", "sun"])
    assert "'Letter_A', 'Letter_B'" in coordinator.get(federation)["class_differences"]
    refused = coordinator.post(f"/v1/federations/{federation}/start", status=409)
    assert refused["type"].endswith("/other-classes")
    assert "beside 1 that all have (a, c: 'letter A', 'letter B' | b: 'Letter_A', 'Letter_B')" in refused["detail"]
    assert "label_space: client" in refused["detail"]
    assert coordinator.get(federation)["class_names"] is None


def test_the_same_names_are_kept_and_bind_those_who_come_later(coordinator: InThread) -> None:
    federation = coordinator.create(class_names=None, participation={"min_clients": 2})
    coordinator.enrol(federation, "a", class_names=LETTERS)
    coordinator.enrol(federation, "b", class_names=LETTERS[::-1])
    coordinator.start(federation)
    assert coordinator.get(federation)["class_names"] == LETTERS
    token = coordinator.token(federation)
    refused = coordinator.client(federation, "c").enrol(token, class_names=["Letter_A", "sun"])
    assert (refused.status_code, refused.json()["type"].rsplit("/", 1)[-1]) == (409, "other-classes")
    assert "c: 'Letter_A'" in refused.json()["detail"]
    assert coordinator.client(federation, "c").enrol(token, class_names=LETTERS).status_code == 201
    coordinator.enrol(federation, "referee", role="evaluator", class_names=["moon", "sea"])


def test_where_each_client_has_classes_of_its_own(coordinator: InThread) -> None:
    own = {"name": "promptfl", "label_space": "client"}
    federation = coordinator.create(method=own, class_names=None, participation={"min_clients": 2})
    coordinator.enrol(federation, "a", class_names=["sun", "moon"])
    coordinator.enrol(federation, "b", class_names=["sea", "tree"])
    coordinator.start(federation)
    assert coordinator.get(federation)["class_names"] is None
    dealt = [Site(name, f"symbols:neon?partition=pathological&clients=2&client={k}") for k, name in enumerate("ab")]
    plain = resolve_spec({"name": "x", "method": {"name": "promptfl"}})
    assert with_own_classes(plain, dealt).method["label_space"] == "client"
    assert new_federation("fed-1", resolve_spec({"name": "x", "method": {"name": "fedtpg"}})).may_differ


# What a method may say of clients that enrol, and of a supplied state, before anything has started.


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
        assert text.startswith(f"{name} computes with torch on the coordinator, and this one has no torch: use an ")
        assert "coordinator-torch" in text
        assert "pip install torch" in text
    assert coordinator.http.get(f"/v1/methods/{name}").json()["needs_torch"] is True
    assert coordinator.http.get("/v1/methods/promptfl").json()["needs_torch"] is False
    coordinator.create(method={"name": "promptfl"})
    monkeypatch.setattr(global_state, "has_torch", lambda: True)
    coordinator.create(name="torch", method={"name": name})


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
    body = encode({"context": torch.zeros(4, 8)})
    assert supply(coordinator, federation, body).is_success
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
