"""Magnitude pruning (weight thresholding): the largest weights stay as they are, the others become 0.

`scope="layer"` keeps the same share of every layer, `scope="global"` lets all layers compete.

>>> Magnitude(scope="global")
Magnitude(scope='global')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch

from coresieve.errors import MethodError
from coresieve.methods.method import Job, Method, Work, split_evenly


@dataclass(frozen=True)
class Magnitude(Method):
    scope: Literal["layer", "global"] = "layer"

    name: ClassVar[str] = "magnitude"
    random: ClassVar[bool] = False

    def __post_init__(self):
        if self.scope not in ("layer", "global"):
            raise MethodError(f"scope={self.scope!r}", "'layer' or 'global'", 'Magnitude(scope="global")')

    def __str__(self) -> str:
        return self.name if self.scope == "layer" else "magnitude (global)"

    def compress(self, job: Job) -> None:
        assert job.budget.keep is not None
        if self.scope == "global":
            keep_largest(job.works, job.target())
            return
        for work, target in zip(job.works, split_evenly(job.works, job.budget.keep), strict=True):
            keep_largest([work], target)


def keep_largest(works: list[Work], k: int) -> None:
    """Zero all but the k largest |w| of these layers; of equals the first stay."""
    if k >= sum(work.line.before for work in works):
        return
    bits, above = threshold(works, k)
    equals_left = k - above
    for work, rows, w in blocks(works):
        size = order(w)
        stay = size > bits
        equal = size == bits
        if equals_left and equal.any():
            index = np.flatnonzero(equal)[:equals_left]
            stay.reshape(-1)[index] = True
            equals_left -= len(index)
        work.layer.write(rows, torch.where(torch.from_numpy(stay).to(w.device), w, 0.0))


def threshold(works: list[Work], k: int) -> tuple[int, int]:
    """The k-th largest |w| as an ordered integer, and how many are larger: two counting passes, no sorting, no copy."""
    high = np.zeros(2**16, np.int64)
    for _, _, w in blocks(works):
        high += np.bincount(order(w).ravel() >> 16, minlength=2**16)
    top, above = _falls_in(high, k)
    low = np.zeros(2**16, np.int64)
    for _, _, w in blocks(works):
        size = order(w).ravel()
        low += np.bincount(size[size >> 16 == top] & 0xFFFF, minlength=2**16)
    rest, more = _falls_in(low, k - above)
    return (top << 16) + rest, above + more


def _falls_in(counts: np.ndarray, k: int) -> tuple[int, int]:
    """The bin that holds the k-th largest, and how many lie in bins above it."""
    at_least = counts[::-1].cumsum()[::-1]
    where = int(np.flatnonzero(at_least >= max(k, 1))[-1]) if k > 0 else len(counts) - 1
    return where, int(at_least[where] - counts[where])


def order(w: torch.Tensor) -> np.ndarray:
    """|w| in float32 as integers: non-negative floats compare as their bits do."""
    return w.abs().float().cpu().numpy().view(np.int32).astype(np.int64)


def blocks(works: list[Work]) -> Iterator[tuple[Work, slice, torch.Tensor]]:
    for work in works:
        for rows in work.layer.blocks():
            yield work, rows, work.layer.read(rows)
