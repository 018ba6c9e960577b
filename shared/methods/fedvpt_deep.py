"""FedVPT-D: FedVPT with fresh visual prompts in every block."""

from __future__ import annotations

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.fedvpt import FedVPT, VptHyper


class FedVPTDeepHyper(VptHyper):
    """As in pFedPG's tables: one token in each of all blocks."""

    m: int = pf.option(1, "prompt tokens in each block that has any", ge=1, le=512)
    depth: int | None = pf.option(None, "blocks with prompts, counted from the first; null: all", ge=1, le=256)


class FedVPTDeep(FedVPT):
    """VPT-Deep (Jia et al., 2022, section 3.2) averaged over clients."""

    name = "fedvpt_deep"
    summary = "Visual prompts in every block, averaged over clients; text head, or a private linear one."
    protects = True
    several_labels = True
    Hyper = FedVPTDeepHyper
    hyper: FedVPTDeepHyper
