"""Wanda (Sun et al. 2024): in each row the edges with the largest |w_ij| ||a_j||_2 stay as they are.

a_j is what edge j sees of the calibration inputs, through the layers pruned before. Every row keeps the same share. The
bias is one more edge, whose input is 1.

>>> best_in_rows(torch.tensor([[1.0, 3.0, 2.0], [9.0, 8.0, 7.0]]), 3)
tensor([[False,  True,  True],
        [ True, False, False]])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from coresieve.methods.one_shot import OneShot


@dataclass(frozen=True)
class Wanda(OneShot):
    name: ClassVar[str] = "wanda"

    def pruned(self, W: Tensor, H: Tensor, size: int) -> Tensor:
        return torch.where(best_in_rows(W.abs() * H.diagonal().sqrt(), size), W, 0.0)


def best_in_rows(score: Tensor, size: int) -> Tensor:
    """A mask of the largest in each row, as many in all as `size`: one more in the first rows where it does not divide.

    What is 0 has the lowest rank; of equals the first stay.
    """
    rows = len(score)
    each = torch.full((rows, 1), size // rows, device=score.device)
    each[: size % rows] += 1
    rank = torch.argsort(torch.argsort(score, dim=1, descending=True, stable=True), dim=1)
    return rank < each
