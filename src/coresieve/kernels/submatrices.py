"""Of one symmetric matrix many small ones: H[e_b, e_b] for the edges e_b of each row, lower triangles only.

Which is what a Cholesky factorisation reads. Compiled by numba where it is there; else torch's indexing does it, in
whole and several times slower.

>>> H = torch.tensor([[1.0, 2.0, 3.0], [2.0, 4.0, 5.0], [3.0, 5.0, 6.0]])
>>> submatrices(H, torch.tensor([[0, 2], [1, 2]])).tril().tolist()
[[[1.0, 0.0], [3.0, 6.0]], [[4.0, 0.0], [5.0, 6.0]]]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def submatrices(H: Tensor, edges: Tensor) -> Tensor:
    """(rows, most, most) for `edges` of shape (rows, most)."""
    lower = _compiled() if H.device.type == "cpu" else None
    if lower is None:
        return H[edges[:, :, None], edges[:, None, :]]
    rows, most = edges.shape
    out = torch.zeros(rows, most, most, dtype=H.dtype)
    lower(H.detach().contiguous().numpy(), edges.contiguous().numpy(), out.numpy())
    return out


def _lower(H, edges, out):
    for b in range(edges.shape[0]):
        for i in range(edges.shape[1]):
            row = H[edges[b, i]]
            for j in range(i + 1):
                out[b, i, j] = row[edges[b, j]]


@functools.cache
def _compiled() -> Callable[..., Any] | None:
    try:
        import numba
    except ImportError:
        return None
    try:
        return numba.njit(cache=True, nogil=True)(_lower)
    except RuntimeError:  # no folder that a cache could be written to
        return numba.njit(nogil=True)(_lower)
