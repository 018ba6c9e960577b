"""Prompts for classes that nobody trained on: the coordinator runs the generator, the caller brings text features."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface.base import ServerContext
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.testing.clients import SHAPE, drive
from tests.support.coordinators import InThread

METHOD = {"name": "fedtpg", "m": 3}
FEATURES = torch.nn.functional.normalize(torch.randn(2, 8, generator=torch.Generator().manual_seed(0)), dim=-1)


def body(**changes: Any) -> dict[str, Any]:
    return {"class_names": ["anvil", "brush"], "text_features": FEATURES.tolist()} | changes


def test_the_generator_of_the_asked_round_makes_them(coordinator: InThread) -> None:
    federation = coordinator.create(method=METHOD, rounds=1)
    clients = coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    drive(clients)
    made = {round: coordinator.post(f"{federation}/prompts/generate?round={round}", body()) for round in (0, 1)}
    assert coordinator.post(f"{federation}/prompts/generate", body()) == made[1]
    reports = [coordinator.get(f"{federation}/rounds/{round}") for round in (0, 1)]
    assert [made[round]["state_hash"] for round in (0, 1)] == [report["state_hash"] for report in reports]
    method = make_method(METHOD)
    server = ServerContext(TrainingSpec(), BackboneShape(**SHAPE), None, (), 7, 1)
    start = method.initial_state(server, initial_draws(7))
    wanted = method.generate(start, FEATURES, server)["context"]
    found = made[0]["tensors"]
    assert set(found) == {"context"}
    assert (found["context"]["dtype"], found["context"]["shape"]) == ("float32", [3, 8])
    torch.testing.assert_close(torch.tensor(found["context"]["data"]), wanted, rtol=0, atol=1e-6)
    assert made[1]["tensors"] != found


def test_one_class_is_enough_and_many_are_allowed(coordinator: InThread) -> None:
    federation = coordinator.create(method=METHOD)
    coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    one = coordinator.post(f"{federation}/prompts/generate", body(class_names=["a"], text_features=[[1.0] * 8]))
    assert one["tensors"]["context"]["shape"] == [3, 8]
    many = [f"class {index}" for index in range(50_000)]
    long = body(class_names=many, text_features=[[0.123456789] * 8] * len(many))
    found = coordinator.post(f"{federation}/prompts/generate", long)
    assert found["tensors"]["context"]["shape"] == [3, 8]


def test_before_the_start_there_is_no_generator(coordinator: InThread) -> None:
    federation = coordinator.create(method=METHOD)
    assert coordinator.post(f"{federation}/prompts/generate", body(), status=404)["type"].endswith("/no-state")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"text_features": [[0.0] * 8]}, "2 class names have 1 text features"),
        ({"text_features": [[0.0] * 8, [0.0] * 7]}, "the same length"),
        ({"text_features": [[0.0] * 5] * 2}, "have 8 numbers; these have 5"),
        ({"text_features": [["x"] * 8] * 2}, "valid number"),
        ({"class_names": [], "text_features": []}, "at least 1 item"),
        ({"class_names": ["", "b"]}, "must not be empty"),
        ({"template": "a photo of a {}"}, "Extra inputs"),
    ],
)
def test_features_that_do_not_fit_are_refused(coordinator: InThread, change: dict[str, Any], says: str) -> None:
    federation = coordinator.create(method=METHOD)
    coordinator.enrol(federation, "a", "b")
    coordinator.post(f"{federation}/start")
    problem = coordinator.post(f"{federation}/prompts/generate", body(**change), status=422)
    assert problem["type"].endswith("/invalid-request")
    assert says in problem["detail"]
    assert problem["errors"][0]["path"].startswith("body")


def test_numbers_that_are_none_are_refused(coordinator: InThread) -> None:
    federation = coordinator.create(method=METHOD)
    path = f"/v1/federations/{federation}/prompts/generate"
    content = b'{"class_names": ["a"], "text_features": [[NaN, 0, 0, 0, 0, 0, 0, 0]]}'
    headers = coordinator.operator | {"Content-Type": "application/json"}
    answer = coordinator.http.post(path, content=content, headers=headers)
    assert (answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]) == (422, "invalid-request")
    assert "finite" in answer.json()["detail"]


def test_methods_say_whether_they_generate(coordinator: InThread) -> None:
    listed = coordinator.http.get("/v1/methods").json()["methods"]
    assert [one["name"] for one in listed if one["generates_prompts"]] == ["fedtpg"]
