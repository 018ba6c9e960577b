"""What goes up of a training, what a payload may be, and how a client measures: on small tensors and stand-ins."""

from __future__ import annotations

import asyncio
import io
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from promptfed.client_service.exits import ClientError, Failure
from promptfed.client_service.serving.page import page, page_file
from promptfed.client_service.serving.prediction import OneImage, Predictor, Served
from promptfed.client_service.serving.problems import ApiProblem
from promptfed.client_service.state.private_state import TensorOrigin
from promptfed.client_service.training import data as data_module
from promptfed.client_service.training.data import TEST, ClientData, placed, split_by
from promptfed.client_service.training.evaluation import Evaluation
from promptfed.client_service.training.payloads import check_payload, known_sizes, phase_of
from promptfed.client_service.training.trainer import TaskWork
from promptfed.client_service.training.updates import encoded, made_body, sent
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import MethodError, Phase, TensorSpec, TrainResult
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.seeds import derive_seed
from promptfed.shared.spec.sections import CompressionSpec, SelectionSpec
from promptfed.shared.spec.spec import BackboneShape
from promptfed.shared.tensors import TensorError
from promptfed.shared.tensors.compression import compressed
from promptfed.shared.tensors.torch_tensors import decode, encode

SHAPE = BackboneShape(d_t=8, d_v=8, d_e=8, text_layers=1, vision_layers=1, context_length=16)
UP = Phase("train", down=(), up=(TensorSpec("a", (2,)), TensorSpec("b", (2,), "bfloat16")))


def test_an_update_is_sent_as_its_phase_says() -> None:
    given = {
        "a": torch.ones(2, dtype=torch.float64, requires_grad=True),
        "b": torch.ones(2),
        "c": torch.ones(2).bfloat16(),
    }
    found = sent(UP, TrainResult(given | {"n": torch.tensor([1])}))
    assert {name: tensor.dtype for name, tensor in found.items()} == {
        "a": torch.float32, "b": torch.bfloat16, "c": torch.float32, "n": torch.int64,
    }  # fmt: skip
    assert not found["a"].requires_grad
    for bad in (torch.nan, torch.inf, -torch.inf):
        with pytest.raises(MethodError, match="the trained tensor 'b' holds NaN or infinity"):
            sent(UP, TrainResult({"a": torch.ones(2), "b": torch.tensor([0.0, bad])}))


@pytest.mark.parametrize("up", ["none", "int8", "bf16"])
def test_a_change_is_encoded_with_draws_of_its_task(up: str) -> None:
    draws = torch.Generator().manual_seed(1)
    before, after = ({"a": torch.randn(40, generator=draws)} for _ in range(2))

    def body(round: int = 1, phase: str = "train", client: str = "k", seed: int = 7) -> dict[str, Tensor]:
        config = SimpleNamespace(seed=seed, compression=CompressionSpec(up=cast(Any, up)))
        payload = SimpleNamespace(sha256="sha256:" + "0" * 64)
        task = cast(Any, SimpleNamespace(round=round, phase=phase, config=config, task_id="t-1", payload=payload))
        trained = SimpleNamespace(update=after, metrics={"loss": 0.5}, spent=None)
        made, about = decode(made_body(task, client, cast(Any, trained), encode(before)))
        assert about == {"task_id": "t-1", "payload_sha256": payload.sha256, "metrics": {"loss": 0.5}}
        whole = encoded(task, client, after, encode(before))
        assert all(whole[name].equal(tensor) for name, tensor in made.items())
        return made

    if up == "none":
        assert body()["a"].equal(after["a"])
        return
    change = {"a": (after["a"] - before["a"]).numpy()}
    wanted = compressed(change, cast(Any, up), np.random.default_rng(derive_seed(7, "compression", 1, "train", "k")))
    found = body()
    assert set(wanted) == set(found)
    for name, array in wanted.items():
        assert np.asarray(array).tobytes() == found[name].contiguous().view(torch.uint8).numpy().tobytes()
    for other in ({"round": 2}, {"phase": "p"}, {"client": "l"}, {"seed": 8}):
        assert not all(found[name].equal(tensor) for name, tensor in body(**cast(Any, other)).items()), other


