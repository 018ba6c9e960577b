"""Failures under differential privacy: their cause may depend on the data, and no noise covers it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from promptfed.client_service.exits import ClientError, Failure
from promptfed.shared.methods.core.training import TaskCancelled

log = logging.getLogger("promptfed.client")


@contextmanager
def unexplained(hidden: bool, work: Literal["training", "evaluation"] = "training") -> Iterator[None]:
    """If ``hidden``, replace every failure inside by the same one. The cause is written to this client's own log only.

    Raises:
        Failure: training-failed (or evaluation-failed), with the same text whatever the cause.
    """
    try:
        yield
    except (TaskCancelled, ClientError):
        raise
    except Exception:
        if not hidden:
            raise
        log.exception("protected %s failed", work)
        raise Failure(f"{work}-failed", f"protected {work} failed; this client's own log says why") from None
