"""pFedPG: the coordinator generates visual prompts for each client and learns from how the client changed them.

Notation: ``n`` clients, ``m`` prompt tokens (the paper's K), ``d_v`` width of the vision tower, ``d_k`` inner width of
the attention (the paper's l_k = l_v), P_n the prompts of client n, P̃_n what the client made of them, ΔP_n = P̃_n − P_n.

Basis, generator and the clients' descriptors never leave the coordinator: down goes P_n, up comes ΔP_n. The linear head
H_n stays with the client. Source: Yang et al., ICCV 2023, section 3.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core import visual
from promptfed.shared.methods.core.array_library import needs_torch
from promptfed.shared.methods.core.client_rows import row_of
from promptfed.shared.methods.core.heads import HeadRate, LinearHead, head_width
from promptfed.shared.methods.core.visual import ImageClassifier, PromptedHead, Towers, VisualHyper, vpt_bound
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.lazy import Tensor, torch

BASIS, DESCRIPTORS, ADAPTED = "prompt_basis", "descriptors", "adapted_prompts"
PROMPTS = TensorSpec("prompts", ("m", "d_v"))
DELTA = TensorSpec("delta", ("m", "d_v"))
PARAMETERS: dict[str, dict[str, tuple[str, ...]]] = {
    "attention": {
        BASIS: ("m", "d_v"),
        "w_query": ("d_v", "d_k"),
        "w_key": ("d_v", "d_k"),
        "w_value": ("d_v", "d_k"),
        "w_output": ("d_k", "d_v"),
        DESCRIPTORS: ("n", "d_v"),
    },
    "mlp": {
        "w_hidden": ("d_v", "h"),
        "b_hidden": ("h",),
        "w_prompts": ("h", "m", "d_v"),
        "b_prompts": ("m", "d_v"),
        DESCRIPTORS: ("n", "d_v"),
    },
    "adain": {BASIS: ("m", "d_v"), DESCRIPTORS: ("n", "d_v")},
    "basis": {BASIS: ("m", "d_v")},
}
"""What the coordinator learns, by kind of generator."""

NORM_EPS = 1e-5
HIDDEN = 100  # pFedHN's
BETAS, ADAM_EPS = (0.9, 0.999), 1e-8

MEAN, SQUARE, STEPS = "adam_mean.", "adam_square.", "adam_steps"
"""Adam keeps its moments and counters in the state beside what it moves: ``adam_mean.NAME``, ``adam_square.NAME``,
``adam_steps`` and, where rows move alone, ``adam_steps.NAME``."""


class PFedPGHyper(VisualHyper):
    """pFedPG's hyperparameters (section 4.1.3) and the ablations of its Table 4."""

    m: int = pf.option(10, "prompt tokens between [cls] and the patches (K)", ge=1, le=512)
    generator: Literal["attention", "mlp", "adain", "basis"] = pf.option(
        "attention",
        "attention: equation 3; mlp: descriptor → hidden → all tokens, without a basis; adain: the "
        "basis' tokens with the descriptor's mean and deviation; basis: the same prompts for every client",
    )
    inner_width: int | None = pf.option(
        None, "l_k = l_v of the attention; default: the vision tower's width", ge=1, le=16384
    )
    hidden: int = pf.option(HIDDEN, "hidden width of the generator `mlp`", ge=1, le=16384)
    generator_optimizer: Literal["adam", "sgd"] = pf.option(
        "adam", "takes one step a round on generator, basis and descriptors"
    )
    generator_learning_rate: float = pf.option(0.001, "its rate α", gt=0, le=1000)
    projected: bool = pf.option(False, "the linear head stands on the feature behind the image tower's projection")
    head_learning_rate: HeadRate = None


# The generator


def generate(kind: str, parameters: Mapping[str, Tensor], descriptors: Tensor) -> Tensor:
    """Prompts ``(k, m, d_v)`` of the clients with ``descriptors (k, d_v)``, in the descriptors' dtype."""
    makers: dict[str, Callable[[Mapping[str, Tensor], Tensor], Tensor]] = {
        "attention": _attention,
        "mlp": _mlp,
        "adain": _adain,
        "basis": lambda parameters, descriptors: _like(descriptors, parameters[BASIS]).expand(len(descriptors), -1, -1),
    }
    return makers[kind](parameters, descriptors)


