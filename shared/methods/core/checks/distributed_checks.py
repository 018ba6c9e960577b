"""Checks of ``privacy.level: client`` where each client adds a part of the noise to a secure sum."""

from __future__ import annotations

from promptfed.shared.methods.core.checks import client_checks
from promptfed.shared.methods.core.interface.base import Method, MethodError
from promptfed.shared.privacy.accounting import PrivacyError, check_delta, default_delta
from promptfed.shared.privacy.distributed import calibrate_sums
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.spec.spec_section import ceil_fraction


def check_distributed(spec: FederationSpec) -> None:
    """Raise MethodError if the clients' noise in a sum cannot provide the protection in ``spec``."""
    given = spec.privacy
    if spec.secure_aggregation is None:
        raise MethodError("noise: distributed is enough only where nobody sees its parts: give secure_aggregation")
    client_checks.check_client_level(spec)
    if given.noise_multiplier is None and given.epsilon is None:
        raise MethodError("give noise_multiplier, or epsilon, from which it follows")
    if spec.evaluations != "withheld":
        raise MethodError("accuracies depend on all records of a client, and its noise does not cover them: withhold")
    if given.adaptive_clip is not None:
        raise MethodError("adaptive_clip needs each change's length, which nobody sees: leave it out")
    if spec.admission.max_update_norm is not None:
        raise MethodError("admission.max_update_norm would stop a federation for its noise: leave it out")


def with_parts(method: Method, spec: FederationSpec) -> FederationSpec:
    """``spec`` with its least sum, δ and noise multiplier filled in; unchanged for any other noise.

    The least sum is the threshold's share of the smallest number of clients with which a first attempt continues. Every
    sum has at least this number of noise parts, since clients refuse smaller sums.

    Raises:
        MethodError: no part is secret, δ does not suit the number of clients, or no noise multiplier is large enough.
    """
    given, secure = spec.privacy, spec.secure_aggregation
    if not given.is_distributed or secure is None:
        return spec
    first = max(secure.minimum, spec.participation.least_answers)
    least = max(secure.minimum, ceil_fraction(secure.threshold, first))
    spec = spec.model_copy(update={"secure_aggregation": secure.model_copy(update={"minimum": least})})
    if client_checks.honest_parts(spec) < 1:
        text = f"a sum is of {least} clients at least, and {given.colluding} of them may be on the operator's side"
        raise MethodError(f"{text}: no part of the noise would be secret; raise secure_aggregation.minimum")
    delta = given.delta or default_delta(spec.participation.min_clients)
    phases = client_checks.noised_phases(method, spec.rounds, spec.rounds)
    try:
        check_delta(delta, spec.participation.min_clients)
        assert given.clip is not None
        z = given.noise_multiplier or calibrate_sums(
            given.epsilon or 0.0, delta, given.clip, client_checks.honest_parts(spec), phases
        )
        spec = spec.model_copy(update={"privacy": given.model_copy(update={"delta": delta, "noise_multiplier": z})})
        client_checks.partial_noise(spec)
    except PrivacyError as error:
        raise MethodError(str(error)) from None
    cost = client_checks.spent(spec, phases)
    if given.epsilon is not None and cost > given.epsilon:
        text = f"all {phases} sums with noise_multiplier {z:g} cost ε = {cost:.4g}, and {given.epsilon:g} is allowed"
        raise MethodError(f"{text}: leave noise_multiplier out, and it follows from epsilon")
    return spec
