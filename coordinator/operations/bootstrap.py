"""``--bootstrap``: creates a federation at the first start, and an enrolment token for its clients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from promptfed.coordinator.domain.federation import Federation
from promptfed.coordinator.engine.expiry import has_expired
from promptfed.coordinator.engine.registry import Registry
from promptfed.coordinator.operations import federations, tokens
from promptfed.coordinator.problems import Refusal
from promptfed.coordinator.settings import Settings
from promptfed.coordinator.store.tokens import digest, write_secret
from promptfed.shared.api.access_schemas import TokenRequest
from promptfed.shared.service.reasons import why
from promptfed.shared.service.yaml_text import read_yaml


class BootstrapFailed(Exception):
    """The spec cannot be read or run."""


def bootstrap(registry: Registry, settings: Settings) -> None:
    """Create the settings' federation if it does not exist, and write an enrolment token unless there is a valid one.

    The token is for as many clients as the settings say, or the spec's ``min_clients``, minus the enrolled ones.
    """
    if settings.bootstrap is None:
        return
    raw = read_spec(settings.bootstrap)
    federation = next((known for known in registry.federations.values() if known.name == raw.get("name")), None)
    path = settings.enrolment_token_file
    try:
        if federation is None:
            federation = federations.create(registry, raw)
        if path is not None and not _is_good(federation, path):
            uses = settings.enrolment_token_uses or federation.spec.participation.min_clients
            missing = uses - len(registry.get(federation.id).clients)
            if missing > 0:
                minted = tokens.mint(registry, federation.id, TokenRequest(uses=missing), settings.token_hours)
                write_secret(path, minted.token)
    except Refusal as refusal:
        raise BootstrapFailed(f"{settings.bootstrap}: {refusal.detail}") from None


def read_spec(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file. Raises BootstrapFailed."""
    try:
        raw = read_yaml(path.read_text())
    except OSError as error:
        raise BootstrapFailed(f"cannot read {path}: {why(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BootstrapFailed(f"{path} is not YAML: {why(error)}") from None
    if not isinstance(raw, dict):
        raise BootstrapFailed(f"{path} must hold a mapping, such as `name: eyes`")
    return raw


def _is_good(federation: Federation, path: Path) -> bool:
    """Whether the file holds a token of this federation that has not expired."""
    try:
        token = federation.tokens.get(digest(path.read_text().strip()))
    except (OSError, UnicodeDecodeError):
        return False
    return token is not None and not has_expired(token)
