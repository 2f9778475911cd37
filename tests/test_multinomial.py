"""The sampling step: exact totals, the multinomial law, and bits that depend on (seed, key, sign) alone.

The tests of the law have fixed seeds, so they give the same answer on every run. With a fresh seed each of
their comparisons would reject a correct sampler with probability ALARM; there are fewer than 100 of them, so
a change of the bits, and of nothing else, turns one red with probability under 1 %.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from coresieve.errors import DomainError, NonFiniteError
from coresieve.kernels import multinomial as module
from coresieve.kernels.multinomial import multinomial

ALARM = 1e-4
EDGES = 300  # more than one tile, more than one step of the search
REGIMES = [25, 150, 5_000, 200_000, 10**9]  # one by one; inversion; both; rejection; counts near 2^31


@pytest.fixture(params=["numba", "numpy"], autouse=True)
def path(request, monkeypatch):
    if request.param == "numpy":
        monkeypatch.setattr(module, "_compiled", lambda: False)
    else:
        pytest.importorskip("numba")
    return request.param


def sensitivities(rows: int, edges: int = EDGES, seed: int = 0) -> np.ndarray:
    """Both signs, a tail, and one zero in ten."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, edges)) * rng.exponential(size=(rows, edges))
    return np.where(rng.random((rows, edges)) < 0.1, 0.0, q).astype(np.float32)


def draws(rows: int, above: int, below: int | None = None) -> np.ndarray:
    return np.tile(np.array([above, above if below is None else below], np.int64), (rows, 1))


