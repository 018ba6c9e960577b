"""What a federation costs: noise and its epsilon, bytes on the line and on the disk."""

from __future__ import annotations

import math

from promptfed.shared.methods.core.interface import Method, MethodError, Phase, ServerContext
from promptfed.shared.privacy import accounting
from promptfed.shared.privacy.accounting import Drowned, PrivacyError, budget_rounds, client_event
from promptfed.shared.spec.sections import sample_size
from promptfed.shared.spec.spec import FederationSpec
from promptfed.shared.spec.training_terms import TrainingTerms
from promptfed.shared.tensors import DTYPES, LARGE, TensorSpec

DEFAULT_LIMIT = 64 << 20  # admission.max_bytes where nobody says otherwise
LARGEST = 1 << 31  # bytes of an update
HEADER = 1 << 20  # beside the tensors of an update: names, metadata
NOISY = 10.0  # times the usual limit of changes, where clients add noise


def distinct_phases(method: Method, rounds: int) -> list[Phase]:
    """The distinct phases of a first, a second and a last round."""
    return list(dict.fromkeys(phase for round in (1, 2, rounds) for phase in method.phases(round, rounds)))


def _rounds(method: Method, spec: FederationSpec | TrainingTerms) -> list[tuple[object, ...]]:
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
    privacy = spec.privacy
    if not privacy.protects_clients:
        return spec
    least = spec.participation.min_clients
    delta = privacy.delta or accounting.default_delta(least)
    phases = noised_phases(method, spec.rounds, spec.rounds)
    try:
        accounting.check_delta(delta, least)
        z = privacy.noise_multiplier or accounting.calibrate(privacy.epsilon or 0.0, delta, 1.0, phases)
    except accounting.PrivacyError as error:
        raise MethodError(str(error)) from None
    return spec.model_copy(update={"privacy": privacy.model_copy(update={"delta": delta, "noise_multiplier": z})})


def allowed_rounds(method: Method, spec: FederationSpec | TrainingTerms) -> int | None:
    """The number of rounds that the privacy budget allows; None if it allows all.

    Raises:
        MethodError: the budget does not allow a single round.
    """
    privacy = spec.privacy
    if privacy is None or not privacy.protects_clients or privacy.epsilon is None:
        return None
    assert privacy.noise_multiplier is not None
    assert privacy.delta is not None
    per_round = max(len(phases) for phases in _rounds(method, spec))
    try:
        allowed = budget_rounds(privacy.noise_multiplier, 1.0, per_round, spec.rounds, privacy.epsilon, privacy.delta)
    except accounting.PrivacyError as error:
        raise MethodError(str(error)) from None
    return None if allowed == spec.rounds else allowed


def spent(spec: FederationSpec, phases: int) -> float:
    """ε of ``phases`` noised sums at the spec's δ for zero-out neighbours, if the participants are known.

    Poisson sampling does not amplify here, since timing, traffic and the operator's pages reveal the participants.
    Calibration and budgets also use this ε.
    """
    privacy = spec.privacy
    if phases == 0:
        return 0.0
    assert privacy.noise_multiplier is not None
    assert privacy.delta is not None
    return accounting.epsilon_of([client_event(privacy.noise_multiplier, 1.0, phases)], privacy.delta)


def costs(spec: FederationSpec, phases: int) -> dict[str, float | None]:
    """ε of ``phases`` noised sums by the names that reports use.

    ``epsilon``: as `spent`. ``epsilon_replace_one``: for replace-one neighbours. ``epsilon_if_secret``: for zero-out
    neighbours under Poisson sampling, against attackers who do not know the participants; None without amplification.
    """
    privacy, part = spec.privacy, spec.participation
    spending: dict[str, float | None] = {"epsilon": spent(spec, phases), "epsilon_if_secret": None}
    if phases == 0:
        return spending | {"epsilon_replace_one": 0.0, "epsilon_if_secret": 0.0 if part.is_secret else None}
    assert privacy.noise_multiplier is not None
    assert privacy.delta is not None
    spending["epsilon_replace_one"] = accounting.replace_one_epsilon(
        [client_event(privacy.noise_multiplier, 1.0, phases)], privacy.delta
    )
    if part.is_secret:
        amplified = client_event(privacy.noise_multiplier, part.fraction, phases)
        spending["epsilon_if_secret"] = accounting.epsilon_of([amplified], privacy.delta)
    return spending


def expected_clients(spec: FederationSpec, clients: int) -> float:
    """K̄, the expected participants among ``clients`` trainers: q·N with Poisson sampling, else the sampled number."""
    if spec.participation.sampling == "poisson":
        return spec.participation.fraction * clients
    return float(sample_size(spec.participation.fraction, clients, spec.secure_aggregation))


def drowned(method: Method, spec: FederationSpec, context: ServerContext, clients: int) -> Drowned:
    """Compare the noise with a mean over ``clients`` trainers. Raises MethodError as ``dims``."""
    dims = method.dims(context)
    phases = distinct_phases(method, spec.rounds)
    numbers = max(sum(math.prod(tensor.resolve(dims)) for tensor in phase.up) for phase in phases)
    expected, z = expected_clients(spec, clients), spec.privacy.noise_multiplier or 0.0
    return Drowned(z, numbers, expected, noised_phases(method, spec.rounds, spec.rounds))


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


def exchanged(method: Method, context: ServerContext) -> tuple[int, int]:
    """The most bytes of tensors that a client takes, and sends, in any phase. Raises MethodError as ``dims`` does."""
    dims = method.dims(context)
    phases = [phase for round in (1, 2, context.rounds) for phase in method.phases(round, max(2, context.rounds))]
    down = max((_bytes(phase.down, dims) for phase in phases), default=0)
    return down, max((_bytes(phase.up, dims) for phase in phases), default=0)


def update_limit(spec: FederationSpec, method: Method, context: ServerContext) -> int:
    """How many bytes an update may have: the spec's, or where that is the default as many as the method's needs."""
    limit = spec.admission.max_bytes
    if limit != DEFAULT_LIMIT:
        return limit
    return max(limit, min(LARGEST, int(1.1 * exchanged(method, context)[1]) + HEADER))


def change_limit(spec: FederationSpec, method: Method, numbers: int) -> float:
    """L2 norm that a change of ``numbers`` numbers may have: the spec's, or else the method's c·√numbers.

    At level ``sample`` clients add noise to each step of the training, so their changes may be longer.
    """
    limit = spec.admission.max_update_norm
    if limit is not None:
        return limit
    longer = NOISY if spec.privacy.protects_records else 1.0
    return longer * method.change_per_number * math.sqrt(numbers)


def needed_bytes(spec: FederationSpec, method: Method, context: ServerContext, clients: int) -> int:
    """Disk that a federation of ``clients`` takes while its method's exchanges are large; 0 where they are not.

    Updates and states of the round and of the one before, its payload, and what is being written.
    """
    down, up = exchanged(method, context)
    if max(down, up) < LARGE:
        return 0
    kept = 2 if spec.retention == "last_round" else spec.rounds
    return kept * (clients * up + down) + 2 * down


def _bytes(specs: tuple[TensorSpec, ...], dims: dict[str, int]) -> int:
    """Bytes of ``specs``; a size that depends on who answers counts as 1."""
    return sum(
        math.prod(dims.get(size, 1) if isinstance(size, str) else size for size in spec.shape)
        * DTYPES[spec.dtype].itemsize
        for spec in specs
    )
