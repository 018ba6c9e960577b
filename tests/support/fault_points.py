"""The coordinator's fault points (`promptfed.shared.service.fault_points`), by who reaches them."""

from __future__ import annotations

#: Every point there is, in the order in which a run first reaches them.
POINTS = (
    "federation-created", "client-enrolled", "start-before-commit", "start-committed", "blob-row-written",
    "blob-written", "blob-renamed", "payloads-before-commit", "payloads-committed", "evaluation-entered",
    "group-stepped", "group-before-commit", "group-committed", "answer-sent", "update-received", "update-checked",
    "update-entered", "phase-closed", "aggregate-computed", "state-before-commit", "state-committed",
)  # fmt: skip
OF_FILES = ("blob-written", "blob-renamed")
"""Reached where blobs are files, large ones that is."""
OF_ROWS = ("blob-row-written",)
"""Reached where blobs are rows, small ones that is."""

#: Those of a federation's deletion, in their order; the second comes once for each transaction.
DELETION_POINTS = ("federation-hidden", "federation-rows-deleted")

#: Those that only secure sums reach.
SECURE_POINTS = ("exchange-before-commit", "exchange-committed", "sum-computed", "exchanges-deleted")
