"""What a site's computation is bound to: its privacy, its policy, and torch's settings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from promptfed.client_service.privacy.noisy_counts import Leaving, NoisyCounts
from promptfed.client_service.privacy.payloads import PayloadChecks
from promptfed.client_service.privacy.policy import Policy, SiteFacts
from promptfed.client_service.privacy.protection import SiteProtection
from promptfed.shared.clip import Backbone
from promptfed.shared.privacy.noise import Noise, SecretNoise
from promptfed.shared.spec.spec import TrainingSpec


@dataclass(frozen=True)
class SitePrivacy:
    """How this site's updates are protected, and what of its accuracies leaves: noisy ``counts``, if any.

    ``floor``: the disclosure floor.
    """

    protection: SiteProtection | None = None
    noise: Noise = field(default_factory=SecretNoise)
    leaving: Leaving = "plain"
    counts: NoisyCounts | None = None
    floor: int = 1


@dataclass(frozen=True)
class SiteRules:
    """The site's policy, with what the federation ``asked`` of the site when it enrolled; empty without a policy.

    ``payloads``: the checks of payloads, where the policy has a section for them.
    """

    policy: Policy | None = None
    asked: SiteFacts | None = None
    payloads: PayloadChecks | None = None


@contextmanager
def torch_settings(training: TrainingSpec, backbone: Backbone) -> Iterator[None]:
    """The spec's number of threads; on a GPU deterministic kernels where the spec asks for them."""
    torch.set_num_threads(training.threads)
    if not training.deterministic or backbone.device.type == "cpu":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
