"""Counts over all clients, in whole federations: classes for the loss, and calibration scores for prediction sets."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import promptfed
from promptfed.cli.main import app
from promptfed.client_service.privacy.ledger import Ledger
from promptfed.client_service.training.counting import above_floor, score_counts
from promptfed.client_service.training.data import ClientData, held_out
from promptfed.client_service.training.evaluation import probabilities
from promptfed.experiments.simulation import workers
from promptfed.experiments.simulation.simulation import simulate
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.prediction_sets import PredictionSets, own_scores
from promptfed.runtime.services import Site
from promptfed.sdk.errors import CommandError
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache, load_backbone, shape_of, tiny
from promptfed.shared.data import Source, open_source
from promptfed.shared.data.source import Split
from promptfed.shared.methods import METHODS, make_method, method_for, resolve_spec
from promptfed.shared.methods.core.interface.base import ServerContext
from promptfed.shared.methods.core.interface.label_bias import LabelBias
from promptfed.shared.methods.core.losses import ClassificationLoss
from promptfed.shared.methods.core.statistics import COUNTS, UNIT, statistics_of
from promptfed.shared.metrics.conformal import Histograms, score_bins
from promptfed.shared.metrics.score_sums import ScoreSums
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.loss import LossSpec
from promptfed.shared.spec.spec import SpecError
from tests.support.own_images import SHAPES, write_scanned
from tests.support.visual_clients import client_context, small_backbone

DATA = "symbols:painting?topic=weather&per_class=20&test_per_class=5&partition=iid&clients=4&client={}"
SITES = [Site(f"site-{k}", DATA.format(k)) for k in range(4)]
NAMES = list(open_source(DATA.format(0)).class_names)
SUMMED = {"secure_aggregation": {"threshold": 0.7}, "aggregation": {"weighting": "uniform"}}
NOISED = {"privacy": {"level": "sample", "clip": 1.0, "noise_multiplier": 1.0, "evaluation_epsilon": 2.0}}
BALANCED = {"loss": {"balance": "logit_adjusted", "counts": "federation"}}
BUDGET = {"training": {"learning_rate": 0.02, "batch_size": 4, "optimizer": "sgd", "budget": {"epochs": 2}}}
CALIBRATED = {"calibration": {"share": 0.3, "bins": 10}}


@pytest.fixture(scope="module")
def backbone() -> Backbone:
    torch.set_num_threads(1)
    return load_backbone(tiny.MODEL, tiny.PRETRAINED)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> FeatureCache:
    return FeatureCache(tmp_path_factory.mktemp("features"))


def spec(**changes: Any) -> dict[str, Any]:
    return {
        "name": "counted",
        "method": {"name": "promptfl", "m": 4},
        "rounds": 2,
        "class_names": NAMES,
        "training": {"learning_rate": 0.02, "batch_size": 4},
        "participation": {"min_clients": 4},
        "seed": 3,
    } | changes


def held(share: float = 0.3) -> list[Source]:
    return [held_out(open_source(site.data), share, 3) for site in SITES]


def literal_scores(result: FederationResult, backbone: Backbone, features: FeatureCache) -> list[int]:
    """Each held-out image's score under the final state, counted one by one."""
    classifier = AdaptedModel.of(result).serve(backbone, NAMES).classifier
    counts = [0] * 10
    for source in held():
        split = ClientData(source, backbone, features).split("test", tuple(NAMES))
        for label, told in zip(split.labels.tolist(), probabilities(classifier, split).tolist(), strict=True):
            counts[max(0, math.ceil((1 - told[label]) * 10) - 1)] += 1
    return counts


