"""What a federation may not ask: checks of a spec against what its method supports, section by section."""

from __future__ import annotations

import math

from promptfed.shared.methods.core import costs
from promptfed.shared.methods.core.interface import Method, MethodError, ServerContext, has_own
from promptfed.shared.privacy import accounting
from promptfed.shared.secagg import MOST_CLIENTS
from promptfed.shared.spec.section import ceil_fraction
from promptfed.shared.spec.sections import AggregationSpec, PrivacySpec, sample_size
from promptfed.shared.spec.spec import FederationSpec, TrainingSpec
from promptfed.shared.tensors import BYTES_PER_SECOND, LARGE

OF_TRAINING = ("privacy", "secure_aggregation", "stop", "selection")
"""Sections of a spec that say something of training alone."""

ROUNDING = 1e-9  # tolerance for a share times a number
MOST_SORTED = 1 << 28  # numbers of all updates together that are sorted
SORTING = ("median", "trimmed_mean")


def check_one_mean(method: Method, rounds: int, nothing: str, so: str) -> None:
    """Raise MethodError unless the updates of each phase are combined to one mean of real numbers.

    ``nothing`` and ``so`` are the ends of the messages: the purpose that is void, and the consequence.
    """
    phases = costs.distinct_phases(method, rounds)
    if not any(phase.up for phase in phases):
        raise MethodError(f"{method.name} sends nothing up: there is nothing to {nothing}")
    others = [phase.name for phase in phases if not phase.mean]
    if others:
        raise MethodError(f"{method.name} does not combine its updates by a mean in its phase {others[0]!r}: {so}")
    if not method.one_payload:
        raise MethodError(f"{method.name} gives each client another payload, from which it trains: {so}")
    if type(method).expected_update is not Method.expected_update:
        raise MethodError(f"{method.name} asks clients for different tensors: {so}")
    if any(tensor.dtype != "float32" for phase in phases for tensor in phase.up):
        raise MethodError(f"{method.name} sends tensors that are no real numbers: {so}")


