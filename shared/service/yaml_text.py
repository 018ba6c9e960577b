"""YAML with plain values, in which no key is given twice."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import yaml

from promptfed.shared.canonical import parse_json
from promptfed.shared.service.reasons import NESTED


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


class _Unrepeated(_Loader):
    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "write out what the alias repeats", mark)
        return super().compose_node(parent, index)


def read_yaml(text: str | bytes, aliases: bool = True) -> Any:
    """The value of ``text``. JSON is read as such: PyYAML refuses its tabs, and takes ``1e3`` for a text.

    Without ``aliases`` none is read: what they repeat can grow without bound once it is written out. Raises
    yaml.YAMLError, and UnicodeDecodeError of bytes.
    """
    with suppress(ValueError):
        return parse_json(text if isinstance(text, bytes) else text.encode())
    try:
        return yaml.load(text, _Loader if aliases else _Unrepeated)  # noqa: S506 - a safe loader
    except RecursionError:
        raise yaml.YAMLError(NESTED) from None
