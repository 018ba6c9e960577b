"""Common steps of building models of open_clip and timm."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from promptfed.shared.clip.backbone import Backbone
from promptfed.shared.clip.errors import BackboneError, one_line

RANDOM_SEED = 20_240_229
DRAWING = (
    Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_, init.kaiming_normal_,
    init.xavier_uniform_, init.xavier_normal_, init.trunc_normal_,
)  # fmt: skip

_global_generator = threading.Lock()


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the global generator, from which random weights are drawn, and restore it afterwards."""
    with _global_generator, torch.random.fork_rng(devices=[]):
        torch.manual_seed(RANDOM_SEED)
        yield


class Undrawn(TorchFunctionMode):
    """Leaves out the random numbers of weights all of which are read from a file next: ViT-B/16's take a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in DRAWING:
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


@contextmanager
def load_errors(model: str, pretrained: str | None, precision: str) -> Iterator[None]:
    """Turn any error of the block, which builds a model, into a BackboneError with the model's name."""
    try:
        yield
    except BackboneError:
        raise
    except Exception as error:
        name = model if pretrained is None else f"{model} ({pretrained})"
        hint = "" if precision == "fp32" else f" (in {precision}; try precision fp32)"
        raise BackboneError(f"The backbone {name} cannot be loaded{hint}: {one_line(error)}") from error


@torch.no_grad()
def check_runs(backbone: Backbone) -> None:
    """Raise BackboneError if a model does not run in its precision.

    open_clip converts some towers only partly to half precision, which would otherwise fail during a round.
    """
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
