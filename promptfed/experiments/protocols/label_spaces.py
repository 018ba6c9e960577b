"""The class names of a federation over several data sets, read without opening an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from urllib.parse import quote

from promptfed.experiments.protocols.setting import with_options, without_options
from promptfed.sdk.errors import CommandError, Exit
from promptfed.shared.data import DataError
from promptfed.shared.data.options import Role
from promptfed.shared.data.registry import class_names_of

_SHOWN = 5  # classes of one data set that an error lists
_WAYS = (
    "give --class-names union to tell all classes apart everywhere, or --class-names intersection to leave out those "
    "that some lack; or name those to keep in the data URI, only=NAME,NAME"
)


@cache
def names_of(uri: str, role: Role = "trainer") -> tuple[str, ...]:
    """The class names of the data at ``uri``, remembered until `forget_names`.

    Raises:
        CommandError: the data cannot be used.
    """
    try:
        return class_names_of(uri, role)
    except DataError as error:
        raise CommandError(str(error), Exit.BAD_INPUT) from None


def forget_names() -> None:
    """Forget the remembered class names, since data may have changed."""
    names_of.cache_clear()


@dataclass(frozen=True)
class LabelSpace:
    """Class names, and the value of ``only=`` that cuts every data set to them (empty if none has others)."""

    names: tuple[str, ...]
    only: str = ""

    def cut(self, uri: str) -> str:
        """``uri`` with these classes only."""
        if not self.only:
            return uri
        return with_options(without_options(uri, lambda option: option.startswith("only=")), {"only": self.only})


def label_space(kind: str, first: str, uris: Mapping[str, str]) -> LabelSpace:
    """The label space of the data sets ``uris`` (by name).

    ``kind`` is ``same`` (the classes of the data set ``first``; no other data set may have more), ``union`` (all
    classes, those of ``first`` in front) or ``intersection`` (the common classes, in the order of ``first``).

    Raises:
        CommandError: with ``same``, data sets have classes that ``first`` lacks (the text names all); with
            ``intersection``, fewer than two classes are common; or data cannot be used.
    """
    spaces = {name: names_of(uri) for name, uri in uris.items()}
    own = spaces[first]
    if kind == "union":
        return LabelSpace(tuple(dict.fromkeys([*own, *(name for names in spaces.values() for name in names)])))
    if kind == "intersection":
        common = tuple(name for name in own if all(name in names for names in spaces.values()))
        return _cut_to(common, any(len(names) > len(common) for names in spaces.values()))
    problems = []
    for name, names in spaces.items():
        more = [class_name for class_name in names if class_name not in own]
        if more:
            shown = ", ".join(more[:_SHOWN]) + (f" and {len(more) - _SHOWN} more" if len(more) > _SHOWN else "")
            problems.append(f"{name} has classes that {first} lacks ({shown})")
    if problems:
        raise CommandError(f"{'; '.join(problems)}: {_WAYS}", Exit.BAD_INPUT)
    return LabelSpace(own)


def _cut_to(common: tuple[str, ...], needed: bool) -> LabelSpace:
    if len(common) < 2:
        text = f"the data sets have {len(common)} class{'es' * (len(common) != 1)} in common, and two are needed"
        raise CommandError(f"{text}: give --class-names union", Exit.BAD_INPUT)
    with_comma = [name for name in common if "," in name]
    if needed and with_comma:
        text = f"the class {with_comma[0]!r} has a comma in its name, which only= cannot write: rename it"
        raise CommandError(text, Exit.BAD_INPUT)
    return LabelSpace(common, quote(",".join(common), safe=",") if needed else "")
