"""How much may stay: a share of the parameters (`keep=`) or an error that the theory bounds (`eps=` with `delta=`).

>>> Budget.of(keep=0.1).parameters(1234)
123
"""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from coresieve.errors import BudgetError


@dataclass(frozen=True)
class Budget:
    """Exactly one of `keep` and `eps`; `delta` is the probability with which an `eps` may fail."""

    keep: float | None = None
    eps: float | None = None
    delta: float = 0.05

    @classmethod
    def of(cls, *, keep: float | None = None, eps: float | None = None, delta: float = 0.05) -> Budget:
        given = ", ".join(f"{k}={v!r}" for k, v in (("keep", keep), ("eps", eps)) if v is not None)
        if (keep is None) == (eps is None):
            raise BudgetError(
                given or "no budget", "exactly one of keep= and eps=", "keep=0.1, or eps=0.5, delta=0.05"
            )
        keep, eps, delta = real(keep), real(eps), check_delta(delta)
        if keep is not None and not 0 < keep <= 1:
            raise BudgetError(given, "a share in (0, 1]", "keep=0.1 keeps a tenth of the parameters")
        if eps is not None and not 0 < eps < 1:
            raise BudgetError(given, "a relative error in (0, 1)", "eps=0.5 lets each output be off by half")
        return cls(keep, eps, delta)

    def parameters(self, before: int) -> int:
        """How many of `before` parameters may stay."""
        assert self.keep is not None
        return math.floor(self.keep * before + 1e-9)  # 0.29 * 100 is 28.999999999999996

    def __str__(self) -> str:
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
