"""FedAPT: a prompt for every class, scaled by a frozen random key of each domain; a query tells an image's domains.

Notation: ``n`` domains, P the meta prompt, K_j the key of domain j, Q the query, I an image's normalised feature, ⊙
entry by entry. Domains are by the wording of their descriptions, as FaST-PT's; a client that describes none is one.

Source: Su et al., "Federated Adaptive Prompt Tuning for Multi-Domain Collaborative Learning", AAAI 2024. Its abstract
and the released code were read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fast_pt.domains import domain_key
from promptfed.shared.seeds import Draws
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import namespace
from promptfed.shared.tensors.lazy import F, Tensor, into_graph, no_grad, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import Backbone

QUERY = TensorSpec("query_weight", ("n", "d_e"))
KEY = TensorSpec("key", ("m", "d_t"))  # a client's own
KEYS = TensorSpec("keys", ("n", "m", "d_t"))
DOMAINS = TensorSpec("domains", ("n",), "int64")
META = "meta_prompt"
TEXTS = 256  # in one pass where each image has texts of its own
ALONE = 1e-6  # what other domains may share in an image that is taken for one domain's


class FedAPTHyper(pf.Hyperparameters):
    """The prompt, and how an image's domains are found and used."""

    m: int = pf.option(16, "context vectors of each class", ge=1, le=64)
    class_specific: bool = pf.option(True, "a context for every class, or one for all")
    t: float = pf.option(0.01, "temperature of the softmax over standardised scores", gt=0, le=1000)
    query_scale: float = pf.option(10.0, "s, length of the features that the query is trained on", gt=0, le=1000)


def scaled(prompt: Tensor, key: Tensor) -> Tensor:
    """(A1) P ⊙ (1 + K) of ``(C, m, d_t)`` or ``(m, d_t)`` and keys ``(..., m, d_t)``; a class's dimension is made."""
    return prompt * (1 + (key.unsqueeze(-3) if prompt.dim() == 3 else key))


def mixture_of(scores: Tensor, t: float) -> Tensor:
    """(A3) w ``(B, n)`` = softmax(û/t), û the scores ``(B, n)`` standardised over their n entries (sd with n − 1).

    Scores that are all the same tell nothing: every domain has the same share.
    """
    centred = scores - scores.mean(-1, keepdim=True)
    spread = scores.std(-1, keepdim=True)
    return (centred / spread.where(spread > 0, torch.ones_like(spread)) / t).softmax(-1)


