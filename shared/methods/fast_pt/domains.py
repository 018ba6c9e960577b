"""Domains, identified by the wording of their descriptions and not by the clients that hold the images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.plain_text import quoted
from promptfed.shared.tensors import Tensors, TensorSpec
from promptfed.shared.tensors.arrays import namespace
from promptfed.shared.tensors.lazy import F, Tensor, torch

if TYPE_CHECKING:
    from promptfed.shared.clip import ClassPrompts


DESCRIPTION = 200  # characters of a domain's description
WORDS = pf.Disclosed("sites", "this client's name and the words that describe its domain")
OF_DOMAIN_PROMPTS = (
    pf.Disclosed("sites", "this client's own domain prompt as it trained it, after the last round, with whose it is"),
    pf.Disclosed("operator", "mixtures of image features: the domain classifier's gradients are sums of them"),
)
SPECIAL = 2  # tokens of every text besides words: start and end
WEIGHT = TensorSpec("classifier_weight", ("n", "d_e"))
BIAS = TensorSpec("classifier_bias", ("n",))
DOMAINS = TensorSpec("domains", ("n",), "int64")  # the domain of each row
Mixture = Literal["hard", "soft"]
CPU_ROWS = 2_048  # rows of the text tower that a soft mixture computes at once: more fall out of a CPU's cache
ROWS = 32_768  # on other devices, which small batches leave idle


def wording(description: str) -> str:
    """A domain's description without case, spacing and full stop, which do not distinguish domains."""
    return " ".join(description.casefold().split()).rstrip(" .")


def domain_key(description: str) -> int:
    """A domain as 63 bits of its wording's SHA-256, which represent the description in tensors."""
    return int.from_bytes(hashlib.sha256(wording(description).encode()).digest()[:8], "big") >> 1


def own_domain(context: pf.ClientContext) -> Domain:
    """The client's domain. Raises MethodError if its data declare none."""
    if context.domain is None:
        raise pf.MethodError(f"client {context.client!r} has no domain description, which FaST-PT starts from")
    return context.domain


def own_key(context: pf.ClientContext) -> int:
    """The key of the client's domain."""
    return domain_key(own_domain(context).description)


def trainer_domains(clients: Iterable[pf.ClientInfo]) -> dict[int, Domain]:
    """The trainers' domains by key, sorted by name; an unseen domain, which only evaluates, is none of them."""
    return described_domains(client for client in clients if client.role == "trainer")


def described_domains(clients: Iterable[pf.ClientInfo]) -> dict[int, Domain]:
    """The domains of ``clients`` by key, sorted by name; those with the same wording are one."""
    domains: dict[int, Domain] = {}
    for client in clients:
        if client.domain is not None:
            domains.setdefault(domain_key(client.domain.description), client.domain)
    return dict(sorted(domains.items(), key=lambda item: (item[1].name, wording(item[1].description))))


def domain_names(keys: Sequence[int], clients: Iterable[pf.ClientInfo], own: Domain | None) -> tuple[str, ...]:
    """The names of the domains with ``keys``, as far as ``clients`` and ``own`` tell; else "domain 1", "domain 2"."""
    descriptions = described_domains(clients)
    if own is not None:
        descriptions.setdefault(domain_key(own.description), own)
    return tuple(
        descriptions[key].name if key in descriptions else f"domain {place}" for place, key in enumerate(keys, 1)
    )


def check_description(
    client: pf.ClientInfo, former: pf.ClientInfo | None, context: pf.ServerContext, merge_domains: bool
) -> None:
    """Refuse words of a trainer's domain that say nothing, are too many, another's, or not those it came with before.

    Raises:
        MethodError: which of these, and what to do.
    """
    description = client.domain.description if client.domain is not None else ""
    if not any(letter.isalnum() for letter in description):
        raise pf.MethodError(
            f"the domain description {description!r} says nothing: use words, as in 'a sketch of a {{}}'"
        )
    _check_length(description, context.shape)
    key = domain_key(description)
    before = former.domain if former is not None else None
    if before is not None and domain_key(before.description) != key:
        then, now = quoted([before.description, description])
        raise pf.MethodError(
            f"{client.name!r} took part with the domain {then}: come back with it, or enrol {now} under another name"
        )
    same = [other.name for other in context.clients if key in trainer_domains([other])]
    if same and not merge_domains:
        raise pf.MethodError(
            f"{same[0]!r} describes its domain as {description!r} too: say what sets this one apart, or set "
            "method.merge_domains to make them one domain"
        )


def _check_length(description: str, shape: pf.BackboneShape) -> None:
    """Refuse a description that is too long for every text tower of this kind, since other clients use it in texts.

    The exact length needs a tokenizer, which the coordinator does not have; each word is at least one token.
    """
    words, room = len(description.split()), shape.context_length
    if len(description) > DESCRIPTION or (room is not None and words > room - SPECIAL):
        text = f"the domain description has {words} words and {len(description)} characters"
        most = f" and {room - SPECIAL} words" if room is not None else ""
        raise pf.MethodError(f"{text}; there is room for {DESCRIPTION} characters{most}: say it in fewer")


def fits(domain: Domain, context: pf.ClientContext) -> bool:
    """Whether the texts of a peer's domain fit into the text tower; long words of one site must not stop the others."""
    try:
        pf.template_features(context.backbone, domain.description, context.for_training().class_names)
    except BackboneError:
        return False
    return True


