"""Remarks on a result: one sentence for each apparent problem, with advice."""

from __future__ import annotations

from statistics import fmean

from promptfed.sdk.result import FederationResult
from promptfed.shared.api import remarks as shared


def remarks(result: FederationResult) -> list[str]:
    """What looks wrong on the clients' own test images, and what to try: `promptfed.shared.api.remarks`."""
    return shared.remarks(result.federation.spec, result.round_reports, _classes(result))


def _classes(result: FederationResult) -> float | None:
    """The mean number of classes of a trainer."""
    spec = result.federation.spec
    if spec.class_names is not None and spec.method.get("label_space") != "client":
        return float(len(spec.class_names))
    counts = [client.num_classes for client in result.clients if client.role == "trainer"]
    return fmean(counts) if counts else None
