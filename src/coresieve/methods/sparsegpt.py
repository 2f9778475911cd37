"""SparseGPT (Frantar, Alistarh 2023): prune column after column, each time letting the columns to the right make up.

With H = sum a a^T (plus 1 % of its mean diagonal) and U the upper Cholesky factor of H^-1, the error that pruning w_ij
costs is w_ij^2 / U_jj^2. For each block of 128 columns the edges that cost least are chosen, over all rows together;
then each column in turn passes what its pruned weights leave undone to the columns after it:

    e = (w_j - kept w_j) / U_jj,    w_k -= e U_jk for k > j

a is what the layer sees through the layers pruned before. Every layer keeps the same share; the bias is one more edge,
whose input is 1, the last one.

>>> H = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
>>> pruned(torch.tensor([[1.0, 1.5]]), H, 1)[0, 1].item()     # the second makes up for the first
2.391...
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coresieve.methods.one_shot import OneShot

BLOCK, DAMPING = 128, 0.01


@dataclass(frozen=True)
class SparseGPT(OneShot):
    name: ClassVar[str] = "sparsegpt"

    def pruned(self, W: Tensor, H: Tensor, size: int) -> Tensor:
        return pruned(W, H, size)


def pruned(W: Tensor, H: Tensor, size: int) -> Tensor:
    """W with about `size` entries left, the others 0; each block of columns keeps the same share."""
    W, U = W.clone(), _upper(H).to(W.dtype)
    edges, left = W.shape[1], size
    for start in range(0, edges, BLOCK):
        end = min(start + BLOCK, edges)
        stay = _cheapest_leave(
            W[:, start:end] / U.diagonal()[start:end], round(left * (end - start) / (edges - start))
        )
        left -= int(stay.sum())
        errors = torch.zeros_like(W[:, start:end])
        for j in range(start, end):
            w = W[:, j]
            kept = torch.where(stay[:, j - start], w, 0.0)
            errors[:, j - start] = (w - kept) / U[j, j]
            W[:, j] = kept
            W[:, j + 1 : end] -= errors[:, j - start, None] * U[j, j + 1 : end]
        W[:, end:] -= errors @ U[start:end, end:]
    return W


def _upper(H: Tensor) -> Tensor:
    """U with U^T U = (H + damping)^-1. An input that is always 0 has its place on the diagonal alone."""
    damping = DAMPING * float(H.diagonal().mean()) or 1.0
    damped = H.double() + damping * torch.eye(len(H), dtype=torch.float64, device=H.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
    return torch.linalg.cholesky(inverse, upper=True)


def _cheapest_leave(cost: Tensor, stay: int) -> Tensor:
    mask = torch.zeros(cost.numel(), dtype=torch.bool, device=cost.device)
    mask[torch.topk(cost.abs().flatten(), min(stay, cost.numel())).indices] = True
    return mask.view_as(cost)