class AdaptiveClassifier:
    """Logits of images under the keys mixed by their domains."""

    def __init__(self, context: pf.ClientContext, method: FedAPT, prompt: Tensor, query: Tensor, keys: Tensor):
        """prompt: with the rows of ``context.class_names``; keys ``(n, m, d_t)``; of one key nothing is mixed."""
        device = context.backbone.device
        self._backbone, self._method = context.backbone, method
        self._prompts = pf.class_prompts(context, method.hyper.m)
        self._prompt, self._query, self._keys = prompt.to(device), query.to(device), keys.to(device)
        with torch.no_grad():
            self._texts = torch.stack([self._text(key) for key in self._keys])  # (n, C, d_e)

    @no_grad
    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        features = split.features()
        features = features[pf.sent_to(indices, features.device)]
        shares = self.shares_of(features)
        likeliest = shares.argmax(-1)
        logits = self._backbone.logit_scale * torch.einsum("bd,bcd->bc", features, self._texts[likeliest])
        at_once = max(1, TEXTS // len(self._prompts))
        if into_graph():  # mixes the keys of every image
            blended = torch.ones_like(likeliest).cumsum(0) - 1
        else:
            blended = (shares.amax(-1) <= 1 - ALONE).nonzero().squeeze(1)
        for rows in torch.split(blended, at_once):
            if not len(rows):
                continue
            mixed = torch.einsum("bn,nmd->bmd", shares[rows], self._keys)
            text = self._text(mixed)
            logits[rows] = self._backbone.logit_scale * torch.einsum("bd,bcd->bc", features[rows], text)
        return logits

    def shares_of(self, features: Tensor) -> Tensor:
        """w ``(B, n)`` of normalised features ``(B, d_e)``."""
        if len(self._keys) == 1:
            return features.new_ones(len(features), 1)
        return mixture_of(features @ self._query.T, self._method.hyper.t)

    def _text(self, keys: Tensor) -> Tensor:
        """``(..., C, d_e)`` under keys ``(..., m, d_t)``."""
        return self._method.encode(self._backbone, scaled(self._prompt, keys), self._prompts)


class FedAPT(pf.Method):
    """One exchange a round: P and Q up, their plain mean down, with the client's own key."""

    name = "fedapt"
    summary = "A prompt for every class, scaled by random keys of the domains that an image looks like."
    paper = "Su et al., Federated Adaptive Prompt Tuning for Multi-Domain Collaborative Learning (FedAPT), 2024"
    unprotected = "a prompt for every class has too many numbers for a useful noise"
    one_payload = False  # each client is handed its own key
    Hyper = FedAPTHyper
    hyper: FedAPTHyper
    needs = pf.Needs(join_when_extended=False)
    metrics = ("loss",)
    defaults = pf.defaults(
        50,
        {"participation": {"min_clients": 2}, "aggregation": {"weighting": "uniform"}},
        epochs=1,
        batch_size=256,
        learning_rate=0.01,
        weight_decay=1e-5,
    )

    @property
    def disclosures(self) -> tuple[pf.Disclosed, ...]:
        """A prompt of its own shows how a class looks at a site."""
        shown = "a prompt for every class, as you trained it" if self.hyper.class_specific else "a prompt"
        return (pf.AGGREGATE, pf.Disclosed("operator", shown))

    # Server half

    @property
    def meta(self) -> TensorSpec:
        """P."""
        return TensorSpec(META, ("classes", "m", "d_t") if self.hyper.class_specific else ("m", "d_t"))

    def check(self, spec: pf.FederationSpec) -> None:
        """A prompt for every class needs to know the classes."""
        if not self.hyper.class_specific:
            return
        if spec.class_names is None:
            raise pf.MethodError(
                "fedapt learns a prompt for every class: list the federation's class_names in the spec, or take "
                "class_specific: false"
            )
        if self.hyper.label_space != "federation":
            raise pf.MethodError("fedapt's prompts are for the federation's classes: leave label_space out")

    def state_tensors(self) -> tuple[TensorSpec, ...]:
        """P, Q, and the keys with whose they are."""
        return (self.meta, QUERY, KEYS, DOMAINS)

    def phases(self, round: int, rounds: int) -> tuple[pf.Phase, ...]:
        """P and Q both ways, the client's own key down."""
        return (pf.Phase("train", down=(self.meta, QUERY, KEY, DOMAINS), up=(self.meta, QUERY), mean=True),)

    def dims(self, context: pf.ServerContext) -> dict[str, int]:
        """``classes``, ``m``, the widths, and the number n of domains."""
        sizes = {"m": self.hyper.m, "d_t": pf.text_width(self.name, self.hyper.m, context), "d_e": context.shape.d_e}
        return sizes | {"classes": len(context.class_names or ()), "n": len(domains_of(context.clients))}

    def admit(self, client: pf.ClientInfo, former: pf.ClientInfo | None, context: pf.ServerContext) -> None:
        """Who comes back is of the domain that it was of."""
        if former is None:
            return
        if former.role != client.role:
            raise pf.MethodError(
                f"{client.name!r} took part as {former.role}: enrol the {client.role} under another name"
            )
        if key_of(former) != key_of(client):
            raise pf.MethodError(
                f"{client.name!r} took part with another domain: come back with it, or under another name"
            )

    def check_clients(self, context: pf.ServerContext) -> None:
        """Scores are standardised over the domains: of one there is no spread."""
        if len(domains_of(context.clients)) < 2:
            raise pf.MethodError(f"all trainers are of one domain: {self.name} needs a trainer of another domain")

    def initial_state(self, context: pf.ServerContext, draws: Draws) -> Tensors:
        """P from N(0, 0.02²), Q uniform in ±1/√d_e, each key from its domain and the seed."""
        dims = self.dims(context)
        domains = domains_of(context.clients)
        prompt = draws.normal(*self.meta.resolve(dims)) * pf.INIT_STD
        query = (draws.uniform(*QUERY.resolve(dims)) * 2 - 1) / math.sqrt(dims["d_e"])
        keys, xp = [self._key(context, domain, dims) for domain in domains], draws.xp
        empty = xp.zeros((0, dims["m"], dims["d_t"]), dtype=xp.float32)
        return {
            META: prompt,
            QUERY.name: query,
            KEYS.name: xp.stack(keys) if keys else empty,
            DOMAINS.name: xp.asarray(domains, dtype=xp.int64),
        }

    def join(self, state: Tensors, client: pf.ClientInfo, context: pf.ServerContext) -> Tensors:
        """A new domain's key, and a row of Q that is zero."""
        rows = state[DOMAINS.name].tolist()
        if client.role != "trainer" or key_of(client) in rows:
            return state
        domain = key_of(client)
        key = self._key(context, domain, self.dims(context))
        query, xp = state[QUERY.name], namespace(state[QUERY.name])
        return state | {
            QUERY.name: xp.concat([query, xp.zeros((1, query.shape[1]), dtype=query.dtype)]),
            KEYS.name: xp.concat([state[KEYS.name], key[None]]),
            DOMAINS.name: xp.asarray([*rows, domain], dtype=xp.int64),
        }

    def payload(
        self, state: Tensors, phase: pf.Phase | None, client: pf.ClientInfo, context: pf.ServerContext
    ) -> Tensors:
        """P, Q and the client's own key; for an evaluation all keys."""
        if phase is None:
            return super().payload(state, phase, client, context)
        row = state[DOMAINS.name].tolist().index(key_of(client))
        return {name: state[name] for name in (META, QUERY.name, DOMAINS.name)} | {KEY.name: state[KEYS.name][row]}

    def _key(self, context: pf.ServerContext, domain: int, dims: dict[str, int]) -> Any:
        """K ``(m, d_t)`` uniform in [0, 1), whoever else there is."""
        return context.draws(self.name, str(domain)).uniform(dims["m"], dims["d_t"])

    # Client half

    @property
    def prompt_length(self) -> int:
        """As many as ``m``."""
        return self.hyper.m

    def encode(self, backbone: Backbone, prompt: Tensor, prompts: Any) -> Tensor:
        """``(..., C, d_e)`` text features under a context for each class, or one for all."""
        return backbone.encode_prompts(prompt, prompts, per_class=self.hyper.class_specific)

    def train(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.TrainResult:
        """E epochs of CE(A1) for P and (A2) for Q, which share no parameter."""
        backbone, device = context.backbone, context.backbone.device
        prompts, scale = pf.class_prompts(context, self.hyper.m), backbone.logit_scale
        prompt, query = (pf.leaf(payload[name], backbone) for name in (META, QUERY.name))
        key, row = payload[KEY.name].to(device), self._own_row(context, payload)
        features, labels = context.train.features(), context.train.labels.to(device)

        def loss(indices: Tensor) -> Tensor:
            rows = pf.sent_to(indices, device)
            text = self.encode(backbone, scaled(prompt, key), prompts)
            scores = self.hyper.query_scale * features[rows] @ query.T
            query_loss = F.cross_entropy(scores, torch.full_like(labels[rows], row))
            return F.cross_entropy(scale * features[rows] @ text.T, labels[rows]) + query_loss

        final = pf.train(context, [prompt, query], loss)
        return pf.TrainResult({META: prompt, QUERY.name: query}, metrics={"loss": final})

    def _own_row(self, context: pf.ClientContext, payload: Tensors) -> int:
        domains = payload[DOMAINS.name].tolist()
        description = context.domain.description if context.domain is not None else context.client
        for words in (description, context.client):
            if domain_key(words) in domains:
                return int(domains.index(domain_key(words)))
        raise pf.MethodError(f"the federation does not know the domain of {context.client!r}: enrol under another name")

    def classifier(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> pf.Classifier:
        """Everybody: the keys mixed by each image's domains."""
        prompt = self._rows(context, payload[META])
        return AdaptiveClassifier(context, self, prompt, payload[QUERY.name], payload[KEYS.name])

    def variants(self, context: pf.ClientContext, payload: Tensors, private: Tensors) -> dict[str, pf.Classifier]:
        """``own``: a trainer's data under its own key."""
        if not len(context.train):
            return {}
        key = payload[KEYS.name][self._own_row(context, payload)].unsqueeze(0)
        prompt = self._rows(context, payload[META])
        return {"own": AdaptiveClassifier(context, self, prompt, payload[QUERY.name], key)}

    def _rows(self, context: pf.ClientContext, prompt: Tensor) -> Tensor:
        """P with the rows of the candidates. Raises MethodError for a class that it has no prompt for."""
        if not self.hyper.class_specific:
            return prompt
        rows = context.trained_rows()
        unknown = [name for name, row in zip(context.class_names, rows, strict=True) if row < 0]
        if unknown:
            raise pf.MethodError(
                f"fedapt has no prompt for {unknown[0]!r}, a class that it was not trained for: leave that test set "
                "out, or take class_specific: false"
            )
        return prompt[rows]


def key_of(client: pf.ClientInfo) -> int:
    """The client's domain: what its description says, or its own name."""
    return domain_key(client.domain.description if client.domain is not None else client.name)


def domains_of(clients: Iterable[pf.ClientInfo]) -> list[int]:
    """The trainers' domains, in order of the first client of each."""
    return list(dict.fromkeys(key_of(client) for client in clients if client.role == "trainer"))
