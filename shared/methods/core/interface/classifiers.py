"""A client's images as a method sees them, and what a method makes for them: a classifier."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor

from promptfed.shared.tensors import Tensors


class Split(Protocol):
    """Labelled images of one client: features come from its cache, images from its disk."""

    @property
    def labels(self) -> Tensor:
        """``(N,)`` int64, indices in the label space of the task."""

    def __len__(self) -> int: ...

    def features(self) -> Tensor:
        """``(N, d_e)`` float32, L2-normalised, from the frozen image tower, on the backbone's device."""

    def raw_features(self) -> Tensor:
        """The same, as the tower gives them: not normalised."""

    def images(self, indices: Tensor) -> Tensor:
        """``(B, 3, H, W)`` preprocessed images at ``indices (B,)``, on the backbone's device."""

    def patches(self, indices: Tensor) -> Tensor:
        """``(B, M, d_e)`` float32, L2-normalised features of the patches of the images at ``indices (B,)``.

        From the client's disk, rounded to float16 there, on the backbone's device; for methods that need them.
        """

    def block_rows(self, indices: Tensor, start: int) -> Tensor:
        """``(B, S, d_v)`` float32 of the images at ``indices (B,)`` before block ``start`` of the frozen image tower.

        From the client's disk, rounded to float16 there, on the backbone's device. Raises MethodError where images
        change from step to step.
        """


class Classifier(Protocol):
    """Scores images against class names."""

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits, already divided by the temperature, of the images at ``indices (B,)``."""


@runtime_checkable
class Fixed(Protocol):
    """A classifier whose text features no longer change: it can be used without promptfed."""

    def weights(self) -> Tensors | None:
        """What plain code multiplies normalised image features I ``(B, d_e)`` of the frozen tower with.

        ``class_weights (C, d_e)`` W, logits τ⁻¹·I·Wᵀ; or ``class_weights (k, C, d_e)`` of k domains, of which an image
        takes the one at the argmax of I·``domain_weight (k, d_e)``ᵀ + ``domain_bias (k,)``. None where texts depend
        on the image in another way.
        """


@runtime_checkable
class Mixes(Protocol):
    """A classifier that tells which domains an image looks like."""

    domain_names: tuple[str, ...]

    def shares(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, k)`` shares of the domains in ``domain_names``, which sum to 1, of the images at ``indices (B,)``."""
