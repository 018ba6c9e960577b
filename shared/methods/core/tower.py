"""Methods that train weights of the image tower: which weights, their training, and their merged form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, runtime_checkable

from promptfed.shared.clip.towers import BLOCK_KINDS
from promptfed.shared.methods.core import heads, visual
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.heads import Head, HeadRate, LinearHead, TextHead
from promptfed.shared.methods.core.visual import ImageClassifier, Towers, VisualHyper
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import CHANGE, Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, checkpointing, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone
    from promptfed.shared.clip.towers.copies import PlainTower


Trainable = Literal["all", "last_k", "norms", "biases", "none"]

_BLOCK_SHAPES: dict[str, tuple[str, ...]] = {
    "ln_1_weight": ("d_v",),
    "ln_1_bias": ("d_v",),
    "in_proj_weight": ("d_v3", "d_v"),
    "in_proj_bias": ("d_v3",),
    "out_proj_weight": ("d_v", "d_v"),
    "out_proj_bias": ("d_v",),
    "ln_2_weight": ("d_v",),
    "ln_2_bias": ("d_v",),
    "c_fc_weight": ("h", "d_v"),
    "c_fc_bias": ("h",),
    "c_proj_weight": ("d_v", "h"),
    "c_proj_bias": ("d_v",),
}
_OTHER_SHAPES: dict[str, tuple[str | int, ...]] = {
    "conv1_weight": ("d_v", 3, "p", "p"),
    "class_embedding": ("d_v",),
    "positional_embedding": ("s", "d_v"),
    "ln_pre_weight": ("d_v",),
    "ln_pre_bias": ("d_v",),
    "ln_post_weight": ("d_v",),
    "ln_post_bias": ("d_v",),
    "proj": ("d_v", "d_e"),
}
NORMS = frozenset(kind for kind in (*_BLOCK_SHAPES, *_OTHER_SHAPES) if kind.startswith("ln_"))
_LAST = ("ln_post_weight", "ln_post_bias", "proj")

HEAD = tuple(spec.name for spec in heads.SHARED_HEAD)


class TowerHyper(VisualHyper):
    """Which weights of the image tower are trained."""

    trainable: Trainable = pf.option(
        "all",
        "all: every weight of the image tower; last_k: its last k blocks and what follows them; norms: "
        "the layer norms; biases: all biases; none: the linear head alone (a linear probe)",
    )
    k: int = pf.option(1, "last_k: how many blocks, counted from the last", ge=1, le=256)
    projected: bool = pf.option(False, "the linear head stands on the feature behind the image tower's projection")
    head_learning_rate: HeadRate = None


def trained_kinds(trainable: Trainable, projected: bool) -> tuple[str, ...]:
    """The kinds that are trained, in order of name; ``projected``: the projection is used at all."""
    every = (*_BLOCK_SHAPES, *_OTHER_SHAPES)
    chosen: Iterable[str] = {
        "all": every,
        "last_k": (*_BLOCK_SHAPES, *_LAST),
        "norms": NORMS,
        "biases": [kind for kind in every if kind.endswith("_bias")],
        "none": (),
    }[trainable]
    return tuple(sorted(kind for kind in chosen if kind != "proj" or projected))


def tensor_spec(kind: str) -> TensorSpec:
    """The change of a kind, as it stands in a state."""
    if kind in _BLOCK_SHAPES:
        return TensorSpec(kind, ("k", *_BLOCK_SHAPES[kind]))
    return TensorSpec(kind, _OTHER_SHAPES[kind])


def tower_dims(method: str, trainable: Trainable, k: int, context: pf.ServerContext) -> dict[str, int]:
    """Numbers for the symbols of `tensor_spec`. Raises MethodError where the backbone's shape does not say them."""
    shape = context.shape
    if shape.d_v is None or shape.vision_layers is None or shape.mlp_width is None or shape.positions is None:
        raise pf.MethodError(
            f"{method} trains the weights of a vision transformer; this backbone's image tower is none of the plain "
            "kind, or the shape does not say its mlp_width and positions: choose a ViT model, or leave the shape out"
        )
    if shape.patch_size is None:
        raise pf.MethodError(f"{method} needs square patches (patch_size), and this backbone's shape says none")
    layers = shape.vision_layers
    if trainable == "last_k" and k > layers:
        raise pf.MethodError(f"k = {k}, but the image tower has {layers} blocks: lower it, or take trainable: all")
    return {
        "k": k if trainable == "last_k" else layers,
        "d_v": shape.d_v,
        "d_v3": 3 * shape.d_v,
        "h": shape.mlp_width,
        "p": shape.patch_size,
        "s": shape.positions,
        "d_e": shape.d_e,
    }