@pytest.mark.extended
@pytest.mark.parametrize("protected", [{}, SUMMED, BUDGET], ids=["plain", "summed", "budget"])
def test_the_export_has_the_scores_of_all_held_out_images(
    protected: dict[str, Any], backbone: Backbone, features: FeatureCache
) -> None:
    result = simulate(spec(**CALIBRATED, **protected), SITES, backbone=backbone, features=features)
    sums = own_scores(AdaptedModel.of(result), NAMES)
    assert (sums.sites, sums.slack, sums.epsilon) == (4, 0, None)
    assert sums.counts.tolist() == [literal_scores(result, backbone, features)]
    evaluated = result.reports[-1]["evaluation"]
    assert not any("calibration" in client["splits"] for client in evaluated["clients"].values())


@pytest.mark.extended
def test_class_counts_are_the_sum_and_every_client_trains_with_them(backbone: Backbone, features: FeatureCache) -> None:
    result = simulate(spec(**CALIBRATED, **SUMMED, **BALANCED), SITES, backbone=backbone, features=features)
    wanted = torch.bincount(torch.cat([source.train.labels for source in held()]), minlength=len(NAMES))
    assert torch.equal(torch.as_tensor(result.state[COUNTS][0]) * UNIT, wanted.float())
    own = {"loss": {"balance": "logit_adjusted"}}
    other = simulate(spec(**CALIBRATED, **SUMMED, **own), SITES, backbone=backbone, features=features)
    assert not torch.equal(torch.as_tensor(result.state["context"]), torch.as_tensor(other.state["context"]))


