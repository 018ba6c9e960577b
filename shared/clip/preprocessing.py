"""A backbone's preprocessing in two halves: what PIL does with an image, and the numbers made of its pixels."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from promptfed.shared.data.image_files import Cut
from promptfed.shared.tensors.transfer import sent_to

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True)
class Halves:
    """``cut`` makes uint8 of an image, and `numbers` of those what the whole preprocessing gives, bit for bit."""

    cut: Cut
    mean: Sequence[float]
    std: Sequence[float]
    _there: dict[torch.device, list[Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, transform: Any) -> Halves | None:
        """The halves of a preprocessing of torchvision; None if it has other steps than these."""
        from torchvision.transforms.functional import pil_modes_mapping

        steps = {type(step).__name__.removeprefix("Maybe"): step for step in transform.transforms}
        steps.pop("ConvertMode", None)
        if [name for name in steps if name != "CenterCrop"] != ["Resize", "ToTensor", "Normalize"]:
            return None
        resize, normalize = steps["Resize"], steps["Normalize"]
        scale = resize.size if isinstance(resize.size, int) else tuple(resize.size)
        scale = scale[0] if isinstance(scale, tuple) and len(scale) == 1 else scale
        crop = tuple(steps["CenterCrop"].size) if "CenterCrop" in steps else scale
        least = (scale, scale) if isinstance(scale, int) else scale
        if not isinstance(crop, tuple) or resize.max_size is not None or crop[0] > least[0] or crop[1] > least[1]:
            return None
        cut = Cut(scale, crop, int(pil_modes_mapping[resize.interpolation]))
        return cls(cut, torch.as_tensor(normalize.mean).tolist(), torch.as_tensor(normalize.std).tolist())

    def numbers(self, pixels: Tensor, device: torch.device) -> Tensor:
        """`(B, 3, H, W)` float32 on ``device`` of uint8 pixels, of which a quarter as many bytes are sent there."""
        if device not in self._there:
            # The divisor is a tensor of that device too: a GPU would multiply by the inverse of a number.
            given = ([255.0] * len(self.mean), self.mean, self.std)
            self._there[device] = [torch.tensor(values, device=device).view(-1, 1, 1) for values in given]
        full, mean, std = self._there[device]
        return sent_to(pixels, device).float().div_(full).sub_(mean).div_(std)
