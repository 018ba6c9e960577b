"""MST against its equations written out, and its life on a client: resumed, extended, reported once, stopped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone, FeatureCache, load_backbone
from promptfed.shared.data import open_source
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.interface import ClientContext, ClientInfo, MethodError
from promptfed.shared.methods.core.training import TaskCancelled
from promptfed.shared.methods.fast_pt import style_transfer
from promptfed.shared.methods.fast_pt.domains import described_domains, domain_key, trainer_domains, wording
from promptfed.shared.methods.fast_pt.style_transfer import (
    PARAMETERS,
    EmbeddedSplit,
    StyleTransfer,
    StyleTransferHyper,
    alignment,
    new_transform,
    transfer_loss,
    transferred,
    transform,
)
from promptfed.shared.seeds import generator
from tests.shared.methods.conftest import NAMES
from tests.support import literal_fast_pt as literal
from tests.support.equality import assert_values
from tests.support.terms import training_terms

Make = Callable[..., ClientContext]

SKETCH = Domain(name="sketch", description="a sketch of a {}")
NEON = Domain(name="neon", description="a neon sign of a {}")
CHALK = Domain(name="chalk", description="a chalk drawing of a {}")
TEMPLATE = "a photo of a {}."


def client(name: str, domain: Domain | None, role: Any = "trainer") -> ClientInfo:
    return ClientInfo(name, role, 10, (), domain)


def texts(backbone: Backbone, template: str) -> Tensor:
    return torch.stack([literal.whole_text(backbone, template, name) for name in NAMES])


@pytest.fixture
def sketcher(make_context: Make) -> ClientContext:
    return replace(make_context(10), domain=SKETCH)


@pytest.mark.parametrize(("weight", "temperature"), [(0.5, 1.0), (0.2, 1.0), (0.2, 0.05)])
def test_the_loss_is_the_papers_with_its_gradients(
    weight: float, temperature: float, backbone: Backbone, sketcher: ClientContext
) -> None:
    hyper = StyleTransferHyper(mst_weight=weight, mst_temperature=temperature)
    own, target, template = (texts(backbone, one) for one in (SKETCH.description, NEON.description, TEMPLATE))
    start = new_transform(backbone.d_e, 7, torch.Generator().manual_seed(3))
    values, labels = sketcher.train.features(), sketcher.train.labels

    q = {name: one.clone().requires_grad_() for name, one in start.items()}
    found = transfer_loss(transform(q, values), values, labels, target - own, template, hyper)
    gradients = torch.autograd.grad(found, list(q.values()))

    p = {name: one.clone().requires_grad_() for name, one in start.items()}
    aligned, consistent = literal.transfer_terms(
        p, values, labels, list(own), list(target), list(template), temperature
    )
    wanted = weight * aligned + (1 - weight) * consistent
    literally = torch.autograd.grad(wanted, list(p.values()))

    assert_values(found, wanted)
    for one, other in zip(gradients, literally, strict=True):
        assert float((one - other).abs().max()) <= 1e-4 * float(other.abs().max())


def test_training_a_transform_equals_the_equations(backbone: Backbone, sketcher: ClientContext) -> None:
    hyper = StyleTransferHyper(mst_hidden=5, mst_epochs=2, mst_batch_size=4, mst_learning_rate=0.01)
    values, labels = sketcher.train.features(), sketcher.train.labels
    trained = StyleTransfer(sketcher, hyper).train(NEON)
    draws = generator(3, "hospital-a", "style-transfer", "a neon sign of a {}")
    templates = (SKETCH.description, NEON.description, TEMPLATE)
    wanted = literal.trained_transform(
        backbone, values, labels, NAMES, templates, draws, hidden=5, epochs=2, batch_size=4, rate=0.01
    )
    found = {name.rsplit(".", 1)[1]: one for name, one in trained.items()}
    start = new_transform(backbone.d_e, 5, generator(3, "hospital-a", "style-transfer", "a neon sign of a {}"))
    for name in PARAMETERS:
        assert float((wanted[name] - start[name]).abs().max()) > 0.01
        assert_values(found[name], wanted[name], 1e-4)
    moved = StyleTransfer(sketcher, hyper).apply(trained, NEON)
    assert_values(moved, literal.transferred(wanted, values), 1e-4)
    assert_values(moved.norm(dim=1), torch.ones(10))


def test_the_hidden_width_is_half_of_d_e_by_default(backbone: Backbone, sketcher: ClientContext) -> None:
    trained = StyleTransfer(sketcher, StyleTransferHyper(mst_epochs=1)).train(NEON)
    shapes = {name.rsplit(".", 1)[1]: tuple(one.shape) for name, one in trained.items()}
    d_e = backbone.d_e
    assert shapes == {"w1": (d_e // 2, d_e), "b1": (d_e // 2,), "w2": (d_e, d_e // 2), "b2": (d_e,), "report": (4,)}


def test_training_aligns_and_keeps_the_class(backbone: Backbone, sketcher: ClientContext) -> None:
    transfer = StyleTransfer(sketcher, StyleTransferHyper())
    private = transfer.train(NEON)
    report = transfer.report(private, NEON)
    assert report["alignment_after"] > report["alignment_before"] + 0.3
    assert report["consistency_after"] > report["consistency_before"]
    values, labels = sketcher.train.features(), sketcher.train.labels
    parameters = {name: private[f"transform.{domain_key(SKETCH.description):016x}."
                                f"{domain_key(NEON.description):016x}.{name}"] for name in PARAMETERS}  # fmt: skip
    directions = texts(backbone, NEON.description) - texts(backbone, SKETCH.description)
    aligned = alignment(transform(parameters, values), values, directions[labels])
    assert float(aligned.mean()) == pytest.approx(report["alignment_after"], abs=1e-5)
    read = (transferred(parameters, values) @ texts(backbone, TEMPLATE).T).argmax(dim=1) == labels
    assert float(read.float().mean()) == pytest.approx(report["consistency_after"])


def test_few_images_are_trained_on_in_as_many_steps(sketcher: ClientContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """50 epochs of batch 256 were 50 steps on 208 images, and 10 images had as many."""
    steps: list[int] = []

    def counted(moved: Tensor, *rest: Any) -> Tensor:
        steps.append(len(moved))
        return transfer_loss(moved, *rest)

    monkeypatch.setattr(style_transfer, "transfer_loss", counted)
    StyleTransfer(sketcher, StyleTransferHyper()).train(NEON)
    assert steps == [10] * 400
    steps.clear()
    StyleTransfer(sketcher, StyleTransferHyper(mst_steps=5, mst_batch_size=4)).train(NEON)
    assert steps == [4, 4, 2, 4, 4]
    steps.clear()
    StyleTransfer(sketcher, StyleTransferHyper(mst_epochs=2, mst_batch_size=4)).train(NEON)
    assert steps == [4, 4, 2, 4, 4, 2]


def test_on_real_embeddings_the_class_is_kept(tmp_path: Path) -> None:
    """Sketches of 13 signs, 16 of each, as clients of the embedded benchmark have them, into neon."""
    backbone = load_backbone("promptfed-tiny", "embedded")
    source = open_source("symbols:sketch?topic=signs&per_class=16&test_per_class=1")
    features = FeatureCache(tmp_path).features(backbone, source.train)
    names = source.class_names
    context = ClientContext(
        backbone, training_terms(rounds=1, seed=0), names, TEMPLATE, "a", SKETCH, (), 1, "global",
        EmbeddedSplit(features, source.train.labels),
    )  # fmt: skip
    kept = {}
    for label, hyper in (("epochs", StyleTransferHyper(mst_epochs=50)), ("steps", StyleTransferHyper())):
        transfer = StyleTransfer(context, hyper)
        kept[label] = transfer.report(transfer.train(NEON), NEON)["consistency_after"]
    assert kept["epochs"] < 0.7
    assert kept["steps"] > 0.8


def test_a_transform_does_not_depend_on_when_or_beside_which_it_is_trained(sketcher: ClientContext) -> None:
    transfer = StyleTransfer(sketcher, StyleTransferHyper(mst_epochs=2))
    alone = transfer.train(NEON)
    transfer.train(CHALK)
    again = StyleTransfer(replace(sketcher, round=4, phase="evaluation"), StyleTransferHyper(mst_epochs=2)).train(NEON)
    assert all(torch.equal(alone[name], again[name]) for name in alone)
    with torch.no_grad():
        under_no_grad = transfer.train(NEON)
    assert all(torch.equal(alone[name], under_no_grad[name]) for name in alone)


def test_a_stop_is_noticed_between_steps(sketcher: ClientContext) -> None:
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 3

    with pytest.raises(TaskCancelled):
        StyleTransfer(replace(sketcher, cancelled=cancelled), StyleTransferHyper()).train(NEON)
    assert len(asked) == 4


def test_a_client_without_a_description_cannot_transfer(make_context: Make) -> None:
    with pytest.raises(MethodError, match="'hospital-a' has no domain description"):
        StyleTransfer(make_context(), StyleTransferHyper())


def test_a_domain_is_its_wording() -> None:
    assert wording("A  Sketch of a {}.") == "a sketch of a {}"
    assert domain_key("A Sketch of a {}.") == domain_key("a sketch of a {}") != domain_key("a sketch of the {}")
    assert 0 <= domain_key("a {}") < 1 << 63


def test_domains_are_the_trainers_sorted_by_name_and_told_once() -> None:
    shout = Domain(name="a-sketch", description="A SKETCH OF A {}")
    clients = [client("a", SKETCH), client("b", NEON), client("c", shout), client("d", CHALK, "evaluator")]
    clients.append(client("e", None, "evaluator"))
    assert [domain.name for domain in trainer_domains(clients).values()] == ["neon", "sketch"]
    assert [domain.name for domain in described_domains(clients).values()] == ["chalk", "neon", "sketch"]
    assert list(trainer_domains(clients)) == [domain_key(NEON.description), domain_key(SKETCH.description)]


def test_embedded_splits_join_and_have_no_images() -> None:
    values = torch.arange(6.0).reshape(3, 2)
    joined = EmbeddedSplit.of([(values, torch.tensor([0, 1, 2])), (values + 10, torch.tensor([2, 1, 0]))])
    assert len(joined) == 6
    assert torch.equal(joined.features(), torch.cat([values, values + 10]))
    assert joined.labels.tolist() == [0, 1, 2, 2, 1, 0]
    with pytest.raises(MethodError, match="no images"):
        joined.images(torch.tensor([0]))
