"""What a training loop minimises, in parts, and its differential privacy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from promptfed.shared.privacy.accounting import Event, training_event
from promptfed.shared.privacy.noise import NoiseStream
from promptfed.shared.tensors.lazy import Tensor


@dataclass(frozen=True)
class Objective:
    """A loss in parts: one part for each unit, and one part that does not depend on data.

    ``units``: losses ``(b,)`` from copies ``(b, *shape)`` of the parameters and indices ``(b,)``; loss i reads only
    copy i and unit i. ``common``: R of the parameters themselves (None: zero).
    """

    units: Callable[[Sequence[Tensor], Tensor], Tensor]
    common: Callable[[Sequence[Tensor]], Tensor] | None = None


class LabelLoss(Protocol):
    """A loss of logits in place of the cross-entropy, with one tensor that it trains beside the method's."""

    leaf: Tensor

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Losses ``(B,)`` of ``logits (B, C)`` under the split's labels of the same images."""

    def step(self) -> None:
        """One step along the leaf's gradient, if it has one."""

    def among(self, objective: Objective) -> Objective:
        """``objective`` with the leaf as the last of its parameters."""


@dataclass
class Protection:
    """One task's differential privacy: DP-SGD over ``units`` records, clipped at ``clip``, noise ``noise_multiplier``.

    Everything except ``stream``, the attempt's secret draws, is public. It serves one training loop, since only one is
    accounted for. ``rows``: the images of each unit if units are groups; a unit's loss is then their mean.
    """

    clip: float
    noise_multiplier: float
    units: int
    batch_size: int
    epochs: int
    stream: NoiseStream
    rows: Sequence[Sequence[int]] | None = None
    used: bool = False

    @property
    def event(self) -> Event:
        """The loop's event for the accountant."""
        return training_event(self.units, self.batch_size, self.epochs, self.noise_multiplier)

    def images_of(self, unit: int) -> Sequence[int]:
        """The images of a unit."""
        return (unit,) if self.rows is None else self.rows[unit]

    def begin(self, images: int) -> Event:
        """Begin the loop over ``images``; returns its event.

        Raises:
            UnprotectedError: it is a second loop, or the number of units differs from the accounted number.
        """
        if self.used:
            raise UnprotectedError("a second training loop in one task: only one was accounted for")
        units = images if self.rows is None else len(self.rows)
        if units != self.units:
            raise UnprotectedError(f"{units} units to train on instead of the {self.units} that were accounted for")
        if self.rows is not None and not all(0 <= row < images for rows in self.rows for row in rows):
            raise UnprotectedError(f"a group has images beyond the {images} that there are to train on")
        self.used = True
        return self.event


class UnprotectedError(ValueError):
    """Training would have run without the promised protection; the text gives the reason."""