def same_row(rows: int, m: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The positive part of many draws from one row, and its probabilities."""
    q = sensitivities(1)
    counts = multinomial(np.repeat(q, rows, axis=0), draws(rows, m), seed, np.arange(rows))
    above = q[0] > 0
    return counts[:, above].astype(np.int64), q[0, above].astype(np.float64) / q[0, above].sum(
        dtype=np.float64
    )


@pytest.mark.parametrize("m", [0, 1, *REGIMES])
def test_totals_are_exact_and_zeros_are_never_drawn(m):
    q = sensitivities(20)
    counts = multinomial(q, draws(20, m, 2 * m), 1, np.arange(20))
    assert counts.min() >= 0
    assert not counts[q == 0].any()
    assert (np.where(q > 0, counts, 0).sum(1, dtype=np.int64) == m).all()
    assert (np.where(q < 0, counts, 0).sum(1, dtype=np.int64) == 2 * m).all()


@pytest.mark.parametrize("m", REGIMES)
def test_shares_of_the_edges(m):
    counts, p = same_row(4000, m, seed=2)
    expected = p * counts.sum()
    few = expected < 5  # pooled, as the chi-square approximation asks
    observed = np.append(counts.sum(0)[~few], counts.sum(0)[few].sum())
    expected = np.append(expected[~few], expected[few].sum())
    keep = expected > 0
    assert stats.chisquare(observed[keep], expected[keep]).pvalue > ALARM


@pytest.mark.parametrize("m", REGIMES)
def test_each_count_is_binomial(m):
    counts, p = same_row(1000, m, seed=3)
    order = np.argsort(p)
    edges = order[np.linspace(0, len(p) - 1, 12).astype(int)]
    jitter = np.random.default_rng(0).random((len(counts), len(edges)))
    law = stats.binom(m, p[edges])
    below = law.cdf(counts[:, edges] - 1)
    place = below + jitter * (law.cdf(counts[:, edges]) - below)  # uniform if and only if the law is right
    worst = min(stats.kstest(column, "uniform").pvalue for column in place.T)
    assert worst > ALARM / len(edges)


@pytest.mark.parametrize("m", REGIMES)
def test_counts_of_two_edges_are_as_dependent_as_they_should_be(m):
    """The five heaviest edges have Cov = -m p_i p_j and Var = m p_i (1 - p_i); and Pearson's statistic of a
    whole row has mean k - 1, where for Poisson counts it would be k."""
    counts, p = same_row(2000, m, seed=4)
    heavy = np.argsort(p)[-5:]
    share = p[heavy]
    z = (counts[:, heavy] - m * share) / np.sqrt(m)
    products = np.einsum("ri,rj->rij", z, z)
    expected = np.diag(share) - np.outer(share, share)
    score = (products.mean(0) - expected) / (products.std(0) / np.sqrt(len(z)))
    assert np.abs(score).max() < stats.norm.isf(ALARM / 2 / 15)
    pearson = ((counts - m * p) ** 2 / (m * p)).sum(1)
    k = len(p)
    variance = 2 * (k - 1) + ((1 / p).sum() - k * k - 2 * k + 2) / m
    assert abs(pearson.mean() - (k - 1)) < stats.norm.isf(ALARM / 2) * np.sqrt(variance / len(pearson))


@pytest.mark.parametrize("m", [20, 5_000])
def test_the_two_signs_are_independent(m):
    q = np.repeat(sensitivities(1), 2000, axis=0)
    counts = multinomial(q, draws(2000, m), 5, np.arange(2000))
    above, below = np.argmax(q[0]), np.argmin(q[0])
    correlation = np.corrcoef(counts[:, above], counts[:, below])[0, 1]
    assert abs(correlation) < stats.norm.isf(ALARM / 2) / np.sqrt(2000)


@pytest.mark.parametrize("m", [5, 700, 10**6])
def test_same_seed_same_bits_whatever_else_is_drawn(m):
    q, keys = sensitivities(10), np.arange(10) * 7919
    together = multinomial(q, draws(10, m), 6, keys)
    assert (multinomial(q, draws(10, m), 6, keys) == together).all()
    for i in range(10):
        alone = multinomial(q[i : i + 1], draws(1, m), 6, keys[i : i + 1])
        assert (alone[0] == together[i]).all()
    only_above = multinomial(q, draws(10, m, 0), 6, keys)
    assert (only_above == np.where(q > 0, together, 0)).all()


@pytest.mark.parametrize("m", [5, 700])
def test_thread_count_changes_nothing(m, monkeypatch):
    monkeypatch.setattr(module, "WORTH", 1)
    q, keys, before = sensitivities(50), np.arange(50), torch.get_num_threads()
    drawn = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            drawn.append(multinomial(q, draws(50, m), 7, keys))
    finally:
        torch.set_num_threads(before)
    assert (drawn[0] == drawn[1]).all()
    assert (drawn[0] == drawn[2]).all()


@pytest.mark.parametrize("m", [20, 700, 10**6])
def test_another_seed_key_or_sign_draws_differently(m):
    q = np.abs(sensitivities(1))
    drawn = [
        multinomial(q, draws(1, m), 0, [0]),
        multinomial(q, draws(1, m), 1, [0]),
        multinomial(q, draws(1, m), 0, [1]),
        multinomial(-q, draws(1, m), 0, [0]),
        multinomial(q, draws(1, m), -1, [0]),
        multinomial(q, draws(1, m), 2**70, [0]),
        multinomial(q, draws(1, m), 0, np.array([2**64 - 1], np.uint64)),
    ]
    assert len({counts.tobytes() for counts in drawn}) == len(drawn)
    assert (multinomial(q, draws(1, m), 0, [-1]) == drawn[-1]).all()  # a key is 64 bits, signed or not


@pytest.mark.parametrize("m", [0, 1, 50, 10**9, 2**40])
@pytest.mark.parametrize("edges", [1, 2, 9, 17])
def test_few_edges_one_sign_and_an_empty_part(m, edges):
    q = np.zeros((3, edges), np.float32)
    q[0, -1], q[1, 0] = 1e-45, -3e38
    counts = multinomial(q, draws(3, m), 0, [0, 1, 2])
    assert (counts == (q != 0) * m).all()
    assert counts.dtype == (np.int64 if m >= 2**31 else np.int32)


@pytest.mark.parametrize("m", [20, 700, 10**6])
def test_masses_of_very_different_size(m):
    """Beside edges of 1 and 1e-3, edges of 1e-30 are never drawn; alone, each of them has its share."""
    q = np.full((4, 200), 1e-30, np.float32)
    q[:, [0, 57, 199]] = [1.0, 1e-3, 1.0]
    q[2:] = -q[2:, ::-1]
    counts = multinomial(q, draws(4, m), 0, np.arange(4))
    assert (np.where(np.abs(q) > 1e-4, counts, 0).sum(1) == m).all()
    light = np.where(np.abs(q) > 1e-4, 0, q)
    counts = multinomial(light, draws(4, m), 0, np.arange(4))
    assert all(
        stats.chisquare(row[row_q != 0]).pvalue > ALARM for row, row_q in zip(counts, light, strict=True)
    )


def test_many_rows_of_many_widths():
    for edges in (7, 8, 9, 127, 128, 129, 136, 255, 256, 257, 1000):
        q = sensitivities(30, edges)
        for m in (2, edges, 100 * edges):
            counts = multinomial(q, draws(30, m), 0, np.arange(30))
            assert (np.where(q > 0, counts, 0).sum(1) == m * (q > 0).any(1)).all()
            assert not counts[q == 0].any()


def test_tensors_and_strides():
    q = torch.from_numpy(sensitivities(6))
    counts = multinomial(q, torch.full((6, 2), 40), 0, torch.arange(6))
    assert isinstance(counts, torch.Tensor)
    again = multinomial(q.T.contiguous().T.numpy(), draws(6, 40), 0, np.arange(6))
    assert (counts.numpy() == again).all()
    assert multinomial(q[:0], torch.zeros(0, 2, dtype=torch.int64), 0, torch.arange(0)).shape == (0, EDGES)
    assert multinomial(q[:, :0], torch.full((6, 2), 40), 0, torch.arange(6)).shape == (6, 0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(bad):
    q = sensitivities(3)
    q[1, 4] = bad
    with pytest.raises(NonFiniteError, match=r"q\[1\]"):
        multinomial(q, draws(3, 5), 0, [0, 1, 2])


def test_what_cannot_be_drawn_is_refused():
    q = sensitivities(3)
    with pytest.raises(DomainError, match="shape"):
        multinomial(q, draws(2, 5), 0, [0, 1, 2])
    with pytest.raises(DomainError, match="-1"):
        multinomial(q, draws(3, -1), 0, [0, 1, 2])
    with pytest.raises(DomainError, match="2\\^53"):
        multinomial(q, draws(3, 2**53 + 1), 0, [0, 1, 2])
    with pytest.raises(DomainError, match="float64"):
        multinomial(q.astype(np.float64), draws(3, 5), 0, [0, 1, 2])
    with pytest.raises(DomainError, match="m of float64"):
        multinomial(q, draws(3, 5) / 2, 0, [0, 1, 2])


def test_poisson_laws_of_the_kernels(path):
    """Inversion and rejection meet at SMALL: means on both sides of it, and far from it."""
    if path == "numpy" or not module._compiled():
        pytest.skip("only numba has these kernels")
    size = 20_000
    stream, start = np.array([[1, 2], [3, 4]], np.uint64), np.zeros(2, np.uint64)
    work, counts = np.empty((3, module.TILE)), np.empty(size, np.int64)
    means = [1e-3, 0.7, 5.0, module.SMALL - 1e-9, module.SMALL + 1e-9, 15.5, 80.0, 1e4]
    for mean in means:
        module._poisson(np.ones(size, np.float32), np.array([mean, 0.0]), stream, start, work, counts)
        start += module.ROUND
        law = stats.poisson(mean)
        below = law.cdf(counts - 1)
        place = below + np.random.default_rng(0).random(size) * (law.cdf(counts) - below)
        assert stats.kstest(place, "uniform").pvalue > ALARM / len(means)


def test_lookup_of_the_kernels(path):
    """The search is right at and beside every border; beyond a group's sum it stays on some mass."""
    if path == "numpy" or not module._compiled():
        pytest.skip("only numba has these kernels")
    for edges in (1, 5, 8, 300, 5000):
        q = sensitivities(1, edges, seed=edges)[0]
        groups = -(-edges // module.MEMBERS)
        cum = np.empty((2, groups + 1 + module.STRIDE))
        module._cumulate(q, cum)
        for sign, sums in zip((1.0, -1.0), cum, strict=True):
            steps = sums[module.STRIDE : groups + 1 : module.STRIDE].copy()
            for u in (*sums[:groups], *np.nextafter(sums[1 : groups + 1], 0)):
                if u < sums[groups]:
                    g = module._group(sums, steps, u)
                    assert sums[g] <= u < sums[g + 1]
                    assert sign * q[module._edge(q, sign, groups, g, u - sums[g])] > 0
                    assert sign * q[module._edge(q, sign, groups, g, 2 * (sums[g + 1] - sums[g]))] > 0
