"""`nn.Linear` as rows: one neuron a row, one weight an edge, the bias an edge whose input is always 1.

>>> import torch
>>> from torch import nn
>>> rows, points = inputs(nn.Linear(3, 2), torch.zeros(4, 5, 3)).shape, weight(nn.Linear(3, 2)).shape
>>> rows, points
(torch.Size([20, 3]), torch.Size([2, 3]))
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def why_not(module: nn.Module) -> str | None:
    """None when this module is a plain Linear whose rows we can rewrite; else the reason in words."""
    if not isinstance(module, nn.Linear):
        return f"{type(module).__name__} is not a layer that coresieve compresses"
    if type(module).forward is not nn.Linear.forward:
        return f"{type(module).__name__} has a forward of its own"
    if parametrize.is_parametrized(module) or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return "its weight is computed by a parametrization (remove it first to compress this layer)"
    if module.weight.dtype not in DTYPES or module.weight.device.type == "meta":
        return f"its weight is {module.weight.dtype} on {module.weight.device}, which coresieve does not compute with"
    if module.weight.numel() == 0:
        return "it has no edges"
    return None


def weight(module: nn.Linear) -> Tensor:
    """(rows, edges): the weights as stored, no copy."""
    return module.weight


def inputs(module: nn.Linear, x: Tensor) -> Tensor:
    """(points, edges): what each neuron sees, one line a point and position."""
    return x.reshape(-1, module.in_features)


def outputs(module: nn.Linear, y: Tensor) -> Tensor:
    """(points, rows): what the neurons answer."""
    return y.reshape(-1, module.out_features)
