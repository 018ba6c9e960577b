"""YAML with plain values, in which no key is given twice."""

from __future__ import annotations

from typing import Any

import yaml

from promptfed.shared.service.reasons import NESTED


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(str(key.value))
        return super().construct_mapping(node, deep)


def read_yaml(text: str | bytes) -> Any:
    """The value of ``text``. Raises yaml.YAMLError, and UnicodeDecodeError of bytes."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader
    except RecursionError:
        raise yaml.YAMLError(NESTED) from None
