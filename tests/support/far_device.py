"""A device far away: torch's ``meta``, whose tensors have no content, so that every wait for it is seen.

A GPU computes while the CPU goes on, until the CPU asks for a value, or copies memory that is not pinned.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from promptfed.shared.clip import Backbone
from promptfed.shared.tensors.transfer import sent_to
from tests import ROOT
from tests.support.visual_clients import ImageSplit

FAR = torch.device("meta")
aten = torch.ops.aten


class Waits(TorchDispatchMode):
    """Counts waits by the lines of this project that cause them, and answers for the device with some value."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default and args[0].is_meta:
            self._note()
            return 0.5 if args[0].is_floating_point() else 0
        if func is aten._to_copy.default and kwargs.get("device") is not None:
            there = torch.device(kwargs["device"]).type == "meta"
            if there and not args[0].is_meta and not kwargs.get("non_blocking"):
                self._note()
            if not there and args[0].is_meta:
                self._note()
                return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if func is aten.copy_.default and args[0].is_meta != args[1].is_meta:
            self._note()
            if args[1].is_meta:
                return args[0]
        return func(*args, **kwargs)

    def _note(self) -> None:
        own = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT))]
        near = [frame for frame in own if ".venv" not in frame.filename and "tests" not in Path(frame.filename).parts]
        self.lines["; ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in near[-2:])] += 1


class FarSplit(ImageSplit):
    """Images of which only what is asked for is sent to the device."""

    @classmethod
    def of(cls, split: Any, backbone: Backbone) -> FarSplit:
        return cls(split.pixels, split.labels, backbone)

    def features(self) -> Tensor:
        return torch.zeros(len(self), self.backbone.d_e, device=FAR)

    raw_features = features

    def images(self, indices: Tensor) -> Tensor:
        return sent_to(self.pixels[indices], FAR)

    def patches(self, indices: Tensor) -> Tensor:
        return torch.zeros(len(indices), self.backbone.patch_tokens or 0, self.backbone.d_e, device=FAR)
