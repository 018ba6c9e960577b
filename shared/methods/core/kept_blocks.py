"""Images that go through the frozen lower blocks of the tower once: what they are to the methods above these."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from promptfed.shared.methods.core import toolkit as pf

CacheBlocks = Annotated[
    bool,
    Field(
        description="keep on the client's disk, in 16 bits, what each image is before the first block that changes "
        "(ViT-B/16: 303 kB an image): the frozen blocks below run once an image instead of once a step"
    ),
]


def check_kept_blocks(method: str, spec: pf.FederationSpec, *, frozen_below: bool, how: str) -> None:
    """Raise MethodError where no block below the changed ones is left, or images change from step to step."""
    if not frozen_below:
        raise pf.MethodError(f"{method} changes the first block too, so that no rows can be kept: {how}")
    if spec.training.augmentation != "none":
        raise pf.MethodError(
            "cache_blocks keeps what an image is, and with training.augmentation it is another one in every step: "
            "leave one of them out"
        )
