"""Operations of the server half for numpy arrays and torch tensors alike.

The coordinator computes with numpy, and with torch where a method asks for it. Functions for both use
``xp = namespace(array)``, whose names numpy and torch share, and these.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from promptfed.shared.tensors.lazy import F, torch


def namespace(array: Any) -> Any:
    """The module of ``array``: numpy or torch."""
    return np if isinstance(array, np.ndarray | np.generic) else torch


def copied(array: Any) -> Any:
    """A copy."""
    return array.copy() if namespace(array) is np else array.clone()


def double(array: Any) -> Any:
    """``array`` in float64."""
    return array.astype(np.float64, copy=False) if namespace(array) is np else array.double()


def single(array: Any) -> Any:
    """``array`` in float32."""
    return array.astype(np.float32) if namespace(array) is np else array.float()


def softmax(array: Any, axis: int) -> Any:
    """exp(x)/Σ exp(x) along ``axis``."""
    if namespace(array) is not np:
        return torch.softmax(array, dim=axis)
    powers = np.exp(array - array.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def relu(array: Any) -> Any:
    """max(x, 0)."""
    return np.maximum(array, 0) if namespace(array) is np else F.relu(array)


def lengths(rows: Any) -> Any:
    """The L2 norms ``(K,)`` of ``rows (K, d)``."""
    return np.linalg.norm(rows, axis=1) if namespace(rows) is np else torch.linalg.vector_norm(rows, dim=1)


def argsort(array: Any, axis: int = 0) -> Any:
    """The indices that sort ``array`` along ``axis``; equal entries keep their order."""
    if namespace(array) is np:
        return np.argsort(array, axis=axis, kind="stable")
    return torch.argsort(array, dim=axis, stable=True)


def take_along(array: Any, indices: Any, axis: int) -> Any:
    """The entries of ``array`` at ``indices`` along ``axis``."""
    if namespace(array) is np:
        return np.take_along_axis(array, indices, axis)
    return torch.take_along_dim(array, indices, dim=axis)


def cholesky(matrix: Any) -> Any | None:
    """The lower Cholesky factor of ``matrix (K, K)``; None if it is not positive definite."""
    if namespace(matrix) is not np:
        factor, failed = torch.linalg.cholesky_ex(matrix)
        return None if int(failed) else factor
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:
        return None


def in_namespace(xp: Any, array: np.ndarray[Any, Any]) -> Any:
    """``array`` as an array of ``xp`` that shares its memory."""
    return array if xp is np else torch.from_numpy(array)
