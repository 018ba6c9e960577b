"""FedOTP against its equations written out, patch by patch, class by class and image by image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import fedotp, make_method
from promptfed.shared.methods.core.interface import ClientContext, MethodError, ServerContext
from promptfed.shared.methods.fedotp import FedOTP, PatchTextLogits, transport_plan
from promptfed.shared.methods.promptfl import LOCAL
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.support import literal
from tests.support.equality import assert_moved_equally

M, PATCHES = 4, 6


@dataclass
class Patched(MadeUpSplit):
    """Random features of images and of their patches."""

    every: Tensor

    def patches(self, indices: Tensor) -> Tensor:
        return self.every[indices]


def patched(context: ClientContext, patches: int = PATCHES) -> ClientContext:
    draws = torch.Generator().manual_seed(8)
    every = F.normalize(torch.randn(len(context.train), patches, context.backbone.d_e, generator=draws), dim=-1)
    return replace(context, train=Patched(context.train.features(), context.train.labels, every))


def otp(**hyper: Any) -> FedOTP:
    made = make_method({"name": "fedotp", "m": M} | hyper)
    assert isinstance(made, FedOTP)
    return made


def start_of(tried: FedOTP, context: ClientContext) -> Tensors:
    draws = torch.Generator().manual_seed(1)
    shared = torch.randn(M, context.backbone.d_t, generator=draws) * 0.02
    return {"global_context": shared, LOCAL: tried.local_context(context, {})}


def literal_logits(context: ClientContext, contexts: list[Tensor], row: int, hyper: Any) -> Tensor:
    """(1.1) to (1.5) of one image; the plan, a constant, by the solver that has tests of its own."""
    backbone, scores = context.backbone, []
    patches = context.train.patches(torch.tensor([row]))[0]
    for name in context.class_names:
        raw = [literal.raw_text_feature(backbone, vectors, name) for vectors in contexts]
        texts = [text / text.norm() for text in raw]
        similarities = torch.stack([torch.stack([torch.dot(patch, text) for text in texts]) for patch in patches])
        plan = transport_plan(similarities, hyper.gamma, hyper.epsilon)
        total = torch.zeros(())
        for p in range(len(patches)):
            for n in range(len(texts)):
                total = total + plan[p, n].detach() * similarities[p, n]
        scores.append(total)
    return backbone.logit_scale * torch.stack(scores)


def otp_loss(context: ClientContext, hyper: Any) -> literal.Loss:
    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        contexts = [tensors["global_context"], tensors[LOCAL]]
        losses = [
            literal.cross_entropy(literal_logits(context, contexts, row, hyper), int(context.train.labels[row]))
            for row in rows.tolist()
        ]
        return torch.stack(losses).mean()

    return loss


@pytest.mark.extended
@pytest.mark.parametrize("options", [{}, {"gamma": 0.5, "epsilon": 0.05}], ids=str)
def test_fedotps_training_equals_the_equations(options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    context = patched(make_context(5, epochs=1, batch_size=3, learning_rate=0.05))
    tried = otp(**options)
    start = start_of(tried, context)
    found = tried.train(context, {"global_context": start["global_context"]}, {})
    wanted = literal.training(context, start, otp_loss(context, tried.hyper), 0.05)
    assert set(found.update) == {"global_context"}
    assert set(found.private) == {LOCAL}
    assert_moved_equally(found.update | found.private, wanted, start)


def test_the_loss_and_its_gradient_equal_the_equations(backbone: Backbone, make_context: Make) -> None:
    plain = make_context(3, batch_size=3, learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    context, tried = patched(plain, 49), otp()
    start = start_of(tried, context)
    result = tried.train(context, {"global_context": start["global_context"]}, {})
    leaves = {key: value.clone().requires_grad_() for key, value in start.items()}
    loss = otp_loss(context, tried.hyper)(leaves, torch.arange(3))
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    assert result.metrics["loss"] == pytest.approx(float(loss.detach()), rel=1e-5)
    for key, value in (result.update | result.private).items():
        scale = float(wanted[key].abs().max())
        assert float((start[key] - value - wanted[key]).abs().max()) <= 1e-4 * scale


def test_who_classifies_with_what(backbone: Backbone, make_context: Make) -> None:
    """Trainers with both contexts; an evaluator, and ``global``, with the shared one, to which all of γ goes."""
    context, tried, rows = patched(make_context()), otp(), torch.arange(4)
    start = start_of(tried, context)
    payload = {"global_context": start["global_context"]}
    trained = {LOCAL: torch.randn(M, backbone.d_t, generator=torch.Generator().manual_seed(9)) * 0.1}
    none = replace(context, train=MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long)))

    def literally(contexts: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return torch.stack([literal_logits(context, contexts, int(row), tried.hyper) for row in rows])

    alone = literally([start["global_context"]])
    for found, wanted in [
        (tried.classifier(context, payload, trained), literally([start["global_context"], trained[LOCAL]])),
        (tried.classifier(context, payload, {}), literally([start["global_context"], start[LOCAL]])),
        (tried.classifier(none, payload, {}), alone),
        (tried.variants(context, payload, trained)["global"], alone),
    ]:
        scored = found.logits(context.train, rows)
        assert float((scored - wanted).abs().max()) <= 2e-5 * float(wanted.abs().max())
        assert not hasattr(found, "weights"), "plain code cannot use it"
    kept = [(none, {}, set()), (none, trained, {"global"}), (context, {}, {"global"})]
    assert all(set(tried.variants(own, payload, private)) == names for own, private, names in kept)


def test_private_contexts_start_alike_with_the_stated_spread(make_context: Make) -> None:
    long, short = (otp(m=m).local_context(patched(make_context()), {}) for m in (16, 2))
    assert short.equal(long[:2])
    assert float(long.std()) == pytest.approx(0.02, rel=0.1)


def test_an_image_alone_and_among_others(backbone: Backbone, make_context: Make) -> None:
    context, tried = patched(make_context(7), 49), otp()
    start = start_of(tried, context)
    classifier = tried.classifier(context, {"global_context": start["global_context"]}, {})
    together = classifier.logits(context.train, torch.arange(7)) / backbone.logit_scale
    for row in range(7):
        alone = classifier.logits(context.train, torch.tensor([row])) / backbone.logit_scale
        assert float((alone[0] - together[row]).abs().max()) <= 1e-6


@pytest.mark.parametrize(("images", "parts"), [(5.0, [5]), (4.9, [4, 1]), (2.0, [2, 2, 1]), (0.9, [1] * 5)])
def test_as_many_plans_as_fit_are_made_at_once(
    images: float, parts: list[int], make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    context, tried = patched(make_context(5)), otp()
    classifier = tried.classifier(context, start_of(tried, context), {})
    whole, sizes, scores = classifier.logits(context.train, torch.arange(5)), list[int](), PatchTextLogits._scores

    def counted(logits: PatchTextLogits, some: Tensor, text: Tensor) -> Tensor:
        sizes.append(len(some))
        return scores(logits, some, text)

    monkeypatch.setattr(PatchTextLogits, "_scores", counted)
    monkeypatch.setattr(fedotp, "MOST_ENTRIES", int(images * len(NAMES) * 2 * PATCHES))
    torch.testing.assert_close(classifier.logits(context.train, torch.arange(5)), whole)
    assert sizes == parts


def server_context(**shape: Any) -> ServerContext:
    given = {"d_t": 512, "d_e": 512, "context_length": 77, "patch_tokens": 196} | shape
    return ServerContext(TrainingSpec(), BackboneShape(**given), NAMES, (), 3, 4)


def test_towers_without_patches_are_refused() -> None:
    tried = otp()
    tried.check_backbone(server_context().shape)
    with pytest.raises(MethodError, match="needs the features of an image's patches; this backbone's image tower"):
        tried.check_backbone(server_context(patch_tokens=None).shape)
