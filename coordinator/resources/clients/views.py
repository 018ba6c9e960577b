"""Clients as operators see them."""

from __future__ import annotations

from promptfed.coordinator.store.tables import ClientRow
from promptfed.shared.api import api_schemas as schemas


def client_view(row: ClientRow) -> schemas.ClientView:
    """One client, without its secret's digest and its class names."""
    computed = {
        "client_id": row.id,
        "status": "active" if row.active else "withdrawn",
        "reset": row.secret_digest is None,
        "num_classes": len(row.class_names),
        "release": (row.software or {}).get("release"),
        "system": (row.software or {}).get("system"),
        "grey": (row.software or {}).get("grey"),
        "last_refusal": schemas.LastRefusal.model_validate(row.last_refusal) if row.last_refusal else None,
    }
    stored = {name: getattr(row, name) for name in schemas.ClientView.model_fields if name not in computed}
    return schemas.ClientView.model_validate(stored | computed)