def test_a_payload_is_what_the_phase_declares() -> None:
    method = make_method({"name": "fedtaskres"})
    assert known_sizes(method, SHAPE, ("a", "b", "c")) == {"classes": 3, "d_e": 8}
    assert known_sizes(make_method({"name": "fedavg"}), SHAPE, None) == {}, "of no use to the method"
    grown = make_method({"name": "fast_pt", "m": 2})
    assert "n" not in known_sizes(grown, SHAPE, ("a", "b")), "it depends on who takes part"
    method = make_method({"name": "promptfl", "m": 4})
    phase = phase_of(method, 1, 3, "train")
    with pytest.raises(MethodError, match="round 1 of 3 of promptfl has no phase 'others'"):
        phase_of(method, 1, 3, "others")
    for sizes in ({"m": 4, "d_t": 8}, {"m": 4}):
        check_payload({"context": torch.zeros(4, 8)}, method, phase, sizes)
    context = torch.zeros(4, 8)
    for tensors in ({}, {"context": torch.zeros(5, 8)}, {"context": torch.zeros(32)}, {"context": context.long()},
                    {"context": torch.zeros(4, 8), "more": torch.zeros(1)}):  # fmt: skip
        with pytest.raises(TensorError):
            check_payload(tensors, method, phase, {"m": 4, "d_t": 8})
    free = SimpleNamespace(payload_tensors=lambda phase: (TensorSpec("a", ("n", 2)), TensorSpec("b", ("n",))))
    check_payload({"a": torch.zeros(3, 2), "b": torch.zeros(3)}, cast(Any, free), None, {})
    with pytest.raises(TensorError):
        check_payload({"a": torch.zeros(3, 2), "b": torch.zeros(4)}, cast(Any, free), None, {})


class Mixing:
    """Mixes two domains of one name and a third; every image looks like those by its row."""

    domain_names = ("neon", "sketch", "neon")

    def logits(self, split: Any, indices: Tensor) -> Tensor:
        return torch.tensor([[0.0, 2.0, -1.0, 0.1]]).expand(len(indices), 4)

    def shares(self, split: Any, indices: Tensor) -> Tensor:
        first = (indices % 2).float()
        return torch.stack([0.5 * first, 1 - first, 0.5 * first], dim=1)


def test_shares_of_domains_are_means_over_own_test_images(source: Source, backbone: Backbone) -> None:
    data = SimpleNamespace(split=lambda which, names: source.test, count=lambda which: len(source.test))
    measured, context = Evaluation(cast(Any, data)), SimpleNamespace(class_names=source.class_names)
    assert measured.mixture(Mixing(), cast(Any, context)) == pytest.approx(
        {"domain_share:neon": 0.5, "domain_share:sketch": 0.5}
    )
    assert measured.mixture(cast(Any, SimpleNamespace(logits=None)), cast(Any, context)) == {}
    data.count = lambda which: 0 if which == TEST else 1
    assert measured.mixture(Mixing(), cast(Any, context)) == {}


def test_a_prediction_is_of_one_image(source: Source, backbone: Backbone) -> None:
    image = source.test.image(0)
    one, pixels = OneImage(backbone, image), backbone.preprocess(image).unsqueeze(0)
    assert (len(one), one.labels.tolist()) == (1, [0])
    row = torch.zeros(1, dtype=torch.int64)
    assert one.features().equal(backbone.encode_images(pixels))
    assert one.raw_features().equal(backbone.encode_images(pixels, normalize=False))
    assert one.images(row).equal(pixels)
    assert one.patches(row).equal(backbone.encode_patches(pixels).half().float())
    predictor, content = Predictor(), io.BytesIO()
    image.save(content, "PNG")
    for task, several in (({}, False), ({"task": "multi_label"}, True)):
        terms = SimpleNamespace(method={"name": "promptfl"} | task)
        context = SimpleNamespace(class_names=("a", "b", "c", "d"), backbone=backbone, terms=terms)
        predictor.served = Served("promptfl", 3, cast(Any, context), Mixing(), None)
        told = predictor.predict(content.getvalue())
        assert [row["name"] for row in told["classes"]] == ["b", "d", "a", "c"]
        assert (told["class_name"], told["round"], told["classes"][0]["zero_shot"]) == ("b", 3, None)
        logits = torch.tensor([0.0, 2.0, -1.0, 0.1])
        wanted = logits.sigmoid() if several else logits.softmax(-1)
        assert told["classes"][0]["probability"] == pytest.approx(float(wanted[1]))
        assert told.get("present") == (["b", "d"] if several else None), "above one half: not of 0.5 itself"
        assert told["domains"] == [
            {"name": "neon", "share": 0},
            {"name": "sketch", "share": 1},
            {"name": "neon", "share": 0},
        ]
        predictor.served = Served("promptfl", 3, cast(Any, context), First(), First())
        told = predictor.predict(content.getvalue())
        assert (told["domains"], told["classes"][0]["zero_shot"]) == (None, told["classes"][0]["probability"])


