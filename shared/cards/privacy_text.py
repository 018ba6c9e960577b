"""What a card says of differential privacy."""

from __future__ import annotations

from promptfed.shared.api.export_card import PrivacySummary

UNPROTECTED = (
    "Trained without differential privacy. Whoever has these prompts can test whether an image was among the training "
    "images; attacks on prompt vectors alone are published."
)


def of_privacy(given: PrivacySummary | None) -> str:
    """What ε covers and what it does not cover."""
    if given is None or not given.clients or given.noise_multiplier is None:
        return UNPROTECTED
    if given.level == "client":
        return _clients(given)
    text = (
        f"Each of {given.clients} clients trained with DP-SGD (clip {given.clip:g}, noise at least "
        f"{given.noise_multiplier:g}) at the level of one {given.unit}. {_of_records(given)} It covers the tensors "
        "that they sent. It does not cover numbers of images, class names, who took part and when, what many records "
        f"share, nor one person at two sites. Accuracies: {given.evaluation}."
    )
    if given.noise == "seeded":
        text += " The noise was simulated, from a seed: this is no guarantee to anybody."
    return text


def _of_records(given: PrivacySummary) -> str:
    """ε of this federation, which the coordinator has computed, and the largest of the sites' own figures."""
    ledgers = ""
    if given.ledger_epsilon_max is not None:
        most = f"ε = {given.ledger_epsilon_max:.3g}"
        ledgers = f" By the clients' own word, their ledgers hold {most} at most, of all federations together."
    if given.epsilon_max is None or given.epsilon_median is None:
        return f"What this federation alone has cost was not computed.{ledgers}"
    return (
        f"From the noise and the numbers of {given.unit}s that they declared, this federation has cost ε = "
        f"{given.epsilon_max:.3g} at most and {given.epsilon_median:.3g} in the median, at δ = "
        f"{given.delta:g} ({given.relation}, {given.accountant}){_replaced(given)}.{ledgers}"
    )


def _clients(given: PrivacySummary) -> str:
    if given.epsilon_max is None:
        return UNPROTECTED
    text = (
        f"The coordinator added noise (clip {given.clip:g}, noise {given.noise_multiplier:g}) to each round's mean at "
        f"the level of one whole client of {given.clients}: ε is {given.epsilon_max:.3g} at δ = {given.delta:g} "
        f"({given.relation}, {given.accountant}) after {given.rounds_counted} rounds{_replaced(given)}. It covers the "
        "prompts, by the operator's word, who saw every update, and holds also against those who know who took part. "
        "It does not cover numbers of images, class names, nor what many clients share. "
        f"Accuracies: {given.evaluation}."
    )
    if given.epsilon_if_secret is not None:
        text += (
            f" Clients were sampled in secret: against those who learn nothing of who took part and when, ε is "
            f"{given.epsilon_if_secret:.3g} (zero-out)."
        )
    if given.noise == "seeded":
        text += " The noise was simulated, from a seed: this is no guarantee to anybody."
    return text


def _replaced(given: PrivacySummary) -> str:
    """ε for replace-one neighbours, shown beside ε for zero-out neighbours."""
    if given.epsilon_replace_one is None:
        return ""
    return f", and at most {given.epsilon_replace_one:.3g} for replace-one neighbours"
