"""Validating an export with data at hand, in this process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from promptfed.experiments.simulation.simulation import SimulationOptions, simulate
from promptfed.export.continuing import continued
from promptfed.library.run import Data, sites_of
from promptfed.sdk.backbone import open_backbone, resolve
from promptfed.shared.api.validation_report import SignedValidation
from promptfed.shared.clip import Backbone
from promptfed.shared.data.sharing import SharedSources
from promptfed.shared.metrics.disclosure import FLOOR
from promptfed.shared.spec.spec import AllowedBackbones


def validate(
    export: Path | str,
    data: Data,
    *,
    floor: int = FLOOR,
    backbone: Backbone | None = None,
    key: str | None = None,
    allow_backbone: AllowedBackbones = False,
) -> SignedValidation:
    """Test an export on each site's data, as `promptfed validate` does over a network.

    Args:
        export: a folder that `promptfed export` has written.
        data: each site's images, as for `run`; all of them are tested on.
        floor: counts below it are not told, and every count is a range of so many numbers; 1: exact.
        backbone: the loaded frozen model; default: the export's, loaded here.
        key: the public key of the coordinator that must have signed the export.
        allow_backbone: names of a model or checkpoint outside open_clip's registry that may be loaded; True: any.

    Raises:
        CommandError: the export, the data or the backbone cannot be used.
    """
    sources = SharedSources()
    sites = [replace(site, floor=floor) for site in sites_of(sources, data, "evaluator")]
    given: dict[str, Any] = {"participation": {"min_clients": len(sites)}}
    raw, state = continued(Path(export), given, key, "validation")
    spec = resolve(raw)
    model = backbone or open_backbone(spec.backbone, allow_backbone=allow_backbone)
    result = simulate(spec, sites, backbone=model, sources=sources, options=SimulationOptions(initial=state))
    assert result.validation is not None
    return SignedValidation.model_validate(result.validation)
