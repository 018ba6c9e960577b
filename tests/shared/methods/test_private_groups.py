"""Groups of records as units: their images, their gradient written out, and that nothing else of them counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from promptfed.shared.clip import Backbone
from promptfed.shared.methods import make_method
from promptfed.shared.methods.core.interface import ClientContext, Protection, UnprotectedError
from promptfed.shared.methods.core.training import make_optimizer, train
from promptfed.shared.privacy.noise import SeededNoise
from tests.shared.methods.conftest import NAMES
from tests.shared.methods.test_private_training import M, start_of
from tests.support import literal, literal_private

Make = Callable[..., ClientContext]
GROUPS = ((4, 0, 7), (1,), (5, 2), (3, 6, 8, 9))


def grouped(context: ClientContext, batch: int, epochs: int, groups: Any = GROUPS) -> ClientContext:
    own = Protection(0.3, 1.0, len(groups), batch, epochs, SeededNoise(7).stream(), groups)
    return replace(context, protection=own)


@pytest.mark.parametrize(("batch", "epochs"), [(2, 2), (4, 1), (1, 2)])
@pytest.mark.parametrize("at_once", [512, 10], ids=["whole groups", "groups in parts"])
def test_promptfl_equals_dp_sgd_over_groups_written_out(
    batch: int, epochs: int, at_once: int, backbone: Backbone, make_context: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group is sampled, clipped and counted as one: the gradient of the mean loss of its images."""
    monkeypatch.setattr("promptfed.shared.clip.backbone.PREFIX_TEXTS", at_once)
    context = make_context(10, epochs=epochs, batch_size=batch, learning_rate=0.05)
    start = start_of({"name": "promptfl", "m": M}, backbone)["context"]
    method = make_method({"name": "promptfl", "m": M})
    found = method.train(grouped(context, batch, epochs), {"context": start}, {}).update["context"]

    def unit_loss(theta: Any, unit: int) -> Tensor:
        rows = list(GROUPS[unit])
        features, labels = context.train.features()[rows], context.train.labels[rows]
        return literal.context_loss(backbone, theta[0], list(NAMES), features, labels)

    wanted = literal_private.private_sgd(
        [start],
        unit_loss,
        None,
        lambda theta: make_optimizer(theta, context.training, 0.05),
        SeededNoise(7).stream(),
        units=len(GROUPS),
        batch=batch,
        epochs=epochs,
        clip=0.3,
        z=1.0,
    )[0]
    moved = float((wanted - start).abs().max())
    assert float((found - wanted).abs().max()) <= 1e-3 * moved


def test_without_an_objective_a_group_is_one_pass_over_its_images(make_context: Make) -> None:
    theta, asked = torch.zeros(3, requires_grad=True), []

    def loss(rows: Tensor) -> Tensor:
        asked.append(tuple(rows.tolist()))
        return (theta * rows.float().mean()).sum()

    context = make_context(10, epochs=1, batch_size=4)
    train(grouped(context, 4, 1), [theta], loss)
    assert asked == list(GROUPS), "q is 1: all groups, each by itself"


def test_groups_that_the_data_do_not_have_are_refused(make_context: Make) -> None:
    theta = torch.zeros(3, requires_grad=True)
    context = make_context(5, epochs=1, batch_size=4)
    with pytest.raises(UnprotectedError, match="a group has images beyond the 5 that there are"):
        train(grouped(context, 4, 1), [theta], lambda rows: theta.sum())
    fewer = replace(grouped(context, 4, 1, GROUPS[:2]).protection, units=3)  # type: ignore[type-var]
    with pytest.raises(UnprotectedError, match="2 units to train on instead of the 3"):
        train(replace(context, protection=fewer), [theta], lambda rows: theta.sum())
