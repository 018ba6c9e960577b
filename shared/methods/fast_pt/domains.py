"""Domains, identified by the wording of their descriptions and not by the clients that hold the images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from promptfed.shared.clip.errors import BackboneError
from promptfed.shared.messages import Domain
from promptfed.shared.methods.core import toolkit as pf

DESCRIPTION = 200  # characters of a domain's description
WORDS = pf.Disclosed("sites", "this client's name and the words that describe its domain")
OF_DOMAIN_PROMPTS = (
    pf.Disclosed("sites", "this client's own domain prompt as it trained it, after the last round, with whose it is"),
    pf.Disclosed("operator", "mixtures of image features: the domain classifier's gradients are sums of them"),
)
SPECIAL = 2  # tokens of every text besides words: start and end


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
    known = described_domains(clients)
    if own is not None:
        known.setdefault(domain_key(own.description), own)
    return tuple(known[key].name if key in known else f"domain {place}" for place, key in enumerate(keys, 1))


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
        raise pf.MethodError(
            f"{client.name!r} took part with the domain {before.description!r}: come back with it, or enrol "
            f"{description!r} under another name"
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
