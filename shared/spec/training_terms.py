"""The training terms: everything in a federation's spec that reaches a client's training.

The coordinator offers them before a client enrols and repeats them in every task. The client's owner agrees to them,
and the method gets them in its context. A field of the spec that training reads is added here and nowhere else: offer,
task, consent and context all contain this model. Give a new field the default that describes training without it, and
leave it out of the JSON at that default (``left_out``), so that older messages and consents stay valid.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.spec.section import left_out
from promptfed.shared.spec.sections import CompressionSpec, PrivacySpec, SecureAggregationSpec, SelectionSpec
from promptfed.shared.spec.spec import BackboneSpec, ClassName, FederationSpec, TrainingSpec, Visible
from promptfed.shared.spec.weighting import Weighting


class TrainingTerms(BaseModel):
    """What every client of a federation trains with.

    ``backbone`` carries the fingerprint and the shape of the weights once they are known. ``template`` is None where
    each client uses the template of its own data.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    method: dict[str, Any]
    training: TrainingSpec
    backbone: BackboneSpec
    class_names: Annotated[list[ClassName], Field(max_length=100_000)] | None
    template: Annotated[str, Field(max_length=500), Visible] | None
    rounds: Annotated[int, Field(ge=0, le=100_000)]
    seed: Annotated[int, Field(description="batches, initial prompts and crops of training follow from it")]
    privacy: PrivacySpec | None = left_out(None, "how training is protected; left out where it is not")
    secure_aggregation: SecureAggregationSpec | None = left_out(
        None, "how updates become a sum that nobody can look into; left out where they are sent in the clear"
    )

    weighting: Weighting | None = left_out(None, "of secure sums: how much each client counts")
    selection: SelectionSpec | None = left_out(None, "training images are held out, and each round is measured on them")
    compression: CompressionSpec = left_out(CompressionSpec(), "how changes are encoded on their way")

    @classmethod
    def of(cls, spec: FederationSpec, **known: Any) -> TrainingTerms:
        """The terms of a resolved ``spec``; ``known`` replaces fields, such as a ``backbone`` with its fingerprint."""
        summed = spec.secure_aggregation is not None
        terms = {
            "privacy": spec.privacy if spec.privacy.level != "none" else None,
            "weighting": Weighting.of(spec.aggregation) if summed else None,
            **known,
        }
        names = TrainingTerms.model_fields
        return TrainingTerms(**{name: terms[name] if name in terms else getattr(spec, name) for name in names})

    def training_terms(self) -> TrainingTerms:
        """The terms alone, of a message that contains them."""
        return TrainingTerms.model_construct(**{name: getattr(self, name) for name in TrainingTerms.model_fields})
