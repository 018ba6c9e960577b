"""Checks of ``privacy.level: client`` with noise at the coordinator, and the privacy cost of this noise."""

from __future__ import annotations

import math

from promptfed.shared.methods.core.checks.mean_checks import check_one_mean, distinct_phases
from promptfed.shared.methods.core.interface.base import Method, MethodError, ServerContext
from promptfed.shared.privacy import accounting
from promptfed.shared.privacy.client_level import Drowned, budget_rounds, client_event
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.spec.spec_section import ceil_fraction


def check_central(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if noise at the coordinator cannot provide the protection in ``spec``."""
    given, rule, part = spec.privacy, spec.aggregation, spec.participation
    check_one_mean(method, spec.rounds, "protect", "no noise fits them")
    if given.clip is None:
        raise MethodError("give clip, the longest that one client's change may be, such as the median of plain rounds")
    if rule.weighting != "uniform" or rule.max_weight_share not in (None, 1.0):
        raise MethodError("each client counts the same: take aggregation.weighting uniform, and max_weight_share 1")
    if given.unit == "group":
        raise MethodError("unit: group is of level sample: a whole client is protected here")
    if given.noise_multiplier is None and given.epsilon is None:
        raise MethodError("give noise_multiplier, or epsilon, from which it follows, or both: then rounds end in time")
    if rule.rule != "mean" or rule.clip_norm is not None:
        raise MethodError("the noise is for a mean of changes that are clipped already: take rule mean, no clip_norm")
    if spec.secure_aggregation is not None:
        raise MethodError("noise at the coordinator needs each update, and secure sums hide them: take level sample")
    if given.evaluation == "noisy":
        raise MethodError("noisy counts are of level sample: at level client take evaluation plain or withheld")
    if part.sampling == "poisson" and any(len(phases) > 1 for phases in _rounds(method, spec)):
        text = f"{method.name} asks the same clients in several phases of a round"
        raise MethodError(f"{text}: no accountant amplifies that, take participation.sampling fixed")


def check_sampling(spec: FederationSpec) -> None:
    """Raise MethodError for Poisson sampling without noise for whole clients, its only purpose."""
    if spec.participation.sampling == "poisson" and not spec.privacy.protects_clients:
        raise MethodError("sampling poisson is for privacy.level client: leave it out")


def _rounds(method: Method, spec: FederationSpec) -> list[tuple[object, ...]]:
    """The phases of a first, a second and a last round."""
    return [method.phases(round, spec.rounds) for round in sorted({1, min(2, spec.rounds), spec.rounds})]


def noised_phases(method: Method, rounds: int, total: int) -> int:
    """The number of noised sums in the first ``rounds`` of ``total`` rounds."""
    return sum(1 for round in range(1, rounds + 1) for phase in method.phases(round, total) if phase.up)


def with_noise(method: Method, spec: FederationSpec) -> FederationSpec:
    """``spec`` with its δ and noise multiplier filled in; unchanged at any other level.

    Raises:
        MethodError: δ does not suit the number of clients, or no noise multiplier is large enough.
    """
    given = spec.privacy
    if not given.protects_clients:
        return spec
    least = spec.participation.min_clients
    delta = given.delta or accounting.default_delta(least)
    phases = noised_phases(method, spec.rounds, spec.rounds)
    try:
        accounting.check_delta(delta, least)
        z = given.noise_multiplier or accounting.calibrate(given.epsilon or 0.0, delta, 1.0, phases)
    except accounting.PrivacyError as error:
        raise MethodError(str(error)) from None
    return spec.model_copy(update={"privacy": given.model_copy(update={"delta": delta, "noise_multiplier": z})})


def allowed_rounds(method: Method, spec: FederationSpec) -> int | None:
    """The number of rounds that the privacy budget allows; None if it allows all.

    Raises:
        MethodError: the budget does not allow a single round.
    """
    given = spec.privacy
    if not given.protects_clients or given.epsilon is None:
        return None
    assert given.noise_multiplier is not None
    assert given.delta is not None
    per_round = max(len(phases) for phases in _rounds(method, spec))
    try:
        allowed = budget_rounds(given.noise_multiplier, 1.0, per_round, spec.rounds, given.epsilon, given.delta)
    except accounting.PrivacyError as error:
        raise MethodError(str(error)) from None
    return None if allowed == spec.rounds else allowed


def spent(spec: FederationSpec, phases: int) -> float:
    """ε of ``phases`` noised sums at the spec's δ for zero-out neighbours, if the participants are known.

    Poisson sampling does not amplify here, since timing, traffic and the operator's pages reveal the participants.
    Calibration and budgets also use this ε.
    """
    given = spec.privacy
    if phases == 0:
        return 0.0
    assert given.noise_multiplier is not None
    assert given.delta is not None
    return accounting.epsilon_of([client_event(given.noise_multiplier, 1.0, phases)], given.delta)


def costs(spec: FederationSpec, phases: int) -> dict[str, float | None]:
    """ε of ``phases`` noised sums by the names that reports use.

    ``epsilon``: as `spent`. ``epsilon_replace_one``: for replace-one neighbours. ``epsilon_if_secret``: for zero-out
    neighbours under Poisson sampling, against attackers who do not know the participants; None without amplification.
    """
    given, part = spec.privacy, spec.participation
    spending: dict[str, float | None] = {"epsilon": spent(spec, phases), "epsilon_if_secret": None}
    if phases == 0:
        return spending | {"epsilon_replace_one": 0.0, "epsilon_if_secret": 0.0 if part.is_secret else None}
    assert given.noise_multiplier is not None
    assert given.delta is not None
    spending["epsilon_replace_one"] = accounting.replace_one_epsilon(
        [client_event(given.noise_multiplier, 1.0, phases)], given.delta
    )
    if part.is_secret:
        amplified = client_event(given.noise_multiplier, part.fraction, phases)
        spending["epsilon_if_secret"] = accounting.epsilon_of([amplified], given.delta)
    return spending


def expected_clients(spec: FederationSpec, clients: int) -> float:
    """K̄, the expected participants among ``clients`` trainers: q·N with Poisson sampling, else the sampled number."""
    part = spec.participation
    if part.sampling == "poisson":
        return part.fraction * clients
    return float(max(part.min_clients, ceil_fraction(part.fraction, clients)))


def drowned(method: Method, spec: FederationSpec, context: ServerContext, clients: int) -> Drowned:
    """Compare the noise with a mean over ``clients`` trainers. Raises MethodError as ``dims``."""
    dims = method.dims(context)
    phases = distinct_phases(method, spec.rounds)
    numbers = max(sum(math.prod(tensor.resolve(dims)) for tensor in phase.up) for phase in phases)
    expected, z = expected_clients(spec, clients), spec.privacy.noise_multiplier or 0.0
    return Drowned(z, numbers, expected, noised_phases(method, spec.rounds, spec.rounds))


def check_hopeless(method: Method, spec: FederationSpec, context: ServerContext, clients: int) -> None:
    """Raise MethodError if the noise exceeds the largest possible change by ``clients`` in all rounds."""
    if not spec.privacy.protects_clients or spec.privacy.accept_noise:
        return
    ratio = drowned(method, spec, context, clients)
    if ratio.after_rounds > 1:
        text = "; accept_noise: true runs it all the same (clients: participation.min_clients, before they enrol)"
        raise MethodError(ratio.told() + text)


def check_clients(spec: FederationSpec, clients: int) -> None:
    """Raise MethodError if δ is too large: with δ = 1/N the data of one of N trainers may be published."""
    if not spec.privacy.protects_clients:
        return
    assert spec.privacy.delta is not None
    try:
        accounting.check_delta(spec.privacy.delta, max(1, clients))
    except accounting.PrivacyError as error:
        raise MethodError(f"{error}: create the federation with a smaller privacy.delta") from None
