"""Texts of others that are no plain values: each is refused with one reason, within bounds of time."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import yaml

from promptfed.shared.errors import BadInput
from promptfed.shared.service import yaml_text
from promptfed.shared.service.reasons import why
from promptfed.shared.service.yaml_text import MOST_NESTED, MOST_PARTS, read_mapping, read_yaml

NESTED, QUOTES = "nested too deeply", "put a text in quotes"


@pytest.mark.parametrize(("text", "told"), [
    ("a: 190:20:30.15", QUOTES), ("a: 1:20", QUOTES), (f"a: {'9' * 400}:0.5", QUOTES),
    ("a: " + ":".join(["1"] * 40_000), QUOTES), ("a: 2001-13-45", QUOTES), ('{"a": "\\ud800"}', "is no letter"),
    ('a: ["\\ud800"]', ""), ('a: "\\U00110000"', "mend line 1"), ('a: "\\UFFFFFFFF"', "mend line 1"),
    ("[" * 300 + "]" * 300, NESTED), ("a: " + "- " * 300, ""),
    ("a: " + "[" * 300 + "]" * 300, NESTED), ("- " * 100_000, NESTED), ("[" * 100_000, NESTED),
])  # fmt: skip
def test_what_is_no_plain_value_is_refused_in_one_line(text: str, told: str) -> None:
    start = time.process_time()
    with pytest.raises(yaml.YAMLError) as refused:
        read_yaml(text)
    assert told in why(refused.value)
    assert "\n" not in why(refused.value)
    assert time.process_time() - start < 2


def test_bounds_have_two_sides() -> None:
    for text in (
        "[" * MOST_NESTED + "1" + "]" * MOST_NESTED,
        "a: " + "[" * (MOST_NESTED - 1) + "]" * (MOST_NESTED - 1),
    ):
        read_yaml(text)
        with pytest.raises(yaml.YAMLError):
            read_yaml(text.replace("[", "[[", 1) + "]")
    few, many = ("- a\n" * (MOST_PARTS + more) for more in (-10, 10))
    assert len(read_yaml(few, aliases=False)) == MOST_PARTS - 10
    with pytest.raises(yaml.YAMLError, match="parts"):
        read_yaml(many, aliases=False)
    assert len(read_yaml(many)) == MOST_PARTS + 10, "a site's own file"


@pytest.mark.parametrize("text", ["a: b: c", "a:\n\t- b", "a: [1, 2", "a: !!python/object:x y", "a: *b", "a: 1\na: 2"])
def test_mistakes_are_told_with_their_line(text: str) -> None:
    with pytest.raises(yaml.YAMLError) as refused:
        read_yaml(text)
    assert why(refused.value).startswith("mend line")
    assert "cannot be understood" not in why(refused.value)


def test_texts_as_long_as_a_run_text_may_be_are_read_in_the_time_of_a_request() -> None:
    many = ("[" + "1," * 49_000 + "]", "- {a: b, c: d}\n" * 6_000, "- &a b\n" * 14_000, "{" + "a: b," * 19_000 + "}")
    for text in many:
        start = time.process_time()
        with pytest.raises(yaml.YAMLError):
            read_yaml(text, aliases=False)
        assert time.process_time() - start < 1.5


def test_a_file_of_a_mapping_is_read_or_named(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("a: &x 1\nb: *x\n")
    assert read_mapping(file) == {"a": 1, "b": 1}
    for content, says in (
        (b"- a", "must hold a mapping"),
        (b"a: [", "is not YAML: mend line"),
        (b"\xff", "is not YAML"),
    ):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=f"{file} {says}"):
            read_mapping(file)
    with pytest.raises(BadInput, match=f"cannot read {tmp_path}/none: there is no such file"):
        read_mapping(tmp_path / "none")
    with pytest.raises(yaml.YAMLError, match="write out what the alias repeats"):
        read_yaml("a: &x 1\nb: *x\n", aliases=False)


@pytest.mark.parametrize(("more", "slow"), [(0, True), (-1, False)])
def test_a_mistake_is_looked_for_slowly_in_a_text_of_so_many_letters(
    more: int, slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[object] = []
    text = "a: [1"
    load = yaml.load
    monkeypatch.setattr(yaml_text, "MOST_SLOW", len(text) + more)
    monkeypatch.setattr(yaml, "load", lambda shown, loader: looked.append(loader) or load(shown, loader))
    with pytest.raises(yaml.YAMLError):
        yaml_text.read_yaml(text)
    assert len(looked) == slow
