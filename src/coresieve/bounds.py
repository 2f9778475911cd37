"""Exact bounds from counting: what n independent inputs, k of them bad, say about the share p of all that are bad.

    upper    p <= U(k, n) with probability at least 1 - alpha,  U the p at which Pr(Binomial(n, p) <= k) = alpha
    lower    p >= L(k, n) with probability at least 1 - alpha,  L the p at which Pr(Binomial(n, p) >= k) = alpha
    rank     the k-th smallest of n values is exceeded by at most a share `delta` of fresh ones, with
             probability at least 1 - alpha

The first two are one-sided Clopper-Pearson limits (Clopper, Pearson 1934), quantiles of a Beta law; the third is the
order statistic that Wilks (1941) took, and the same statement read the other way: rank(n, delta) is n - k for the
largest k with U(k, n) <= delta. All hold for every n and p; nothing is approximated.

>>> round(upper(0, 299, 0.05), 4), round(upper(12, 5000, 0.05), 5)
(0.01, 0.00389)
"""

from __future__ import annotations

import math

from scipy.special import betaincc, betaincinv

from coresieve.errors import DomainError


def upper(k: int, n: int, alpha: float) -> float:
    """U(k, n): with k of n inputs bad, at most this share of all are, except with probability alpha.

    >>> upper(3, 3, 0.05), upper(0, 0, 0.05), round(upper(0, 1, 0.05), 2)
    (1.0, 1.0, 0.95)
    """
    _check(k, n, alpha)
    return 1.0 if k == n else float(betaincinv(k + 1, n - k, 1 - alpha))


def lower(k: int, n: int, alpha: float) -> float:
    """L(k, n): with k of n inputs bad, at least this share of all are, except with probability alpha.

    >>> lower(0, 5, 0.05), round(lower(1, 1, 0.05), 3)
    (0.0, 0.05)
    """
    _check(k, n, alpha)
    return 0.0 if k == 0 else float(betaincinv(k, n - k + 1, alpha))


def allowance(n: int, share: float, alpha: float) -> int:
    """The most of n inputs that may be bad while U(k, n) <= share; -1 when even none is too many.

    >>> allowance(299, 0.01, 0.05), allowance(298, 0.01, 0.05), allowance(5000, 0.01, 0.05)
    (0, -1, 38)
    """
    _check(0, n, alpha)
    if share >= 1:
        return n
    if share <= 0:
        return -1
    # Pr(Binomial <= k) rises with k: at most alpha at low, and above it at high, where it is 1
    low, high = -1, n
    while high - low > 1:
        middle = (low + high) // 2  # scipy's bdtr would be NaN from n = 2^31 on
        low, high = (middle, high) if betaincc(middle + 1, n - middle, share) <= alpha else (low, middle)
    return low


def rank(n: int, delta: float, alpha: float) -> int | None:
    """Which of n sorted values, counted from 1, at most a share delta of fresh ones exceed; None: n is too small.

    >>> rank(59, 0.05, 0.05), rank(58, 0.05, 0.05), rank(5000, 0.05, 0.05)
    (59, None, 4776)
    """
    spare = allowance(n, delta, alpha)
    return None if spare < 0 else n - spare


def points_for(share: float, alpha: float) -> int:
    """How many inputs, none of them bad, show that at most this share of all are: (1 - share)^n <= alpha.

    >>> points_for(0.01, 0.05), points_for(0.05, 0.05), points_for(1e-12, 0.05)
    (299, 59, 2995732273553)
    """
    _check(0, 0, alpha)
    if not 0 < share < 1:
        raise DomainError(f"share={share}", "a share strictly between 0 and 1", "share=0.01")
    exact = min(math.log(alpha) / math.log1p(-share), 1e300)
    n = max(1, math.ceil(exact) - 1)  # rounding may be one off either way
    return next((few for few in (n, n + 1) if allowance(few, share, alpha) >= 0), n + 2)


def _check(k: int, n: int, alpha: float) -> None:
    if not 0 < alpha < 1:
        raise DomainError(f"alpha={alpha}", "a probability in (0, 1)", "confidence=0.95")
    if not 0 <= k <= n:
        raise DomainError(
            f"{k} of {n}", "a count between 0 and the number of inputs", "count each input once"
        )
