"""What a bench compares: methods with overrides, as ``plan:residual=false:training.learning_rate=0.01``."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import yaml

from promptfed.shared.errors import BadInput
from promptfed.shared.methods import make_method, method_class, resolve_spec
from promptfed.shared.service.yaml_text import read_yaml
from promptfed.shared.spec.spec import FederationSpec, SpecError, merged

OPTION, ENTRY = (re.compile(rf"{mark}(?![^{{}}]*\}})") for mark in ":,")  # outside of braces, which hold a mapping

RawSpec = dict[str, Any]  # a spec, or some of its keys, as written, without its method's defaults


@dataclass(frozen=True)
class BenchEntry:
    """One row of a table: its label, the method with its hyperparameters, and the changes to the spec."""

    label: str
    method: RawSpec
    changes: RawSpec = field(default_factory=dict)

    @property
    def personal(self) -> bool:
        """Whether each client has its own classifier. Raises PromptfedError for wrong hyperparameters."""
        try:
            return make_method(self.method).personal
        except SpecError as error:
            raise BadInput(f"{self.label}: {error}") from None

    @property
    def least_clients(self) -> int:
        """The fewest trainers that the method can run with."""
        participation = method_class(self.method["name"]).defaults.get("participation", {})
        least: int = participation.get("min_clients", 1)
        return least

    def spec(self, base: RawSpec, m: int | None = None) -> RawSpec:
        """``base`` with this method and the entry's changes; ``m`` prompt tokens for methods that have them.

        Training settings of ``base``, which are every method's, are left out where the method does not use them.

        Raises:
            PromptfedError: the spec cannot be run. The text names the entry.
        """
        method, kind = dict(self.method), method_class(self.method["name"])
        if m is not None and "m" in kind.Hyper.model_fields:
            method = {"name": method["name"], "m": m} | method
        if "training" in base:
            used = {name: value for name, value in base["training"].items() if name not in kind.ignores}
            base = base | {"training": used}
        raw = merged(base, self.changes) | {"method": method}
        try:
            resolve_spec(raw)
        except SpecError as error:
            raise BadInput(f"{self.label}: {error}") from None
        return raw


def parse_entry(text: str, label: str = "") -> BenchEntry:
    """The entry of a text ``name[:key=value]...``. Keys of the spec (``rounds``, ``training.epochs``) change the
    spec, unless the method has a hyperparameter of that name.

    ``label`` names its row; the default is the text.

    Raises:
        PromptfedError: an unknown method, or an option that is not ``key=value``.
    """
    name, *options = OPTION.split(text.strip())
    try:
        hyperparameters = method_class(name).Hyper.model_fields
    except SpecError as error:
        raise BadInput(str(error.errors[0]["detail"])) from None
    method: RawSpec = {"name": name}
    changes: RawSpec = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not equals or not key:
            raise BadInput(f"{text}: {option!r} is not key=value, as in plan:residual=false")
        parts = key.split(".")
        if key == "seed":
            raise BadInput(f"{text}: seeds are given by --seeds, the same for every method")
        # As fedtpg's start.
        if parts[0] in FederationSpec.model_fields and key != "name" and key not in hyperparameters:
            changes = merged(changes, _nested(parts, _value(text, option, value)))
        else:
            method[key] = _value(text, option, value)
    return BenchEntry(label or text.strip(), method, changes)


def parse_entries(text: str) -> list[BenchEntry]:
    """Entries separated by commas.

    Raises:
        PromptfedError: there is no entry, one occurs twice, or one cannot be read.
    """
    texts = ENTRY.split(text)
    if not all(entry.strip() for entry in texts):
        what = f"{text!r} has an empty entry" if text.strip(" ,") else "no method is given"
        raise BadInput(f"{what}: write --methods promptfl,fedpgp")
    entries = [parse_entry(entry) for entry in texts]
    labels = [entry.label for entry in entries]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    if twice:
        raise BadInput(f"{twice[0]} is given twice: leave one out")
    return entries


def _value(text: str, option: str, value: str) -> Any:
    try:
        return read_yaml(value)
    except yaml.YAMLError:
        raise BadInput(f"{text}: the value of {option!r} cannot be read: write YAML") from None


def _nested(parts: list[str], value: Any) -> RawSpec:
    return {parts[0]: _nested(parts[1:], value) if len(parts) > 1 else value}
