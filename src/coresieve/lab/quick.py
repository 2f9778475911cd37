"""Judging a small network costs less than its dense size: layers with few weights run as sparse matrices.

Only for the lab's own chains of layers; the answers are the same to rounding.

>>> layer = nn.Linear(400, 30)
>>> _ = layer.weight.data.mul_(torch.rand(30, 400) < 0.05)
>>> model, x = nn.Sequential(layer, nn.ReLU()), torch.rand(5, 400)
>>> type(quick(model)[0]).__name__, bool(torch.allclose(quick(model)(x), model(x), atol=1e-6))
('Sparse', True)
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn

DENSITY = 0.17  # from here on torch's sparse product is no faster than its dense one, at 500 inputs


class Sparse(nn.Module):
    """x W^T + b for a W that is mostly zeros."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that sparse tensors are in beta
            csr = layer.weight.detach().to_sparse_csr()
            index = csr.crow_indices().int(), csr.col_indices().int()
            self.weight = torch.sparse_csr_tensor(*index, csr.values(), csr.shape)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        y = (self.weight @ x.T.contiguous()).T
        return y if self.bias is None else y + self.bias


def quick(model: nn.Module) -> nn.Module:
    """The same network, to be run and not to be kept."""
    if type(model) is not nn.Sequential:
        return model
    return nn.Sequential(*map(_quicker, model))


def _quicker(layer: nn.Module) -> nn.Module:
    if type(layer) is not nn.Linear or not layer.weight.numel():
        return layer
    kept = int(torch.count_nonzero(layer.weight))
    return Sparse(layer) if kept < DENSITY * layer.weight.numel() else layer
