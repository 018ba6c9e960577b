"""Membership inference: what an export, stored updates or shadow runs reveal about an owner's images."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from promptfed.cli.predicting import model_of_export
from promptfed.client_service.training.data import ClientData
from promptfed.experiments.attacks.membership import Attack, LabelledLogits, logits_of, loss_attacks
from promptfed.experiments.attacks.shadows import ShadowPlan, Shadows, run_shadows
from promptfed.experiments.attacks.stored_updates import Attacker, read_stored
from promptfed.export.adapted_model import AdaptedModel
from promptfed.export.export import open_backbone_of
from promptfed.runtime.run_file import read_run
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.sdk.errors import CommandError, Exit
from promptfed.sdk.output import note
from promptfed.sdk.result import FederationResult
from promptfed.shared.clip import Backbone, FeatureCache
from promptfed.shared.data import Source, open_source
from promptfed.shared.methods.core.interface.base import Classifier
from promptfed.shared.spec.spec import AllowedBackbones


def attack_export(
    export: Path, uri: str, parts: tuple[str, str], references: list[Path], allow_backbone: AllowedBackbones
) -> list[Attack]:
    """The attacks on an export with the images of ``uri``, of whose ``parts`` the first was trained on.

    ``loss``: minus the loss. ``lira``, with ``references`` that were not trained on these images: the likelihood ratio
    of the log odds.

    Raises:
        CommandError, DataError: the export, the data or the backbone cannot be used, or the references are too few.
    """
    source = open_source(uri, "trainer")
    if 0 < len(references) < 4:
        raise CommandError(f"{len(references)} references are too few: give at least 4, or none", Exit.USAGE)
    with TemporaryDirectory(prefix="promptfed-audit-") as features:
        cache = FeatureCache(Path(features))
        own, *of_references = [
            [_logits(path, source, part, cache, allow_backbone) for part in parts] for path in (export, *references)
        ]
        return loss_attacks(own, of_references)


def attack_updates(
    store: Path,
    federation: str,
    client: str,
    uri: str,
    parts: tuple[str, str],
    most: int,
    delta: float,
    allow_backbone: AllowedBackbones,
) -> list[Attack]:
    """The attacks on a client's stored updates with at most ``most`` images of each of two ``parts`` of ``uri``.

    Raises:
        CommandError, DataError: the folder, the federation, the data or the backbone cannot be used.
    """
    stored = read_stored(store, federation, client)
    source = open_source(uri, "trainer")
    backbone = open_backbone(stored.spec.backbone, allow_backbone=allow_backbone)
    torch.set_num_threads(stored.spec.training.threads)
    with TemporaryDirectory(prefix="promptfed-audit-") as features:
        data = ClientData(source, backbone, FeatureCache(Path(features)))
        return Attacker(stored, client, backbone, data).attacks(*parts, most, delta)


def attack_run(
    path: Path, client: str | None, seeds: int, canaries: int, allow_backbone: AllowedBackbones, quiet: bool
) -> Shadows:
    """Shadows of a run file, each trained on another half of a client's images.

    Raises:
        CommandError: the run file, the client, its data or the backbone cannot be used, or a run failed.
    """
    run = read_run(path)
    spec = resolve(run.spec)
    chosen = client or next((site.name for site in run.sites if site.role == "trainer"), "")
    plan = ShadowPlan(spec.model_dump(mode="json"), tuple(run.sites), chosen, seeds, canaries)
    backbone = open_backbone(spec.backbone, allow_backbone=allow_backbone)

    def tell(number: int) -> None:
        if not quiet:
            note(f"run {number + 1} of {seeds}")

    with TemporaryDirectory(prefix="promptfed-audit-") as features:
        return run_shadows(plan, served, backbone, FeatureCache(Path(features)), tell)


def served(
    result: FederationResult, backbone: Backbone, names: tuple[str, ...]
) -> tuple[Classifier, Classifier | None]:
    """The classifier of a result's global state alone, and the template's."""
    model = AdaptedModel.of(result).serve(backbone, names)
    return model.classifier, model.template


def _logits(
    export: Path, source: Source, part: str, cache: FeatureCache, allow_backbone: AllowedBackbones
) -> LabelledLogits:
    """``(n, C)`` logits of a part's images under an export, and their labels ``(n,)``."""
    model, names = model_of_export(export, otherwise=source.class_names)
    backbone = open_backbone_of(model, allow_backbone)
    classifier = model.serve(backbone, names).classifier
    split = ClientData(source, backbone, cache).split(part, names)
    if not len(split):
        raise CommandError(f"the data have no {part} images", Exit.BAD_INPUT)
    return logits_of(classifier, split)
