"""How much may stay: a share of the parameters (`keep=`), an error that the theory bounds (`eps=` with `delta=`), or
the bytes of the compact file (`max_bytes=`).

>>> Budget.of(keep=0.1).parameters(1234)
123
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any, SupportsIndex

from coresieve.errors import BudgetError


@dataclass(frozen=True)
class Budget:
    """Exactly one of `keep`, `eps` and `max_bytes`; `delta` is the probability with which an `eps` may fail."""

    keep: float | None = None
    eps: float | None = None
    delta: float = 0.05
    max_bytes: int | None = None

    @classmethod
    def of(
        cls,
        *,
        keep: float | None = None,
        eps: float | None = None,
        delta: float = 0.05,
        max_bytes: int | None = None,
    ) -> Budget:
        budgets = {"keep": keep, "eps": eps, "max_bytes": max_bytes}
        given = ", ".join(f"{k}={v!r}" for k, v in budgets.items() if v is not None)
        if len([v for v in budgets.values() if v is not None]) != 1:
            raise BudgetError(
                given or "no budget",
                "exactly one of keep=, eps= and max_bytes=",
                "keep=0.1, or eps=0.5, delta=0.05, or max_bytes=200_000",
            )
        if max_bytes is not None and (
            isinstance(max_bytes, bool) or not isinstance(max_bytes, SupportsIndex) or max_bytes < 1
        ):
            raise BudgetError(given, "a whole number of bytes", "max_bytes=200_000")
        keep, eps, delta = real(keep), real(eps), check_delta(delta)
        if keep is not None and not 0 < keep <= 1:
            raise BudgetError(given, "a share in (0, 1]", "keep=0.1 keeps a tenth of the parameters")
        if eps is not None and not 0 < eps < 1:
            raise BudgetError(given, "a relative error in (0, 1)", "eps=0.5 lets each output be off by half")
        return cls(keep, eps, delta, None if max_bytes is None else operator.index(max_bytes))

    def parameters(self, before: int) -> int:
        """How many of `before` parameters may stay."""
        assert self.keep is not None
        return math.floor(self.keep * before + 1e-9)  # 0.29 * 100 is 28.999999999999996

    def __str__(self) -> str:
        if self.max_bytes is not None:
            return f"max_bytes={self.max_bytes}"
        return f"keep={self.keep:g}" if self.keep is not None else f"eps={self.eps:g}, delta={self.delta:g}"


def check_delta(delta: float) -> float:
    value = real(delta)
    if value is None or not 1e-200 < value < 1:  # smaller ones make the formulas overflow
        raise BudgetError(
            f"delta={delta!r}", "a probability in (0, 1)", "delta=0.05 lets the promise fail once in 20"
        )
    return value


def real(x: Any) -> float | None:
    """A plain float of any kind of real number, NaN for what is none; None stays.

    >>> real(True), real("0.5"), real(1j), real(None), real(1)
    (nan, nan, nan, None, 1.0)
    """
    if x is None:
        return None
    if isinstance(x, bool | str | bytes) or not hasattr(x, "__float__") or _imaginary(x):
        return math.nan
    try:
        return float(x)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _imaginary(x: object) -> bool:
    """NumPy's complex numbers turn into floats, with a warning."""
    return isinstance(x, numbers.Complex) and not isinstance(x, numbers.Real)
