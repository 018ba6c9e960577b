"""The check of a spec's section ``compression``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.mean_checks import check_one_mean
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.spec.spec import FederationSpec


def check_compression(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if changes of ``spec`` cannot be compressed."""
    if spec.compression.up == "none":
        return
    if spec.secure_aggregation is not None:
        raise MethodError("a secure sum has its own grid of whole numbers: leave compression out")
    check_one_mean(method, spec.rounds, "compress", "what is rounded at random needs a mean")
