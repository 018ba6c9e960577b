"""Differentially private training: the mechanism against itself written out, and what refuses to be protected.

The lower bound on ε is what guessing canaries in one run shows (Steinke, Nasr, Jagielski, 2023).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import METHODS, make_method, promptfl
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import training
from promptfed.shared.methods.core.objectives import Protection, UnprotectedError
from promptfed.shared.methods.core.training import PrivateGradients, clipped, make_optimizer, train
from promptfed.shared.methods.promptfl import LOCAL, PrivateContextMethod, PromptFL
from promptfed.shared.privacy.accounting import epsilon_of
from promptfed.shared.privacy.noise import NoiseStream, SeededNoise
from promptfed.shared.seeds import initial_draws
from promptfed.shared.spec.spec import BackboneShape, TrainingSpec
from promptfed.shared.tensors import Tensors
from tests.shared.methods.conftest import NAMES, MadeUpSplit, Make
from tests.support import literal, literal_private
from tests.support.equality import assert_moved_equally

MOST_EPSILON = 50.0


def one_run_bound(guesses: int, right: int, canaries: int, delta: float, chance: float = 0.05) -> float:
    """The largest ε that ``right`` of ``guesses`` rule out, if each of ``canaries`` took part by a fair coin.

    Steinke et al., 2023, Theorem 5.2: under (ε, δ) at least v right have probability f(v) + 2mδ·max_i (f(v − i) −
    f(v))/i at most, f(v) = P[Bin(r, e^ε/(1 + e^ε)) ≥ v].
    """
    if guesses == 0 or _one_run_chance(0.0, guesses, right, canaries, delta) > chance:
        return 0.0
    low, high = 0.0, MOST_EPSILON
    while high - low > 1e-4:
        middle = (low + high) / 2
        if _one_run_chance(middle, guesses, right, canaries, delta) <= chance:
            low = middle
        else:
            high = middle
    return low


def _one_run_chance(epsilon: float, guesses: int, right: int, canaries: int, delta: float) -> float:
    sure = 1 / (1 + math.exp(-epsilon))
    at_least = stats.binom.sf(right - 1, guesses, sure)
    if right == 0 or delta == 0:
        return float(at_least)
    steps = np.arange(1, right + 1)
    more = (stats.binom.sf(right - 1 - steps, guesses, sure) - at_least) / steps
    return float(at_least + 2 * canaries * delta * more.max())


M = 4


TEXT = [
    {"name": "promptfl", "m": M}, {"name": "promptfl_prox", "m": M}, {"name": "promptfl_ft", "m": M},
    {"name": "fedkgcoop", "m": M}, {"name": "fedpgp", "m": M, "b": 2}, {"name": "fedpgp", "m": M, "full_rank": True},
    {"name": "fedcocoop", "m": M}, {"name": "fedclip"}, {"name": "fedtaskres"}, {"name": "fedclipadapter"},
    {"name": "fedtpg", "m": M}, {"name": "promptfolio", "m": M}, {"name": "promptfl_per", "m": M},
]  # fmt: skip


COPIED = TEXT[:11]  # whose gradients come from batches of copies


def protected(context: pf.ClientContext, stream: NoiseStream, clip: float = 0.3, z: float = 1.0) -> pf.ClientContext:
    training = context.training
    own = Protection(clip, z, len(context.train), training.batch_size, training.epochs, stream)
    return replace(context, protection=own)


def start_of(settings: dict[str, Any], backbone: Backbone) -> Tensors:
    method = make_method(settings)
    context = pf.ServerContext(
        TrainingSpec(), BackboneShape(d_t=backbone.d_t, d_e=backbone.d_e), NAMES, (), seed=3, rounds=4
    )
    return method.initial_state(context, initial_draws(3))


@pytest.mark.parametrize("settings", TEXT, ids=lambda one: "-".join(str(value) for value in one.values()))
def test_without_clip_and_noise_a_full_batch_is_the_plain_one(
    settings: dict[str, Any], backbone: Backbone, make_context: Make
) -> None:
    """Σ g_i/B + ∇R is the plain gradient, whatever the method."""
    context, start = make_context(6, epochs=1, batch_size=6, learning_rate=0.05), start_of(settings, backbone)
    assert type(make_method(settings)).can_protect()
    plain = make_method(settings).train(context, start, {})
    quiet = make_method(settings).train(protected(context, literal_private.Silent(bytes(32)), clip=1e9), start, {})
    for name, value in quiet.update.items():
        moved = plain.update[name] - start[name]
        scale = max(float(moved.abs().max()), 1e-5)  # a key's bias has no gradient at all
        stored = torch.finfo(value.dtype).eps * float(value.abs().max())  # both are rounded to what a number can hold
        assert float((value - plain.update[name]).abs().max()) <= 2e-4 * scale + stored, name
    for name, value in quiet.private.items():
        assert torch.allclose(value, plain.private[name], rtol=1e-4, atol=1e-6), name
    assert math.isnan(quiet.metrics["loss"])


@pytest.mark.parametrize("settings", COPIED, ids=lambda one: "-".join(str(value) for value in one.values()))
def test_each_copy_is_moved_by_its_own_unit_alone(
    settings: dict[str, Any], backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[pf.Objective, list[Tensor]]] = []

    def step(gradients: PrivateGradients) -> None:
        assert gradients._objective is not None
        seen.append((gradients._objective, list(gradients._parameters)))
        for parameter in gradients._parameters:
            parameter.grad = torch.zeros_like(parameter)

    monkeypatch.setattr(PrivateGradients, "step", step)
    context = protected(make_context(6, batch_size=6), literal_private.Silent(bytes(32)))
    make_method(settings).train(context, start_of(settings, backbone), {})
    objective, parameters = seen[0]
    copies = [one.detach().expand(3, *one.shape).clone().requires_grad_() for one in parameters]
    losses = objective.units(copies, torch.tensor([4, 0, 2]))
    for unit in range(3):
        found = torch.autograd.grad(losses[unit], copies, retain_graph=True, allow_unused=True)
        moved = [part for part in found if part is not None]
        others = [other for other in range(3) if other != unit]
        assert max(float(part[unit].abs().max()) for part in moved) > 0
        assert all(float(part[others].abs().max()) == 0 for part in moved)


RUNS = [(7, 3, 2, "sgd"), (7, 7, 1, "adam"), (5, 32, 2, "adamw"), (9, 1, 1, "sgd")]


@pytest.mark.parametrize(("count", "batch", "epochs", "optimizer"), RUNS)
def test_promptfl_equals_dp_sgd_written_out(
    count: int, batch: int, epochs: int, optimizer: str, backbone: Backbone, make_context: Make
) -> None:
    """Empty samples (9, 1), q = 1, last batches, momentum, decay, Adam: from the same draws the same context."""
    context = make_context(count, epochs=epochs, batch_size=batch, learning_rate=0.05, optimizer=optimizer)
    start = start_of({"name": "promptfl_prox", "m": M}, backbone)["context"]
    method = make_method({"name": "promptfl_prox", "m": M, "mu": 0.5})
    found = method.train(protected(context, SeededNoise(7).stream()), {"context": start}, {}).update["context"]

    def unit_loss(theta: Any, unit: int) -> Tensor:
        rows = slice(unit, unit + 1)
        return literal.context_loss(
            backbone, theta[0], list(NAMES), context.train.features()[rows], context.train.labels[rows]
        )

    wanted = literal_private.private_sgd(
        [start], unit_loss, lambda theta: 0.25 * (theta[0] - start).square().sum(),
        lambda theta: make_optimizer(theta, context.training, 0.05), SeededNoise(7).stream(), units=count, batch=batch,
        epochs=epochs, clip=0.3, z=1.0,
    )[0]  # fmt: skip
    moved = wanted - start
    # Adam divides by the root of a gradient's square, which magnifies what float32 rounds.
    assert float((found - wanted).abs().max()) <= 1e-3 * float(moved.abs().max())
    if optimizer == "adam":
        other = method.train(protected(context, SeededNoise(8).stream()), {"context": start}, {}).update["context"]
        assert float((other - wanted).abs().max()) > 0.1 * float(moved.abs().max())


def test_gradients_are_clipped_over_all_tensors_and_bad_numbers_count_as_nothing() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 0.0], [math.nan, 2.0], [1e30, -1e30], [math.inf, 0.1], [0.1, 0.1]]).double()
    found = clipped(rows, 1.0)
    assert bool((found.norm(dim=1) <= 1.0).all())
    assert torch.allclose(found[0], torch.tensor([0.6, 0.8]).double(), atol=2e-6)
    assert found[1].tolist() == [0, 0]
    assert found[2].tolist() == pytest.approx([0, 1], abs=2e-6)
    assert found[3].tolist() == pytest.approx([0.5**0.5, -(0.5**0.5)], abs=2e-6)
    assert found[4].tolist() == pytest.approx([0, 0.1])
    assert found[5].tolist() == pytest.approx([0.1, 0.1])
    assert clipped(torch.tensor([[0.6, 0.8]]).double(), 1.0)[0].tolist() == pytest.approx([0.6, 0.8], abs=2e-6)
    rows = torch.randn(10_000, 7, generator=torch.Generator().manual_seed(1)).double()
    assert float(clipped(rows, 0.3).float().double().norm(dim=1).max()) <= 0.3, "also of what float32 rounds"


@pytest.mark.parametrize("batch", [1, 8])
def test_where_no_gradient_is_the_step_is_noise_of_the_said_size_even_for_an_empty_sample(batch: int) -> None:
    """Units of zero gradient: what is left is z·C·ξ/(q·n), however many were sampled."""
    theta = torch.zeros(100_000, requires_grad=True)
    objective = pf.Objective(lambda copies, rows: copies[0].sum(dim=1) * 0.0)
    protection = Protection(0.5, 2.0, 8, batch, 1, SeededNoise(5).stream())
    gradients = PrivateGradients(protection, [theta], lambda rows: theta.sum() * 0, objective, 8, 5, 512)
    for _ in range(12):
        theta.grad = None  # what an earlier step has left is no answer of this one
        gradients.step()
        assert theta.grad is not None
        drawn = theta.grad.double() * (min(batch, 8) / (2.0 * 0.5))
        assert abs(float(drawn.mean())) < 5 / math.sqrt(theta.numel())
        assert float(drawn.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / theta.numel()))


@pytest.mark.parametrize(("texts", "classes", "sizes"), [
    (64, 5, [8]), (20, 5, [4, 4]), (4, 5, [1] * 8), (9, 1, [3, 3, 2]), (2, 1, [1] * 8),
])  # fmt: skip
def test_copies_are_as_many_as_their_texts_and_numbers_allow(
    texts: int, classes: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three numbers, where a text has room for one."""
    monkeypatch.setattr(training, "NUMBERS_PER_TEXT", 1)
    theta, asked = torch.zeros(3, requires_grad=True), list[int]()
    objective = pf.Objective(lambda copies, rows: (asked.append(len(rows)), copies[0].sum(dim=1))[1])
    protection = Protection(0.5, 1.0, 8, 8, 1, SeededNoise(5).stream())
    PrivateGradients(protection, [theta], lambda rows: theta.sum(), objective, 8, classes, texts).step()
    assert asked == sizes


