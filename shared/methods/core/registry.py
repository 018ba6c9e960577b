"""The methods by name: promptfed's own, and those of packages; swept rates on the embedded backbones."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from dataclasses import asdict
from functools import cached_property
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from threading import RLock
from typing import Any

from promptfed.shared.methods.core.array_library import needs_torch_always
from promptfed.shared.methods.core.context import WordsHyper
from promptfed.shared.methods.core.default_backbone import default_backbone
from promptfed.shared.methods.core.interface import Method
from promptfed.shared.tensors import TensorSpec

TINY, EMOJI, PHOTO = ((f"promptfed-{name}", "embedded") for name in ("tiny", "emoji", "photo"))
FACTORS = {TINY: {"sgd": 10, "adamw": 100}, EMOJI: {"adamw": 100}, PHOTO: {"sgd": 10}}
BY_ADAM = {"optimizer": "adam", "learning_rate": 0.003, "weight_decay": 0.0, "batch_size": 256, "epochs": 20}
"""Training of words on `PHOTO`, where the loss is flat around the template and steep beyond, since the text tower was
fitted to hear the same in every template. A step of SGD is nothing there and then a leap; one of Adam moves no number
by more than the rate. Batches of a whole site leave no noise that turns the way out; the text tower costs the same for
them. On `TINY` of a shared and a private part of four words too, where SGD lost what more vectors had learned."""
TOWER_FACTORS = {TINY: {"adam": 10, "adamw": 10}}  # of methods that train the image tower's weights
SMALL = 0.01  # rates from here on are not multiplied: they are of methods that scale them
USUAL = 0.002  # the rate of methods that give none
SWEPT: Mapping[tuple[str, str], Mapping[str, float | Mapping[str, Any]]] = {
    TINY: {
        "fedvpt": 0.64,
        "fedvpt_deep": 2.0,
        "singleset_vpt": 0.64,
        "fedclip": 0.002,
        "fedtaskres": 0.15,
        "fedkgcoop": 0.01,
        "fedpgp": BY_ADAM,
        "promptfolio": BY_ADAM,
    },
    EMOJI: {"fedmaple": 0.035, "fedclip": 0.002, "fedtaskres": 0.11},
    PHOTO: {"fedtaskres": 0.12, "pfedmoap": 0.6},
}
"""Rates of their own. fedclip's is 0.2/d_e, and fedtaskres's 1.5/(α·scale), so a step moves a logit by 1.5 at most:
for the usual d_e of 512 and scale of 100 they are the methods' defaults. fedkgcoop's own term lengthens its steps."""

GROUP = "promptfed.methods"
INSTALL = "install {} beside promptfed, if you trust it"
log = logging.getLogger("promptfed.methods")


def swept_for(method: type[Method]) -> list[dict[str, Any]]:
    """The training settings of a method as ``GET /v1/methods/{name}`` tells them, each with its backbone."""
    found = [(model, weights, _swept(method, (model, weights))) for model, weights in FACTORS]
    return [{"model": model, "pretrained": weights, "training": swept} for model, weights, swept in found if swept]


def swept_training(raw: Mapping[str, Any], method: type[Method], backbone: Mapping[str, Any]) -> dict[str, Any]:
    """The training settings for ``method`` on ``backbone`` (a spec's, nothing left out) that ``raw`` leaves open.

    None where ``raw`` names a rate, or an optimizer, of which it then has the rate that the method gives. Who names a
    momentum means SGD. Who names ``m`` has vectors that start at random, which `SWEPT` has no whole training for.
    """
    training, options = raw.get("training"), raw.get("method")
    named = set(training) if isinstance(training, Mapping) else set()
    words = not (isinstance(options, Mapping) and options.get("m") is not None)
    swept = _swept(method, (str(backbone.get("model")), str(backbone.get("pretrained"))), words)
    if named & {"learning_rate", "optimizer"} or ("momentum" in named and "optimizer" in swept):
        return {}
    return {name: value for name, value in swept.items() if name not in named}


def _swept(method: type[Method], backbone: tuple[str, str], words: bool = True) -> dict[str, Any]:
    """What a sweep found on an embedded backbone; nothing for a method of a package. ``words``: of the template."""
    training, fields = method.defaults.get("training", {}), method.Hyper.model_fields
    given, optimizer = training.get("learning_rate", USUAL), training.get("optimizer", "sgd")
    has_rate = "learning_rate" in training or "m" in fields
    is_ours = method.__module__.startswith("promptfed.shared.methods.")
    swept, factor = SWEPT.get(backbone, {}), FACTORS.get(backbone, {}).get(optimizer)
    if is_ours and (own := swept.get(method.name)) is not None and (words or not isinstance(own, Mapping)):
        return dict(own) if isinstance(own, Mapping) else {"learning_rate": own}
    if given >= SMALL or not (has_rate and is_ours):
        return {}
    if "trainable" in fields:
        factor = TOWER_FACTORS.get(backbone, {}).get(optimizer)
    if issubclass(method.Hyper, WordsHyper) and backbone == PHOTO:
        return dict(BY_ADAM)
    return {} if factor is None else {"learning_rate": float(f"{given * factor:.3g}")}


class UnusableMethod(KeyError):
    """A package's method cannot be used; the text names the package, the reason and a remedy."""

    def __str__(self) -> str:
        return str(self.args[0])


class MethodRegistry(MutableMapping[str, type[Method]]):
    """The classes of methods by name.

    ``own`` are promptfed's, as classes or as names of modules. The others are the entry points of the group ``GROUP``
    of installed packages. Both are imported when a method is first asked for. Iteration leaves out those that cannot be
    used, with a warning; asking for one raises UnusableMethod. A package never replaces a method of promptfed's, so
    that installing one changes no federation.
    """

    def __init__(self, own: Mapping[str, type[Method] | str]):
        self._modules = {name: module for name, module in own.items() if isinstance(module, str)}
        self._classes = {name: kind for name, kind in own.items() if not isinstance(kind, str)}
        self._packages: dict[str, str] = {}
        self._unusable: dict[str, str] = {}
        self._given: set[str] = set()  # by `use`
        self._loading = RLock()  # a package may ask for other methods while it is imported

    @cached_property
    def _offers(self) -> dict[str, list[EntryPoint]]:
        """What packages bring beside our own, by name."""
        offers: dict[str, list[EntryPoint]] = {}
        for entry in entry_points(group=GROUP):
            offers.setdefault(entry.name, []).append(entry)
        for name in offers.keys() & (self._modules.keys() | self._classes.keys()):
            packages = _packages(offers.pop(name))
            log.warning("the method %r of %s is not used: promptfed has its own %r; rename it", name, packages, name)
        return offers

    def __getitem__(self, name: str) -> type[Method]:
        if name in self._unusable:
            raise UnusableMethod(self._unusable[name])
        if name not in self._classes and name in self._modules:
            self._classes[name] = _of_module(name, self._modules[name])
        if name not in self._classes:
            self._load(name, self._offers[name])
        return self._classes[name]

    def _load(self, name: str, offers: list[EntryPoint]) -> None:
        with self._loading:
            if name in self._classes:
                return
            packages = _packages(offers)
            try:
                kind = _load(name, offers)
            except ValueError as error:
                self._unusable[name] = f"the method {name!r} of {packages} cannot be used: {error}"
                raise UnusableMethod(self._unusable[name]) from error
            # Its package first: who finds the class asks for it.
            self._packages[name] = packages
            self._classes[name] = kind

    def use(self, kind: type[Method]) -> None:
        """Register a method class in this process, such as one of a notebook. A later class of its name replaces it.

        Raises:
            ValueError: it is no complete method, or promptfed or a package has another of its name.
        """
        name = str(getattr(kind, "name", ""))
        if name in self and name not in self._given and self[name] is not kind:
            raise ValueError(f"there is a method {name!r} already: give yours another name")
        _check(kind, name, getattr(kind, "__qualname__", repr(kind)), "complete it", "set its `name`")
        if self.get(name) is not kind:
            self._given.add(name)
            self._classes[name] = kind

    def __setitem__(self, name: str, kind: type[Method]) -> None:
        self._classes[name] = kind

    def __delitem__(self, name: str) -> None:
        del self._classes[name]
        self._given.discard(name)

    def __iter__(self) -> Iterator[str]:
        ours = dict.fromkeys([*self._modules, *self._classes])
        for name in [*ours, *sorted(self._offers.keys() - ours.keys())]:
            new = name not in self._unusable
            if name in self:
                yield name
            elif new:
                log.warning("%s", self._unusable[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def own(self) -> list[str]:
        """The names without those that packages bring or somebody has given; no package is imported for it."""
        here = dict.fromkeys([*self._modules, *self._classes])
        return [name for name in here if name not in self._packages and name not in self._given]

    def package(self, name: str) -> str | None:
        """The package that a method in use comes from, as ``name==version``; None for promptfed's own."""
        return self._packages.get(name)


def _of_module(name: str, module: str) -> type[Method]:
    """The method ``name`` of promptfed's, in the file or folder of this name."""
    members = vars(import_module(module)).values()
    return next(kind for kind in members if isinstance(kind, type) and vars(kind).get("name") == name)


def _packages(offers: Iterable[EntryPoint]) -> str:
    return " and ".join(
        # What is left of a half-removed package has no name.
        f"{entry.dist.name}=={entry.dist.version}" if entry.dist is not None and entry.dist.name else entry.value
        for entry in offers
    )


def _load(name: str, offers: list[EntryPoint]) -> type[Method]:
    """The class that a package brings as method ``name``.

    Raises:
        ValueError: it cannot be used; the text says why, and what to do.
    """
    if len(offers) > 1:
        raise ValueError("more than one package brings it: uninstall all but one")
    where = offers[0].value
    try:
        kind = offers[0].load()
    except (Exception, SystemExit) as error:
        text = f"importing {where} fails ({type(error).__name__}: {error}): mend the package, or uninstall it"
        raise ValueError(text) from error
    _check(kind, name, where, "mend the package, or uninstall it", "name it and its entry point alike")
    checked: type[Method] = kind
    return checked


def _check(kind: object, name: str, where: str, remedy: str, naming: str) -> None:
    """Raise ValueError, ending in ``remedy`` or ``naming``, where ``kind`` cannot be used as the method ``name``."""
    if not (isinstance(kind, type) and issubclass(kind, Method)):
        raise ValueError(f"{where} is not a subclass of {Method.__module__}.Method: {remedy}")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ValueError(f"{where} does not define {missing}: {remedy}")
    try:
        described = description(kind)["name"]
    except Exception as error:
        raise ValueError(f"{where} cannot be described ({type(error).__name__}: {error}): {remedy}") from error
    if described != name:
        raise ValueError(f"{where} calls itself {described!r}: {naming}")


def description(kind: type[Method]) -> dict[str, Any]:
    """What ``GET /v1/methods/{name}`` answers: summary, paper, phases with their tensors, hyperparameters, needs."""
    method = kind(kind.Hyper())
    phases = {phase.name: phase for round in (1, 2) for phase in method.phases(round, rounds=2)}
    return {
        "name": kind.name,
        "summary": kind.summary,
        "paper": kind.paper,
        "phases": [
            {
                "name": phase.name,
                "ask": phase.ask,
                "mean": phase.mean,
                "down": [_tensor(spec) for spec in phase.down],
                "up": [_tensor(spec) for spec in phase.up],
            }
            for phase in phases.values()
        ],
        "state": [_tensor(spec) for spec in method.state_tensors()],
        "hyperparameters": kind.Hyper.model_json_schema(),
        "defaults": kind.defaults,
        "change_per_number": kind.change_per_number,
        "default_backbone": default_backbone(method)[0],
        "swept": swept_for(kind),
        "needs": {
            "text_tower": kind.needs.text_tower,
            "vision_transformer": kind.needs.vision_transformer,
            "domain_descriptions": kind.needs.domain_descriptions,
        },
        "needs_torch": needs_torch_always(method),
        "cached_features": kind.needs.cached_features,
        "metrics": list(kind.metrics),
        "disclosures": [asdict(disclosed) for disclosed in method.disclosures],
    }


def _tensor(spec: TensorSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "shape": list(spec.shape),
        "dtype": spec.dtype,
        "shared_with_clients": spec.shared_with_clients,
    }
