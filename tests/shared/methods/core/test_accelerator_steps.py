"""Training steps on a device that is far away, or too small: losses are read seldom, and batches shrink in memory only.

There is no GPU here: the CPU plays one that runs out of memory, and one that is far away (`far_device`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from promptfed.client_service.training.data import TRAIN, ClientData
from promptfed.client_service.training.evaluation import Evaluation
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source, open_source
from promptfed.shared.messages import Domain
from promptfed.shared.methods import METHODS, make_method
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.objectives import Protection
from promptfed.shared.methods.core.training import batches, leaf, train
from promptfed.shared.privacy.noise import SeededNoise
from promptfed.shared.seeds import generator, initial_draws
from promptfed.shared.tensors import replay
from promptfed.shared.tensors.replay import Operations
from promptfed.shared.tensors.torch_tensors import TorchDraws
from promptfed.shared.tensors.transfer import sent_to
from tests.support.equality import assert_gradients, assert_values
from tests.support.far_device import far_device, waits
from tests.support.own_images import write_folder
from tests.support.recording_device import recording
from tests.support.visual_clients import client_context, filled, server_context, small_backbone


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Backbone:
    return small_backbone(tmp_path_factory.mktemp("configs"))


@pytest.fixture
def backbone(shared: Backbone) -> Iterator[Backbone]:
    yield shared
    shared.held_images = None


class SmallDevice:
    """Runs out of memory where gradients are kept of more than ``room`` images; ``late``: only in the backward pass."""

    def __init__(self, backbone: Backbone, room: int, monkeypatch: pytest.MonkeyPatch, late: bool = False):
        self.parts: list[int] = []
        real = backbone.encode_images_prompted

        def encode(images: Tensor, *given: Any, **options: Any) -> Tensor:
            features = real(images, *given, **options)
            if torch.is_grad_enabled():
                self.parts.append(len(images))
                if len(images) > room and not late:
                    raise torch.OutOfMemoryError("CUDA out of memory")
                if len(images) > room:
                    features.register_hook(self._fail)
            return features

        monkeypatch.setattr(backbone, "encode_images_prompted", encode)

    def _fail(self, gradient: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")


def update(backbone: Backbone, method: str) -> dict[str, Tensor]:
    """One client's update after two steps of six images."""
    chosen = make_method({"name": method})
    context = client_context(backbone, 12, batch_size=6, momentum=0.9, learning_rate=0.01)
    state = chosen.initial_state(server_context(backbone, "a"), TorchDraws())
    state = filled({name: tuple(tensor.shape) for name, tensor in state.items()}, 4, 0.3)
    return dict(chosen.train(context, state, {}).update)


@pytest.mark.parametrize(
    ("method", "room", "late"), [("fedvpt", 1, False), ("fedvpt", 5, True), ("fedvpt_deep", 2, True)]
)
def test_a_small_device_gives_the_same_update(
    backbone: Backbone, monkeypatch: pytest.MonkeyPatch, method: str, room: int, late: bool
) -> None:
    wanted = update(backbone, method)
    device = SmallDevice(backbone, room, monkeypatch, late)
    found = update(backbone, method)
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert_values(found[name], wanted[name])
    assert device.parts[0] == 6
    assert backbone.held_images is not None
    assert room / 2 <= backbone.held_images <= room
    assert max(device.parts[-3:]) <= room
    device.parts.clear()
    update(backbone, method)
    assert max(device.parts) <= room  # nothing fails a second time


