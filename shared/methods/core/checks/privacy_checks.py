"""The check of a spec's section ``privacy``."""

from __future__ import annotations

from promptfed.shared.methods.core.checks.client_checks import check_central, check_sampling
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.methods.core.interface.hooks import Prepares
from promptfed.shared.privacy.accounting import PrivacyError
from promptfed.shared.privacy.settings import PrivacySpec
from promptfed.shared.spec.spec import FederationSpec


def check_privacy(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``method`` or this version cannot provide the protection in ``spec.privacy``."""
    given = spec.privacy
    check_sampling(spec)
    if given.evaluation == "noisy" and spec.task == "multi_label":
        raise MethodError(
            "noisy counts are of right answers, and with task: multi_label the figure is no count: take evaluation "
            "withheld"
        )
    if given.level == "none":
        # With secure sums the section determines the form in which accuracies leave a site.
        alone = PrivacySpec(evaluation=given.evaluation) if spec.secure_aggregation is not None else PrivacySpec()
        if given != alone:
            raise MethodError("the level is none, and something else is asked for: give level: sample, or leave it out")
        return
    if given.protects_clients:
        check_central(method, spec)
        return
    if given.unit == "group" and given.evaluation == "noisy":
        raise MethodError("noisy counts protect single test images, and unit is group: take evaluation withheld")
    if given.clip is None:
        raise MethodError("give clip, the longest contribution of one record: 0.3 is a sensible start")
    if (given.noise_multiplier is None) == (given.epsilon is None):
        raise MethodError("give either noise_multiplier or epsilon: one follows from the other")
    if not type(method).can_protect():
        raise MethodError(
            f"{method.name} cannot be trained at level sample ({method.unprotected}): take another method"
        )
    if isinstance(method, Prepares):
        raise MethodError(
            f"{method.name} cannot be trained at level sample (what it prepares has no noise): take another"
        )


def training_loops(method: Method, rounds: int) -> int:
    """The largest number of protected training loops of a client in a federation of ``rounds``.

    Raises:
        PrivacyError: there is no protected loop.
    """
    phases = [phase for round in range(1, rounds + 1) for phase in method.phases(round, rounds)]
    loops = sum(1 for phase in phases if phase.up)
    if not loops:
        raise PrivacyError(f"{method.name} sends nothing up: there is nothing to protect")
    return loops
