"""What is kept of a layer's inputs while the sample streams by: one number an edge, a few a row.

Each batch of inputs a (points x edges) updates, and then is forgotten:

    s[i, j]      the sensitivity of edge j of row i, a running maximum                 Algorithm 2, line 2
    delta[i]     the sum of Delta_i(x), whose mean is in Delta-hat                     Algorithm 1, line 6
    largest[j]   the largest |a_j|, which is 0 for a dead neuron                       section 3.3

Inputs of both signs are split as a = a_pos - a_neg and the maximum is taken over both parts (the appendix's remarks
on negative activations); whether that is needed is read off the data.

>>> import torch
>>> stats = Statistics.empty(rows=1, edges=2, biases=0, dtype=torch.float32)
>>> stats.update(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0], [3.0, 1.0]]))
>>> stats.s                         # of the row's value, 4 and 6, the edges bring (1, 3) and (3, 3)
tensor([[0.5000, 0.7500]])
>>> stats.delta_mean().tolist()     # nothing cancels
[1.0]
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coresieve.kernels.max_times import denominators, max_times, reciprocal
from coresieve.layers import ROWS_AT_ONCE, working_dtype

POINTS_AT_ONCE = 512  # bounds the memory for the denominators, two numbers a row and point


@dataclass
class Statistics:
    """The streaming statistics of one layer; `s` is None where only Delta is wanted (a layer that stays exact)."""

    s: Tensor | None  # (rows, edges)
    s_bias: Tensor  # (rows, biases)
    delta: Tensor  # (rows,) float64
    largest: Tensor  # (edges,)
    points: int = 0  # lines of inputs seen: points times positions
    signed: bool = False  # whether any input was negative

    @classmethod
    def empty(
        cls, rows: int, edges: int, biases: int, dtype: torch.dtype, device=None, sensitivities: bool = True
    ):
        s = torch.zeros(rows, edges, dtype=dtype, device=device) if sensitivities else None
        s_bias = torch.zeros(rows, biases, dtype=dtype, device=device)
        delta = torch.zeros(rows, dtype=torch.float64, device=device)
        return cls(s, s_bias, delta, torch.zeros(edges, dtype=dtype, device=device))

    def read(self, rows: Tensor | slice, edges: Tensor | None = None) -> Tensor:
        """The sensitivities of some rows, biases last, as `Layer.read` lays out the weights; perhaps of some edges."""
        assert self.s is not None
        s = self.s[rows]
        return torch.cat([s if edges is None else s[:, edges], self.s_bias[rows]], dim=1)

    def update(self, w: Tensor, a: Tensor, bias: Tensor | None = None, bias_column: int = 0) -> None:
        """Take in inputs `a` of a layer with weights `w`, whose bias is number `bias_column`."""
        for chunk in a.split(POINTS_AT_ONCE):
            chunk = chunk.to(self.largest.dtype).contiguous()
            low, high = chunk.amin(dim=0), chunk.amax(dim=0)
            self.largest = torch.maximum(self.largest, torch.maximum(high, -low))
            self.points += len(chunk)
            negative = bool((low < 0).any())
            self.signed |= negative
            for rows in _blocks(w):
                b = None if bias is None else bias[rows].to(self.largest.dtype)
                self._rows(rows, w[rows].to(self.largest.dtype), chunk, b, bias_column, negative)

    def _rows(
        self, rows: slice, w: Tensor, a: Tensor, b: Tensor | None, bias_column: int, negative: bool
    ) -> None:
        plus, minus = self._part(rows, w, a.clamp(min=0) if negative else a, b, bias_column)
        if negative:  # z^+ = z_pos^+ + z_neg^- and z^- = z_neg^+ + z_pos^-
            neg_plus, neg_minus = self._part(rows, w, (-a).clamp(min=0), None, bias_column)
            plus, minus = plus + neg_minus, minus + neg_plus
        self.delta[rows] += delta(plus, minus).sum(dim=1, dtype=torch.float64)

    def _part(
        self, rows: slice, w: Tensor, a: Tensor, b: Tensor | None, bias_column: int
    ) -> tuple[Tensor, Tensor]:
        """Sensitivities of non-negative inputs; returns the denominators z^+ and z^- (rows x points)."""
        plus, minus = denominators(w, a, b)
        if self.s is not None:
            r_plus, r_minus = reciprocal(plus), reciprocal(minus)
            max_times(w, a, r_plus, r_minus, self.s[rows])
            if b is not None:
                column = self.s_bias[rows, bias_column]
                one = torch.where(b > 0, r_plus.amax(dim=1), r_minus.amax(dim=1)) * b.abs()
                torch.maximum(column, one.clamp(max=1), out=column)
        return plus, minus

    def delta_mean(self) -> Tensor:
        """The mean of Delta_i(x) over the inputs seen, one a row."""
        return self.delta / max(self.points, 1)

    def largest_delta(self) -> float:
        """The largest of those means; 1, which says that nothing cancels, when no input was seen."""
        return float(self.delta_mean().max()) if self.points else 1.0


def delta(plus: Tensor, minus: Tensor) -> Tensor:
    """Delta(x) = (z^+ + z^-) / |z^+ - z^-|, infinite where all cancels, and 1 where there is nothing to cancel."""
    total = plus + minus
    return torch.where(total > 0, total / (plus - minus).abs(), 1.0)


def _blocks(w: Tensor) -> list[slice]:
    """All rows at once, unless a narrow dtype has to be widened: then a block of rows at a time."""
    if w.dtype == working_dtype(w):
        return [slice(None)]
    return [slice(i, i + ROWS_AT_ONCE) for i in range(0, len(w), ROWS_AT_ONCE)]
