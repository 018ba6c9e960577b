"""Class names that cannot be trained on are refused when a federation is created, or when a client brings them."""

from __future__ import annotations

from typing import Any

import pytest

from promptfed.coordinator.domain.federation import new_federation
from promptfed.runtime.processes import Site
from promptfed.runtime.run_file import with_own_classes
from promptfed.shared.methods import resolve_spec
from promptfed.shared.spec.spec import SpecError
from tests.support.coordinators import InThread

ONLY, SAME = "the only class", "these class names are the same: 'Chess_Knight', 'chess  knight'"


@pytest.mark.parametrize("method", ["zero_shot", "coop", "promptfl", "fedpgp", "fedtpg", "fedcocoop"])
@pytest.mark.parametrize(("names", "says"), [(["sun"], ONLY), (["sun", "Chess_Knight", "chess  knight"], SAME)])
def test_in_a_spec(method: str, names: list[str], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        resolve_spec({"name": "eyes", "method": {"name": method}, "class_names": names})
    (error,) = caught.value.errors
    assert error["path"] == "class_names"
    assert says in error["detail"]


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
    coordinator.enrol(federation, "b", class_names=["Letter_A", "Letter_B", "sun"])
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