def test_a_device_without_room_for_all_copies_takes_fewer() -> None:
    target = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    asked: list[int] = []

    def gradient(room: int) -> Tensor:
        def units(copies: Any, rows: Tensor) -> Tensor:
            asked.append(len(rows))
            if len(rows) > room:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return ((copies[0] - target[rows]) ** 2).sum(dim=1)

        theta = torch.zeros(3, requires_grad=True)
        protection = Protection(0.5, 1.0, 8, 8, 1, SeededNoise(5).stream())
        PrivateGradients(protection, [theta], lambda rows: theta.sum(), pf.Objective(units), 8, 5, 64).step()
        assert theta.grad is not None
        return theta.grad

    whole = gradient(8)
    assert asked == [8]
    assert torch.allclose(gradient(3), whole)
    assert asked == [8, 8, 6, 3, 3, 2]
    with pytest.raises(torch.OutOfMemoryError):
        gradient(0)


def test_what_was_not_accounted_for_is_refused(make_context: Make) -> None:
    theta = torch.zeros(3, requires_grad=True)

    def loss(rows: Tensor) -> Tensor:
        return theta.sum()

    context = protected(make_context(6, batch_size=3), SeededNoise(1).stream())
    train(context, [theta], loss)
    with pytest.raises(UnprotectedError, match="second training loop"):
        train(context, [theta], loss)
    fresh = protected(make_context(6), SeededNoise(1).stream())
    with pytest.raises(UnprotectedError, match="other epochs"):
        train(fresh, [theta], loss, epochs=3)
    other = replace(fresh, train=make_context(7).train)
    with pytest.raises(UnprotectedError, match="7 units to train on instead of the 6"):
        train(other, [theta], loss)


