"""The weights of the edges that stay: the exact minimum of w H w - 2 g w over each row's own edges.

Rows are taken together in batches of like size: one batched Cholesky factorisation, no loop over rows.

>>> H, G = torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([[3.0, 3.0], [3.0, 3.0]])
>>> refit(H, G, torch.tensor([[True, True], [True, False]])).round(decimals=4).tolist()
[[1.0, 1.0], [1.5, 0.0]]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from coresieve.kernels.submatrices import submatrices

NUMBERS_AT_ONCE = 2**25  # in the matrices of one batch


def refit(H: Tensor, G: Tensor, stay: Tensor) -> Tensor:
    """(rows, edges), 0 where an edge does not stay. H has to be positive definite."""
    n = len(H)
    H, G = nn.functional.pad(H, (0, 1, 0, 1)), nn.functional.pad(G, (0, 1))  # a last edge of nothing
    W = torch.zeros_like(G)
    for rows, most in _alike(stay.sum(dim=1)):
        edges = _numbers(stay[rows], most)
        A = submatrices(H, edges)
        A.diagonal(dim1=1, dim2=2).add_(
            (edges == n).to(H.dtype)
        )  # shorter rows are filled up with the identity
        W[rows] = W[rows].scatter(1, edges, _solve(A, G[rows].gather(1, edges)))
    return W[:, :n]


def _numbers(stay: Tensor, most: int) -> Tensor:
    """Of the edges that stay in each row; the number after the last edge where a row has fewer than `most`."""
    n = stay.shape[1]
    numbers = torch.where(stay, torch.arange(n, device=stay.device), n)
    return torch.sort(numbers, dim=1, stable=True).values[:, :most]


def _alike(sizes: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Rows in batches of nearly as many edges: (rows, the most of them)."""
    order = torch.argsort(sizes, stable=True)
    order = order[int((sizes == 0).sum()) :]
    while len(order):
        most = int(sizes[order[-1]])
        n = max(1, min(len(order), NUMBERS_AT_ONCE // most**2))
        near = int((sizes[order[-n:]] >= 0.9 * most - 8).sum())
        yield order[-near:], most
        order = order[:-near]


def _solve(A: Tensor, b: Tensor) -> Tensor:
    """By Cholesky; what is singular to rounding is solved again in float64, with a trace of the identity added."""
    L, failed = torch.linalg.cholesky_ex(A)  # reads the lower triangles
    x = torch.cholesky_solve(b.unsqueeze(2), L).squeeze(2)
    bad = (failed != 0) | ~torch.isfinite(x).all(dim=1)
    if bool(bad.any()):
        wide = A[bad].double()
        wide = wide.tril() + wide.tril(-1).mT
        wide.diagonal(dim1=1, dim2=2).add_(1e-9 * wide.diagonal(dim1=1, dim2=2).amax(dim=1, keepdim=True))
        x[bad] = torch.linalg.lstsq(wide, b[bad].double().unsqueeze(2)).solution.squeeze(2).to(x.dtype)
    return x
