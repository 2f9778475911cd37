"""max_bytes=: the share to keep at which the file just fits.

A file grows nearly along a line with the share that is kept, so a few compressions suffice: one with nothing kept, the
least; one at a guess from what an entry costs; then where the line through the nearest two meets the bytes.

>>> keep = fit(lambda keep: keep, lambda keep: 700 + round(90_000 * keep), 10_000, entries=20_000, bits=26.0)
>>> 9_900 <= 700 + 90_000 * keep <= 10_000
True
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

from coresieve.errors import BudgetError

TRIES = 8
CLOSE = 0.99  # of the bytes: full enough
Small = TypeVar("Small")


def fit(
    draw: Callable[[float], Small], size: Callable[[Small], int], max_bytes: int, *, entries: int, bits: float
) -> Small:
    """Of the networks drawn, each at a share to keep, the largest of at most `max_bytes`.

    `entries` is how many parameters there are to keep, `bits` about what the value of one costs.
    """
    first = 1 / max(1, entries)
    best = draw(first)
    filled = least = size(best)
    if least > max_bytes:
        enough = least + 8  # the report tells the budget, in more digits then
        expected = f"at least {enough}, with next to nothing kept of the layers"
        raise BudgetError(f"max_bytes={max_bytes}", expected, f"max_bytes={2 * enough}")
    under, over = (first, least), (math.inf, math.inf)
    keep = max(first, guess(8 * (max_bytes - least), entries, bits))
    for _ in range(TRIES):
        small = draw(keep)
        here = (keep, size(small))
        if here[1] > max_bytes:
            over = min(over, here)
        else:
            under = max(under, here)
            if here[1] >= filled:
                filled, best = here[1], small
            if keep == 1 or filled >= CLOSE * max_bytes:
                break
        if over[0] - under[0] < first:
            break
        keep = following((first, least), under, over, (1 + CLOSE) / 2 * max_bytes)
    return best


def guess(room: float, entries: int, bits: float) -> float:
    """The share of `entries` that costs `room` bits: their values, and log2 of the number of ways to choose them."""
    low, high = 0.0, 1.0
    for _ in range(30):
        p = (low + high) / 2
        chosen = -p * math.log2(p) - (1 - p) * math.log2(1 - p)
        low, high = (p, high) if entries * (p * bits + chosen) <= room else (low, p)
    return high if high < 0.999 else 1.0


def following(
    least: tuple[float, int], under: tuple[float, int], over: tuple[float, float], aim: float
) -> float:
    """Between the two, or beyond the one, where a line of (share, bytes) meets `aim`."""
    (a, size_a), (b, size_b) = (under, over) if over[0] < math.inf else (least, under)
    if size_b <= size_a:
        return min(1.0, 2 * b)
    keep = a + (aim - size_a) / (size_b - size_a) * (b - a)
    if over[0] < math.inf:
        return min(max(keep, a + 0.05 * (b - a)), b - 0.05 * (b - a))
    return min(1.0, max(keep, 1.01 * b))
