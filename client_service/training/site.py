"""What a site's computation is bound to: its privacy, its policy, and torch's settings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from promptfed.client_service.privacy.noisy_counts import Leaving, NoisyCounts
from promptfed.client_service.privacy.policy import STATES, Policy, SiteFacts
from promptfed.client_service.privacy.protection import SiteProtection
from promptfed.shared.methods.core.interface.base import ClientContext
from promptfed.shared.privacy.noise import Noise, SecretNoise


@dataclass(frozen=True)
class SitePrivacy:
    """How this site's updates are protected, and what of its accuracies leaves: noisy ``counts``, if any.

    ``floor``: the disclosure floor; ``states``: how many states are answered on one test set while it is over 1.
    """

    protection: SiteProtection | None = None
    noise: Noise = field(default_factory=SecretNoise)
    leaving: Leaving = "plain"
    counts: NoisyCounts | None = None
    floor: int = 1
    states: int = STATES


@dataclass(frozen=True)
class SiteRules:
    """The site's policy, with what the federation ``asked`` of the site when it enrolled; empty without a policy."""

    policy: Policy | None = None
    asked: SiteFacts | None = None


class _Deterministic:
    """Deterministic kernels, while a task that asks for them runs. Torch has one switch for all threads of a process.

    Other tasks that run meanwhile have them too: they are slower, and as right.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tasks = 0
        self._before = False

    @contextmanager
    def asked(self) -> Iterator[None]:
        """For the length of one task."""
        with self._lock:
            if not self._tasks:
                self._before = torch.are_deterministic_algorithms_enabled()
                torch.use_deterministic_algorithms(True)
            self._tasks += 1
        try:
            yield
        finally:
            with self._lock:
                self._tasks -= 1
                if not self._tasks:
                    torch.use_deterministic_algorithms(self._before)


_deterministic = _Deterministic()


@contextmanager
def torch_settings(context: ClientContext) -> Iterator[None]:
    """The spec's number of threads. On a GPU also the precision of products and the kernels that the spec asks for."""
    training = context.training
    torch.set_num_threads(training.threads)
    if context.backbone.device.type == "cpu":
        yield
        return
    with _deterministic.asked() if training.deterministic else nullcontext():
        # Torch's own defaults differ: products are exact, and convolutions are not.
        torch.set_float32_matmul_precision("high" if training.tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = training.tf32
        yield
