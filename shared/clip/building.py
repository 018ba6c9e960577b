"""What building a model of open_clip and one of timm have in common."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.errors import BackboneError, one_line

RANDOM_SEED = 20_240_229

_global_generator = threading.Lock()


@contextmanager
def seeded() -> Iterator[None]:
    """Random weights are drawn from the global generator: seeded here, and put back afterwards."""
    with _global_generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        yield


@torch.no_grad()
def check_runs(backbone: Backbone) -> None:
    """open_clip converts some towers only in part to half precision; better said now than in the middle of a round."""
    try:
        backbone.encode_images(torch.zeros(1, 3, *backbone.image_size))
        if backbone.has_text:
            backbone.model.encode_text(
                torch.zeros(1, backbone.context_length, dtype=torch.long, device=backbone.device)
            )
    except RuntimeError as error:
        raise BackboneError(
            f"The backbone {backbone.model_name} does not run in {backbone.precision}, use precision fp32: "
            f"{one_line(error)}"
        ) from error
