"""A spec's section ``privacy``: the protected units and the privacy budget."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from promptfed.shared.privacy.accounting import LEAST_DELTA, LEAST_NOISE, MOST_NOISE

Evaluations = Literal["withheld", "noisy", "plain"]


class PrivacySpec(BaseModel):
    """Differential privacy of the training.

    ``level: sample``: each client adds noise that protects its records. ``client``: the coordinator adds noise that
    protects whole clients.
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, strict=True)

    level: Annotated[
        Literal["none", "sample", "client"],
        Field(description="the noise protects one record of a client, or a whole client"),
    ] = "none"
    clip: Annotated[
        float | None, Field(gt=0, le=16, description="C, the largest L2 norm of one unit's contribution")
    ] = None
    noise_multiplier: Annotated[
        float | None, Field(ge=LEAST_NOISE, le=MOST_NOISE, description="z: the noise's standard deviation is z·C")
    ] = None
    epsilon: Annotated[
        float | None,
        Field(
            gt=0,
            le=100,
            description="ε that the whole federation may cost each client, instead of noise_multiplier; level client: "
            "both may be given, and then rounds end before ε is exceeded",
        ),
    ] = None
    delta: Annotated[
        float | None,
        Field(
            ge=LEAST_DELTA,
            lt=1,
            description="level sample: the largest δ that a ledger may use; level client: the federation's, below "
            "1/N, by default the power of ten at or below a tenth of 1/min_clients",
        ),
    ] = None
    unit: Annotated[Literal["record", "group"], Field(description="what is protected at level sample")] = "record"
    per_group: Annotated[int, Field(ge=1, le=1024, description="records of a group that count")] = 8
    evaluation: Annotated[
        Evaluations | None,
        Field(description="which accuracies leave a site; default: withheld at levels sample and client"),
    ] = None
    evaluation_epsilon: Annotated[float, Field(gt=0, le=10, description="ε of one noisy count")] = 0.1
    accept_noise: Annotated[bool, Field(description="run even if the noise is larger than all that can be learned")] = (
        False
    )

    @property
    def protects_records(self) -> bool:
        """Whether clients add noise for their records, and report its cost."""
        return self.level == "sample"

    @property
    def protects_clients(self) -> bool:
        """Whether the coordinator adds noise for whole clients."""
        return self.level == "client"

    @property
    def evaluations(self) -> Evaluations:
        """The form in which accuracies leave a site."""
        return self.evaluation or ("plain" if self.level == "none" else "withheld")
