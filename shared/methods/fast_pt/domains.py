"""Domains as a method knows them: by what their descriptions say, whoever holds their images."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from promptfed.shared.messages import Domain
from promptfed.shared.methods.core.base import ClientContext, ClientInfo, MethodError


def wording(description: str) -> str:
    """A domain's description but for case, spacing and a full stop, which set no domain apart."""
    return " ".join(description.casefold().split()).rstrip(" .")


def domain_key(description: str) -> int:
    """A domain as 63 bits of its wording's SHA-256: what tensors say for a description."""
    return int.from_bytes(hashlib.sha256(wording(description).encode()).digest()[:8], "big") >> 1


def own_domain(context: ClientContext) -> Domain:
    """The client's domain. Raises MethodError where its data declares none."""
    if context.domain is None:
        raise MethodError(f"client {context.client!r} has no domain description, which FaST-PT starts from")
    return context.domain


def own_key(context: ClientContext) -> int:
    """The key of the client's domain."""
    return domain_key(own_domain(context).description)


def trainer_domains(clients: Iterable[ClientInfo]) -> dict[int, Domain]:
    """The trainers' domains by key, sorted by name; an unseen domain, which only evaluates, is none of them."""
    return described_domains(client for client in clients if client.role == "trainer")


def described_domains(clients: Iterable[ClientInfo]) -> dict[int, Domain]:
    """The domains of ``clients`` by key, sorted by name; those with the same wording are one."""
    found: dict[int, Domain] = {}
    for client in clients:
        if client.domain is not None:
            found.setdefault(domain_key(client.domain.description), client.domain)
    return dict(sorted(found.items(), key=lambda item: (item[1].name, wording(item[1].description))))


def domain_names(keys: Sequence[int], clients: Iterable[ClientInfo], own: Domain | None) -> tuple[str, ...]:
    """The names of the domains with ``keys``, as far as ``clients`` and ``own`` tell; else "domain 1", "domain 2"."""
    known = described_domains(clients)
    if own is not None:
        known.setdefault(domain_key(own.description), own)
    return tuple(known[key].name if key in known else f"domain {place}" for place, key in enumerate(keys, 1))
