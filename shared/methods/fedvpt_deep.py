"""FedVPT-D: FedVPT with fresh visual prompts in every block."""

from __future__ import annotations

from pydantic import Field

from promptfed.shared.methods.fedvpt import FedVPT, VptHyper


class FedVPTDeepHyper(VptHyper):
    """As in pFedPG's tables: one token in each of all blocks."""

    m: int = Field(default=1, ge=1, le=512, description="prompt tokens in each block that has any")
    depth: int | None = Field(
        default=None, ge=1, le=256, description="blocks with prompts, counted from the first; null: all"
    )


class FedVPTDeep(FedVPT):
    """VPT-Deep (Jia et al., 2022, section 3.2) averaged over clients."""

    name = "fedvpt_deep"
    summary = "Visual prompts in every block, averaged over clients; text head, or a private linear one."
    protects = True
    Hyper = FedVPTDeepHyper
    hyper: FedVPTDeepHyper
