"""SingleSet-Full: each client fine-tunes an image tower of its own and never shares it."""

from __future__ import annotations

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.methods.core.weights import HeadHyper, WeightMethod


class SingleSetFull(WeightMethod):
    """The local baseline of pFedPG's tables. It starts like `fedavg`, so the two differ only in sharing."""

    name = "singleset_full"
    summary = "Each client fine-tunes the image tower for itself and never shares it."
    paper = "SingleSet-Full in pFedPG's tables (Yang et al., 2023)"
    personal = True
    Hyper = HeadHyper
    hyper: HeadHyper

    def __init__(self, hyper: HeadHyper):
        super().__init__(hyper)
        self.takes_evaluators = not self.is_linear  # under a text head they classify zero-shot

    @property
    def shares_head(self) -> bool:
        """Nothing is shared."""
        return False

    @property
    def private_kinds(self) -> tuple[str, ...]:
        """All trained kinds."""
        return self.kinds

    def check(self, spec: pf.FederationSpec) -> None:
        """Refuses only options that cannot be trained."""
        self.check_options(spec)