def test_every_method_protects_or_says_why_not_and_a_subclass_speaks_for_itself() -> None:
    for kind in METHODS.values():
        assert kind.can_protect() or kind.unprotected
    assert not METHODS["plan"].can_protect()

    class Changed(PromptFL):
        name = "changed"

    assert not Changed.can_protect()


CANARIES, DELTA = 1000, 1e-5


def shown(make_context: Make, seed: int, z: float, stream: NoiseStream, batch: int = CANARIES) -> tuple[float, float]:
    """The bound that the guesses show, and the accountant's ε."""
    inside = np.random.default_rng(seed).random(CANARIES) < 0.5
    present = torch.from_numpy(inside.astype(np.float32))
    theta = torch.zeros(CANARIES, requires_grad=True)

    def units(copies: Any, rows: Tensor) -> Tensor:
        return -30.0 * present[rows] * copies[0][torch.arange(len(rows)), rows]

    plain = make_context(CANARIES, batch_size=batch, learning_rate=1.0, momentum=0.0, weight_decay=0.0)
    protection = Protection(0.3, z, CANARIES, batch, 1, stream)
    train(replace(plain, protection=protection), [theta], lambda rows: theta.sum(), objective=pf.Objective(units))
    order = torch.argsort(theta.detach(), stable=True).numpy()
    each = CANARIES // 10  # guesses of either kind, the surest
    right = int(inside[order[-each:]].sum() + (~inside[order[:each]]).sum())
    return one_run_bound(2 * each, right, CANARIES, DELTA), epsilon_of([protection.event], DELTA)