def _attention(parameters: Mapping[str, Tensor], descriptors: Tensor) -> Tensor:
    """P_n = basis + softmax(d_n W_Q (basis W_K)ᵀ/√l_k)(basis W_V) W_O: one shift on all tokens (Eq. 3)."""
    basis, w_query = parameters[BASIS], parameters["w_query"]
    # What the clients have in common comes first: (d_v, m) and (m, d_v) instead of a product of full width for each.
    queried = _like(descriptors, w_query @ (basis @ parameters["w_key"]).T)
    values = _like(descriptors, basis @ parameters["w_value"] @ parameters["w_output"])
    weights = torch.softmax(descriptors @ queried / math.sqrt(w_query.shape[1]), dim=-1)  # (k, m)
    return _like(descriptors, basis) + (weights @ values).unsqueeze(1)


def _mlp(parameters: Mapping[str, Tensor], descriptors: Tensor) -> Tensor:
    """W₂·ReLU(W₁·d_n + b₁) + b₂, as pFedHN makes a client's parameters (Table 4)."""
    weights = {name: _like(descriptors, parameters[name]) for name in PARAMETERS["mlp"] if name != DESCRIPTORS}
    hidden = torch.relu(descriptors @ weights["w_hidden"] + weights["b_hidden"])
    return torch.einsum("kh,hmd->kmd", hidden, weights["w_prompts"]) + weights["b_prompts"]


def _adain(parameters: Mapping[str, Tensor], descriptors: Tensor) -> Tensor:
    """σ(d_n)·norm(basis) + μ(d_n), mean and deviation over the width, token by token (Table 4)."""
    basis = _like(descriptors, parameters[BASIS])
    centred = basis - basis.mean(-1, keepdim=True)
    normed = centred / (basis.var(-1, correction=0, keepdim=True) + NORM_EPS).sqrt()
    deviation = (descriptors.var(-1, correction=0) + NORM_EPS).sqrt()
    return deviation[:, None, None] * normed + descriptors.mean(-1)[:, None, None]


def gradients(kind: str, parameters: Mapping[str, Tensor], descriptors: Tensor, deltas: Tensor) -> Tensors:
    """−Σ_n (∇P_n)ᵀ·ΔP_n for every parameter, and for ``descriptors (k, d_v)``; sums over clients in float64.

    ``deltas (k, m, d_v)``. A client's ΔP_n points downhill, so −ΔP_n stands for the gradient with respect to P_n:
    equations 4 and 5 read with +ΔP_n walk away from P̃_n.
    """
    leaves = {name: parameters[name].detach().requires_grad_() for name in PARAMETERS[kind] if name != DESCRIPTORS}
    leaf = descriptors.double().requires_grad_()
    prompts = generate(kind, leaves, leaf)
    if DESCRIPTORS in PARAMETERS[kind]:
        leaves[DESCRIPTORS] = leaf
    slopes = torch.autograd.grad(prompts, list(leaves.values()), grad_outputs=-deltas.double())
    return {name: gradient.float() for name, gradient in zip(leaves, slopes, strict=True)}


def _like(reference: Tensor, tensor: Tensor) -> Tensor:
    return tensor.to(reference.dtype)


# The optimizer


def sgd(state: Tensors, name: str, gradient: Tensor, rate: float, rows: list[int] | None) -> Tensors:
    """w ← w − α·g, in ``rows`` only where they are given; ``gradient`` is theirs."""
    return {name: _put(state[name], rows, _at(state[name], rows) - rate * gradient)}