def own_dims(method: str, trainable: Trainable, k: int, context: pf.ClientContext) -> dict[str, int]:
    """The same of what a client knows by itself."""
    from promptfed.shared.clip import shape_of

    shape = shape_of(context.backbone)
    names, training = context.class_names, context.training
    return tower_dims(
        method, trainable, k, pf.ServerContext(training, shape, names, (), seed=context.seed, rounds=context.rounds)
    )


@dataclass(frozen=True)
class TrainedTower:
    """A private copy of the image tower in which some weights are W = frozen + change, the others the backbone's own.

    ``leaves`` holds W by kind, float32, of a block's stacked from block ``first`` on. What a tower lacks is left out.
    ``start`` has the change of each kind that it was made with.
    """

    backbone: Backbone
    tower: PlainTower
    hyper: TowerHyper
    first: int
    leaves: Tensors
    start: Mapping[str, Tensor]

    @classmethod
    def of(cls, backbone: Backbone, hyper: TowerHyper, changes: Mapping[str, Tensor]) -> TrainedTower:
        """With ``changes`` by kind added; copies, which take no gradient yet."""
        tower = backbone.vision_tower()
        stacked = [len(change) for kind, change in changes.items() if kind in BLOCK_KINDS]
        first = tower.layers - (stacked[0] if stacked else tower.layers)
        leaves = {}
        for kind, change in sorted(changes.items()):
            parts = list(tower.named(kind, first).values())
            if parts:
                frozen = torch.stack(parts) if kind in BLOCK_KINDS else parts[0].reshape(change.shape)
                leaves[kind] = frozen.float() + change.to(frozen.device)
        return cls(backbone, tower.copy(), hyper, first, leaves, changes)

    def trainable(self) -> TrainedTower:
        """The same with leaves that take gradients."""
        leaves = {kind: leaf.detach().clone().requires_grad_() for kind, leaf in self.leaves.items()}
        return replace(self, leaves=leaves)

    def changes(self) -> Tensors:
        """By kind of ``start``, how far W has moved from frozen + start; zero for what the tower lacks."""
        begun = TrainedTower.of(self.backbone, self.hyper, self.start).leaves
        return {
            kind: (self.leaves[kind].detach() - begun[kind]).cpu() if kind in self.leaves else torch.zeros_like(change)
            for kind, change in self.start.items()
        }

    def weights(self) -> Tensors:
        """W by the names of the copy's own weights."""
        weights: Tensors = {}
        for kind, leaf in self.leaves.items():
            # Taken apart at once: the gradient of an index would be a tensor of all blocks, for each of them.
            parts = leaf.unbind(0) if kind in BLOCK_KINDS else [leaf]
            weights |= zip(self.tower.named(kind, self.first), parts, strict=True)
        return weights

    def features(self, images: Tensor, *, projected: bool, normalize: bool) -> Tensor:
        """``(B, d_e)`` of images ``(B, 3, H, W)``; ``(B, d_v)`` before the projection unless ``projected``."""
        tower, images = self.tower, self.backbone.image_input(images)
        tower.put(self.weights())

        def encode(part: Tensor) -> Tensor:
            with Towers(self.backbone, self.hyper).image_precision():
                pooled = tower.pool(tower.run(tower.rows(part)))
                features = (tower.project(pooled) if projected else pooled).float()
            return torch.nn.functional.normalize(features, dim=-1) if normalize else features

        size = self.backbone.held_images
        if size is None or not torch.is_grad_enabled():
            return encode(images)
        parts = torch.split(images, size)
        return torch.cat([checkpointing.checkpoint(encode, part, use_reentrant=False) for part in parts])


