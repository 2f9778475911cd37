"""What no coder gets below that knows nothing but the numbers: the bits of a tensor's values and of where they are.

Where: log2 of the number of ways to choose k of n entries. Values: all their bits for each entry that is not 0; 16
where they were rounded to float16 or bfloat16; for 8, 6 or 4 bits the entropy of the whole numbers, all rows together
(steps and tables come on top). Real numbers of 32 bits cost less: their exponents are alike, so a lossless file may
be smaller than this. Biases are not rounded.

>>> some = torch.zeros(100, 100)
>>> some[:, :10] = 1.5
>>> least(some), least(some, "float16").values, least(some, "8 bits").values
(Least(kept=1000, positions=4683.7..., values=32000.0), 16000.0, 0.0)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coresieve.compact import rans
from coresieve.compact.positions import bound

WIDTHS = {"float16": 16, "bfloat16": 16}


@dataclass(frozen=True)
class Least:
    """Entries that are not 0, and bits."""

    kept: int
    positions: float
    values: float

    @property
    def bytes(self) -> float:
        return (self.positions + self.values) / 8


def least(tensor: Tensor, rounding: str = "") -> Least:
    """`rounding` as a report tells it: "", "float16", "8 bits"."""
    k = int(torch.count_nonzero(tensor))
    width = 8 * tensor.element_size()
    if tensor.ndim < 2 or not tensor.is_floating_point():
        values = float(k * width)
    elif rounding.endswith(" bits"):
        values = min(_steps(tensor, int(rounding.removesuffix(" bits"))), float(k * width))
    else:
        values = float(k * min(width, WIDTHS.get(rounding, width)))
    return Least(k, bound(tensor.numel(), k), values)


def _steps(w: Tensor, bits: int) -> float:
    """The entropy of each entry's multiple of its row's step."""
    w = w.flatten(1).double()
    step = w.abs().amax(dim=1, keepdim=True).clamp(min=1e-300) / (2 ** (bits - 1) - 1)
    counts = np.unique((w / step).round()[w != 0].numpy(), return_counts=True)[1]
    return rans.entropy(counts)
