"""The card's text, whole, and each clause that comes or goes with a fact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from promptfed.shared.api.export_card import Card
from promptfed.shared.cards import card_text

FULL = Path(__file__).with_name("full_card.txt")


def participant(name: str, role: str, images: int, **more: object) -> dict[str, Any]:
    return {"name": name, "role": role, "domain": None, "num_samples": images, "num_classes": 3} | more


def measured(client: str, role: str, split: str, adapted: float, images: int, **more: object) -> dict[str, Any]:
    of = {"zero_shot": adapted / 2, "interval": (adapted - 0.1, adapted + 0.1), "num_samples": images}
    return {"client": client, "role": role, "split": split, "adapted": adapted} | of | more


def card(**changed: object) -> Card:
    facts: dict[str, object] = {
        "federation": {"name": "wards", "id": "fed-0123456789abcdef", "state": "finished"},
        "method": {"name": "promptfl", "m": 4, "label_space": "all"},
        "summary": "One context for all.",
        "paper": "PromptFL",
        "backbone": {"model": "promptfed-tiny", "pretrained": None, "precision": "fp32"},
        "template": "a | of {}",
        "round": 4,
        "rounds": 8,
        "training": {"epochs": 2},
        "seed": 7,
        "domains": [],
        "participants": [
            participant("a", "trainer", 40, domain="x-ray", updates_counted=4, grey=(12, 4095)),
            participant("b", "trainer", 60, updates_counted=None),
            participant("c", "evaluator", 20, updates_counted=0),
        ],
        "origin": {"federation": "fed-fedcba9876543210", "card": "sha256:" + "0" * 64, "licence": "CC-BY-4.0"},
        "licence": "MIT",
        "selection": {"metric": "macro_f1", "value": 0.75, "round": 4, "compared": 8, "split": "validation"},
        "stopped": "no rise",
        "accuracy": {
            "round": 4,
            "clients": [
                measured("a", "trainer", "test", 0.8, 10, ece=0.05, macro_f1=0.7, auroc=0.9, majority=0.4),
                measured("b", "trainer", "test", 0.6, 30),
                measured("b", "trainer", "other", 0.5, 99),
                measured("c", "evaluator", "test", 0.4, 20),
            ],
            "mean": {
                "trainer": {"zero_shot": 0.35, "adapted": 0.7, "ece": 0.05},
                "evaluator": {"zero_shot": 0.2, "adapted": 0.4},
            },
        },
        "unreadable": 2,
        "privacy": None,
        "secure_aggregation": {"smallest_sum": 3, "threshold": 0.67},
        "bytes": {"up": 4000, "down": 8000},
        "hashes": {"state": "sha256:1", "backbone": "sha256:2", "spec": None},
        "class_names": [f"kind {number}" for number in range(14)],
        "class_names_from": "the federation's spec",
        "use": {"open_clip": True, "promptfed": True, "why_not_open_clip": None},
        "files": {
            "prompts.safetensors": {"bytes": 1234, "sha256": "a" * 64},
            "class_weights.safetensors": {
                "bytes": 5, "sha256": "b" * 64, "tensors": {"class_weights": {"shape": [2, 14, 8], "dtype": "float32"}}
            },
            "card.md": {"bytes": 6, "sha256": "c" * 64},
        },
        "made": {"at": "2026-01-02T03:04:05Z", "promptfed": "0.4.0"},
    }  # fmt: skip
    return Card.model_validate(facts | changed)


def test_the_whole_text() -> None:
    assert card_text.markdown(card(), "import open_clip\n") == FULL.read_text()


MIXTURE = "An image takes the class weights of the domain that it looks most like."
ON_THE_WAY = "The federation had 8 rounds to go through: this is a state on the way."
FILE = {"bytes": 5, "sha256": "b" * 64}
NO_BYTES = "| sent | withheld: it would tell how many took part; not one image |"


@pytest.mark.parametrize(("changed", "comes", "goes"), [
    ({"selection": None, "stopped": None}, ON_THE_WAY, "| round |"),
    ({"selection": None}, "finished (no rise), seed 7", ON_THE_WAY),
    ({"stopped": None}, "| federation | finished, seed 7 |", ON_THE_WAY),
    ({"selection": None, "stopped": None, "round": 8}, "after round 8 of 8", ON_THE_WAY),
    ({"origin": None}, "| licence | MIT |", "started from"), ({"licence": None}, "started from", "| licence |"),
    ({"bytes": None}, NO_BYTES, " a round)"),
    ({"round": 0}, "| sent | 4.0 kB up, 8.0 kB down, and not one image |", " a round)"),
    ({"unreadable": 0}, "| state |", "not readable"),
    ({"unreadable": 1}, "| not readable | 1 answer of clients: in no figure |", "1 answers"),
    ({"secure_aggregation": None}, "## Use", "sums of at least"),
    ({"secure_aggregation": {"smallest_sum": None, "threshold": 0.67}}, "## Use", "sums of at least"),
    ({"files": {"class_weights.safetensors": FILE}}, "## Files", MIXTURE), ({"files": {}}, "## Files", MIXTURE),
    ({"files": {"backbone/open_clip_model.safetensors": FILE}}, "so it lies in `backbone/`", MIXTURE),
    ({"class_names": None}, "| classes | not named: each client used its own |", "kind 0"),
    ({"class_names": [f"kind {number}" for number in range(12)]}, "kind 11 |", " more |"),
    ({"accuracy": None}, "Nobody has measured any yet.", "| mean of"),
    ({"method": {"name": "fedtpg"}}, "fedtpg learns a generator", "adds what it keeps"),
    ({"method": {"name": "promptfl_per"}}, "each client's own predictions add what it keeps to itself", "generator"),
    ({"method": {"name": "promptfl"}}, "| hyperparameters | none |", "each client's own predictions"),
])  # fmt: skip
def test_a_clause_comes_or_goes_with_its_fact(changed: dict[str, object], comes: str, goes: str) -> None:
    text = card_text.markdown(card(**changed), "import open_clip\n")
    assert comes in text
    assert goes not in text


@pytest.mark.parametrize("why", [None, "it has too many parts"])
def test_without_code_for_open_clip(why: str | None) -> None:
    use = {"open_clip": False, "promptfed": False, "why_not_open_clip": why}
    text = card_text.markdown(card(use=use), None)
    assert ("There are no class weights for plain open_clip code: it has too many parts." in text) == (why is not None)
    assert "promptfed predict" not in text
    assert "class weights of the domain" not in text


def test_a_mean_has_an_interval_only_of_sites_that_all_have_one() -> None:
    rows = [measured("a", "trainer", "test", 0.8, 10, interval=None), measured("b", "trainer", "test", 0.6, 30)]
    accuracy = {"round": 4, "clients": rows, "mean": {"trainer": {"adapted": 0.7}, "evaluator": {}}}
    text = card_text.markdown(card(accuracy=accuracy), None)
    assert "| mean of the trainers |  | test | - | 70.0 % | 40 |" in text
    assert "mean of the evaluators" not in text
    assert "AUROC" not in text  # nobody has told a calibration error