def too_long(context: pf.ClientContext) -> list[str]:
    """Names of the peers' domains whose words are too long here: nothing is transferred to them."""
    return [domain.name for domain in described_domains(context.peers).values() if not fits(domain, context)]


def has_rows(state: Tensors) -> bool:
    """Whether ``state`` contains φ and the domains of its rows."""
    specs = (WEIGHT, BIAS, DOMAINS)
    present = [(spec, state[spec.name]) for spec in specs if spec.name in state]
    fitting = [
        tensor
        for spec, tensor in present
        if (tensor.ndim, tensor.dtype) == (len(spec.shape), getattr(namespace(tensor), spec.dtype))
    ]
    return len(fitting) == len(specs) and len({len(tensor) for tensor in fitting}) == 1


def rows_for(state: Tensors, keys: list[int]) -> Tensors:
    """φ of ``state`` with a row for each of ``keys`` in their order: its own where it has one, else zeros."""
    row_of = {key: row for row, key in enumerate(state[DOMAINS.name].tolist())}
    pairs = [(row, row_of[key]) for row, key in enumerate(keys) if key in row_of]
    xp, old = namespace(state[WEIGHT.name]), (state[WEIGHT.name], state[BIAS.name])
    weight, bias = (xp.zeros((len(keys), *rows.shape[1:]), dtype=rows.dtype) for rows in old)
    for row, before in pairs:
        weight[row], bias[row] = state[WEIGHT.name][before], state[BIAS.name][before]
    return {WEIGHT.name: weight, BIAS.name: bias, DOMAINS.name: xp.asarray(keys, dtype=xp.int64)}


def one_of(updates: list[pf.ClientUpdate], combine: pf.Combine) -> Tensors:
    """The tensors of one domain: those of its only client, or the result of the rule for several clients."""
    if len(updates) == 1:
        return dict(updates[0].tensors)
    total = sum(update.weight for update in updates)
    return combine(replace(update, weight=update.weight / total) for update in updates)


class MixtureClassifier:
    """Classifies with a mixture of ``domain_prompts (k, m, d_t)`` behind ``general (m, d_t)``, or by themselves.

    ``weight (k, d_e)`` and ``bias (k,)`` are φ's rows of the same domains in the same order: its softmax over them is
    g renormalised over the prompts that there are. ``domain_names`` are the k domains' as people know them.
    """

    def __init__(
        self,
        context: pf.ClientContext,
        general: Tensor | None,
        domain_prompts: Tensor,
        weight: Tensor,
        bias: Tensor,
        mixture: Mixture,
        domain_names: tuple[str, ...] = (),
    ):
        self.domain_names = domain_names
        device = context.backbone.device
        self._backbone = context.backbone
        self._general = None if general is None else general.to(device)
        self._own = domain_prompts.to(device)
        self._weight, self._bias = weight.to(device), bias.to(device)
        length = self._own.shape[1] + (0 if general is None else len(general))
        self._prompts = pf.class_prompts(context, length)
        self._texts = self._encode(self._own) if mixture == "hard" else None  # (k, C, d_e)

    def logits(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits of the images at ``indices (B,)``."""
        features = split.features()
        features = features[pf.sent_to(indices, features.device)]
        scores = F.linear(features, self._weight, self._bias)
        return self._soft(features, scores.softmax(dim=-1)) if self._texts is None else self._hard(features, scores)

    def shares(self, split: pf.Split, indices: Tensor) -> Tensor:
        """``(B, k)`` g of the images at ``indices (B,)``."""
        features = split.features()
        return F.linear(features[pf.sent_to(indices, features.device)], self._weight, self._bias).softmax(dim=-1)

    def weights(self) -> Tensors | None:
        """The hard mixture's texts and φ; a soft one makes texts for each image."""
        if self._texts is None:
            return None
        return {"class_weights": self._texts, "domain_weight": self._weight, "domain_bias": self._bias}

    def _hard(self, features: Tensor, scores: Tensor) -> Tensor:
        assert self._texts is not None
        likeliest = scores.argmax(dim=-1)
        logits = features.new_empty(len(features), self._texts.shape[1])
        for domain, text in enumerate(self._texts):
            rows = likeliest == domain
            logits[rows] = self._backbone.logit_scale * features[rows] @ text.T
        return logits

    def _soft(self, features: Tensor, shares: Tensor) -> Tensor:
        rows = CPU_ROWS if features.device.type == "cpu" else ROWS
        at_once = max(1, rows // text_rows(self._prompts, self._backbone.supports.text_prefix))
        parts = [features.new_empty(0, len(self._prompts))]
        for some, share in zip(torch.split(features, at_once), torch.split(shares, at_once), strict=True):
            text = self._encode(torch.einsum("bk,kmd->bmd", share, self._own))
            parts.append(self._backbone.logit_scale * torch.einsum("bd,bcd->bc", some, text))
        return torch.cat(parts)

    def _encode(self, prompts: Tensor) -> Tensor:
        """``(B, C, d_e)`` text features with domain prompts ``(B, m, d_t)``."""
        if self._general is not None:
            prompts = torch.cat([self._general.expand(len(prompts), -1, -1), prompts], dim=1)
        with torch.no_grad():
            return self._backbone.encode_prompts(prompts, self._prompts)


def text_rows(prompts: ClassPrompts, shared_prefix: bool) -> int:
    """Rows of the text tower that one context takes for all classes."""
    positions = prompts.ids.shape[1]
    if not shared_prefix:
        return len(prompts) * positions
    prefix = prompts.start + prompts.context_length
    return prompts.context_length + int((prompts.end + 1 - prefix).sum())
