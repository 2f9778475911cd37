"""Exact bounds: against scipy, against values by hand, and their coverage computed exactly, not simulated."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from coresieve.bounds import allowance, lower, points_for, rank, upper
from coresieve.errors import DomainError

CASES = [(k, n, a) for n in (1, 2, 7, 50, 5000) for k in {0, 1, n // 3, n - 1, n} for a in (0.2, 0.05, 1e-3)]


@pytest.mark.parametrize(("k", "n", "alpha"), CASES)
def test_they_are_scipys_exact_one_sided_limits(k, n, alpha):
    less = stats.binomtest(k, n, alternative="less").proportion_ci(1 - alpha, method="exact").high
    more = stats.binomtest(k, n, alternative="greater").proportion_ci(1 - alpha, method="exact").low
    assert upper(k, n, alpha) == pytest.approx(less, rel=1e-9, abs=1e-12)
    assert lower(k, n, alpha) == pytest.approx(more, rel=1e-9, abs=1e-12)


def test_corners_by_hand():
    assert upper(0, 20, 0.05) == pytest.approx(1 - 0.05 ** (1 / 20))
    assert upper(1, 1, 0.05) == upper(20, 20, 0.05) == upper(0, 0, 0.05) == 1
    assert upper(0, 1, 0.05) == pytest.approx(0.95)
    assert lower(0, 20, 0.05) == lower(0, 1, 0.05) == 0
    assert lower(20, 20, 0.05) == pytest.approx(0.05 ** (1 / 20))


@pytest.mark.parametrize("n", [1, 5, 30, 200])
def test_coverage_is_exact(n):
    """For every p, Pr(p > U) <= alpha and Pr(p < L) <= alpha: sums over the binomial law, no simulation."""
    alpha, k = 0.1, np.arange(n + 1)
    above = np.array([upper(int(i), n, alpha) for i in k])
    below = np.array([lower(int(i), n, alpha) for i in k])
    missed = []
    for p in np.linspace(0.001, 0.999, 331):
        pmf = stats.binom.pmf(k, n, p)
        missed.append(pmf[above < p].sum())
        assert missed[-1] <= alpha + 1e-12
        assert pmf[below > p].sum() <= alpha + 1e-12
    assert max(missed) > alpha / 4  # and they are not needlessly wide


@pytest.mark.parametrize(
    ("n", "share"), list(itertools.product([1, 58, 59, 299, 1000, 5000], [0.005, 0.01, 0.05, 0.5]))
)
def test_allowance_is_the_last_count_that_passes(n, share):
    k = allowance(n, share, 0.05)
    assert k < 0 or upper(k, n, 0.05) <= share * (1 + 1e-9)
    assert upper(k + 1, n, 0.05) > share
    assert rank(n, share, 0.05) == (None if k < 0 else n - k)


@pytest.mark.parametrize(("n", "delta"), [(59, 0.05), (100, 0.05), (500, 0.1), (40, 0.3)])
def test_the_order_statistic_covers_exactly(n, delta):
    """With values uniform on (0, 1): the k-th smallest is Beta(k, n - k + 1), and must reach 1 - delta."""
    k = rank(n, delta, 0.05)
    assert stats.beta.cdf(1 - delta, k, n - k + 1) <= 0.05 + 1e-12
    assert k == 1 or stats.beta.cdf(1 - delta, k - 1, n - k + 2) > 0.05  # one less would not do


@pytest.mark.parametrize("alpha", [0.5, 0.05, 1e-9])
@pytest.mark.parametrize("share", [0.9, 0.3, 0.05, 0.01, 0.005, 1e-4, 1e-10])
def test_points_for_is_the_least_that_does(share, alpha):
    n = points_for(share, alpha)
    assert allowance(n, share, alpha) >= 0
    assert n == 1 or allowance(n - 1, share, alpha) == -1
    assert n >= math.log(alpha) / math.log1p(-share) * (1 - 1e-12)


def test_more_inputs_than_a_32_bit_number_counts():
    n, share = 2**33, 1e-8
    k = allowance(n, share, 0.05)
    assert 60 < k < n * share
    assert upper(k, n, 0.05) <= share < upper(k + 1, n, 0.05)


@pytest.mark.parametrize("call", [
    lambda: upper(3, 2, 0.05), lambda: lower(-1, 2, 0.05), lambda: upper(0, 5, 0.0), lambda: upper(0, 5, 1.0),
    lambda: points_for(0, 0.05), lambda: points_for(1, 0.05), lambda: upper(0, 5, float("nan")),
])  # fmt: skip
def test_what_is_no_count_or_no_probability_is_refused(call):
    with pytest.raises(DomainError):
        call()


@pytest.mark.parametrize("share", [1e-8, 1e-9, 1e-10, 1e-12])
def test_points_for_a_share_next_to_nothing_is_the_formula(share):
    n = points_for(share, 0.05)
    assert n == pytest.approx(math.log(20) / share, rel=1e-6)


def test_points_for_the_smallest_shares_there_are():
    assert points_for(1e-200, 0.05) > 10**199
    assert points_for(5e-324, 0.05) >= 10**299
