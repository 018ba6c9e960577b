"""Entries of a bench: what they hold, and what is wrong with a bad one."""

from __future__ import annotations

import pytest

from promptfed.experiments.bench.entries import parse_entries, parse_entry
from promptfed.sdk.client import CommandError


def test_keys_of_the_spec_change_the_spec_and_others_the_method() -> None:
    entry = parse_entry("promptfl_prox:mu=0.5:training.learning_rate=0.1:rounds=3:training.epochs=2")
    assert entry.method == {"name": "promptfl_prox", "mu": 0.5}
    assert entry.changes == {"training": {"learning_rate": 0.1, "epochs": 2}, "rounds": 3}
    spec = entry.spec({"name": "x", "training": {"momentum": 0.5, "epochs": 7}}, m=4)
    assert spec["method"] == {"name": "promptfl_prox", "m": 4, "mu": 0.5}
    assert spec["training"] == {"momentum": 0.5, "epochs": 2, "learning_rate": 0.1}


def test_a_hyperparameter_with_the_name_of_a_key_of_the_spec_is_the_methods() -> None:
    entry = parse_entry("fedtpg:start=xavier:feedforward=geglu")
    assert (entry.method, entry.changes) == ({"name": "fedtpg", "start": "xavier", "feedforward": "geglu"}, {})


def test_the_number_of_tokens_is_for_methods_that_have_some_and_for_those_that_say_nothing() -> None:
    assert parse_entry("zero_shot").spec({"name": "x"}, m=4)["method"] == {"name": "zero_shot"}
    assert parse_entry("promptfl:m=8").spec({"name": "x"}, m=4)["method"]["m"] == 8


def test_what_is_personal_depends_on_the_method_and_its_hyperparameters() -> None:
    labels = ("coop", "fedpgp", "promptfl_ft", "pfedpg", "singleset_vpt", "fedvpt:head=linear")
    assert [parse_entry(label).personal for label in labels] == [True] * len(labels)
    assert not any(parse_entry(label).personal for label in ("promptfl", "fedtpg", "plan", "fast_pt", "fedvpt"))
    with pytest.raises(CommandError, match="promptfl:colour=red"):
        parse_entry("promptfl:colour=red").personal  # noqa: B018


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("promptfll", "did you mean 'promptfl'"),
        ("promptfl:m", "'m' is not key=value"),
        ("promptfl:=3", "is not key=value"),
        ("promptfl,promptfl", "given twice"),
        (" , ", "no method is given"),
    ],
)
def test_bad_entries_are_refused(text: str, complaint: str) -> None:
    with pytest.raises(CommandError, match=complaint):
        parse_entries(text)


@pytest.mark.parametrize(
    ("text", "path"), [("promptfl:colour=red", "method.colour"), ("promptfl:training.epochs=0", "training.epochs")]
)
def test_an_entry_that_makes_no_spec_is_named(text: str, path: str) -> None:
    with pytest.raises(CommandError, match=f"{text}: .*{path}"):
        parse_entry(text).spec({"name": "x"})


def test_a_mapping_stands_in_braces() -> None:
    first, second = parse_entries("fedpgp:lengths={a: 4, b: 32}:m=8:rounds=3,promptfl")
    assert first.method == {"name": "fedpgp", "lengths": {"a": 4, "b": 32}, "m": 8}
    assert first.changes == {"rounds": 3}
    assert second.method == {"name": "promptfl"}
