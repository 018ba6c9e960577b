"""FaST-PT with the real coordinator and real clients: a round by hand, what leaves a client, what is computed once."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from promptfed.client_service.serving.prediction import Predictor
from promptfed.client_service.state.private_state import PrivateState
from promptfed.client_service.training.data import ClientData
from promptfed.client_service.training.trainer import TaskWork
from promptfed.experiments.simulation.asgi_transport import InProcess
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import open_source
from promptfed.shared.messages import Domain, Peer, Task
from promptfed.shared.methods.core.interface import ClientContext, TrainResult
from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.methods.fast_pt.method import FastPT
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.tensors import Tensors
from promptfed.shared.tensors.torch_tensors import decode, encode
from tests.support import literal, literal_fast_pt
from tests.support.agreed import agreed, asked
from tests.support.equality import assert_values
from tests.support.small_fast_pt import count_transforms

SMALL = "topic=weather&per_class=1&test_per_class=1"
DATA = {"anna": f"symbols:sketch?{SMALL}", "bert": f"symbols:neon?{SMALL}"}
UNSEEN = Site("unseen", f"symbols:chalk?{SMALL}", role="evaluator")
MST = {"mst_epochs": 1, "mst_hidden": 4, "mst_batch_size": 5, "mst_learning_rate": 0.01}
SGD: dict[str, Any] = {"epochs": 1, "batch_size": 10, "momentum": 0.9, "weight_decay": 5e-4}
NAMES = open_source(DATA["anna"]).class_names


def sites() -> list[Site]:
    return [*(Site(name, uri) for name, uri in DATA.items()), UNSEEN]


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "styles",
        "method": {"name": "fast_pt", "m": 2, **MST},
        "class_names": list(NAMES),
        "backbone": {"model": "promptfed-tiny", "pretrained": None},
        "rounds": 1,
        "training": {"learning_rate": 0.05, **SGD},
        "seed": 5,
    } | changes


@dataclass
class ByHand:
    """One client of the two, with loops."""

    backbone: Backbone
    name: str
    other: Domain
    row: int
    own: Domain
    values: Tensor
    labels: Tensor

    def global_phase(self, general: Tensor) -> tuple[Tensor, Tensor]:
        """P^G, and φ with its bias as the last column."""
        draws = generator(5, self.name, "style-transfer", self.other.description)
        templates = (self.own.description, self.other.description, "a photo of a {}.")
        q = literal_fast_pt.trained_transform(
            self.backbone,
            self.values,
            self.labels,
            NAMES,
            templates,
            draws,
            hidden=4,
            epochs=1,
            batch_size=5,
            rate=0.01,
        )
        values = torch.cat([self.values, literal_fast_pt.transferred(q, self.values)])
        labels = torch.cat([self.labels, self.labels])
        rows = torch.tensor([self.row] * len(self.labels) + [1 - self.row] * len(self.labels))
        purpose = (5, 1, "global", self.name)

        def prompt_loss(weight: Tensor, some: Tensor) -> Tensor:
            return literal.context_loss(self.backbone, weight, list(NAMES), values[some], labels[some])

        def domain_of(weight: Tensor, some: Tensor) -> Tensor:
            return literal_fast_pt.classifier_loss(weight[:, :-1], weight[:, -1], values[some], rows[some])

        prompt = literal_fast_pt.sgd_on(general, prompt_loss, len(rows), purpose, rate=0.05, **SGD)
        start = torch.zeros(2, self.backbone.d_e + 1)
        return prompt, literal_fast_pt.sgd_on(start, domain_of, len(rows), purpose, rate=0.01, **SGD)

    def last_phase(self, general: Tensor) -> Tensor:
        """P^D."""
        start = torch.randn(2, self.backbone.d_t, generator=generator(5, "domain_prompt")) * 0.02

        def loss(prompt: Tensor, some: Tensor) -> Tensor:
            values, labels = self.values[some], self.labels[some]
            return literal_fast_pt.domain_loss(
                self.backbone, general, prompt, self.own.description, NAMES, values, labels
            )

        purpose = (5, 1, "domain_prompts/domain_prompt", self.name)
        return literal_fast_pt.sgd_on(start, loss, len(self.labels), purpose, rate=0.05, **SGD)


def test_a_round_of_two_clients_over_http_is_the_one_by_hand(backbone: Backbone, features: FeatureCache) -> None:
    found = simulate(spec(), sites(), backbone=backbone, features=features)
    domains = {name: Domain(**vars(open_source(uri).domain)) for name, uri in DATA.items()}
    clients = []
    for name, other, row in (("anna", "bert", 1), ("bert", "anna", 0)):  # neon stands before sketch
        train = open_source(DATA[name]).train
        values = features.features(backbone, train)
        clients.append(ByHand(backbone, name, domains[other], row, domains[name], values, train.labels))
    start = torch.randn(2, backbone.d_t, generator=initial_draws(5)) * 0.02
    trained = [client.global_phase(start) for client in clients]
    general, classifier = (sum(parts) / 2 for parts in zip(*trained, strict=True))
    prompts = [client.last_phase(general) for client in clients]

    moved = general - start
    size = float(moved.abs().max())
    assert size > 1e-4
    assert_values((found.state["global_prompt"] - start) / size, moved / size, 1e-4)
    assert_values(found.state["classifier_weight"], classifier[:, :-1])
    assert_values(found.state["classifier_bias"], classifier[:, -1])
    listed = [domain_key(domains[name].description) for name in ("bert", "anna")]
    assert found.state["domains"].tolist() == found.state["listed_domains"].tolist() == listed
    own_start = torch.randn(2, backbone.d_t, generator=generator(5, "domain_prompt")) * 0.02
    for one, wanted in zip(found.state["domain_prompts"], (prompts[1], prompts[0]), strict=True):
        size = float((wanted - own_start).abs().max())
        assert size > 1e-4
        assert_values((one - own_start) / size, (wanted - own_start) / size, 1e-4)


@dataclass
class Wire:
    """Every byte that went over the wire either way, in order, and every domain prompt that was ever trained."""

    passed: list[tuple[str, bytes]] = field(default_factory=list)  # "verb path" of a request, "answer" else
    prompts: dict[str, list[tuple[str, Tensor]]] = field(default_factory=dict)


@pytest.fixture
def wire(monkeypatch: pytest.MonkeyPatch) -> Wire:
    seen = Wire()
    handle, train = InProcess.handle_async_request, FastPT.train

    async def recorded(self: InProcess, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        head = str(request.url).encode() + repr(request.headers.raw).encode()
        seen.passed.append((f"{request.method} {request.url.path}", head + body))
        answer = await handle(self, request)
        content = await answer.aread()
        seen.passed.append(("answer", repr(answer.headers.raw).encode() + content))
        return httpx.Response(answer.status_code, headers=answer.headers, content=content)

    def watched(self: FastPT, context: ClientContext, payload: Tensors, private: Tensors) -> TrainResult:
        result = train(self, context, payload, private)
        if "domain_prompt" in result.private:
            kept = seen.prompts.setdefault(context.client, [])
            kept.append((context.phase, result.private["domain_prompt"].clone()))
        return result

    monkeypatch.setattr(InProcess, "handle_async_request", recorded)
    monkeypatch.setattr(FastPT, "train", watched)
    return seen


def traces(prompt: Tensor) -> list[bytes]:
    """Four consecutive numbers from every place of a prompt, as their bytes, and every number as JSON writes it."""
    raw = prompt.contiguous().numpy().tobytes()
    return [raw[at : at + 16] for at in range(0, len(raw) - 16, 4)] + [
        json.dumps(value).encode() for value in prompt.flatten().tolist()
    ]


def test_no_byte_of_a_domain_prompt_leaves_before_the_last_round_is_over(
    backbone: Backbone, features: FeatureCache, wire: Wire
) -> None:
    simulate(spec(rounds=3), sites(), backbone=backbone, features=features)
    assert {client: [phase for phase, _ in one] for client, one in wire.prompts.items()} == {
        name: ["global", "global", "domain_prompts"] for name in DATA
    }
    updates = [number for number, (what, _) in enumerate(wire.passed) if what.endswith("/update")]
    naming = [number for number in updates if b"domain_prompt" in wire.passed[number][1]]
    assert len(updates) == 2 * 3 + 2
    assert naming == updates[-2:], "only the two last updates name it"
    kept = [prompt for one in wire.prompts.values() for _, prompt in one]
    before = b"\n".join(body for _, body in wire.passed[: updates[-2]])
    assert not [trace for prompt in kept for trace in traces(prompt) if trace in before]
    # The same search does find what is sent in the end.
    last = b"\n".join(wire.passed[number][1] for number in updates[-2:])
    assert all(one[-1][1].numpy().tobytes() in last for one in wire.prompts.values())
    everything = b"\n".join(body for _, body in wire.passed)
    earlier = [prompt for one in wire.prompts.values() for _, prompt in one[:-1]]
    assert not [trace for prompt in earlier for trace in traces(prompt) if trace in everything], "nor ever an older one"


def test_the_image_tower_sees_each_image_once(
    backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode_images, seen = Backbone.encode_images, []

    def counted(self: Backbone, images: Tensor, **options: Any) -> Tensor:
        seen.append(images.clone())
        return encode_images(self, images, **options)

    monkeypatch.setattr(Backbone, "encode_images", counted)
    cache = FeatureCache(tmp_path)
    method = {"name": "fast_pt", "m": 2, **MST, "mixture": "soft"}
    found = simulate(spec(rounds=2, method=method), sites(), backbone=backbone, features=cache)
    sources = [open_source(uri) for uri in DATA.values()]
    images = sum(len(source.train) + len(source.test) for source in sources) + len(open_source(UNSEEN.data).test)
    assert cache.images_computed == images == 50
    shown = [image for batch in seen for image in batch if bool(image.any())]
    different = {image.numpy().tobytes() for image in shown}
    assert len(different) == images + 1, "and one made-up image, from which the cache learns the places of a batch"
    assert len(shown) == images + 32
    assert len(reported(found, "unseen", "test")) == 3


def reported(found: FederationResult, client: str, split: str) -> list[float]:
    return [one.accuracy for one in found.accuracies() if (one.client, one.split) == (client, split)]


def test_reports_hold_the_transfer_and_both_classifiers(backbone: Backbone, features: FeatureCache) -> None:
    found = simulate(spec(rounds=2), sites(), backbone=backbone, features=features)
    first, second = found.reports[1]["phases"][0], found.reports[2]["phases"][0]
    metrics = {update["client"]: update["metrics"] for update in first["updates"]}
    told = {"mst_alignment_before", "mst_alignment_after", "mst_consistency_before", "mst_consistency_after"}
    assert {name for name in metrics["anna"] if name.startswith("mst")} == {f"{name}[neon]" for name in told}
    assert {name for name in metrics["bert"] if name.startswith("mst")} == {f"{name}[sketch]" for name in told}
    assert not [n for update in second["updates"] for n in update["metrics"] if n.startswith("mst")]
    assert [phase["phase"] for phase in found.reports[2]["phases"]] == ["global", "domain_prompts"]
    evaluations = found.reports[2]["evaluation"]["clients"]
    assert all(set(one["splits"]) == {"test", "test@global"} for one in evaluations.values())
    before = found.reports[1]["evaluation"]["clients"]
    assert set(before["unseen"]["splits"]) == {"test"}


def peers(*domains: tuple[str, str, str]) -> list[Peer]:
    return [
        Peer.model_validate({"name": name, "role": role, "domain": {"name": name, "description": text}})
        for name, role, text in domains
    ]


def blank_payload(backbone: Backbone, known: list[Peer]) -> bytes:
    """A global state of zeros with a row for each trainer, as an evaluation brings it."""
    domains = [peer.domain for peer in known if peer.role == "trainer" and peer.domain]
    return encode(
        {
            "global_prompt": torch.zeros(2, backbone.d_t),
            "classifier_weight": torch.zeros(len(domains), backbone.d_e),
            "classifier_bias": torch.zeros(len(domains)),
            "domains": torch.tensor([domain_key(domain.description) for domain in domains]),
            "domain_prompts": torch.zeros(0, 2, backbone.d_t),
            "listed_domains": torch.zeros(0, dtype=torch.int64),
        }
    )


def for_training(payload: bytes) -> bytes:
    """Of an evaluation's payload, what the phase ``global`` brings."""
    state, _ = decode(payload)
    return encode({name: tensor for name, tensor in state.items() if name not in ("domain_prompts", "listed_domains")})


