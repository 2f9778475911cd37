"""What is kept of a layer's inputs while the sample streams by: one number an edge, a few a row.

Each batch of inputs a (points x edges) updates, and then is forgotten:

    s[i, j]      the sensitivity of edge j of row i, a running maximum                 Algorithm 2, line 2
    delta[i]     the sum of Delta_i(x), whose mean is in Delta-hat                     Algorithm 1, line 6
    largest[j]   the largest |a_j|, which is 0 for a dead neuron                       section 3.3

Inputs of both signs are split as a = a_pos - a_neg and the maximum is taken over both parts (the appendix's remarks
on negative activations); whether that is needed is read off the data.

Memory: `s` is as large as the weights. In a narrower type than float32 it is rounded up to bfloat16: what is at least
an edge's largest share of a value serves the theorem as well, and what draws an edge also weighs it, so nothing is
biased. All else that a batch needs at one time stays within `room`, four fifths of the weights' size, because a batch
is taken in a few points at a time.

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
from coresieve.layers import ROWS_AT_ONCE

POINTS_AT_ONCE = 512  # at most; more would not be faster
LEAST_POINTS = 16  # at once: fewer would be slow
LEAST_ROWS = 32
SHARE = 0.8  # of the weights' bytes, for what a few points need at one time
LEAST_ROOM = 2**21  # bytes: small networks need not be slow to save what no one misses


@dataclass
class Statistics:
    """The streaming statistics of one layer; `s` is None where only Delta is wanted (a layer that stays exact)."""

    s: Tensor | None  # (rows, edges)
    s_bias: Tensor  # (rows, biases)
    delta: Tensor  # (rows,) float64
    largest: Tensor  # (edges,)
    room: int = LEAST_ROOM  # bytes
    points: int = 0  # lines of inputs seen: points times positions
    signed: bool = False  # whether any input was negative

    @classmethod
    def empty(
        cls,
        rows: int,
        edges: int,
        biases: int,
        dtype: torch.dtype,
        device=None,
        sensitivities: bool = True,
        weights: int = 0,
    ):
        """For weights of this type; `weights` is the size in bytes of all that the network's layers hold."""
        wide = dtype if dtype.itemsize >= 4 else torch.float32
        stored = dtype if dtype == wide else torch.bfloat16  # float16 ends at 6e-8
        return cls(
            s=torch.zeros(rows, edges, dtype=stored, device=device) if sensitivities else None,
            s_bias=torch.zeros(rows, biases, dtype=wide, device=device),
            delta=torch.zeros(rows, dtype=torch.float64, device=device),
            largest=torch.zeros(edges, dtype=wide, device=device),
            room=max(LEAST_ROOM, int(SHARE * weights)),
        )

    @property
    def dtype(self) -> torch.dtype:
        """What is computed in: float32 or wider."""
        return self.largest.dtype

    def read(self, rows: Tensor | slice, edges: Tensor | None = None) -> Tensor:
        """The sensitivities of some rows, biases last, as `Layer.read` lays out the weights; perhaps of some edges."""
        assert self.s is not None
        s = self.s[rows]
        s = s if edges is None else s[:, edges]
        return torch.cat([s.to(self.dtype), self.s_bias[rows]], dim=1)

    def update(self, w: Tensor, a: Tensor, bias: Tensor | None = None, bias_column: int = 0) -> None:
        """Take in inputs `a` of a layer with weights `w`, whose bias is number `bias_column`."""
        low, high = torch.aminmax(a, dim=0)
        self.largest = torch.maximum(self.largest, torch.maximum(high, -low).to(self.dtype))
        negative = bool((low < 0).any())
        self.signed |= negative
        self.points += len(a)
        points, rows_at_once = self._at_once(w, negative)
        for chunk in a.chunk(-(-len(a) // points)):
            chunk = chunk.to(self.dtype).contiguous()
            for first in range(0, len(w), rows_at_once):
                rows = slice(first, first + rows_at_once)
                b = None if bias is None else bias[rows].to(self.dtype)
                self._rows(rows, w[rows].to(self.dtype), chunk, b, bias_column, negative)

    def _at_once(self, w: Tensor, negative: bool) -> tuple[int, int]:
        """How many points, and how many rows, are taken in together, so that the memory for them stays within `room`.

        A point has two numbers for each row, z^+ and z^-, and as many again where they have to be added up; and two
        and a half for each edge, in the kernel's lists, or with a copy up to four and a half. Weights of a narrow type
        are widened a block of rows at a time.
        """
        (rows, edges), narrow, item = w.shape, w.dtype != self.dtype, self.dtype.itemsize
        room = self.room
        if narrow:
            room //= 2
            rows = max(LEAST_ROWS, min(rows, ROWS_AT_ONCE, room // (5 * edges * item)))
        else:
            room -= min(rows, ROWS_AT_ONCE) * edges * item  # a block of w^+ or w^-
        a_point = item * ((4 if negative else 2) * rows + (5 + 2 * negative + 2 * narrow) * edges // 2)
        return max(LEAST_POINTS, min(POINTS_AT_ONCE, room // a_point)), rows

    def _rows(
        self, rows: slice, w: Tensor, a: Tensor, b: Tensor | None, bias_column: int, negative: bool
    ) -> None:
        if not negative:
            z = denominators(w, a, b)
            self._add_delta(rows, *z)
            self._raise(rows, w, a, *z, b, bias_column)
            return
        positive = a.clamp(min=0)
        z = denominators(w, positive, b)
        plus, minus = (part.clone() for part in z)
        self._raise(rows, w, positive, *z, b, bias_column)
        del positive, z  # before there are others
        mirrored = a.neg().clamp_(min=0)
        z = denominators(w, mirrored)
        plus += z[1]  # z^+ = z_pos^+ + z_neg^- and z^- = z_pos^- + z_neg^+
        minus += z[0]
        self._add_delta(rows, plus, minus)
        self._raise(rows, w, mirrored, *z, None, bias_column)

    def _add_delta(self, rows: slice, plus: Tensor, minus: Tensor) -> None:
        parts = zip(plus.split(ROWS_AT_ONCE), minus.split(ROWS_AT_ONCE), strict=True)
        self.delta[rows] += torch.cat([delta(*part).sum(dim=1, dtype=torch.float64) for part in parts])

    def _raise(
        self,
        rows: slice,
        w: Tensor,
        a: Tensor,
        plus: Tensor,
        minus: Tensor,
        b: Tensor | None,
        bias_column: int,
    ) -> None:
        """Raise the sensitivities to what non-negative inputs show. The denominators become their reciprocals."""
        if self.s is None:
            return
        for z in (*plus.split(ROWS_AT_ONCE), *minus.split(ROWS_AT_ONCE)):
            z.copy_(reciprocal(z))
        s = self.s[rows].to(w.dtype)  # no copy where it is of this type
        max_times(w, a, plus, minus, s)
        if s.dtype != self.s.dtype:
            self.s[rows] = rounded_up(s)
        if b is not None:
            column = self.s_bias[rows, bias_column]
            one = torch.where(b > 0, plus.amax(dim=1), minus.amax(dim=1)) * b.abs()
            torch.maximum(column, one.clamp(max=1), out=column)

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


def rounded_up(s: Tensor) -> Tensor:
    """Numbers in float32, none negative, as bfloat16: the least of those that are not smaller.

    >>> rounded_up(torch.tensor([0.0, 1.0, 0.2])).float()
    tensor([0.0000, 1.0000, 0.2002])
    """
    return ((s.view(torch.int32) + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)
