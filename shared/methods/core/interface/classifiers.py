"""The interfaces of a client's images and of a method's classifier."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from promptfed.shared.tensors import Tensors

if TYPE_CHECKING:
    from torch import Tensor


class Split(Protocol):
    """Labelled images of one client: features come from its cache, images from its disk."""

    @property
    def labels(self) -> Tensor:
        """``(N,)`` int64, indices in the label space of the task."""

    def __len__(self) -> int: ...

    def features(self) -> Tensor:
        """``(N, d_e)`` float32, L2-normalised, from the frozen image tower, on the backbone's device."""

    def raw_features(self) -> Tensor:
        """The same features without normalisation."""

    def images(self, indices: Tensor) -> Tensor:
        """``(B, 3, H, W)`` preprocessed images at ``indices (B,)``, on the backbone's device."""

    def patches(self, indices: Tensor) -> Tensor:
        """``(B, M, d_e)`` float32, L2-normalised features of the patches of the images at ``indices (B,)``.

        They are cached on the client's disk in float16, for methods that need them, and returned on the backbone's
        device.
        """

    def block_rows(self, indices: Tensor, start: int) -> Tensor:
        """``(B, S, d_v)`` float32 of the images at ``indices (B,)`` before block ``start`` of the frozen image tower.

        They are cached on the client's disk in float16 and returned on the backbone's device. Raises MethodError if
        images change from step to step.
        """


class Classifier(Protocol):
    """Scores images against class names."""

    def logits(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, C)`` logits, already divided by the temperature, of the images at ``indices (B,)``."""


@runtime_checkable
class Fixed(Protocol):
    """A classifier with fixed text features, which can be used without promptfed."""

    def weights(self) -> Tensors | None:
        """The weights for normalised image features I ``(B, d_e)`` of the frozen tower in plain code.

        Either ``class_weights (C, d_e)`` W with logits τ⁻¹·I·Wᵀ; or ``class_weights (k, C, d_e)`` of k domains, where
        an image uses the domain at the argmax of I·``domain_weight (k, d_e)``ᵀ + ``domain_bias (k,)``. None if texts
        depend on the image in another way.
        """


@runtime_checkable
class Mixes(Protocol):
    """A classifier that estimates the domains of an image."""

    domain_names: tuple[str, ...]

    def shares(self, split: Split, indices: Tensor) -> Tensor:
        """``(B, k)`` shares of the domains in ``domain_names``, which sum to 1, of the images at ``indices (B,)``."""