def check_central(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if noise at the coordinator cannot provide the protection in ``spec``."""
    privacy, rule, part = spec.privacy, spec.aggregation, spec.participation
    check_one_mean(method, spec.rounds, "protect", "no noise fits them")
    if privacy.clip is None:
        raise MethodError("give clip, the longest that one client's change may be, such as the median of plain rounds")
    if rule.weighting != "uniform" or rule.max_weight_share not in (None, 1.0):
        raise MethodError("each client counts the same: take aggregation.weighting uniform, and max_weight_share 1")
    if privacy.unit == "group":
        raise MethodError("unit: group is of level sample: a whole client is protected here")
    if privacy.noise_multiplier is None and privacy.epsilon is None:
        raise MethodError("give noise_multiplier, or epsilon, from which it follows, or both: then rounds end in time")
    if rule.rule != "mean" or rule.clip_norm is not None:
        raise MethodError("the noise is for a mean of changes that are clipped already: take rule mean, no clip_norm")
    if spec.secure_aggregation is not None:
        raise MethodError("noise at the coordinator needs each update, and secure sums hide them: take level sample")
    if privacy.evaluation == "noisy":
        raise MethodError("noisy counts are of level sample: at level client take evaluation plain or withheld")
    if part.sampling == "poisson" and any(len(phases) > 1 for phases in costs._rounds(method, spec)):
        text = f"{method.name} asks the same clients in several phases of a round"
        raise MethodError(f"{text}: no accountant amplifies that, take participation.sampling fixed")


def check_sampling(spec: FederationSpec) -> None:
    """Raise MethodError for Poisson sampling without noise for whole clients, its only purpose, or by another draw."""
    if spec.participation.sampling != "poisson":
        return
    if not spec.privacy.protects_clients:
        raise MethodError("sampling poisson is for privacy.level client: leave it out")
    if spec.participation.draw != "secret":
        raise MethodError("sampling poisson is by a secret that is never shown: leave participation.draw out")


def check_hopeless(method: Method, spec: FederationSpec, context: ServerContext, clients: int) -> None:
    """Raise MethodError if the noise exceeds the largest possible change by ``clients`` in all rounds."""
    if not spec.privacy.protects_clients or spec.privacy.accept_noise:
        return
    ratio = costs.drowned(method, spec, context, clients)
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


def check_compression(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if changes of ``spec`` cannot be compressed."""
    if spec.compression.up == "none":
        return
    if spec.secure_aggregation is not None:
        raise MethodError("a secure sum has its own grid of whole numbers: leave compression out")
    check_one_mean(method, spec.rounds, "compress", "what is rounded at random needs a mean")


def check_training(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError for a setting of the training that changes nothing with the others."""
    training, of_method = spec.training, method.defaults.get("training", {})
    idle = dict.fromkeys(method.ignores, f"{method.name} does not use it")
    if training.optimizer != "sgd":
        idle["momentum"] = f"the optimizer {training.optimizer} has none"
    if training.augmentation == "none":
        idle["views"] = "images are seen as they are: give augmentation crop_flip"
    elif not method.needs.cached_features:
        idle["views"] = f"{method.name} keeps no features, so each image is cropped anew"
    for name, why in idle.items():
        usual = of_method.get(name, TrainingSpec.model_fields[name].default)
        if getattr(training, name) != usual:
            raise MethodError(f"{name} has no effect here ({why}); leave it out")


def check_idle_privacy(given: PrivacySpec) -> None:
    """Raise MethodError for a setting of the privacy that changes nothing with the others."""
    used = {
        "per_group": (given.unit == "group", "unit: group"),
        "evaluation_epsilon": (given.evaluation == "noisy", "evaluation: noisy"),
        "accept_noise": (given.protects_clients, "level: client"),
    }
    for name, (is_used, with_what) in used.items():
        if not is_used and getattr(given, name) != PrivacySpec.model_fields[name].default:
            raise MethodError(f"{name} is for {with_what}: leave it out")


def check_privacy(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``method`` or this version cannot provide the protection in ``spec.privacy``."""
    privacy = spec.privacy
    check_sampling(spec)
    check_idle_privacy(privacy)
    if privacy.evaluation == "noisy" and spec.task == "multi_label":
        raise MethodError(
            "noisy counts are of right answers, and with task: multi_label the figure is no count: take evaluation "
            "withheld"
        )
    if privacy.level == "none":
        # With secure sums the section determines the form in which accuracies leave a site.
        alone = PrivacySpec(evaluation=privacy.evaluation) if spec.secure_aggregation is not None else PrivacySpec()
        if privacy != alone:
            raise MethodError("the level is none, and something else is asked for: give level: sample, or leave it out")
        return
    if privacy.protects_clients:
        check_central(method, spec)
        return
    if privacy.unit == "group" and privacy.evaluation == "noisy":
        raise MethodError("noisy counts protect single test images, and unit is group: take evaluation withheld")
    if privacy.clip is None:
        raise MethodError("give clip, the longest contribution of one record: 0.3 is a sensible start")
    if (privacy.noise_multiplier is None) == (privacy.epsilon is None):
        raise MethodError("give either noise_multiplier or epsilon: one follows from the other")
    if not type(method).can_protect():
        raise MethodError(
            f"{method.name} cannot be trained at level sample ({method.unprotected}): take another method"
        )
    if has_own(method, "prepare"):
        raise MethodError(
            f"{method.name} cannot be trained at level sample (what it prepares has no noise): take another"
        )


def check_rounds(spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` has no rounds, and no export to evaluate, or says how to train."""
    if spec.rounds:
        return
    if spec.continues is None:
        raise MethodError("0 rounds evaluate an export on the clients' images: create it --from one, or give 1 or more")
    of_training = [name for name in OF_TRAINING if getattr(spec, name) != FederationSpec.model_fields[name].default]
    if of_training:
        raise MethodError(f"0 rounds train nobody: leave {of_training[0]} out")


def check_selection(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if no round of a federation of ``spec`` can be selected."""
    if spec.selection is None:
        return
    sections = "selection" if spec.stop is None else "selection and stop"
    if spec.evaluations != "plain" or spec.privacy.level != "none" or spec.secure_aggregation is not None:
        text = "a choice among rounds takes the sites' accuracies, which protection withholds and noise would decide"
        raise MethodError(f"{text}: leave {sections}, or privacy and secure_aggregation, out")
    if spec.task == "multi_label" and "macro_f1" in (spec.selection.metric, spec.stop and spec.stop.metric):
        raise MethodError("macro_f1 is not evaluated with task: multi_label: take accuracy, the mean average precision")
    if spec.retention != "all":
        raise MethodError("the chosen round may be an early one: give retention all")
    if has_own(method, "join", "adopt"):
        raise MethodError(f"the state of {method.name} grows with its clients, and an early one lacks later ones")


def check_rule(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if the rule of ``spec.aggregation`` does not suit the method or the number of updates."""
    check_means(method, spec)
    if spec.aggregation.weighting == "uniform" and spec.aggregation.max_weight_share not in (None, 1.0):
        raise MethodError("max_weight_share has no effect here (all weigh the same); leave it out")
    part, aggregation, needed = spec.participation, spec.aggregation, least_updates(spec.aggregation)
    # With f = floor(tolerate * K), a condition that holds for the fewest updates holds for more.
    sampled = sample_size(part.fraction, part.min_clients, spec.secure_aggregation)
    least = max(1, ceil_fraction(part.quorum, sampled))
    if least < needed:
        rule = f"{aggregation.rule} with tolerate {aggregation.tolerate:g}"
        text = f"{rule} needs at least {needed} updates, and a phase may close"
        remedy = "raise participation.min_clients, fraction or quorum, or choose median"
        raise MethodError(f"{text} with {least}: {remedy}")


def check_means(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``spec.aggregation`` is not the plain mean but the method's phases are no means."""
    aggregation = spec.aggregation
    if aggregation.is_plain_mean and aggregation.server.optimizer == "none":
        return
    if aggregation.is_plain_mean:
        what = f"the server optimizer {aggregation.server.optimizer}"
    else:
        what = f"the rule {aggregation.rule}" if aggregation.rule != "mean" else "clip_norm"
    phases = costs.distinct_phases(method, spec.rounds)
    if not any(phase.up for phase in phases):
        raise MethodError(f"{what} has nothing to work on: {method.name} sends nothing up; leave it out")
    others = [phase.name for phase in phases if not phase.mean]
    if others:
        raise MethodError(
            f"{what} cannot take the mean's place: {method.name} does not combine its updates by a mean in "
            f"its phase {others[0]!r}; leave it out"
        )


def least_updates(given: AggregationSpec) -> int:
    """The fewest updates that the rule can take: Krum's K ≥ 2f + 3 with f > 0 (Blanchard et al., 2017), else 1."""
    if given.rule not in ("krum", "multi_krum"):
        return 1
    tolerate, least = given.tolerate, 3
    assert tolerate is not None
    while least * (1 - 2 * tolerate) < 3 - ROUNDING or least * tolerate < 1 - ROUNDING:
        least += 1
    return least


def check_secure(method: Method, spec: FederationSpec) -> None:
    """Raise MethodError if ``spec`` needs more than the sums that the coordinator sees."""
    secure = spec.secure_aggregation
    if secure is None:
        return
    check_one_mean(method, spec.rounds, "sum", "they cannot be summed, and only their sum is known")
    rule = spec.aggregation
    if rule.rule != "mean":
        raise MethodError(f"the rule {rule.rule} needs each update, and only their sum is known: take rule mean")
    if rule.clip_norm is not None:
        raise MethodError("clip_norm needs each update, and only their sum is known: leave it out")
    if spec.privacy.protects_clients:
        raise MethodError("privacy.level client needs each update, and only their sum is known: take level sample")
    if spec.participation.min_clients < secure.minimum:
        least = spec.participation.min_clients
        text = f"a round may begin with {least} clients (participation.min_clients), and a sum is of {secure.minimum}"
        raise MethodError(f"{text} at least: raise min_clients to {secure.minimum}")
    if spec.participation.min_clients > MOST_CLIENTS:
        raise MethodError(f"a sum is of {MOST_CLIENTS} clients at most: lower participation.min_clients")


def check_texts(method: Method, spec: FederationSpec, positions: int | None) -> None:
    """Raise MethodError for a text that is too long for a text tower of so many positions.

    The exact length needs a tokenizer, which the coordinator does not have: each word is at least one token, and every
    text has a first and a last one.
    """
    if positions is None or not method.needs.text_tower:
        return
    names, template = spec.class_names or ["class"], spec.template or "{}"
    longest = max(names, key=lambda name: len(name.replace("_", " ").split()))
    words = len(longest.replace("_", " ").split())
    needed = max(len(template.split()) - 1 + words, words + method.prompt_length) + 2
    if needed > positions:
        text = f"{template.replace('{}', longest)[:80]!r} needs at least {needed} tokens"
        context = f" with the method's {method.prompt_length} vectors" if method.prompt_length else ""
        raise MethodError(f"{text}{context}, and the backbone takes {positions}: shorten template, class names or m")


def check_sizes(spec: FederationSpec, method: Method, context: ServerContext, clients: int) -> None:
    """Raise MethodError where updates of ``clients`` are too large for the spec's limits, times or rule."""
    down, up = costs.exchanged(method, context)
    if up + costs.HEADER > costs.LARGEST:
        raise MethodError(
            f"an update would have {up:,} bytes, and {costs.LARGEST:,} is the most: train less (trainable: last_k), or "
            "take a smaller backbone"
        )
    if up > spec.admission.max_bytes != costs.DEFAULT_LIMIT:
        raise MethodError(
            f"an update has {up:,} bytes, and admission.max_bytes allows {spec.admission.max_bytes:,}: leave it out"
        )
    seconds = math.ceil((down + up) / BYTES_PER_SECOND)
    if max(down, up) >= LARGE and spec.participation.deadline_seconds < seconds:
        raise MethodError(
            f"{down:,} bytes down and {up:,} up take {seconds} s at 1 MB/s, and participation.deadline_seconds is "
            f"{spec.participation.deadline_seconds:g}: raise it, for the training as well"
        )
    rule = spec.aggregation.rule
    if rule in SORTING and clients * up // 4 > MOST_SORTED:
        raise MethodError(
            f"the rule {rule} goes through all numbers of all updates many times, and {clients} updates of {up // 4:,} "
            "are too many for it: take krum, multi_krum or clip_norm"
        )
