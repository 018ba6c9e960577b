"""What the coordinator tells of prompts: computed from what is stored, remembered, refused where it cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
import torch
from torch.nn import functional as F

from promptfed.coordinator.reports import insights, prompt_metrics
from promptfed.coordinator.store.tables import FederationRow
from promptfed.shared.messages import Domain
from promptfed.shared.methods import method_for, resolve_spec
from promptfed.shared.methods.core.interface.base import ClientInfo, Method, ServerContext
from promptfed.shared.methods.core.interface.insights import LearnsContexts
from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import norm
from promptfed.shared.tensors.torch_tensors import decode, encode
from promptfed.testing.clients import CLASSES, SHAPE, ScriptedClient, drive, trained
from tests.coordinator.test_pfedpg import answer, delta, federation_of
from tests.support.coordinators import InThread
from tests.support.waiting import wait_for

WORDS = ["cat", "dog", "house"]


def finished(coordinator: InThread, **changes: Any) -> tuple[str, list[ScriptedClient]]:
    federation = coordinator.create(**changes)
    clients = coordinator.enrol(federation, "a", "b", "c")
    coordinator.post(f"{federation}/start")
    drive(clients)
    return federation, clients


def state(coordinator: InThread, federation: str, round: int) -> dict[str, torch.Tensor]:
    path = f"/v1/federations/{federation}/prompts?round={round}"
    return decode(coordinator.http.get(path, headers=coordinator.operator).content)[0]


def lexicon(**changes: Any) -> bytes:
    """Words whose embeddings are rows of the unit matrix, and features of every class name."""
    tensors = {"word_embeddings": torch.eye(3, SHAPE["d_t"]), "class_features": torch.eye(3, SHAPE["d_e"])}
    about = {"words": WORDS, "class_names": CLASSES}
    return encode(tensors | changes.get("tensors", {}), about | changes.get("about", {}))


def put(coordinator: InThread, federation: str, body: bytes) -> httpx.Response:
    return coordinator.http.put(f"/v1/federations/{federation}/lexicon", content=body, headers=coordinator.operator)


def test_drift_and_similarity_are_those_of_the_stored_tensors(coordinator: InThread) -> None:
    federation, clients = finished(coordinator)
    found = coordinator.get(f"{federation}/insights")
    assert found["round"] == 2
    assert found["state_hash"] == coordinator.get(federation)["state_hash"]
    start = state(coordinator, federation, 0)["context"]
    assert [one["round"] for one in found["drift"]] == [0, 1, 2]
    for one in found["drift"]:
        now = state(coordinator, federation, one["round"])["context"]
        distance = norm({"context": now.double() - start.double()})
        assert one["tensors"]["context"]["distance"] == pytest.approx(distance)
        assert one["tensors"]["context"]["relative"] == pytest.approx(distance / norm({"context": start}))
    [phase] = found["similarity"]
    assert (phase["phase"], phase["clients"], phase["omitted"]) == ("train", ["a", "b", "c"], 0)
    before = state(coordinator, federation, 1)
    task = {"round": 2, "phase": "train"}
    moved = torch.stack([(trained(before, one.name, task)["context"] - before["context"]).flatten() for one in clients])
    expected = F.cosine_similarity(moved.unsqueeze(0), moved.unsqueeze(1), dim=-1)
    assert torch.allclose(torch.tensor(phase["cosines"]), expected, atol=1e-5)


def test_an_earlier_round_can_be_asked_for_and_one_that_is_not_over_cannot(coordinator: InThread) -> None:
    federation, _ = finished(coordinator)
    early = coordinator.get(f"{federation}/insights?round=1")
    assert (early["round"], len(early["drift"])) == (1, 2)
    assert coordinator.get(f"{federation}/insights?round=0")["similarity"] == []
    fresh = coordinator.create(name="fresh")
    assert coordinator.get(f"{fresh}/insights", status=404)["type"].endswith("no-state")
    assert coordinator.get(f"{federation}/insights?round=9", status=404)["type"].endswith("no-state")


def test_what_a_state_tells_is_computed_once_and_on_the_computing_thread(
    coordinator: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, _ = finished(coordinator)
    compute, jobs = coordinator.registry.compute, []

    async def counted(job: Callable[[], Any]) -> Any:
        jobs.append(job)
        return await compute(job)

    monkeypatch.setattr(coordinator.registry, "compute", counted)
    first = coordinator.get(f"{federation}/insights")
    assert len(jobs) == 5  # three points of the drift, one matrix, one look at words and plane
    assert coordinator.get(f"{federation}/insights") == first
    assert len(jobs) == 5


def test_of_many_rounds_evenly_spaced_ones_are_shown() -> None:
    history: dict[int, str | None] = {round: f"sha256:{round}" for round in range(1001)}
    shown = insights._spaced(history)
    assert insights.MOST_ROUNDS / 2 < len(shown) <= insights.MOST_ROUNDS
    assert {0, 1000} <= set(shown)
    history |= {1001: "sha256:1001"}
    assert set(insights._spaced(history)) ^ set(shown) == {1001}, "1000 is one of every eight"
    assert insights._spaced({1: None, 2: "x"}) == {1: None, 2: "x"}


def test_what_is_no_longer_kept_is_said(coordinator: InThread) -> None:
    federation, _ = finished(coordinator, retention="last_round", rounds=3)
    wait_for("the removal", lambda: coordinator.get(f"{federation}/insights")["drift"] == [])
    found = coordinator.get(f"{federation}/insights")
    whys = {one["what"]: one["why"] for one in found["missing"]}
    assert "retention: last_round" in whys["drift"]
    assert "promptfed federation words eyes" in whys["words"]


def test_words_are_named_once_a_lexicon_is_there(coordinator: InThread) -> None:
    federation, _ = finished(coordinator)
    assert coordinator.get(f"{federation}/lexicon") == {"words": None, "class_names": CLASSES, "featureless": 3}
    assert coordinator.get(f"{federation}/insights")["words"] is None
    answer = put(coordinator, federation, lexicon())
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"words": 3, "class_names": CLASSES, "featureless": 0}
    found = coordinator.get(f"{federation}/insights")
    assert found["missing"] == []
    assert found["words"]["spacing"] == pytest.approx(2**0.5)
    [context] = found["words"]["contexts"]
    assert context["label"] == "context"
    vectors = state(coordinator, federation, 2)["context"]
    for vector, near in zip(vectors, context["vectors"], strict=True):
        distances = {word: float((vector - row).norm()) for word, row in zip(WORDS, torch.eye(3, 8), strict=True)}
        assert [one["word"] for one in near] == sorted(distances, key=lambda word: distances[word])
        assert [one["distance"] for one in near] == pytest.approx(sorted(distances.values()), abs=1e-4)


def test_a_lexicon_outlives_a_restart_and_its_successor_takes_its_place(
    coordinator_with: Callable[..., InThread],
) -> None:
    first = coordinator_with()
    federation, _ = finished(first)
    assert put(first, federation, lexicon()).status_code == 200
    first.stop()
    again = coordinator_with()
    assert again.get(f"{federation}/lexicon")["words"] == 3
    former = again.registry.get(federation).lexicon
    assert former is not None
    words = {"words": ["tree", *WORDS[1:]]}
    assert put(again, federation, lexicon(about=words)).status_code == 200
    assert not again.registry.blobs.path(former).exists()
    near = again.get(f"{federation}/insights")["words"]["contexts"][0]["vectors"][0]
    assert "cat" not in {one["word"] for one in near}
    again.delete(federation)
    with again.registry.database.read() as session:
        assert session.get(FederationRow, federation) is None
    assert again.registry.blobs.all() == []


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        (b"nothing", 415, "not-safetensors"),
        (lexicon(about={"words": WORDS[:2]}), 422, "wrong-shape"),
        (lexicon(tensors={"word_embeddings": torch.ones(3, 9)}), 422, "wrong-shape"),
        (lexicon(tensors={"class_features": torch.full((3, 8), torch.nan)}), 422, "not-finite"),
        (lexicon(tensors={"more": torch.ones(1)}), 422, "unknown-tensor"),
        (lexicon(about={"words": []}), 422, "bad-metadata"),
        (lexicon(about={"class_names": ["x", "x", "y"]}), 422, "bad-metadata"),
        (encode({"word_embeddings": torch.eye(3)}), 422, "bad-metadata"),
    ],
)
def test_what_is_no_lexicon_is_refused_and_changes_nothing(
    coordinator: InThread, body: bytes, status: int, kind: str
) -> None:
    federation = coordinator.create()
    coordinator.enrol(federation, "a")
    answer = put(coordinator, federation, body)
    assert answer.status_code == status, answer.text
    assert answer.json()["type"].endswith(kind)
    assert coordinator.get(f"{federation}/lexicon")["words"] is None


def test_before_anybody_has_enrolled_a_lexicon_fits_nothing(coordinator: InThread) -> None:
    federation = coordinator.create()
    assert put(coordinator, federation, lexicon()).json()["type"].endswith("wrong-state")


def test_a_generator_s_contexts_lie_in_the_plane_and_beside_words(coordinator: InThread) -> None:
    federation, _ = finished(coordinator, method={"name": "fedtpg", "m": 2, "heads": 2})
    assert coordinator.get(f"{federation}/insights")["plane"] is None, "without class features there is nothing to make"
    assert put(coordinator, federation, lexicon()).status_code == 200
    found = coordinator.get(f"{federation}/insights")
    assert [one["label"] for one in found["words"]["contexts"]] == ["a", "b", "c"]
    assert found["plane"]["of"] == "contexts"
    body = {"class_names": CLASSES, "text_features": torch.eye(3, 8).tolist()}
    made = coordinator.post(f"{federation}/prompts/generate", body)["tensors"]["context"]["data"]
    near = found["words"]["contexts"][0]["vectors"][0][0]
    expected = min(float((torch.tensor(made[0]) - row).norm()) for row in torch.eye(3, 8))
    assert near["distance"] == pytest.approx(expected, abs=1e-4)


def test_descriptors_lie_in_the_plane_and_what_clients_send_is_a_change_by_itself(coordinator: InThread) -> None:
    federation, clients = federation_of(coordinator, "a", "b", "c", rounds=1)
    for _ in range(3):
        for client in clients:
            answer(client, coordinator.task(client))
    coordinator.until(federation, state="finished")
    found = coordinator.get(f"{federation}/insights")
    assert found["plane"]["of"] == "descriptors"
    expected = prompt_metrics.plane(dict(zip("abc", state(coordinator, federation, 1)["descriptors"], strict=True)))
    assert expected is not None
    for point in found["plane"]["points"]:
        assert (point["x"], point["y"]) == pytest.approx(expected.points[point["client"]])
    assert set(found["drift"][1]["tensors"]) == {"prompt_basis", "descriptors"}
    rows = torch.stack([delta(name, 1).flatten() for name in "abc"])
    cosines = F.cosine_similarity(rows.unsqueeze(0), rows.unsqueeze(1), dim=-1)
    assert torch.allclose(torch.tensor(found["similarity"][0]["cosines"]), cosines, atol=1e-5)


def test_methods_say_what_their_prompts_are() -> None:
    plan = made("plan")
    tensors = {spec.name: torch.zeros(1, 1, 1) for spec in plan.state_tensors()}
    assert set(plan.prompts(tensors)) == {"text_prompts", "visual_prompts"}


def test_methods_say_which_vectors_stand_beside_words() -> None:
    domains = [Domain(name=name, description=f"a {name} of a {{}}") for name in ("neon", "sketch")]
    clients = tuple(ClientInfo(f"c{n}", "trainer", 9, ("a", "b"), domain) for n, domain in enumerate(domains))
    context = ServerContext(TrainingSpec(), BackboneShape(**SHAPE), None, clients, seed=0, rounds=1)
    fast_pt = made("fast_pt")
    keys = torch.tensor([domain_key(domain.description) for domain in domains])
    begun = {"global_prompt": torch.ones(4, 8), "domain_prompts": torch.zeros(0, 4, 8), "listed_domains": keys[:0]}
    assert list(fast_pt.contexts(begun, context, {})) == ["global_prompt"]
    ended = begun | {"domain_prompts": torch.stack([torch.zeros(4, 8), torch.ones(4, 8)]), "listed_domains": keys}
    labels = ["global_prompt", "domain_prompts 1: neon", "domain_prompts 2: sketch"]
    assert list(fast_pt.contexts(ended, context, {})) == labels
    assert bool((fast_pt.contexts(ended, context, {})[labels[2]] == 1).all())
    for name in ("plan", "fedmaple"):
        prompts = torch.arange(24.0).reshape(3, 2, 4)
        [first] = made(name).contexts({"text_prompts": prompts}, context, {}).values()
        assert torch.equal(first, prompts[0]), "deeper prompts do not stand beside words"
    assert not isinstance(made("fedvpt"), LearnsContexts), "nor do visual ones"


def made(name: str) -> Method:
    return method_for(resolve_spec({"name": "x", "method": {"name": name}}))
