"""Arguments of the library: of the types that signatures name, or an error of our own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import is_dataclass
from functools import cache, wraps
from types import SimpleNamespace
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from pydantic import ConfigDict, InstanceOf, TypeAdapter, ValidationError

from promptfed.shared.errors import BadInput, Misused

P = ParamSpec("P")
R = TypeVar("R")
C = TypeVar("C", bound=type)
ANY_CLASS = ConfigDict(arbitrary_types_allowed=True, strict=True)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, which refuses arguments of other types than it names with a PromptfedError."""
    signature = inspect.signature(function)

    @cache
    def accepted() -> dict[str, tuple[Any, TypeAdapter[Any]]]:
        named = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        annotations = {each.name: each.annotation for each in named if each.annotation is not each.empty}
        hints = get_type_hints(SimpleNamespace(__annotations__=annotations), function.__globals__, include_extras=True)
        return {name: (hint, _adapter(hint)) for name, hint in hints.items()}

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise Misused(f"{function.__name__}: {error}") from None
        for name, value in bound.arguments.items():
            several = signature.parameters[name].kind is inspect.Parameter.VAR_POSITIONAL
            try:
                if name in accepted():
                    for each in value if several else [value]:
                        accepted()[name][1].validate_python(each)
            except ValidationError:
                text = in_words(accepted()[name][0])
                listed = isinstance(value, str) and "Sequence" in text
                why = f"is a text: give a list of names or URIs, as [{value!r}]" if listed else f"is not {text}"
                raise BadInput(f"{function.__name__}: {name}={value!r:.100} {why}") from None
        return function(*args, **kwargs)

    return call


def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(InstanceOf[hint]) if is_dataclass(hint) else TypeAdapter(hint, config=ANY_CLASS)


def all_checked(kind: C) -> C:
    """A class whose public methods are `checked`."""
    for name, member in list(vars(kind).items()):
        if inspect.isfunction(member) and not name.startswith("_"):
            setattr(kind, name, checked(member))
    return kind


def in_words(hint: Any) -> str:
    """A type without the modules of its names."""
    if get_origin(hint) is Literal:
        return f"known here: give {' or '.join(map(repr, get_args(hint)))}"
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    text = re.sub(r"Annotated\[([^,\]]+), [^\]]*\]", r"\1", text)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)
