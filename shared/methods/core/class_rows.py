"""Shared tensors with a row for each class of the federation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from promptfed.shared.methods.core import toolkit as pf
from promptfed.shared.tensors.arrays import lengths, namespace
from promptfed.shared.tensors.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor


def check_class_rows(method: pf.Method, spec: pf.FederationSpec) -> None:
    """Raise MethodError if ``spec`` has no common list of classes for the rows of a shared tensor."""
    if spec.class_names is None:
        raise pf.MethodError(
            f"{method.name} learns a row for every class: list the federation's class_names in the spec"
        )
    if method.hyper.label_space != "federation":
        raise pf.MethodError(f"{method.name}'s rows are for the federation's classes: leave label_space out")


def rows_of_candidates(context: pf.ClientContext, rows: Tensor) -> Tensor:
    """The rows of ``rows (C, ...)`` for ``context.class_names``; zero for a class that is not one of the federation's.

    Raises:
        MethodError: the number of rows is not the number of trained classes.
    """
    names = context.label_space or context.class_names
    if len(rows) != len(names):
        raise pf.MethodError(
            f"the shared state has {len(rows)} rows for {len(names)} classes: keep the spec's class_names"
        )
    extended = torch.cat([rows, torch.zeros_like(rows[:1])])  # the index -1 is the row of zeros
    return extended[context.trained_rows()]


def class_means(context: pf.ClientContext) -> Tensor:
    """``(C, d_e)`` Σ_{y=c} f/N of the N training features; their weighted mean over clients is that of all images."""
    context.expect_images()
    features, labels = context.train.features(), context.train.labels.to(context.backbone.device)
    sums = features.new_zeros(len(context.class_names), features.shape[1])
    return sums.index_add_(0, labels, features) / len(features)


def directions(rows: Any) -> Any:
    """``rows (C, d)``, each normalised; a row of zeros stays. The server half uses it."""
    sizes = lengths(rows)
    return rows / namespace(rows).where(sizes > 0, sizes, 1.0)[:, None]