@pytest.mark.extended
def test_noisy_counts_are_charged_to_the_ledger(
    backbone: Backbone, features: FeatureCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledgers: list[Ledger] = []

    def in_a_file(path: None) -> Ledger:
        ledgers.append(Ledger(tmp_path / f"{len(ledgers)}.jsonl"))
        return ledgers[-1]

    monkeypatch.setattr(workers, "Ledger", in_a_file)
    given = spec(**CALIBRATED, **NOISED, **BALANCED)
    result = simulate(given, SITES, backbone=backbone, features=features)
    assert len(ledgers) == len(SITES)
    for ledger in ledgers:
        spent = [event for spend in ledger.spends() if spend.split == "train" for event in spend.events]
        noisy = [event for event in spent if event.mechanism == "laplace"]
        assert [(event.z, event.count) for event in noisy] == [(2.0, 2), (2.0, 2)]  # class counts, and scores
        assert len(spent) == 4  # and two rounds of training
    sums, exact = own_scores(AdaptedModel.of(result), NAMES), literal_scores(result, backbone, features)
    assert sums.epsilon == 2.0
    assert sums.counts.tolist() != [exact]
    assert abs(int(sums.counts.sum()) - sum(exact)) < 60


@pytest.mark.extended
def test_predict_and_serve_use_the_scores_of_the_federation(
    backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    calibration = {"calibration": {"share": 0.4, "bins": 50, "by_class": True}}
    result = promptfed.run(
        {"name": "promptfl", "m": 4}, {site.name: site.data for site in SITES}, rounds=1, class_names=NAMES,
        seed=3, **calibration,
    )  # fmt: skip
    result.export(tmp_path / "export")
    open_source(DATA.format(1)).test.image(0).save(tmp_path / "image.png")
    model = AdaptedModel.of(result.taken)
    for by_class in (False, True):
        sets = PredictionSets.of(own_scores(model, NAMES), 0.8, by_class=by_class)
        answer = result.predict(tmp_path / "image.png", coverage=0.8, by_class=by_class)
        limits = sets.thresholds or dict.fromkeys(NAMES, sets.threshold)
        inside = {name for name, p in answer.probabilities.items() if 1 - p <= limits[name]}
        assert set(answer.set or ()) == (inside if 0 < len(inside) < len(NAMES) else set())
    options = ["--export", str(tmp_path / "export"), "--coverage", "0.8"]
    told = CliRunner().invoke(app, ["predict", str(tmp_path / "image.png"), *options])
    assert told.exit_code == 0, told.output
    assert "prediction set:" in told.output
    other = CliRunner().invoke(app, ["predict", str(tmp_path / "image.png"), *options, "--classes", "a,b"])
    assert "leave --classes and --data out" in str(other.exception) + other.output


SCANNED = {"share": 0.4, "bins": 10, "by_class": True, "column": "scanner", "values": ["old", "new"]}


@pytest.mark.extended
@pytest.mark.parametrize("protected", [{}, SUMMED], ids=["plain", "summed"])
def test_scores_are_counted_by_a_column_of_the_data(
    protected: dict[str, Any], backbone: Backbone, features: FeatureCache, tmp_path: Path
) -> None:
    """Each value, and within it each class, by itself; images of other values do not count."""
    data = {
        site: write_scanned(tmp_path / site, {"old": 10 + seed, "new": 7, "lent": 3}, seed)
        for seed, site in enumerate(("a", "b", "c"))
    }
    options = {"rounds": 1, "class_names": list(SHAPES), "seed": 3, "backbone": backbone, "calibration": SCANNED}
    options |= {"participation": {"min_clients": 3}}
    result = promptfed.run({"name": "promptfl", "m": 4}, data, **options, **protected)
    wanted = {value: np.zeros((len(SHAPES), 10), dtype=int) for value in ("old", "new")}
    classifier = AdaptedModel.of(result.taken).serve(backbone, SHAPES).classifier
    for uri in data.values():
        source = held_out(open_source(uri), 0.4, 3)
        split = ClientData(source, backbone, features).split("test", SHAPES)
        told = probabilities(classifier, split)
        for row, label in enumerate(split.labels.tolist()):
            value = source.test.subgroups["scanner"][row]
            if value in wanted:
                wanted[value][label, int(score_bins([1 - float(told[row, label])], 10)[0])] += 1
    sums = own_scores(AdaptedModel.of(result.taken), SHAPES)
    image = open_source(data["a"]).test.image(0)
    for value, counts in wanted.items():
        own = sums.of(("scanner", value))
        assert own.counts.tolist() == counts.tolist()
        assert own.thresholds(0.8) == ScoreSums(counts, 3, classes=SHAPES).thresholds(0.8)
        answer = result.predict(image, coverage=0.8, group=f"scanner={value}")
        inside = {name for name, p in answer.probabilities.items() if 1 - p <= own.threshold(0.8)}
        assert set(answer.set or ()) == (inside if len(inside) < len(SHAPES) else set())
    old, new = (sums.of(("scanner", value)).thresholds(0.8) for value in ("old", "new"))
    assert old != new
    for group, text in (
        ("scanner=lent", "subgroups that have some: scanner=old, scanner=new"),
        ("old", "give COLUMN=VALUE"),
    ):
        with pytest.raises(CommandError, match=text):
            result.predict(image, coverage=0.8, group=group)


def test_a_site_without_the_column_is_refused(backbone: Backbone) -> None:
    calibration = {"column": "scanner", "values": ["old"]}
    with pytest.raises(CommandError, match=r"calibrates by the column scanner, .* add groups=scanner to the data URI"):
        simulate(spec(calibration=calibration), SITES, backbone=backbone)


@pytest.mark.extended
def test_an_export_with_sums_can_be_continued_and_validated(tmp_path: Path) -> None:
    result = promptfed.run(
        {"name": "promptfl", "m": 4}, {site.name: site.data for site in SITES}, rounds=1, class_names=NAMES,
        seed=3, **CALIBRATED,
    )  # fmt: skip
    from promptfed.export.continuing import continued

    result.export(tmp_path / "export")
    raw, _ = continued(tmp_path / "export", {}, kind="validation")
    kept = statistics_of(make_method(resolve_spec(raw).method))
    assert kept is not None
    assert kept.kept
    method = make_method(resolve_spec(raw).method)
    assert [phase.name for phase in method.phases(1, 1)] == ["train"]


def test_below_a_floor_counts_are_multiples_and_one_image_of_a_patient_counts(
    backbone: Backbone, features: FeatureCache
) -> None:
    assert above_floor(np.array([[4, 13, 27, 0, 9, 40]]), 10).tolist() == [[0, 10, 20, 0, 0, 40]]
    assert above_floor(np.array([[39, 19]]), 10).tolist() == [[0, 0]]  # 50 to 59 in all: none could be lower
    source = held()[0]
    split = source.test
    patients = tuple(f"patient {row % 3}" for row in range(len(split)))
    grouped = replace(source, test=Split(split.labels, split.image, patients, digest=split.digest))
    data = ClientData(source, backbone, features, tests={"calibration": grouped})

    class Even:
        def logits(self, split: Any, rows: Any) -> Any:
            return torch.zeros(len(rows), len(NAMES))

    counts = score_counts(data, Even(), tuple(NAMES), Histograms(10))
    assert counts.tolist() == [[0] * 8 + [3, 0]]  # one of each patient, with the score 0.9


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": {"balance": "logit_adjusted", "counts": "federation"}}, "only in a secure sum or with noise"),
    ({"loss": {"counts": "federation"}} | SUMMED, "balance: none reads no counts"),
    (CALIBRATED | {"class_names": None}, "needs class_names"),
    (CALIBRATED | {"task": "multi_label"}, "images with one label"),
    (CALIBRATED | {"method": {"name": "fedpgp"}}, "has its own classifier"),
    ({"calibration": {"column": "scanner"}}, "column and values belong together"),
    ({"calibration": {"column": "scanner", "values": ["old", "old"]}}, "names one value twice"),
    (CALIBRATED | {"selection": {}}, "holds out training images itself"),
    (CALIBRATED | SUMMED | {"aggregation": {"weighting": "samples"}}, "set aggregation.weighting: uniform"),
    (CALIBRATED | {"aggregation": {"server": {"optimizer": "adam"}}}, "leave one of them out"),
    (
        CALIBRATED | {"privacy": {"level": "client", "clip": 1.0, "noise_multiplier": 1.0}},
        "privacy.level client clips what it adds noise to",
    ),
    (CALIBRATED | {"privacy": NOISED["privacy"] | {"unit": "group"}}, "noisy counts protect single images"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED)
def test_what_cannot_be_counted_is_refused_with_the_reason(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SpecError) as refused:
        resolve_spec(spec(**changes))
    assert reason in str(refused.value)


@pytest.mark.parametrize(
    "counted", [CALIBRATED, BALANCED | SUMMED, CALIBRATED | SUMMED], ids=["scores", "counts", "summed"]
)
def test_every_method_counts_or_is_refused(counted: dict[str, Any]) -> None:
    tried = []
    for name in METHODS:
        try:
            resolved = resolve_spec(spec(method={"name": name}) | counted)
        except SpecError:
            continue
        method = method_for(resolved)
        plain = make_method({key: value for key, value in resolved.method.items() if key != "statistics"})
        for round in (1, resolved.rounds):
            names = [phase.name for phase in method.phases(round, resolved.rounds)]
            own = [phase.name for phase in plain.phases(round, resolved.rounds)]
            assert [name for name in names if name in own] == own, name
            assert (round == 1) is (COUNTS in names) or "loss" not in counted
        tried.append(name)
    assert {"promptfl", "fedavg"} <= set(tried) or "loss" in counted


def test_the_state_of_several_labels_has_counts_and_threshold(backbone: Backbone) -> None:
    shape, tried = shape_of(backbone), 0
    for name, kind in METHODS.items():
        if not kind.can_take_several_labels():
            continue
        try:
            resolved = resolve_spec(spec(method={"name": name}, task="multi_label", **SUMMED, **BALANCED))
        except SpecError:
            continue
        method = method_for(resolved)
        context = ServerContext(resolved.training, shape, tuple(NAMES), (), 3, 2)
        for state in (
            method.initial_state_with(backbone, context, initial_draws(3)),
            method.initial_state(context, initial_draws(3)),
        ):
            assert state.keys() == {tensor.name for tensor in method.state_tensors()}, name
            assert COUNTS in state
        tried += 1
    assert tried >= 5


def test_a_resolved_spec_resolves_to_itself() -> None:
    resolved = resolve_spec(spec(**CALIBRATED, **SUMMED, **BALANCED))
    assert resolve_spec(resolved.model_dump(mode="json")) == resolved
    assert "statistics" not in resolve_spec(resolved.model_dump(mode="json") | {
        "calibration": None, "loss": {}
    }).method  # fmt: skip


COUNTED = torch.tensor([[40.0, 8.0, -3.0]])  # noise makes the last one negative: it counts as 1
PAIRS = torch.tensor([[30.0, 5.0, 2.0], [20.0, 45.0, -4.0]])  # present, and absent


def loss_of(backbone: Backbone, counts: torch.Tensor, labels: torch.Tensor, several: bool = False, **loss: Any) -> Any:
    context = client_context(backbone, len(labels)).with_terms(loss=LossSpec(counts="federation", **loss))
    context.train.labels = labels
    bias = LabelBias(torch.zeros(1), backbone, 3) if several else None
    return ClassificationLoss(replace(context, class_counts=counts, label_bias=bias))


def test_the_loss_is_balanced_by_the_counts_of_all_clients(tmp_path: Path) -> None:
    small, labels = small_backbone(tmp_path), torch.tensor([0, 2, 1, 0])
    logits = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    counts = torch.tensor([40.0, 8.0, 1.0], dtype=torch.float64)
    by_shift = torch.nn.functional.cross_entropy(logits + 1.3 * torch.log(counts / 49), labels)
    weights = 1 / (1 - 0.9**counts)
    by_weight = torch.nn.functional.cross_entropy(logits, labels, reduction="none") * (weights / weights.mean())[labels]
    shifted = loss_of(small, COUNTED, labels, balance="logit_adjusted", adjustment=1.3)(logits, labels)
    weighted = loss_of(small, COUNTED, labels, balance="class_balanced", beta=0.9)(logits, labels)
    for found, wanted in ((shifted, by_shift), (weighted, by_weight.mean())):
        assert found.item() == pytest.approx(wanted.item(), abs=1e-6)
        slope, by_hand = (torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (found, wanted))
        assert float((slope - by_hand).abs().max()) < 1e-6


def test_several_labels_are_balanced_by_present_and_absent_of_all_clients(tmp_path: Path) -> None:
    labels = torch.tensor([[1, 0, -1], [0, 1, 1]], dtype=torch.int8)
    logits = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    share = torch.tensor([30.5 / 51, 5.5 / 51, 2.5 / 4], dtype=torch.float64)
    binary = torch.nn.functional.binary_cross_entropy_with_logits
    each = binary(logits + torch.logit(share), labels.clamp(min=0).double(), reduction="none")
    wanted = torch.where(labels >= 0, each, 0.0).sum() / 2
    found = loss_of(small_backbone(tmp_path), PAIRS, labels, several=True, balance="logit_adjusted")(logits, labels)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-6)


def test_no_count_of_scores_can_be_narrowed_within_its_range() -> None:
    """By the number of images, which is told as a range too, each count can still be any of its range."""
    rng, told = np.random.default_rng(7), 0
    for _ in range(3000):
        floor = int(rng.choice([2, 5, 10]))
        counts = rng.poisson(rng.choice([0.3, 4, 30]), (int(rng.integers(1, 4)), int(rng.integers(2, 12))))
        lows = above_floor(counts, floor).reshape(-1)
        if not lows.any():
            continue
        told += 1
        assert (lows % floor == 0).all()
        assert (lows <= counts.reshape(-1)).all()
        images = int(counts.sum())
        least, most = images - images % floor, images - images % floor + floor - 1
        for k in range(len(lows)):
            others = lows.sum() - lows[k]
            for value in (lows[k], lows[k] + floor - 1):
                assert value + others <= most
                assert value + others + (len(lows) - 1) * (floor - 1) >= least
    assert told > 500