def test_a_device_without_room_for_one_image_is_named(backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDevice(backbone, 0, monkeypatch)
    with pytest.raises(pf.MethodError, match=r"OutOfMemoryError: .*lower training\.batch_size"):
        update(backbone, "fedvpt")


def parabola(context: pf.ClientContext, target: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A point and the mean squared distance of rows of ``target`` from it."""
    point = leaf(torch.zeros(3), context.backbone)
    return point, lambda indices: ((target[indices] - point) ** 2).mean()


OTHER_PHASES = {"plan": "prompts", "fast_pt": "global"}
UNTRAINED = {"zero_shot", "fedlp"}  # they take no steps


def started(name: str, backbone: Backbone) -> tuple[Any, dict[str, Tensor], str]:
    """A method, what its client is given in the first round, and the phase that trains."""
    method = make_method({"name": name} | ({"m": 2} if "m" in METHODS[name].Hyper.model_fields else {}))
    server = server_context(backbone, "a")
    state, phase = method.initial_state_with(backbone, server, initial_draws(3)), OTHER_PHASES.get(name, "train")
    phases = {one.name: one for one in method.phases(1, 4)}
    return method, dict(method.payload(state, phases[phase], server.clients[0], server)), phase


@dataclass
class Place:
    """A backbone on one device, and the data of a client beside it."""

    backbone: Backbone
    data: ClientData

    def context(self, phase: str, round: int, batch: int, **training: Any) -> pf.ClientContext:
        """A task of ``a`` of one epoch."""
        usual = {"batch_size": batch, "epochs": 1, "learning_rate": 0.01}
        blank = client_context(self.backbone, 0, **usual | training)
        split = self.data.split(TRAIN, SHAPES)
        own = {"client": "a", "domain": CLIENTS[0].domain, "peers": CLIENTS, "label_space": SHAPES}
        return replace(blank, class_names=SHAPES, phase=phase, round=round, train=split, **own)


def described(name: str) -> pf.ClientInfo:
    return pf.ClientInfo(name, "trainer", 6, SHAPES, Domain(name=name, description=f"a drawing by {name} of a {{}}"))


SHAPES = ("circle", "square", "cross")
SHORT = {"m": 2, "mst_steps": 2, "iterations": 5}
CLIENTS = (described("a"), described("b"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(f"folder:{write_folder(tmp_path_factory.mktemp('drawn'), SHAPES, each=4)}")


@pytest.fixture(scope="module")
def near(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Place:
    backbone = small_backbone(tmp_path_factory.mktemp("near"))
    backbone.text_path = "dense"  # a GPU's, so that only rounding is left to differ
    return Place(backbone, ClientData(source, backbone, FeatureCache(tmp_path_factory.mktemp("features"))))


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory, source: Source) -> Place:
    with far_device() as device:
        backbone = small_backbone(tmp_path_factory.mktemp("far")).to(device)
        return Place(backbone, ClientData(source, backbone, FeatureCache(tmp_path_factory.mktemp("features"))))


def played(
    name: str, place: Place, batch: int, evaluated: bool = True, first: int = 1, **training: Any
) -> tuple[dict[str, Tensor], Any]:
    """Each phase of two rounds of a method from ``first`` on, trained by one client; what it made, and its accuracies.

    Without those, and what a classifier answers, unless ``evaluated``. ``training`` replaces settings.
    """
    short = {key: value for key, value in SHORT.items() if key in METHODS[name].Hyper.model_fields}
    method = make_method({"name": name} | short)
    server = replace(server_context(place.backbone, "a"), class_names=SHAPES, clients=CLIENTS)
    state, private = dict(method.initial_state_with(place.backbone, server, initial_draws(3))), {}
    private = method.prepare(place.context("train", 1, batch, **training), private)
    made: dict[str, Tensor] = {}
    for round in (first, first + 1):
        for phase in method.phases(round, 4):
            if phase.name in made:
                continue
            payload, context = (
                method.payload(state, phase, CLIENTS[0], server),
                place.context(phase.name, round, batch, **training),
            )
            result = method.train(context, payload, private)
            private = result.private
            updates = [pf.ClientUpdate("a", 1.0, result.update)]
            state = dict(method.aggregate(state, phase, updates, lambda some: dict(next(iter(some)).tensors), server))
            made |= {phase.name: torch.zeros(0)} | {
                f"{phase.name} {key}": value for key, value in result.update.items()
            }
    if not evaluated:
        return made, None
    context = place.context("evaluation", 2, batch, **training)
    payload = method.payload(state, None, CLIENTS[0], server)
    classifier = method.classifier(context, payload, private)
    with torch.no_grad():
        made["cosines"] = classifier.logits(context.train, torch.arange(5)).cpu() / place.backbone.logit_scale
    return made | dict(private), Evaluation(place.data).run(method, context, payload, private, classifier, None)


# The first tier's: one context, one for each class, deep prompts, features alone.
SOME = ("promptfl", "fedapt", "fedmaple", "fedclip")


def each(names: Iterable[str], first: Sequence[str]) -> list[Any]:
    """``names`` as parameters: all but the ``first`` ones are the second tier's."""
    return [pytest.param(name, marks=() if name in first else pytest.mark.extended) for name in sorted(names)]


@pytest.mark.parametrize("name", each(METHODS, SOME))
def test_a_device_gives_what_the_cpu_gives_and_no_step_waits_for_it(name: str, near: Place, far: Place) -> None:
    """Two steps more ask the device for nothing, and copy nothing to it from memory that may move."""
    with sdpa_kernel(SDPBackend.MATH):  # as the device has it here, where a CPU has a kernel of its own
        wanted, accuracies = played(name, near, 6)
    with far_device():
        with waits() as one:
            found, told = played(name, far, 6)
        with waits() as two:
            played(name, far, 2, evaluated=False)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(found[key], value, rtol=1e-6, atol=1e-6)
    assert told == accuracies
    assert not two - one


USUAL = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4, "schedule": "cosine"}
TRAINING = {
    "epochs": 2, "batch_size": 3, "optimizer": "adamw", "learning_rate": 0.02, "momentum": 0.3, "weight_decay": 0.3,
    "schedule": "constant",
}  # fmt: skip


@pytest.mark.extended
@pytest.mark.parametrize("name", sorted(METHODS.own()))
def test_each_training_setting_changes_something_or_is_refused(name: str, near: Place) -> None:
    """Of the second round on: in the first every schedule has the same rate."""

    def outcome(**changed: Any) -> object:
        try:
            made, told = played(name, near, 6, first=2, **USUAL | changed)
        except pf.MethodError as error:
            return error
        return {key: value.detach().double().numpy().tobytes() for key, value in made.items()}, told

    base = outcome()
    assert not isinstance(base, Exception), base
    idle = [key for key, value in TRAINING.items() if outcome(**{key: value}) == base]
    assert sorted(idle) == sorted({*METHODS[name].ignores} & {*TRAINING}), "what a method ignores is refused"


@pytest.mark.parametrize("name", each(set(METHODS) - UNTRAINED - {"fast_pt"}, SOME[:3]))
def test_a_dense_text_pass_trains_the_same(name: str, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where gradients are private: then all of a batch's copies pass together."""
    method, payload, phase = started(name, backbone)
    protections = [None] + [Protection(0.3, 1.0, 6, 3, 1, SeededNoise(2).stream())] * method.can_protect()
    for protection in protections:
        found = []
        for path in ("prefix", "dense"):
            monkeypatch.setattr(backbone, "text_path", path)
            own = replace(protection, stream=SeededNoise(2).stream()) if protection is not None else None
            context = replace(client_context(backbone, 6, batch_size=3, epochs=1, phase=phase), protection=own)
            with Operations(backbone.device) as step:
                result = method.train(context, dict(payload), {})
            found.append((result.update | result.private, len(step.noted)))
        for tensor, value in found[0][0].items():
            if not tensor.endswith("to_key.bias"):  # on which no softmax depends
                assert_gradients(found[1][0][tensor], value)
        if name == "promptfl":
            assert found[1][1] < found[0][1]  # the other pass it was


@pytest.mark.parametrize("name", each(set(METHODS) - UNTRAINED - {"fast_pt"}, ("promptfl", "fedtpg")))
def test_replayed_steps_are_the_steps(name: str, backbone: Backbone, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits after two epochs, whose last batches are smaller; graphs end with the task."""
    monkeypatch.setattr(backbone, "text_path", "dense")
    method, payload, phase = started(name, backbone)
    context = client_context(backbone, 19, batch_size=3, epochs=2, phase=phase, momentum=0.9)
    wanted = method.train(context, dict(payload), {})
    graphs = recording(monkeypatch)
    found = method.train(context, dict(payload), {})
    assert found.metrics == wanted.metrics
    for tensor, value in (wanted.update | wanted.private).items():
        assert torch.equal((found.update | found.private)[tensor], value)
    if method.needs.cached_features and not method.needs.patch_tokens:  # nothing of a step is on the host
        assert all(graph.replays >= 9 for graph in graphs)
        assert graphs
    kept = [weakref.ref(graph) for graph in graphs]
    graphs.clear()
    gc.collect()
    assert not any(graph() for graph in kept)


def test_a_seed_that_attention_does_not_set_is_no_difference_between_steps() -> None:
    """As CUDA's attention: its dropout's seed is a number on the host, which without dropout is never filled."""
    with torch.library._scoped_library("promptfed_seeds", "DEF") as library:
        library.define("attention(Tensor rows, float dropout_p=0.0) -> (Tensor, Tensor)")
        library.define("draw(Tensor rows) -> (Tensor, Tensor)")
        library.define("backward(Tensor rows, Tensor seed) -> Tensor")
        seeds = iter(range(100))
        for name in ("attention", "draw"):
            library.impl(name, lambda rows, dropout_p=0.0: (rows.clone(), torch.tensor(next(seeds))), "Meta")
        library.impl("backward", lambda rows, seed: rows.clone(), "Meta")
        made: Any = torch.ops.promptfed_seeds

        def noted(name: str, **dropout: float) -> list[tuple[object, ...]]:
            with Operations(torch.device("meta")) as passed:
                rows, seed = getattr(made, name)(torch.empty(2, 3, device="meta"), **dropout)
                made.backward(rows, seed.detach())  # as what is saved for it: another tensor of the same memory
            assert passed.elsewhere is None
            return passed.noted

        assert noted("attention") == noted("attention")
        assert noted("attention", dropout_p=0.1) != noted("attention", dropout_p=0.1)
        assert noted("draw") != noted("draw")


@pytest.mark.parametrize("what", ["drawn", "read", "other"])
def test_what_cannot_be_replayed_runs_as_it_is_and_says_so_once(
    what: str, backbone: Backbone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replay, "_told", set())
    target = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    context = client_context(backbone, 40, batch_size=2, epochs=1, learning_rate=0.1)

    def trained() -> tuple[float, Tensor]:
        steps = iter(range(100))
        point, loss = parabola(context, target)

        def changing(indices: Tensor) -> Tensor:
            step = next(steps)
            if what == "drawn":
                return loss(indices) * (1 + step / 50)
            if what == "read":
                return loss(indices) * (2.0 if float(target.sum()) > 0 else 1.0)
            return loss(indices) + (point**2).mean() * (0.0 if step < 2 else 1.0)

        return train(context, [point], changing), point.detach()

    wanted = trained()
    graphs = recording(monkeypatch)
    for _ in range(2):
        found = trained()
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])
    assert not any(graph.replays for graph in graphs)
    reason = "not permitted" if what == "read" else "not the same in each step"
    assert [reason in record.message for record in caplog.records] == [True]


def test_the_images_of_the_next_step_are_announced(backbone: Backbone) -> None:
    context = client_context(backbone, 7, batch_size=3, epochs=2)
    announced: list[list[int]] = []
    context.train.soon = lambda rows: announced.append(rows.tolist())
    steps: list[list[int]] = []
    point, loss = parabola(context, torch.randn(7, 3))
    train(context, [point], lambda rows: steps.append(rows.tolist()) or loss(rows), reads_images=True)
    assert len(steps) == 6
    assert announced == steps[1:]


def test_the_device_refuses_what_cuda_refuses_and_waits_are_seen() -> None:
    near = torch.arange(6.0).reshape(2, 3)
    with far_device() as device, waits() as counted:
        there = near.pin_memory().to(device, non_blocking=True)
        assert (there.device, there.is_cuda, str(there.sum().device)) == (device, True, "cuda:0")
        sent_to(near[:1].expand(4, 3), device, torch.float64)  # has no memory of its own to be pinned
        there * torch.tensor(2.0)  # a number may be the CPU's
        for refused, words in {
            lambda: there + near: "same device",
            lambda: near.add_(there): "same device",
            lambda: near @ there.T: "same device",
            lambda: torch.cat([there, near]): "same device",
            lambda: near[there.long()]: "indices should be",
            lambda: there.numpy(): "can't convert",
            lambda: np.asarray(there): "can't convert",
            lambda: torch.empty(1).expand(2).pin_memory(): "single memory location",
            lambda: torch.zeros(1, device="cuda:1"): "invalid device",
            lambda: torch.randn(2, device=device): "draws on the device",
            lambda: there.normal_(): "draws on the device",
        }.items():
            with pytest.raises((RuntimeError, TypeError, AssertionError), match=words):
                refused()
        assert not counted
        for waiting in (
            lambda: float(there.sum()),
            lambda: bool(there.any()),
            lambda: near.to(device),
            lambda: near.to(device, non_blocking=True),
            lambda: near.pin_memory().to(device),
            lambda: torch.tensor([1, 2], device=device),
            lambda: there.cpu(),
            lambda: there.tolist(),
            lambda: there.nonzero(),
            lambda: there[there > 1],
            lambda: there[torch.tensor([1])],
            lambda: there[[1, 0]],
            lambda: torch.cuda.synchronize(),
        ):
            before = sum(counted.values())
            waiting()
            assert sum(counted.values()) > before
        leaf = there.clone().requires_grad_()
        counted.clear()
        (leaf[:, torch.tensor([0, 2]).pin_memory().to(device, non_blocking=True)] ** 2).sum().backward()
        assert not counted
        later, event = there.to("cpu", non_blocking=True), torch.cuda.Event()
        event.record()
        assert later.isnan().all()  # nobody has waited for it
        event.synchronize()
        assert torch.equal(later, near)
    assert leaf.grad is not None
    assert leaf.grad.near.tolist() == [[0.0, 0.0, 4.0], [6.0, 0.0, 10.0]]


@pytest.mark.parametrize("count", [7, 32])
def test_the_loss_is_the_mean_of_the_last_epoch(backbone: Backbone, count: int) -> None:
    context = client_context(backbone, count, batch_size=2, epochs=3, learning_rate=0.1)
    target = torch.randn(count, 3, generator=torch.Generator().manual_seed(1))
    point, loss = parabola(context, target)
    found = train(context, [point], loss)
    own, again = torch.zeros(3), 0.0
    draws = generator(context.seed, context.round, context.phase, context.client, "batches")
    steps = list(batches(count, 2, 3, draws))
    for number, rows in enumerate(steps):
        again = 0.0 if number % (len(steps) // 3) == 0 else again
        again += float(((target[rows] - own) ** 2).mean()) * len(rows)
        own = own - 0.1 * (2 / 3 * (own - target[rows])).mean(0)
    assert found == pytest.approx(again / count, rel=1e-5)


@pytest.mark.parametrize("bad", [1, 20, 21, 60])
def test_the_first_step_without_a_finite_loss_is_named(backbone: Backbone, bad: int) -> None:
    context = client_context(backbone, 40, batch_size=2, epochs=3)
    point, loss = parabola(context, torch.randn(40, 3))
    steps: list[int] = []

    def spoilt(indices: Tensor) -> Tensor:
        steps.append(len(steps) + 1)
        return loss(indices) * (float("nan") if steps[-1] >= bad else 1.0)

    with pytest.raises(pf.MethodError, match=f"not finite in step {bad} of round 1: lower"):
        train(context, [point], spoilt)
    assert len(steps) == -(-bad // 20) * 20  # the losses of an epoch are read together


@pytest.mark.parametrize("path", ["prefix", "short", "plain"])
def test_a_small_device_holds_less_of_texts(backbone: Backbone, path: Any) -> None:
    """What the backward pass keeps of a text pass shrinks, and the gradient stays."""
    prompts, told = backbone.class_prompts(("sun", "chess knight", "umbrella"), 4), []
    start = torch.randn(4, backbone.d_t, generator=torch.Generator().manual_seed(1))
    for backbone.held_images in (None, 1):
        kept: dict[int, int] = {}

        def keep(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        leaf = start.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            features = backbone.encode_prompts(leaf, prompts, path=path)
        told.append((features, torch.autograd.grad(features[0].sum(), leaf)[0], sum(kept.values())))
    assert_values(told[1][0], told[0][0])
    assert_gradients(told[1][1], told[0][1])
    assert told[1][2] < told[0][2]
