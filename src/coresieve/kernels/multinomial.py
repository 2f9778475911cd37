"""Multinomial draws, row by row and sign by sign: the sampling step of Algorithm 1.

Claim: `counts[i]` restricted to the positive entries of `q[i]` is Multinomial(m[i, 0], q / sum q), restricted
to the negative ones Multinomial(m[i, 1], |q| / sum |q|), the two parts independent; the law is exact to the
rounding of float64, the totals are exact, and an edge with q = 0 is never drawn.

>>> import numpy as np
>>> q = np.array([[3.0, -1.0, 0.0, 1.0], [0.0, 0.0, 2.0, 0.0]], dtype=np.float32)
>>> counts = multinomial(q, m=[[1000, 7], [5, 9]], seed=0, keys=[0, 1])
>>> print(counts[0, [0, 3]].sum(), counts[0, 1], counts[1])  # row 1 has no negative part to draw
1000 7 [0 0 5 0]

How. With few draws each is looked up by itself: edges are summed in groups of eight, a search finds the
draw's group and a scan its edge; the only work done for every edge is one addition. With many draws the
counts are Poisson first: N_j ~ Poisson(mu q_j / sum q), all independent, with mu a little under m. Given
their total T such counts are Multinomial(T, q); so when T <= m the m - T draws still missing are added, by
the same two ways, and the sum is Multinomial(m, q) whatever the law of T. When T > m the round is thrown
away, and that too depends on T alone.

Bits. Random numbers are a function of (seed, key, sign, counter), with no state, so a part's draw depends on
nothing else: not on the other rows of the call, nor on the other sign, nor on the number of threads. Without
numba, numpy's generator draws from the same law with bits of its own.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from coresieve.errors import DomainError, NonFiniteError

if TYPE_CHECKING:
    from jaxtyping import Float
    from numpy.typing import ArrayLike
    from torch import Tensor

    Rows = Float[Tensor, "rows edges"] | Float[np.ndarray, "rows edges"]

MOST = 2**53  # more draws than this are not whole numbers in float64
MEMBERS = 8  # edges per group: fewer make the pass over q slower, more make each draw slower
STRIDE = 16  # groups per step of the search
DENSE = 0.1  # a part with more draws than this per edge is drawn as Poisson first
SLACK = 2.0  # mu = m - SLACK sqrt(m): T > m, a round thrown away, has probability 2 %
SMALL = 16.0  # Poisson means up to here are drawn by inversion, larger ones by rejection (which needs 10)
LONGEST = 80  # P(Poisson(16) >= 80) < 1e-29: a search that gets here has met the rounding of its own sums
TILE = 256  # edges worked on at once, so that the work arrays stay in the first-level cache
WORTH = 2**17  # edges that are worth one more thread

GOLDEN, MIX1, MIX2 = (np.uint64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
U11, U27, U30, U31 = (np.uint64(c) for c in (11, 27, 30, 31))
LAP, ROUND = np.uint64(1 << 40), np.uint64(1 << 50)
EXP = np.exp(-np.arange(8 * SMALL + 1) / 8)
LOG_FACTORIAL = np.array([math.lgamma(k + 1) for k in range(16)])


def _mix(z):
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): each bit of z reaches each bit of the answer."""
    z = (z ^ (z >> U30)) * MIX1
    z = (z ^ (z >> U27)) * MIX2
    return z ^ (z >> U31)


def _uniform(a, b, at):
    """The number in [0, 1) at place `at` of the stream (a, b)."""
    bits = _mix(_mix(a + at * GOLDEN) ^ b)
    return np.float64(np.int64(bits >> U11)) * 2.0**-53


