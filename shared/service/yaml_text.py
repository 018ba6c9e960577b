"""YAML with plain values, in which no key is given twice: read by libyaml, within bounds of depth and size."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from promptfed.shared.canonical import parse_json
from promptfed.shared.errors import BadInput
from promptfed.shared.service.reasons import NESTED, why

MOST_NESTED = 50  # levels of lists and mappings, of which no run file has ten
MOST_PARTS = 20_000  # of a text from the network: keys, values, and both ends of lists and mappings
MOST_SLOW = 16_000  # characters that are read once more, by the slower parser, for its words on a mistake


class _Strict(yaml.constructor.SafeConstructor):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Refuse what YAML 1.1 would read as a number to the base of 60, or cannot make of the text."""
        try:
            if isinstance(node, yaml.ScalarNode) and ":" in node.value and node.tag.endswith((":int", ":float")):
                raise ValueError
            return super().construct_object(node, deep)
        except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
            text = f"{str(node.value)[:50]!r} cannot be a value: put a text in quotes"
            raise yaml.constructor.ConstructorError(None, None, text, node.start_mark) from None


class _Loader(_Strict, yaml.SafeLoader):
    pass


_FAST: Any = _Loader
if yaml.__with_libyaml__:

    class _FastLoader(_Strict, yaml.CSafeLoader):
        pass

    _FAST = _FastLoader


def read_yaml(text: str | bytes, aliases: bool = True) -> Any:
    """The value of ``text``. JSON is read as such: PyYAML refuses its tabs, and takes ``1e3`` for a text.

    Without ``aliases`` it comes from the network: none is read, since what they repeat can grow without bound once it
    is written out, and there are at most ``MOST_PARTS``. Raises yaml.YAMLError, and UnicodeDecodeError of bytes.
    """
    shown = text.decode() if isinstance(text, bytes) else text
    with suppress(ValueError):
        value = parse_json(shown.encode())
        _expect_flat(value)
        return value
    try:
        _expect_bounded(shown, aliases)
        value = yaml.load(shown, _FAST)  # noqa: S506 - a safe loader
    except yaml.MarkedYAMLError:
        if len(shown) <= MOST_SLOW:
            with suppress(ValueError, OverflowError):  # the slower parser's own, of an escape beyond all characters
                yaml.load(shown, _Loader)  # noqa: S506 - a safe loader
        raise
    return value


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file, such as an unresolved spec.

    Raises:
        BadInput: the file cannot be read, is not YAML, or does not hold a mapping.
    """
    try:
        raw = read_yaml(path.read_text())
    except OSError as error:
        raise BadInput(f"cannot read {path}: {why(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise BadInput(f"{path} is not YAML: {why(error)}") from None
    if not isinstance(raw, dict):
        raise BadInput(f"{path} must hold a mapping, such as `name: eyes`")
    return raw


def _expect_flat(value: Any) -> None:
    """Refuse a value of JSON that is nested too deep, or has half of a pair of surrogates. Raises yaml.YAMLError."""
    level = [value]
    for depth in range(MOST_NESTED + 1):
        for one in level:
            if isinstance(one, str) and not one.isascii():
                _expect_text(one)
        inner = [one for one in level if isinstance(one, dict | list)]
        if inner and depth == MOST_NESTED:
            raise yaml.YAMLError(NESTED)
        level = [part for one in inner for part in ([*one, *one.values()] if isinstance(one, dict) else one)]


def _expect_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise yaml.YAMLError(f"{text[error.start]!a} is no letter; write the text in UTF-8") from None


def _expect_bounded(text: str, aliases: bool) -> None:
    """Go through the parts of a text, which nothing is made of yet. Raises yaml.YAMLError."""
    depth = 0
    for number, part in enumerate(yaml.parse(text, _FAST)):
        if isinstance(part, yaml.ScalarEvent):
            _expect_text(part.value)
        depth += isinstance(part, yaml.CollectionStartEvent) - isinstance(part, yaml.CollectionEndEvent)
        if depth > MOST_NESTED:
            raise yaml.YAMLError(NESTED)
        if isinstance(part, yaml.AliasEvent) and not aliases:
            raise yaml.composer.ComposerError(None, None, "write out what the alias repeats", part.start_mark)  # type: ignore[arg-type]
        if number > MOST_PARTS and not aliases:
            raise yaml.YAMLError(f"it has more than {MOST_PARTS:,} parts; write fewer")
