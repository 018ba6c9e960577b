"""What a card says of differential privacy: each sentence comes with its figure."""

from __future__ import annotations

import pytest

from promptfed.shared.api.export_card import PrivacySummary
from promptfed.shared.cards.privacy_text import UNPROTECTED, of_privacy

SEEDED = " The noise was simulated, from a seed: this is no guarantee to anybody."
RECORDS = (
    "Each of 3 clients trained with DP-SGD (clip 0.5, noise at least 1.25) at the level of one image. {cost} It covers "
    "the tensors that they sent. It does not cover numbers of images, class names, who took part and when, what many "
    "records share, nor one person at two sites. Accuracies: noisy."
)
COST = (
    "From the noise and the numbers of images that they declared, this federation has cost ε = 4.57 at most and 3 in "
    "the median, at δ = 1e-05 (zero-out, by hand){replaced}."
)
REPLACED = ", and at most 9.88 for replace-one neighbours"
LEDGERS = " By the clients' own word, their ledgers hold ε = 12.3 at most, of all federations together."
CLIENTS = (
    "The coordinator added noise (clip 0.5, noise 1.25) to each round's mean at the level of one whole client of 3: ε "
    "is 4.57 at δ = 1e-05 (zero-out, by hand) after 8 rounds{replaced}. It covers the prompts, by the operator's word, "
    "who saw every update, and holds also against those who know who took part. It does not cover numbers of images, "
    "class names, nor what many clients share. Accuracies: noisy."
)
SECRET = (
    " Clients were sampled in secret: against those who learn nothing of who took part and when, ε is 1.23 (zero-out)."
)
UNKNOWN = "What this federation alone has cost was not computed."


def summary(**changed: object) -> PrivacySummary:
    figures: dict[str, object] = {
        "level": "record", "unit": "image", "relation": "zero-out", "accountant": "by hand", "epsilon_max": 4.5678,
        "epsilon_median": 3.0, "clients": 3, "delta": 1e-5, "clip": 0.5, "noise_multiplier": 1.25, "noise": "secret",
        "rounds_counted": 8, "evaluation": "noisy",
    }  # fmt: skip
    return PrivacySummary.model_validate(figures | changed)


@pytest.mark.parametrize(("changed", "text"), [
    ({}, RECORDS.format(cost=COST.format(replaced=""))),
    ({"epsilon_replace_one": 9.876}, RECORDS.format(cost=COST.format(replaced=REPLACED))),
    ({"ledger_epsilon_max": 12.34}, RECORDS.format(cost=COST.format(replaced="") + LEDGERS)),
    ({"epsilon_max": None}, RECORDS.format(cost=UNKNOWN)),
    ({"epsilon_median": None, "ledger_epsilon_max": 12.34}, RECORDS.format(cost=UNKNOWN + LEDGERS)),
    ({"noise": "seeded"}, RECORDS.format(cost=COST.format(replaced="")) + SEEDED),
    ({"level": "client", "noise": "central"}, CLIENTS.format(replaced="")),
    ({"level": "client", "epsilon_replace_one": 9.876}, CLIENTS.format(replaced=REPLACED)),
    ({"level": "client", "epsilon_if_secret": 1.234}, CLIENTS.format(replaced="") + SECRET),
    ({"level": "client", "noise": "seeded"}, CLIENTS.format(replaced="") + SEEDED),
    ({"level": "client", "epsilon_max": None}, UNPROTECTED), ({"clients": 0}, UNPROTECTED),
    ({"noise_multiplier": None}, UNPROTECTED),
])  # fmt: skip
def test_each_figure_has_its_sentence(changed: dict[str, object], text: str) -> None:
    assert of_privacy(summary(**changed)) == text


def test_no_summary_is_no_protection() -> None:
    assert of_privacy(None) == UNPROTECTED
