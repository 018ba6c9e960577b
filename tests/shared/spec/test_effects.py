"""Every field of a spec, set once to another value beside several others: the result differs, or it is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from promptfed.console.output import remarks
from promptfed.experiments.simulation.simulation import simulate
from promptfed.runtime.processes import Site
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data.registry import SharedSources
from promptfed.shared.errors import PromptfedError
from promptfed.shared.methods import resolve_spec
from promptfed.shared.methods.core.spec_backbone import open_backbone
from promptfed.shared.privacy import accounting
from promptfed.shared.spec.spec import FederationSpec, merged
from tests.support.effects import another, leaves_of, nested

SMALL = "symbols:{}?only=sun,cloud,umbrella,snowman&per_class={}&test_per_class=2"
SITES = [
    Site("a", SMALL.format("neon", 2)),
    Site("b", SMALL.format("sketch", 1) + "&classes=base"),
    Site("c", SMALL.format("chalk", 1)),
]
SAMPLE = {"level": "sample", "clip": 0.3, "noise_multiplier": 1.0}
CLIENT = {"level": "client", "clip": 0.3, "noise_multiplier": 1.0, "accept_noise": True}
UNIFORM = {"aggregation": {"weighting": "uniform", "max_weight_share": 1.0}}
PLAIN: dict[str, Any] = {
    "name": "x", "method": {"name": "promptfl", "m": 2}, "rounds": 2,
    "backbone": {"model": "promptfed-tiny"},
}  # fmt: skip
STEPS = {"training": {"epochs": 2, "batch_size": 2}}
BASES: dict[str, dict[str, Any]] = {
    "plain": STEPS,
    "part": STEPS | {"participation": {"fraction": 0.5, "min_clients": 3}},
    "robust": STEPS | {"aggregation": {"rule": "trimmed_mean"}, "participation": {"min_clients": 3}},
    "sample": STEPS | {"privacy": SAMPLE},
    "client": STEPS | {"privacy": CLIENT, "participation": {"min_clients": 3}} | UNIFORM,
    "probe": {"method": {"name": "fedlp"}},
}
BESIDE = {
    "part": "participation.", "robust": ("aggregation.", "admission."), "sample": ("training.", "privacy."),
    "client": ("aggregation.", "participation.", "privacy.", "secure"),
}  # fmt: skip
"""The sections whose fields are tried beside those of a base; default: all."""
VALUES: dict[str, Any] = {
    "backbone.model": "promptfed-emoji", "backbone.pretrained": "random", "backbone.fingerprint": "sha256:" + "0" * 64,
    "class_names": ["sun", "cloud"], "template": "a drawing: {}.", "continues": "sha256:" + "0" * 64,
    "admission.max_bytes": 1024, "admission.max_update_norm": 1e-9, "aggregation.max_weight_share": 0.4,
    "aggregation.clip_norm": 1e-3, "origin": {"card": "sha256:" + "0" * 64, "federation": "x"}, "seed": 7,
    "participation.min_clients": 4, "participation.fraction": 0.2, "privacy.clip": 0.1, "privacy.epsilon": 1.0,
    "privacy.delta": 1e-7, "privacy.evaluation": "noisy", "training.momentum": 0.3,
    "privacy.noise_multiplier": 3.0, "aggregation.tolerate": 0.4, "rounds": 1,
}  # fmt: skip
OF_GPUS, IN_TROUBLE = "GPUs alone", "where a client is missing: tests/coordinator/domain/test_round_machine.py"
UNSEEN = {
    "training.threads": "how quickly it trains, and last bits: tests/client_service/training/test_kernels.py",
    "name": "a label", "licence": "a label, which the card says", "training.deterministic": OF_GPUS,
    "training.tf32": OF_GPUS, "participation.quorum": IN_TROUBLE, "participation.deadline_seconds": IN_TROUBLE,
    "participation.on_missed_quorum": IN_TROUBLE, "secure_aggregation.threshold": IN_TROUBLE,
    "secure_aggregation.step_seconds": IN_TROUBLE,
    "participation.draw": "a simulation draws by the seed", "start": "a simulation starts by itself",
    "retention": "what is kept: tests/coordinator/resources/results/test_rounds.py",
}  # fmt: skip
"""Fields that no simulation shows, with the reason."""
UNSEEN_BESIDE = {
    ("sample", "template"): "random contexts, and zero-shot figures stay at the site",
    ("client", "template"): "random contexts, and zero-shot figures stay at the site",
    ("probe", "seed"): "it starts at zero-shot, and draws nothing",
}

Observed = tuple[Any, ...]


@pytest.fixture(scope="module", autouse=True)
def costs_are_computed_coarsely() -> Iterator[None]:
    """On a grid of 0.01, in a tenth of the time: whether they differ is all that is asked here."""
    kept, real = (accounting._composed, accounting._replaced), accounting._by_pld
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(accounting, "_by_pld", lambda events, delta, kind, interval: real(events, delta, kind, 1e-2))
        for computed in kept:
            computed.cache_clear()
        yield
    for computed in kept:
        computed.cache_clear()


@pytest.fixture(scope="module")
def observe(tmp_path_factory: pytest.TempPathFactory) -> Callable[[dict[str, Any]], Observed]:
    """All that a simulation tells but times; or its refusal."""
    features, sources = FeatureCache(tmp_path_factory.mktemp("features")), SharedSources()
    backbones: dict[str, Backbone] = {}
    names = list(sources.open(SITES[0].data).class_names)

    def run(raw: dict[str, Any]) -> Observed:
        try:
            spec = resolve_spec(
                merged(PLAIN | {"class_names": names}, raw) | {"method": raw.get("method", PLAIN["method"])}
            )
            key = spec.backbone.model_dump_json(include={"model", "pretrained", "precision"})
            if key not in backbones:
                backbones[key] = open_backbone(spec.backbone, allow_backbone=False)
            result = simulate(spec, SITES, backbone=backbones[key], features=features, sources=sources)
        except PromptfedError as error:
            return ("refused", str(error))
        answers = [(one.client, one.split, one.confidence, one.predicted) for one in result.outcomes]
        return result.state_hash, _timeless(result.reports), answers, remarks(result), repr(result.facts.privacy)

    return run


TIMES = ("seconds", "_at", "deadline", "sha256", "task_id", "received", "bytes")
"""And bytes, which hold the seconds and differ with their figures."""


def _timeless(told: Any) -> Any:
    if isinstance(told, dict):
        return {key: _timeless(value) for key, value in told.items() if not any(time in key for time in TIMES)}
    return [_timeless(one) for one in told] if isinstance(told, list) else told


def fields(base: Any) -> dict[str, Any]:
    """Another value of each field than ``base`` has, by its path."""
    schemas = leaves_of(FederationSpec)
    left = ("backbone.shape.", "origin.")
    found = {}
    for path, schema in schemas.items():
        if path in UNSEEN or path.startswith(left) or path == "method" or "const" in schema:
            continue
        told = value_at(base, path)
        found[path] = (
            VALUES[path] if path in VALUES else another(schema if told is None else schema | {"default": told})
        )
    return found | {"backbone.shape": {"d_e": 9}, "method.m": 3, "method.label_space": "client"}


def value_at(told: Any, path: str) -> Any:
    for part in path.split("."):
        told = told.get(part) if isinstance(told, dict) else None
    return told


def test_all_fields_are_known() -> None:
    """A new field is tried with another value, or stands here with a reason."""
    assert not set(UNSEEN) - set(leaves_of(FederationSpec))
    assert len(fields(resolve_spec(PLAIN).model_dump())) > 50


@pytest.mark.extended
@pytest.mark.parametrize("name", BASES)
def test_each_field_changes_the_result_or_is_refused(name: str, observe: Callable[[dict[str, Any]], Observed]) -> None:
    base = BASES[name]
    wanted, idle = observe(base), []
    resolved = resolve_spec(
        merged(PLAIN | {"class_names": ["a", "b"]}, base) | {"method": base.get("method", PLAIN["method"])}
    )
    assert wanted[0] != "refused", wanted
    assert observe(base) == wanted, "it is the same once more"
    for path, value in fields(resolved.model_dump()).items():
        if (path.startswith("method.") and "method" in base) or not path.startswith(BESIDE.get(name, "")):
            continue
        changed = merged(base if "method" in base else base | {"method": PLAIN["method"]}, nested(path, value))
        if changed != base and observe(changed) == wanted:
            idle.append(path)
    assert not [path for path in idle if (name, path) not in UNSEEN_BESIDE]