class HeadHyper(TowerHyper):
    """Which weights are trained under which head."""

    head: Literal["text", "linear"] = pf.option(
        "text",
        "text: cosines with the template's features, as CLIP; linear: a linear head on the pooled "
        "feature, trained from scratch; where it is shared, over the spec's class_names",
    )


class WeightMethod(pf.Method):
    """Base of the methods whose state is the change Δ of image tower weights, averaged by samples.

    Where subclasses share a linear head it stands in the state too. All of a client's numbers are sent as changes.
    """

    Hyper: ClassVar[type[VisualHyper]] = HeadHyper
    hyper: TowerHyper
    needs = visual.NEEDS
    defaults = pf.defaults(
        20,
        {"participation": {"deadline_seconds": 3600.0}, "evaluation": {"every": 5}, "retention": "last_round"},
        optimizer="adamw",
        learning_rate=1e-5,
        weight_decay=0.01,
        batch_size=32,
        epochs=1,
    )

    def __init__(self, hyper: TowerHyper):
        super().__init__(hyper)
        if self.is_linear:
            self.needs = replace(self.needs, text_tower=False)

    @property
    def is_linear(self) -> bool:
        """Whether the head is a linear one, so that no text tower is needed."""
        return getattr(self.hyper, "head", "linear") == "linear"

    @property
    def shares_head(self) -> bool:
        """Whether a linear head stands in the state."""
        return self.is_linear

    @property
    def uses_projection(self) -> bool:
        """Whether the feature is the one behind the tower's projection."""
        return not self.is_linear or self.hyper.projected

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of weights that are trained."""
        return trained_kinds(self.hyper.trainable, self.uses_projection)

    @property
    def private_kinds(self) -> tuple[str, ...]:
        """The trained kinds that never leave a client: none, or all of a method that shares nothing."""
        return ()

    @property
    def shared_kinds(self) -> tuple[str, ...]:
        """The trained kinds that are exchanged."""
        return () if self.private_kinds else self.kinds

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """Weights reveal more than a prompt."""
        if not self.state_tensors():
            return ()
        text = "changes to the image tower, up to 86 million numbers (ViT-B): images are easier to rebuild from them"
        return (pf.AGGREGATE, pf.Disclosed("operator", f"your {text} than from prompts"))

    # Server half

    def check(self, spec: pf.FederationSpec) -> None:
        """Refuse options that contradict each other, and a shared head without classes."""
        self.check_options(spec)
        if self.shares_head:
            heads.shared_classes(self.name, spec.class_names)
            if self.hyper.label_space == "client":
                raise pf.MethodError("a shared linear head is trained over all of its classes: label_space: federation")

    def check_options(self, spec: pf.FederationSpec) -> None:
        """Refuse what cannot be trained."""
        hyper = self.hyper
        if hyper.projected and not self.is_linear:
            raise pf.MethodError("projected is for a linear head: take head: linear with it, or leave it out")
        if hyper.trainable == "none" and not self.is_linear:
            raise pf.MethodError("trainable: none under a text head leaves nothing to train: take head: linear with it")
        heads.check_head_rate(
            self.name, hyper.head_learning_rate, linear=self.is_linear, alone=hyper.trainable == "none"
        )
        if hyper.trainable == "all" and spec.backbone.precision != "fp32":
            text = f"a backbone in {spec.backbone.precision} cannot hold the small steps that trainable: all takes"
            raise pf.MethodError(f"{text}: take precision fp32, with autocast: bf16 to save memory")

    def check_backbone(self, shape: pf.BackboneShape) -> None:
        """Also requires a tower with known sizes. A ResNet has batch norms, whose running means are not weights."""
        super().check_backbone(shape)
        if shape.mlp_width is None or shape.positions is None:
            raise pf.MethodError(
                f"{self.name} trains the weights of a plain vision transformer; this backbone's image tower is none, "
                "or its shape does not say mlp_width and positions: choose a ViT model, or leave the shape out"
            )

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """All exchanged tensors."""
        return self.travelling()

    def travelling(self) -> tuple[TensorSpec, ...]:
        """The change of each kind that is shared, and a shared head."""
        head = heads.SHARED_HEAD if self.shares_head else ()
        return tuple(tensor_spec(kind) for kind in self.shared_kinds) + head

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """One exchange per round: Δ down, the client's changes up."""
        down = self.travelling()
        up = tuple(replace(spec, name=CHANGE + spec.name) for spec in down)
        return (pf.Phase("train", down=down, up=up, mean=bool(up)),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """The tower's sizes; for a shared head its classes and width."""
        dims = tower_dims(self.name, self.hyper.trainable, self.hyper.k, context)
        if self.shares_head:
            dims["classes"] = heads.shared_classes(self.name, context.class_names)
            dims["d_h"] = dims["d_e"] if self.hyper.projected else dims["d_v"]
        return dims

    def check_texts(self, backbone: Backbone, class_names: tuple[str, ...], template: str) -> None:
        """A shared head, which the coordinator makes, must fit the tower's pooled feature."""
        super().check_texts(backbone, class_names, template)
        if self.shares_head and not self.hyper.projected and backbone.d_pooled != backbone.d_v:
            text = f"{backbone.model_name} pools {backbone.d_pooled} numbers of the image tower's {backbone.d_v}"
            raise pf.MethodError(f"{self.name}: {text}: take projected: true")

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Δ = 0; a shared head starts as a private one would."""
        dims = self.dims(context)
        xp, specs = draws.xp, {kind: tensor_spec(kind) for kind in self.shared_kinds}
        state = {kind: xp.zeros(spec.resolve(dims), dtype=xp.float32) for kind, spec in specs.items()}
        if self.shares_head:
            state |= heads.head_start(context.draws_of, context.seed, dims["classes"], dims["d_h"])
        return state

    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """Δ plus the mean of the changes; empty if nothing is exchanged."""
        if not phase.up:
            return state
        changes = combine(updates)
        # In place: the result of `combine` has no other user, and may be a file of hundreds of megabytes.
        for spec in self.travelling():
            changes[CHANGE + spec.name] += state[spec.name]
        return {spec.name: changes[CHANGE + spec.name] for spec in self.travelling()}

    # Client half

    def tower(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> TrainedTower:
        """The tower with the learned changes."""
        return TrainedTower.of(context.backbone, self.hyper, self.changes(context, payload, private))

    def merged(self, context: pf.ClientContext, payload: Tensors) -> Tensors:
        """The image tower's weights with the shared changes."""
        weights = self.tower(context, payload, {}).weights()
        return {f"visual.{name}": weight for name, weight in weights.items()}

    def changes(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> Tensors:
        """Δ by kind, float32: the received shared part and the client's stored private part, or zero."""
        shared = {kind: payload[kind].float() for kind in self.shared_kinds}
        private_kinds = self.private_kinds
        if private_kinds and private_kinds[0] not in private:
            dims = own_dims(self.name, self.hyper.trainable, self.hyper.k, context)
            private = {kind: torch.zeros(tensor_spec(kind).resolve(dims)) for kind in private_kinds}
        return shared | {kind: private[kind] for kind in private_kinds}

    def shared_head(self, context: pf.ClientContext, payload: Tensors) -> LinearHead:
        """The linear head in a payload, over all of its classes."""
        names = context.label_space or context.class_names
        return LinearHead.shared(names, {name: payload[name].float() for name in HEAD})

    def start_head(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> Head:
        """The head that this method's training begins with: shared, the client's own, or the template's text."""
        if self.shares_head:
            return self.shared_head(context, payload)
        if self.is_linear:
            return LinearHead.of(context, private, heads.head_width(context.backbone, self.hyper.projected))
        return TextHead.of(context)

    def head_groups(self, context: pf.ClientContext, parameters: Sequence[Tensor]) -> tuple[pf.Group, ...]:
        """The new head with its own rate, or with the spec's rate if the tower is not trained."""
        rate = None if self.hyper.trainable == "none" else self.hyper.head_learning_rate or heads.HEAD_RATE
        return heads.head_groups(context, parameters, rate)

    def features(self, tower: TrainedTower, images: Tensor) -> Tensor:
        """The head's input: normalised features ``(B, d_e)``, or pooled features without normalisation."""
        return tower.features(images, projected=self.uses_projection, normalize=not self.is_linear)

    def fixed_features(self, context: pf.ClientContext, tower: TrainedTower) -> Tensor:
        """Features ``(N, d)`` of all training images, computed once if no weight of the tower is trained."""
        with torch.no_grad():
            parts = torch.split(torch.arange(len(context.train)), visual.CHUNK)
            return torch.cat([self.features(tower, context.train.images(part)) for part in parts])

    def fit(
        self,
        context: pf.ClientContext,
        tower: TrainedTower,
        head: Head,
        extra: visual.Term | None = None,
        *,
        trains: Literal["all", "tower", "head"] = "all",
        epochs: int | None = None,
    ) -> float:
        """Minimise CE(H(f(x)), y) + ``extra`` over W and a linear head, in place; the mean loss of the last epoch."""
        parameters = list(tower.leaves.values()) if trains != "head" else []
        groups = self.head_groups(context, head.parameters) if trains != "tower" else ()
        if parameters:

            def logits(images: Tensor) -> Tensor:
                return head.logits(self.features(tower, images))

            return visual.train_on_images(context, parameters, logits, extra, groups=groups)
        features, labels = self.fixed_features(context, tower), context.train.labels.to(context.backbone.device)
        loss_of = pf.ClassificationLoss(context)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, labels.device)
            scores = head.logits(features[rows])
            value = loss_of(scores, labels[rows])
            return value if extra is None else value + extra(indices, features, scores)

        return pf.train(context, parameters, loss, epochs=epochs, groups=groups)

    def sent(self, tower: TrainedTower, head: Head | None = None, begun: Head | None = None) -> Tensors:
        """The update: the changes of all exchanged kinds, and those of a shared ``head`` since ``begun``."""
        changes = tower.changes()
        update = {CHANGE + kind: changes[kind] for kind in self.shared_kinds}
        if self.shares_head and head is not None:
            assert isinstance(head, LinearHead)
            assert isinstance(begun, LinearHead)
            pairs = zip(HEAD, head.parameters, begun.parameters, strict=True)
            update |= {CHANGE + name: after.detach().cpu() - before for name, after, before in pairs}
        return update

    def extra_loss(self, tower: TrainedTower, head: Head) -> visual.Term | None:
        """A term beside the cross-entropy, made where training starts; none."""
        return None

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs from the received weights; sends their changes."""
        tower = self.tower(context, payload, private).trainable()
        begun = self.start_head(context, payload, private)
        head = begun.trainable(context.backbone.device)
        loss = self.fit(context, tower, head, self.extra_loss(tower, head))
        return pf.TrainResult(self.sent(tower, head, begun), self.kept(tower, head), {"loss": loss})

    def kept(self, tower: TrainedTower, head: Head) -> Tensors:
        """The client's private tensors: changes of private kinds, and a linear head that is not shared."""
        changes = tower.changes() if self.private_kinds else {}
        private = {kind: tower.start[kind] + changes[kind] for kind in self.private_kinds}
        return private if self.shares_head else private | head.private()

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Classifies with the global weights (and the client's own norms) and the shared head."""
        head = self.start_head(context, payload, private)
        return self.classify(self.tower(context, payload, private), head, context)

    def classify(self, tower: TrainedTower, head: Head, context: pf.ClientContext) -> ImageClassifier:
        """Classifies among ``context.class_names``."""
        chosen = head.among(context.class_names)
        return ImageClassifier(lambda images: chosen.logits(self.features(tower, images)))


@runtime_checkable
class Merges(Protocol):
    """A method whose global state is a change of weights."""

    def merged(self, context: pf.ClientContext, payload: Tensors) -> Tensors:
        """The weights that the global state changes, by open_clip's names, for a payload of an evaluation."""


def checkpoint_of(backbone: Backbone, changed: Tensors) -> Tensors:
    """The backbone's model with the ``changed`` weights, as open_clip names and keeps them.

    Raises:
        MethodError: it is no model of open_clip's.
    """
    state: Tensors = backbone.model.state_dict()
    if not any(name.startswith("visual.") for name in state):
        raise pf.MethodError("this backbone is not an open_clip model: the changes stay in the state's own tensors")
    changed = {name: tensor.to(state[name].dtype) for name, tensor in changed.items()}
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in (state | changed).items()}