def _cumulate(q, cum):
    """Running sums of q's positive part in cum[0], of its negative part in cum[1], over groups of edges.

    Group g holds the edges g, g + groups, g + 2 groups ...: so groups are summed side by side, in an order
    that is the same on every processor.
    """
    groups = -(-q.size // MEMBERS)
    cum[:, : groups + 1] = 0.0
    cum[:, groups + 1 :] = np.inf
    above, below = cum[0, 1:], cum[1, 1:]
    for first in range(0, q.size, groups):
        some = q[first : first + groups]
        for g in range(some.size):
            x = np.float64(some[g])
            above[g] += 0.0 if x <= 0 else x  # written so that NaN reaches the sum
            below[g] += 0.0 if x >= 0 else -x
    for g in range(1, groups):
        above[g] += above[g - 1]
        below[g] += below[g - 1]
    return above[groups - 1], below[groups - 1]


def _group(cum, steps, u):
    """The g with cum[g] <= u < cum[g + 1]. Counting every entry up to u has no branch to mispredict."""
    g = 0
    for i in range(steps.size):
        g += STRIDE if steps[i] <= u else 0
    first = np.uint64(g + 1)  # unsigned, so that no index is tested for counting from the end
    for i in range(STRIDE):
        g += 1 if cum[first + np.uint64(i)] <= u else 0
    return g


def _edge(q, sign, groups, g, rest):
    """The edge of group g that holds place `rest` of the group's sum; one whose own mass is not zero."""
    reach, passed, last = 0.0, 0, q.size - 1
    for k in range(MEMBERS):
        x = sign * np.float64(q[np.uint64(min(g + k * groups, last))])
        reach += x if x > 0 else 0.0
        passed += 1 if reach <= rest else 0
    edge = g + passed * groups
    if edge > last:  # rounding: the group's own sum is a last bit short of cum[g + 1] - cum[g]
        edge = g + (last - g) // groups * groups
        while edge >= groups and sign * q[edge] <= 0:
            edge -= groups
    return edge


def _one_by_one(q, sign, m, stream, start, total, cum, steps, counts):
    """m draws, each looked up by itself."""
    a, b, groups = stream[0], stream[1], -(-q.size // MEMBERS)
    for i in range(steps.size):
        steps[i] = cum[(i + 1) * STRIDE]
    for d in range(m):
        u = _uniform(a, b, start + np.uint64(d)) * total  # < total, because U is at most 1 - 2^-53
        g = _group(cum, steps, u)
        counts[np.uint64(_edge(q, sign, groups, g, u - cum[np.uint64(g)]))] += 1


def _means(q, rate, lam):
    """The Poisson mean of each edge."""
    above, below = rate[0], -rate[1]  # read once: a load inside the loop would keep it from being vectorised
    for j in range(q.size):
        x = np.float64(q[j])
        lam[j] = x * (above if x > 0 else below)


def _uniforms(q, stream, start, u):
    """A number in [0, 1) for each edge, at its place in the stream of its sign."""
    a0, b0, s0 = stream[0, 0], stream[0, 1], start[0]
    a1, b1, s1 = stream[1, 0], stream[1, 1], start[1]
    for j in range(q.size):
        up = q[j] > 0
        u[j] = _uniform(a0 if up else a1, b0 if up else b1, (s0 if up else s1) + np.uint64(j))


def _inversion(lam, u, p, n):
    """n[j] ~ Poisson(lam[j]) where lam <= SMALL, else 0: all edges take each step of the search together."""
    for j in range(lam.size):
        mean = min(lam[j], SMALL)
        i = np.uint64(8 * mean + 0.5)
        x = np.float64(np.int64(i)) / 8 - mean
        tail = 1 + x / 5 * (1 + x / 6 * (1 + x / 7 * (1 + x / 8)))
        p[j] = EXP[i] * (1 + x * (1 + x / 2 * (1 + x / 3 * (1 + x / 4 * tail))))
        n[j] = 0
        u[j] = u[j] if lam[j] <= SMALL else -1.0
    alive, k = 1, 0
    while alive > 0 and k < LONGEST:
        k += 1
        scale, alive = 1.0 / k, 0
        for j in range(lam.size):
            more = 1 if u[j] >= p[j] else 0  # u < 0 once the search has ended
            alive += more
            n[j] += more
            u[j] -= p[j]
            p[j] *= lam[j] * scale


def _log_poisson(k, lam):
    """log P(Poisson(lam) = k) with no large terms that cancel (Loader 2000)."""
    if k < LOG_FACTORIAL.size:
        return k * math.log(lam) - lam - LOG_FACTORIAL[k]
    x = (k - lam) / lam
    stirling = (1 / 12 - (1 / 360 - (1 / 1260 - 1 / (1680.0 * k * k)) / k / k) / k / k) / k
    return -lam * ((1 + x) * math.log1p(x) - x) - stirling - 0.5 * math.log(2 * math.pi * k)


def _rejection(lam, stream, at):
    """Poisson(lam), lam >= 10: transformed rejection with squeeze, PTRS of Hoermann (1993)."""
    b = 0.931 + 2.53 * math.sqrt(lam)
    a = -0.059 + 0.02483 * b
    while True:
        u = _uniform(stream[0], stream[1], at) - 0.5
        v = _uniform(stream[0], stream[1], at + LAP)
        at += LAP + LAP
        us = 0.5 - abs(u)
        k = math.floor((2 * a / us + b) * u + lam + 0.43)
        if us >= 0.07 and v <= 0.9277 - 3.6224 / (b - 2):
            return np.int64(k)
        if k < 0 or (us < 0.013 and v > us):
            continue
        v *= (1.1239 + 1.1328 / (b - 3.4)) / (a / (us * us) + b)
        if math.log(v) <= _log_poisson(np.int64(k), lam):
            return np.int64(k)


def _quick(lam, u, v):
    """The first trial of `_rejection` for all edges together; -1 where it needs more than the squeeze."""
    for j in range(lam.size):
        b = 0.931 + 2.53 * math.sqrt(lam[j])
        a = -0.059 + 0.02483 * b
        us = 0.5 - abs(u[j] - 0.5)
        k = math.floor((2 * a / us + b) * (u[j] - 0.5) + lam[j] + 0.43)
        v[j] = k if (us >= 0.07) and (v[j] <= 0.9277 - 3.6224 / (b - 2)) else -1.0


def _poisson(q, rate, stream, start, work, n):
    """n[j] ~ Poisson(|q[j]| rate), independent, with the rate of q[j]'s sign. Returns the two totals."""
    total_above = total_below = 0
    for first in range(0, q.size, TILE):
        some, part = q[first : first + TILE], n[first : first + TILE]
        lam, u, v = work[0, : some.size], work[1, : some.size], work[2, : some.size]
        begin = start + np.uint64(first)
        _means(some, rate, lam)
        _uniforms(some, stream, begin, u)
        _inversion(lam, u, v, part)
        if lam.max() > SMALL:
            _uniforms(some, stream, begin, u)
            _uniforms(some, stream, begin + LAP, v)
            _quick(lam, u, v)
            for j in range(lam.size):
                if lam[j] > SMALL:
                    s = 0 if some[j] > 0 else 1
                    part[j] = v[j] if v[j] >= 0 else _rejection(lam[j], stream[s], begin[s] + np.uint64(j))
        for j in range(lam.size):
            total_above += part[j] if some[j] > 0 else 0
            total_below += 0 if some[j] > 0 else part[j]
    return total_above, total_below


def _streams(seed, key, stream):
    """Two words for each sign of a row, from 128 bits that hash (seed, key)."""
    a = _mix(seed + _mix(key + GOLDEN))
    b = _mix(key ^ _mix(seed - GOLDEN))
    for sign in range(2):
        stream[sign, 0] = a
        stream[sign, 1] = _mix(b + np.uint64(sign) * GOLDEN)


def _rates(left, total, edges, rate):
    """Poisson rates for the parts with many draws left, 0 for the others. Each part decides for itself."""
    for s in range(2):
        mu = left[s] - SLACK * math.sqrt(left[s])
        rate[s] = mu / total[s] if left[s] > max(DENSE * edges, 2 * SLACK * SLACK) else 0.0
    return rate[0] > 0 or rate[1] > 0


def _row(q, left, total, stream, start, rate, cum, steps, work, fresh, counts):
    """The counts of one row: Poisson rounds while many draws are left, then the rest one by one."""
    start[:] = np.uint64(0)
    while _rates(left, total, q.size, rate):
        drawn = _poisson(q, rate, stream, start, work, fresh)
        for s in range(2):
            if rate[s] > 0:
                start[s] += ROUND
                if drawn[s] <= left[s]:
                    left[s] -= drawn[s]
                    for j in range(q.size):
                        counts[j] += fresh[j] if (q[j] > 0) == (s == 0) else 0
    for s in range(2):
        _one_by_one(q, 1.0 - 2.0 * s, left[s], stream[s], start[s], total[s], cum[s], steps, counts)


def _rows(q, m, seed, keys, counts):
    """All rows, sharing work arrays. False where a row holds NaN or infinity."""
    rows, edges = q.shape
    finite = np.ones(rows, np.bool_)
    groups = -(-edges // MEMBERS)
    cum, steps = np.empty((2, groups + 1 + STRIDE)), np.empty(groups // STRIDE)
    work, fresh = np.empty((3, TILE)), np.empty(edges, np.int64)
    left, total, rate = np.empty(2, np.int64), np.empty(2), np.empty(2)
    stream, start = np.empty((2, 2), np.uint64), np.empty(2, np.uint64)
    for i in range(rows):
        counts[i] = 0
        total[0], total[1] = _cumulate(q[i], cum)
        finite[i] = math.isfinite(total[0] + total[1])
        if finite[i]:
            left[0] = m[i, 0] if total[0] > 0 else 0
            left[1] = m[i, 1] if total[1] > 0 else 0
            _streams(seed, keys[i], stream)
            _row(q[i], left, total, stream, start, rate, cum, steps, work, fresh, counts[i])
    return finite


_KERNELS = (
    *(_mix, _uniform, _cumulate, _group, _edge, _one_by_one),
    *(_means, _uniforms, _inversion, _log_poisson, _rejection, _quick, _poisson),
    *(_streams, _rates, _row, _rows),
)


@functools.cache
def _compiled() -> bool:
    """Compile the functions above in place, callees first; False where numba is missing.

    In place, so that importing this file needs no numba and each function still finds the compiled others
    under their own names; numba's cache on disk does not serve functions made inside another.
    """
    try:
        import numba
    except ImportError:
        return False
    for kernel in _KERNELS:
        try:
            compiled = numba.njit(cache=True, nogil=True, error_model="numpy")(kernel)
        except RuntimeError:  # no folder that a cache could be written to
            compiled = numba.njit(nogil=True, error_model="numpy")(kernel)
        globals()[kernel.__name__] = compiled
    return True


def _with_numba(q: np.ndarray, m: np.ndarray, seed: int, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rows in blocks, on as many threads as torch has. They are Python's: numba's own wait for each other at
    barriers even where one is asked for, ten times slower on a busy machine, and break in a forked process.
    """
    import torch

    threads = min(torch.get_num_threads(), 1 + counts.size // WORTH)
    if threads == 1:
        return _rows(q, m, np.uint64(seed), keys, counts)
    cuts = np.linspace(0, len(q), 4 * threads + 1).astype(int)
    blocks = [slice(*ends) for ends in itertools.pairwise(cuts)]
    with ThreadPoolExecutor(threads) as pool:
        done = pool.map(lambda b: _rows(q[b], m[b], np.uint64(seed), keys[b], counts[b]), blocks)
        return np.concatenate(list(done))


def _with_numpy(q: np.ndarray, m: np.ndarray, seed: int, keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """The same law from numpy's generator. It finds the mass still left by subtraction, which is accurate
    only while that is not small: so the heaviest edge comes last.
    """
    counts[:] = 0
    finite = np.logical_and.reduce(np.isfinite(q), axis=1)
    for i in np.flatnonzero(finite):
        for s, part in enumerate((np.maximum(q[i], 0), np.maximum(-q[i], 0))):
            edges = np.flatnonzero(part)
            if edges.size and m[i, s]:
                edges = edges[np.argsort(part[edges])]
                p = part[edges].astype(np.float64)
                philox = np.random.Philox(key=np.array([seed, keys[i]], np.uint64), counter=[0, 0, 0, s])
                counts[i, edges] = np.random.Generator(philox).multinomial(m[i, s], p / p.sum())
    return finite


def _as_array(given: Any) -> np.ndarray:
    """An array that shares the memory of what was given, wherever it can."""
    return np.ascontiguousarray(given.detach() if hasattr(given, "detach") else given)


def _check(q: np.ndarray, m: np.ndarray, keys: np.ndarray) -> None:
    if q.ndim != 2 or m.shape != (len(q), 2) or keys.shape != (len(q),):
        given = f"q of shape {q.shape}, m of shape {m.shape}, keys of shape {keys.shape}"
        hint = "m[:, 0] for the positive parts, m[:, 1] for the negative ones, one key for each row"
        raise DomainError(given, "(rows, edges), (rows, 2) and (rows,)", hint)
    if m.dtype.kind not in "iu" or keys.dtype.kind not in "iu" or q.dtype != np.float32:
        given = f"q of {q.dtype}, m of {m.dtype}, keys of {keys.dtype}"
        raise DomainError(given, "float32, integers and integers", "q.float() and m.long()")
    if m.size and not (m.min() >= 0 and m.max() <= MOST):
        given = f"m from {m.min()} to {m.max()}"
        raise DomainError(given, "draws from 0 to 2^53", "to keep the row whole instead")


def multinomial(q: Rows, m: ArrayLike, seed: int, keys: ArrayLike) -> Any:
    """For each row, m[row, 0] draws with replacement among its positive edges, m[row, 1] among its negative.

    `q`: signed sensitivities, not normalised, float32, on the CPU. `m`: whole numbers up to 2^53; a part with
    no mass gets no draws. `seed`: any int. `keys`: one integer per row that stays the row's own, so that its
    draw is the same whichever rows are drawn with it.
    Returns how often each edge was drawn, int32 (int64 if some m needs it), a tensor if `q` is one.
    """
    rows, m, keys = _as_array(q), _as_array(m), _as_array(keys)
    _check(rows, m, keys)
    counts = np.empty(rows.shape, np.int32 if m.max(initial=0) < 2**31 else np.int64)
    digest = hashlib.blake2b(str(int(seed)).encode(), digest_size=8).digest()
    draw = _with_numba if counts.size and _compiled() else _with_numpy
    finite = draw(rows, m.astype(np.int64), int.from_bytes(digest, "little"), keys.astype(np.uint64), counts)
    if not finite.all():
        row = int(np.argmin(finite))
        raise NonFiniteError(f"q[{row}]", "finite sensitivities", "torch.isfinite on weights and activations")
    if isinstance(q, np.ndarray):
        return counts
    import torch

    return torch.from_numpy(counts)