def adam(state: Tensors, name: str, gradient: Tensor, rate: float, rows: list[int] | None) -> Tensors:
    """Adam without weight decay (Kingma and Ba, 2015, Algorithm 1), in ``rows`` only where they are given."""
    counter = STEPS if rows is None else f"{STEPS}.{name}"
    steps = _at(state[counter], rows) + 1
    mean = torch.lerp(_at(state[MEAN + name], rows), gradient, 1 - BETAS[0])
    square = (_at(state[SQUARE + name], rows) * BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
    counted = (steps if rows is None else steps.unsqueeze(-1)).double()  # beside all of it, or beside (k, d_v)
    correction = [(1 - beta**counted).float() for beta in BETAS]
    spread = (square / correction[1]).sqrt_().add_(ADAM_EPS).mul_(correction[0])
    moved = torch.div(mean, spread, out=spread).mul_(-rate).add_(_at(state[name], rows))
    after = {name: moved, MEAN + name: mean, SQUARE + name: square}
    if rows is not None:
        after[counter] = steps
    return {key: _put(state[key], rows, value) for key, value in after.items()}


def _at(tensor: Tensor, rows: list[int] | None) -> Tensor:
    return tensor if rows is None else tensor[rows]


def _put(tensor: Tensor, rows: list[int] | None, value: Tensor) -> Tensor:
    """A copy of ``tensor``, in its own dtype, with ``value`` in ``rows`` or everywhere."""
    value = value.to(tensor.dtype)
    if rows is None:
        return value
    copy = tensor.clone()
    copy[rows] = value
    return copy


# The method


class PFedPG(pf.Method):
    """See the module. All clients are asked in every round; the descriptors of those who are missing stay as they are.

    Evaluated with the generated P_n of the last server step; ``adapted`` is the same with the P̃_n of the client's own
    last training. Both use the client's head, which before its first training is the seeded start.
    """

    name = "pfedpg"
    summary = "Visual prompts generated for each client at the coordinator, which learns from the clients' changes."
    paper = "Yang et al., Efficient Model Personalization in FL via Client-Specific Prompt Generation (pFedPG), 2023"
    protects = True
    Hyper = PFedPGHyper
    hyper: PFedPGHyper
    personal = True
    takes_evaluators = False  # a head is made by training only
    one_payload = False
    metrics = ("loss", "delta_norm")
    needs = replace(visual.NEEDS, text_tower=False)
    defaults = pf.defaults(100, epochs=5, batch_size=64, learning_rate=0.25, weight_decay=1e-3)
    disclosures = (
        pf.Disclosed("operator", "a descriptor of this client, by which those with like images stand near each other"),
        pf.Disclosed("sites", "what the generator has learned from all, in the prompts that it makes for each"),
    )

    # Server half

    def check(self, spec: pf.FederationSpec) -> None:
        """Widths that the chosen generator does not have are refused."""
        hyper = self.hyper
        if hyper.inner_width is not None and hyper.generator != "attention":
            raise pf.MethodError(f"generator {hyper.generator} has no inner_width: leave it out, or take attention")
        if hyper.hidden != HIDDEN and hyper.generator != "mlp":
            raise pf.MethodError(f"generator {hyper.generator} has no hidden layer: leave hidden out, or take mlp")

    @property
    def _learned(self) -> dict[str, tuple[str, ...]]:
        return PARAMETERS[self.hyper.generator]

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """Generator, basis, descriptors and their optimizer's state; clients receive none of them."""
        shapes: dict[str, tuple[str, ...]] = dict(self._learned)
        if self.hyper.generator_optimizer == "adam":
            shapes |= {kind + name: shape for kind in (MEAN, SQUARE) for name, shape in self._learned.items()}
        specs = [TensorSpec(name, shape, shared_with_clients=False) for name, shape in shapes.items()]
        if self.hyper.generator_optimizer == "adam":
            # Descriptors count their own steps: a client that was away goes on where it was.
            specs.append(TensorSpec(STEPS, (), dtype="int64", shared_with_clients=False))
            if DESCRIPTORS in self._learned:
                specs.append(TensorSpec(f"{STEPS}.{DESCRIPTORS}", ("n",), dtype="int64", shared_with_clients=False))
        return tuple(specs)

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """One exchange a round: each client's own prompts down, what it changed up."""
        return (pf.Phase("train", down=(PROMPTS,), up=(DELTA,)),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``m``, ``d_v``, ``d_k``, ``h`` and ``n``, the number of clients that the state knows.

        Raises:
            MethodError: the image tower takes no prompts, or its patches' size is not known.
        """
        width = visual.vision_width(self.name, context)
        if BASIS in self._learned:
            vpt_bound(context.shape.patch_size, width)
        inner = self.hyper.inner_width or width
        return {"m": self.hyper.m, "d_v": width, "d_k": inner, "h": self.hyper.hidden, "n": len(context.clients)}

    @needs_torch
    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """Basis as in VPT, matrices Xavier-uniform, biases zero, descriptors uniform in ±1, one draw for each name."""
        dims = self.dims(context)
        state: Tensors = {}
        for name, symbols in self._learned.items():
            if name == DESCRIPTORS:
                rows = [self._first_descriptor(client, context) for client in context.clients]
                state[name] = torch.stack(rows) if rows else torch.zeros(0, dims["d_v"])
                continue
            shape = tuple(dims[symbol] for symbol in symbols)
            fan_in, fan_out = shape[0], math.prod(shape[1:])
            bound = math.sqrt(6 / (fan_in + fan_out))
            if name == BASIS:
                bound = vpt_bound(context.shape.patch_size, dims["d_v"])
            drawn = (draws.uniform(*shape) * 2 - 1) * bound
            state[name] = torch.zeros(shape) if name.startswith("b_") else drawn
        return state | self._fresh_optimizer(state)

    def _first_descriptor(self, client: pf.ClientInfo, context: pf.ServerContext) -> Tensor:
        width = self.dims(context)["d_v"]
        return torch.rand(width, generator=pf.generator(context.seed, "descriptor", client.name)) * 2 - 1

    def _fresh_optimizer(self, learned: Tensors) -> Tensors:
        if self.hyper.generator_optimizer != "adam":
            return {}
        moments = {kind + name: torch.zeros_like(tensor) for kind in (MEAN, SQUARE) for name, tensor in learned.items()}
        steps = {STEPS: torch.zeros((), dtype=torch.int64)}
        if DESCRIPTORS in learned:
            steps[f"{STEPS}.{DESCRIPTORS}"] = torch.zeros(len(learned[DESCRIPTORS]), dtype=torch.int64)
        return moments | steps

    @needs_torch
    def join(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """Insert a row for the newcomer at the place of its name: the mean descriptor, without optimizer steps."""
        at = row_of(client.name, context)
        rows = {name: tensor for name, tensor in state.items() if name.rpartition(".")[2] == DESCRIPTORS}
        joined = {}
        for name, tensor in rows.items():
            new = tensor.mean(0, keepdim=True) if name == DESCRIPTORS else torch.zeros_like(tensor[:1])
            joined[name] = torch.cat([tensor[:at], new, tensor[at:]])
        return state | joined

    @needs_torch
    def payload(
        self, state: Tensors, phase: pf.Phase | None, client: pf.ClientInfo, context: pf.ServerContext
    ) -> Tensors:
        """The client's own prompts P_n, to train from as to be evaluated with."""
        return {PROMPTS.name: self.prompts_of(state, [row_of(client.name, context)])[0]}

    def payload_tensors(self, phase: pf.Phase | None) -> tuple[TensorSpec, ...]:
        """As `payload`."""
        return (PROMPTS,)

    def prompts_of(self, state: Tensors, rows: list[int]) -> Tensor:
        """Generated prompts ``(k, m, d_v)`` of the clients in ``rows`` of the roster."""
        with torch.no_grad():
            return generate(self.hyper.generator, state, self._descriptors(state, rows))

    def _descriptors(self, state: Tensors, rows: list[int]) -> Tensor:
        """``(k, d_v)``; of no meaning where the generator has none."""
        return state[DESCRIPTORS][rows] if DESCRIPTORS in self._learned else torch.zeros(len(rows), 1)

    @needs_torch
    def aggregate(
        self, state: Tensors, phase: pf.Phase, updates: pf.Updates, combine: pf.Combine, context: pf.ServerContext
    ) -> Tensors:
        """One step of the optimizer on the sum over the clients that answered; their weights play no part."""
        rows, deltas = [], []
        for update in updates:
            rows.append(row_of(update.client, context))
            deltas.append(update.tensors[DELTA.name])
        slopes = gradients(self.hyper.generator, state, self._descriptors(state, rows), torch.stack(deltas))
        rate = self.hyper.generator_learning_rate
        step = adam if self.hyper.generator_optimizer == "adam" else sgd
        after = dict(state)
        for name, gradient in slopes.items():
            after |= step(state, name, gradient, rate, rows if name == DESCRIPTORS else None)
        if STEPS in after:
            after[STEPS] = after[STEPS] + 1
        return after

    # Client half

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE(H_n(F*([c, P_n, z])), y) over prompts and head together (Eq. 2); sends ΔP_n."""
        backbone = context.backbone
        start = payload[PROMPTS.name].to(backbone.device)
        prompts = pf.leaf(start.unsqueeze(0), backbone)
        trained = self._under(context, self._head(context, private).trainable(backbone.device))
        loss = trained.train(context, prompts)
        adapted = prompts.detach()[0]
        delta = adapted - start
        return pf.TrainResult(
            update={DELTA.name: delta.cpu()},
            private={**trained.head.private(), ADAPTED: adapted.cpu()},
            metrics={"loss": loss, "delta_norm": float(delta.norm())},
        )

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> ImageClassifier:
        """Classifies with the generated prompts and the client's head (Eq. 6)."""
        return self._classifier(context, payload[PROMPTS.name], private)

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``adapted``: the prompts as the client's last training left them; none before it has trained."""
        return {"adapted": self._classifier(context, private[ADAPTED], private)} if ADAPTED in private else {}

    def _classifier(self, context: pf.ClientContext, prompts: Tensor, private: Tensors) -> ImageClassifier:
        head = self._head(context, private).among(context.class_names)
        return self._under(context, head).classifier(context, prompts.unsqueeze(0))

    def _head(self, context: pf.ClientContext, private: Tensors) -> LinearHead:
        return LinearHead.of(context, private, head_width(context.backbone, self.hyper.projected))

    def _under(self, context: pf.ClientContext, head: LinearHead) -> PromptedHead:
        towers = Towers(context.backbone, self.hyper)
        return PromptedHead(towers, head, self.hyper.projected, self.hyper.head_learning_rate)
