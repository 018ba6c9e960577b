"""Training terms for tests that run a method without a federation."""

from __future__ import annotations

from typing import Any

from promptfed.shared.spec.spec import BackboneSpec, TrainingSpec
from promptfed.shared.spec.training_terms import TrainingTerms


def training_terms(training: dict[str, Any] | TrainingSpec | None = None, **changes: Any) -> TrainingTerms:
    """Terms with these settings; ``changes`` replace any other field."""
    known: dict[str, Any] = {
        "method": {"name": "promptfl"}, "training": training or {}, "backbone": BackboneSpec(), "class_names": None,
        "template": None, "rounds": 4, "seed": 3,
    }  # fmt: skip
    return TrainingTerms(**known | changes)