def task(kind: str, round: int, known: list[Peer], payload: bytes) -> Task:
    """What the coordinator would ask of a client that knows these peers."""
    config = spec() | {"backbone": {}, "template": "a photo of a {}.", "rounds": 4, "peers": known}
    config["training"] = {"epochs": 1, "batch_size": 10}
    return asked(kind, round, "global" if kind == "train" else "evaluation", payload, config)


def started(backbone: Backbone, features: FeatureCache, folder: Path) -> TaskWork:
    """Anna's client as it starts on what the folder holds."""
    data = ClientData(open_source(DATA["anna"]), backbone, features)
    state = PrivateState(folder)
    return TaskWork("anna", "trainer", backbone, data, state, Predictor(), agreed(state, {"name": "fast_pt"}))


def test_transforms_outlive_a_restart_and_a_newcomer_adds_its_own(
    backbone: Backbone, features: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = count_transforms(monkeypatch)
    anna = ("anna", "trainer", "a sketch of a {}")
    everybody = [anna, ("bert", "trainer", "a neon sign of a {}"), ("unseen", "evaluator", "a chalk drawing of a {}")]
    known = peers(*everybody)
    payload = blank_payload(backbone, known)
    brought = for_training(payload)

    work = started(backbone, features, tmp_path)
    work.evaluate(task("evaluate", 0, known, payload), payload, lambda: False)
    assert trained == ["bert"], "before the first round, with the first task that tells of the peers"
    work.state.close()
    work = started(backbone, features, tmp_path)
    metrics = work.train(task("train", 1, known, brought), brought, lambda: False)
    assert trained == ["bert"]
    assert "mst_alignment_after[bert]" in metrics
    work.state.commit()
    work.state.close()
    work = started(backbone, features, tmp_path)
    late = peers(*everybody, ("cleo", "trainer", "a mosaic of a {}"))
    metrics = work.train(task("train", 2, late, brought), brought, lambda: False)
    assert trained == ["bert", "cleo"]
    assert "mst_alignment_after[cleo]" in metrics
    assert "mst_alignment_after[bert]" not in metrics
    pending = work.state.pending()
    assert pending is not None
    assert set(decode(pending.update.read())[0]) == {"global_prompt", "classifier_weight", "classifier_bias"}
    work.state.close()