class First:
    """The first class, whatever is shown."""

    def logits(self, split: Any, indices: Tensor) -> Tensor:
        assert indices.tolist() == [0], "the image alone"
        return torch.tensor([[1.0, 0.0, 0.0, 0.0]])


def test_labels_stand_at_their_classes_places() -> None:
    names, space = ("b", "a"), ("a", "x", "b")
    assert placed(torch.tensor([0, 1, -1]), names, space).tolist() == [2, 0, -1]
    assert placed(torch.tensor([[1, 0], [0, 1]]), names, space).tolist() == [[0, -1, 1], [1, -1, 0]]


def test_a_selection_holds_images_out_of_a_trainer_alone(source: Source) -> None:
    chosen = SimpleNamespace(selection=SelectionSpec(share=0.25), seed=7)
    apart, tests = split_by(cast(Any, chosen), source, {"novel": source}, "trainer")
    assert (len(apart.train), len(apart.test), set(tests)) == (16, 24, {"novel", "validation"})
    assert apart.test is source.test
    assert len(tests["validation"].test) == 8, "of each class two of six: a quarter, rounded"
    for role, selection in (("evaluator", chosen), ("trainer", SimpleNamespace(selection=None, seed=7))):
        assert split_by(cast(Any, selection), source, {}, cast(Any, role)) == (source, {})


def test_features_of_patches_are_kept_and_sent(source: Source, backbone: Backbone, tmp_path: Path) -> None:
    stopped = [False]
    data = ClientData(source, backbone, FeatureCache(tmp_path), lambda: stopped[0])
    assert data.patch_cost(["train"]).images == len(source.train)
    data.keep_patches("train")
    assert data.patch_cost(["train"]).images == 0
    rows = torch.tensor([3, 1])
    kept = data.split("train", source.class_names).patches(rows)
    pixels = torch.stack([backbone.preprocess(source.train.image(row)) for row in rows.tolist()])
    torch.testing.assert_close(kept.float(), backbone.encode_patches(pixels), atol=0.05, rtol=0.01)
    with pytest.raises(ClientError, match="the federation does not know the classes 'anchor' of the data"):
        data.split("train", tuple(name for name in source.class_names if name != "anchor"))
    stopped[0] = True
    for work in (lambda: data.keep_patches("test"), lambda: data.features("test")):
        with pytest.raises(TaskCancelled):
            work()