class NoNoise(NoiseStream):
    def normals(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count) + super().normals(count) * 1e-6


def test_one_run_bounds_are_those_of_the_texts_and_hold() -> None:
    assert one_run_bound(1000, 731, 1000, 1e-5) == pytest.approx(0.88, abs=0.01)
    assert one_run_bound(100, 100, 1000, 1e-5) == pytest.approx(3.47, abs=0.02)
    assert one_run_bound(100, 50, 1000, 1e-5) == 0
    random, truth, over = np.random.default_rng(5), 1.0, 0
    for _ in range(200):
        right = int(random.binomial(500, 1 / (1 + math.exp(-truth))))
        over += _one_run_chance(truth, 500, right, 500, 1e-6) <= 0.05  # the bound, which is looked for, is above
    assert over <= 20


def test_one_run_shows_no_more_than_the_accountant_gives(make_context: Make) -> None:
    bound, epsilon = shown(make_context, 1, 2.0, SeededNoise(1).stream())
    assert 0 < bound <= epsilon


@pytest.mark.parametrize("broken", ["no noise", "no clip"])
def test_a_lack_of_noise_or_clipping_is_found(broken: str, make_context: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: NoiseStream = SeededNoise(2).stream()
    if broken == "no noise":
        stream = NoNoise(bytes(32))
    else:
        monkeypatch.setattr(training, "clipped", lambda gradients, clip: gradients)
    bound, epsilon = shown(make_context, 2, 2.0, stream)
    assert bound > epsilon


EACH = ("promptfolio", "promptfl_per")


def method(name: str, **hyper: Any) -> PrivateContextMethod:
    made = make_method({"name": name, "m": M} | hyper)
    assert isinstance(made, PrivateContextMethod)
    return made


def start_of_private_contexts(tried: PrivateContextMethod, context: pf.ClientContext) -> Tensors:
    """A shared context, drawn here, and the private one that the method starts with."""
    draws = torch.Generator().manual_seed(1)
    shared = torch.randn(tried.shared_length, context.backbone.d_t, generator=draws) * 0.02
    return {tried.shared.name: shared, LOCAL: tried.local_context(context, {})}


def texts(backbone: Backbone, context: Tensor, names: tuple[str, ...]) -> list[Tensor]:
    return [literal.text_feature(backbone, context, name) for name in names]


def entropy_of(context: pf.ClientContext, features: list[Tensor], rows: Tensor) -> Tensor:
    """Mean cross-entropy of the images in ``rows`` against one vector for each class."""
    losses = []
    for row in rows.tolist():
        image = context.train.features()[row]
        logits = torch.stack([context.backbone.logit_scale * torch.dot(image, text) for text in features])
        losses.append(literal.cross_entropy(logits, int(context.train.labels[row])))
    return torch.stack(losses).mean()


def folio_loss(context: pf.ClientContext, theta: float) -> literal.Loss:
    """(2.1) with the classes one by one."""

    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        shared = texts(context.backbone, tensors["global_context"], context.class_names)
        local = texts(context.backbone, tensors[LOCAL], context.class_names)
        return entropy_of(context, [(1 - theta) * g + theta * z for g, z in zip(shared, local, strict=True)], rows)

    return loss


def per_loss(context: pf.ClientContext) -> literal.Loss:
    def loss(tensors: Tensors, rows: Tensor) -> Tensor:
        whole = torch.stack([*tensors["context"], *tensors[LOCAL]])
        return entropy_of(context, texts(context.backbone, whole, context.class_names), rows)

    return loss


def literally(tried: PrivateContextMethod, context: pf.ClientContext) -> literal.Loss:
    if isinstance(tried, promptfl.PromptFolio):
        return folio_loss(context, tried.hyper.theta)
    return per_loss(context)


CASES: list[tuple[str, dict[str, Any]]] = [
    ("promptfolio", {}), ("promptfolio", {"theta": 0.8}), ("promptfl_per", {}), ("promptfl_per", {"shared_tokens": 3}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options"), CASES, ids=str)
def test_training_is_the_equations(name: str, options: dict[str, Any], backbone: Backbone, make_context: Make) -> None:
    context = make_context(5, round=2, epochs=1, batch_size=3, learning_rate=0.05, schedule="cosine")
    tried = method(name, **options)
    start = start_of_private_contexts(tried, context)
    found = tried.train(context, {tried.shared.name: start[tried.shared.name]}, {})
    rate = 0.05 / 2 * (1 + 0.5**0.5)  # the second of four rounds of a half cosine
    wanted = literal.training(context, start, literally(tried, context), rate)
    assert set(found.update) == {tried.shared.name}
    assert set(found.private) == {LOCAL}
    assert_moved_equally(found.update | found.private, wanted, start)


@pytest.mark.parametrize("name", EACH)
def test_all_clients_start_from_one_private_context(name: str, make_context: Make) -> None:
    context, tried = make_context(), method(name, m=16)
    first = tried.local_context(context, {})
    assert torch.equal(first, tried.local_context(replace(context, client="hospital-b"), {}))
    assert float(first.std()) == pytest.approx(0.02, rel=0.05)
    assert not torch.equal(first, tried.local_context(context.with_terms(seed=4), {}))
    kept = torch.ones_like(first)
    assert tried.local_context(context, {LOCAL: kept}) is kept


@pytest.mark.parametrize("name", EACH)
def test_who_classifies_with_what(name: str, backbone: Backbone, make_context: Make) -> None:
    """A trainer with both contexts, trained or as they start; an evaluator with the shared one; ``global`` as it."""
    context, tried, rows = make_context(), method(name), torch.arange(4)
    assert tried.personal
    start = start_of_private_contexts(tried, context)
    shared, payload = start[tried.shared.name], {tried.shared.name: start[tried.shared.name]}
    features = context.train.features()[rows]
    none = replace(context, train=MadeUpSplit(torch.empty(0, backbone.d_e), torch.empty(0, dtype=torch.long)))

    def logits(vectors: list[Tensor]) -> Tensor:
        with torch.no_grad():
            return backbone.logit_scale * features @ torch.stack(vectors).T

    def both(local: Tensor) -> Tensor:
        with torch.no_grad():
            alone = texts(backbone, shared, NAMES)
            own = texts(backbone, local, NAMES)
            joined = texts(backbone, torch.cat([shared, local]), NAMES) if name == "promptfl_per" else []
        if name == "promptfolio":
            return logits([0.6 * a + 0.4 * b for a, b in zip(alone, own, strict=True)])
        return logits(joined)

    trained = {LOCAL: torch.randn(start[LOCAL].shape, generator=torch.Generator().manual_seed(9)) * 0.1}
    alone = logits(texts(backbone, shared, NAMES))
    for found, wanted in [
        (tried.classifier(context, payload, trained), both(trained[LOCAL])),
        (tried.classifier(context, payload, {}), both(start[LOCAL])),
        (tried.classifier(none, payload, {}), alone),
        (tried.variants(context, payload, trained)["global"], alone),
    ]:
        scored = found.logits(context.train, rows)
        assert float((scored - wanted).abs().max()) <= 1e-5 * float(wanted.abs().max())
    assert tried.variants(none, payload, {}) == {}


# Groups of records as units: their images, their gradient written out, and that nothing else of them counts.


CLIP = 19.0  # the groups' first gradients have 22.0, 18.9, 19.6 and 14.6


GROUPS = ((4, 0, 7), (1,), (5, 2), (3, 6, 8, 9))


def draws(clip: float) -> NoiseStream:
    """Noise, but where a group may be shorter than the clip: it would drown the groups."""
    return SeededNoise(7).stream() if clip <= 0.3 else literal_private.Silent(bytes(32))


def grouped(
    context: pf.ClientContext, batch: int, epochs: int, groups: Any = GROUPS, clip: float = 0.3
) -> pf.ClientContext:
    own = Protection(clip, 1.0, len(groups), batch, epochs, draws(clip), groups)
    return replace(context, protection=own)


# Every group is longer than the first clip, some are longer than the second, none is as long as the third.
@pytest.mark.parametrize(
    ("clip", "batch", "epochs", "at_once"), [(0.3, 2, 2, 512), (CLIP, 4, 1, 512), (CLIP, 4, 1, 10), (1e3, 1, 1, 10)]
)
def test_promptfl_equals_dp_sgd_over_groups_written_out(
    clip: float,
    batch: int,
    epochs: int,
    at_once: int,
    backbone: Backbone,
    make_context: Make,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A group is sampled, clipped and counted as one: the gradient of the mean loss of its images."""
    monkeypatch.setattr("promptfed.shared.clip.backbone.PREFIX_TEXTS", at_once)
    context = make_context(10, epochs=epochs, batch_size=batch, learning_rate=0.05)
    start = start_of({"name": "promptfl", "m": M}, backbone)["context"]
    method = make_method({"name": "promptfl", "m": M})
    found = method.train(grouped(context, batch, epochs, clip=clip), {"context": start}, {}).update["context"]

    def unit_loss(theta: Any, unit: int) -> Tensor:
        rows = list(GROUPS[unit])
        features, labels = context.train.features()[rows], context.train.labels[rows]
        return literal.context_loss(backbone, theta[0], list(NAMES), features, labels)

    wanted = literal_private.private_sgd(
        [start], unit_loss, None, lambda theta: make_optimizer(theta, context.training, 0.05), draws(clip),
        units=len(GROUPS), batch=batch, epochs=epochs, clip=clip, z=1.0,
    )[0]  # fmt: skip
    moved = float((wanted - start).abs().max())
    assert float((found - wanted).abs().max()) <= 1e-3 * moved


def test_without_an_objective_a_group_is_one_pass_over_its_images(make_context: Make) -> None:
    theta, asked = torch.zeros(3, requires_grad=True), []

    def loss(rows: Tensor) -> Tensor:
        asked.append(tuple(rows.tolist()))
        return (theta * rows.float().mean()).sum()

    context = make_context(10, epochs=1, batch_size=4)
    train(grouped(context, 4, 1), [theta], loss)
    assert asked == list(GROUPS), "q is 1: all groups, each by itself"


def test_groups_that_the_data_do_not_have_are_refused(make_context: Make) -> None:
    theta = torch.zeros(3, requires_grad=True)
    context = make_context(5, epochs=1, batch_size=4)
    with pytest.raises(UnprotectedError, match="a group has images beyond the 5 that there are"):
        train(grouped(context, 4, 1), [theta], lambda rows: theta.sum())
    fewer = replace(grouped(context, 4, 1, GROUPS[:2]).protection, units=3)  # type: ignore[type-var]
    with pytest.raises(UnprotectedError, match="2 units to train on instead of the 3"):
        train(replace(context, protection=fewer), [theta], lambda rows: theta.sum())
