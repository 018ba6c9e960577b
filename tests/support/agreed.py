"""The consent of a client that is made by hand."""

from __future__ import annotations

from typing import Any

from promptfed.client_service.privacy.agreement import Agreement, terms_of
from promptfed.client_service.state.private_state import PrivateState
from promptfed.shared.messages import EnrolmentInfo, Task
from promptfed.shared.methods import make_method
from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec


def agreed(state: PrivateState, method: dict[str, Any], rounds: int = 3, **changes: Any) -> Agreement:
    """To train by ``method``; whoever calls a `TaskWork` itself has nothing held against more of it.

    ``changes`` are those of the offer.
    """
    info = EnrolmentInfo(
        federation_id="fed-1", name="pets", method=method, seed=0, backbone=BackboneSpec(), class_names=None,
        template=None, state="running", rounds=rounds, training=TrainingSpec().model_dump(), evaluate_every=1,
        **changes,
    )  # fmt: skip
    return Agreement.made(state, terms_of(info, make_method(method), "http://127.0.0.1", "trainer", []))


def asked(kind: str, round: int, phase: str, payload: bytes, spec: dict[str, Any]) -> Task:
    """What a coordinator would ask of a client in a federation of this spec."""
    return Task.model_validate({
        "task_id": f"{kind}-{round}", "kind": kind, "round": round, "phase": phase,
        "deadline": "2030-01-01T00:00:00Z", "seconds_left": 60,
        "payload": {"url": "/", "bytes": len(payload), "sha256": "sha256:" + "0" * 64},
        "config": {key: value for key, value in spec.items() if key != "name"},
    })  # fmt: skip