def test_features_are_computed_once_under_a_bar_that_is_asked_for(
    source: Source, backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bars = list[dict[str, Any]]()

    class Bar:
        def __init__(self, **given: Any) -> None:
            bars.append({**given, "done": 0})

        def update(self, images: int) -> None:
            bars[-1]["done"] += images

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            """It is gone."""

    monkeypatch.setattr(data_module, "tqdm", Bar)
    data = ClientData(source, backbone, FeatureCache(tmp_path))
    found = [data.features("train", bar=True), data.features("train"), data.features("test")]
    assert found[0] is found[1]
    count, tests = len(source.train), len(source.test)
    assert bars == [
        {"total": count, "desc": "features of train images", "leave": False, "disable": None, "done": count},
        {"total": tests, "desc": "", "leave": False, "disable": True, "done": tests},
    ]
    raw = data.features("train", raw=True)
    torch.testing.assert_close(raw / raw.norm(dim=1, keepdim=True), found[0])
    assert not torch.allclose(raw, found[0], atol=1e-2)


@pytest.mark.parametrize("grey", [None, (0, 4095)])
def test_pictures_are_read_by_the_scale_of_the_training_data(grey: Any, source: Source, backbone: Backbone) -> None:
    train = source.train.select(torch.tensor([0]))
    train.grey = grey
    data = ClientData(replace(source, train=train), backbone, cast(Any, None))
    assert data.greys == (() if grey is None else (grey,))


def work_of(**given: Any) -> Any:
    terms = SimpleNamespace(secure_aggregation=None, privacy=None)
    agreement = SimpleNamespace(consent=SimpleNamespace(terms=terms), metrics=lambda measured: dict(measured))
    own = {"agreement": agreement, "protection": None, "rules": SimpleNamespace(policy=None), "predictor": object()}
    about = {"name": "k", "privacy": SimpleNamespace(floor=1), "_agreed_metrics": dict}
    return SimpleNamespace(**own | about | given)


def test_protection_is_what_was_agreed_to_and_begins_with_protected_tensors() -> None:
    site = SimpleNamespace(begin=lambda task, name, count: ("begun", name, count))
    context, state = cast(Any, SimpleNamespace(train=[1, 2])), SimpleNamespace(committed=lambda: ({}, TensorOrigin()))
    sample, whole = (SimpleNamespace(protects_records=one) for one in (True, False))
    for protection, privacy, same in (
        (None, None, True), (None, whole, True), (site, sample, True),
        (None, sample, False), (site, whole, False), (site, None, False),
    ):  # fmt: skip
        work, task = (
            work_of(protection=protection, state=state),
            SimpleNamespace(config=SimpleNamespace(privacy=privacy)),
        )
        if same:
            found = TaskWork._protection(work, cast(Any, task), context)
            assert found == (("begun", "k", 2) if protection else None)
            continue
        with pytest.raises(Failure, match="is not what this client enrolled for"):
            TaskWork._protection(work, cast(Any, task), context)
    task = cast(Any, SimpleNamespace(config=SimpleNamespace(privacy=sample)))
    for origin, refused in ((TensorOrigin(privacy="sample"), False), (TensorOrigin(), True)):
        state.committed = lambda origin=origin: ({"own": torch.ones(1)}, origin)
        with pytest.raises(Failure, match="trained without noise") if refused else nullcontext():
            TaskWork._protection(work_of(protection=site, state=state), task, context)


def test_numbers_of_training_leave_as_far_as_nothing_hides_them() -> None:
    measured, method = {"loss": 0.5, "trained_parameters": 3.0}, cast(Any, SimpleNamespace(shares=("loss",)))
    alone = {"trained_parameters": 3.0}
    tells = SimpleNamespace(metrics=SimpleNamespace(training=True))
    silent = SimpleNamespace(metrics=SimpleNamespace(training=False))
    for policy, covered, floor, leaves in (
        (None, False, 1, measured), (None, True, 1, alone), (tells, False, 1, measured), (silent, False, 1, alone),
        (None, False, 2, alone),
    ):  # fmt: skip
        work = work_of(rules=SimpleNamespace(policy=policy), privacy=SimpleNamespace(floor=floor))
        assert TaskWork._leaving(work, dict(measured), method, covered) == leaves
        work.agreement.consent.terms.secure_aggregation = object()
        assert TaskWork._leaving(work, dict(measured), method, covered) == measured, "for the owner's own log"


def test_kept_prompts_that_cannot_be_used_wait_for_the_next(caplog: pytest.LogCaptureFixture) -> None:
    served: list[Any] = []

    def serve(serving: Any, cancelled: Any) -> None:
        served.append(serving)
        if serving == "of another method":
            raise MethodError("no such method")

    for kept in (None, "kept", "of another method"):
        TaskWork.restore_serving(
            work_of(state=SimpleNamespace(serving=lambda kept=kept: kept), _serve=serve), lambda: False
        )
    assert served == ["kept", "of another method"]
    assert caplog.messages == [
        "predictions wait for the next evaluation: the kept prompts cannot be used (no such method)"
    ]
    TaskWork.restore_serving(work_of(predictor=None, _serve=None), lambda: False)


def test_of_several_labels_the_mean_average_precision_is_told(source: Source) -> None:
    scores = torch.tensor([[3.0, -1.0], [1.0, 2.0], [-2.0, 1.0]])
    classifier = cast(Any, SimpleNamespace(logits=lambda split, rows: scores[rows]))
    for labels, told in (([[1, 0], [1, 1], [0, 1]], 1.0), ([[1, 1]] * 3, None)):
        data = SimpleNamespace(split=lambda name, names, labels=labels: Sized(torch.tensor(labels)))
        context = SimpleNamespace(class_names=("a", "b"), cancelled=lambda: False)
        found = Evaluation(cast(Any, data))._measure("test", cast(Any, context), classifier)
        assert (None if found is None else (found.accuracy, found.num_samples)) == (None if told is None else (told, 3))


class Sized(list[Any]):
    """Images by their labels alone."""

    def __init__(self, labels: Tensor):
        super().__init__(labels.tolist())
        self.labels = labels


def test_the_page_has_its_files_and_no_others() -> None:
    assert asyncio.run(page("")).status_code == 200
    with pytest.raises(ApiProblem) as missing:
        asyncio.run(page_file("absent.js"))
    assert missing.value.problem.status == 404
