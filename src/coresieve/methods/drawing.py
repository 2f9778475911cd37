"""Draw edges by importance and reweigh them: the loop that all sampling methods share.

A part is a set of edges with a distribution of its own: Algorithm 2 is called once for each row and sign. With m draws
from q = s / S an edge that came up k times weighs k w / (m q), so E[w_hat] = w whatever m is.

`to_size` meets a budget. One scale c serves every part, m = ceil(c S), as one eps would (m is proportional to S in
Algorithm 2, line 6), solved so that the expected number of distinct edges is what is left of the budget. Rows are drawn
in blocks, each three quarters of what remains, and c is solved anew for each block: the last blocks absorb the luck of
the first. Given the blocks before it m is fixed, so every row stays unbiased.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coresieve.kernels.multinomial import multinomial
from coresieve.layers import ROWS_AT_ONCE
from coresieve.methods.method import Job, Work

EDGES_TO_SOLVE_ON = (
    2**13
)  # a few rows tell how many edges a c will keep; what they get wrong, later blocks correct
LAST_BLOCK = 0.004  # of the budget: from here on rows are drawn so that they cannot exceed what is left

Importance = Callable[
    [Work, Tensor, Tensor], Tensor
]  # (work, rows, their weights) -> s >= 0, of the same shape


@dataclass
class Parts:
    """Every row's two parts, positive and negative edges: (rows, 2) each."""

    S: np.ndarray  # sums of s
    n: np.ndarray  # edges that are not zero

    @classmethod
    def of(cls, work: Work, importance: Importance) -> Parts:
        S, n = [], []
        for rows in work.layer.blocks():
            index = torch.arange(rows.start, rows.stop)
            w = work.layer.read(rows)
            s = importance(work, index, w).float()
            for sign in ((w > 0).float(), (w < 0).float()):
                S.append(torch.linalg.vecdot(s, sign).double())
                n.append(sign.sum(dim=1).long())  # exact: rows have fewer than 2^24 edges
        return cls(_pairs(S), _pairs(n))

    def active(self) -> np.ndarray:
        """Parts that are drawn from at all: an importance of 0 everywhere means a value of 0 on every point."""
        return self.S > 0


def _pairs(columns: list[Tensor]) -> np.ndarray:
    pairs = [torch.stack(columns[i : i + 2], dim=1) for i in range(0, len(columns), 2)]
    return torch.cat(pairs).cpu().numpy()


@dataclass
class Draw:
    """How often each part of some rows is drawn, and what a single draw's weight is divided by. (rows, 2) each."""

    m: np.ndarray
    scale: np.ndarray  # S / m, so that one draw of edge j weighs w_j * scale / s_j
    exact: np.ndarray  # parts left as they are


def exact_or(m: np.ndarray, parts: Parts, rows: np.ndarray) -> Draw:
    """m draws for each part, but a part whose edges are no more than its draws stays exact: nothing to save there."""
    exact = m >= parts.n[rows]
    m = np.where(exact, 0, m)
    with np.errstate(divide="ignore", invalid="ignore"):
        return Draw(m.astype(np.int64), np.where(m > 0, parts.S[rows] / m, 0.0), exact)


def sample(
    work: Work, rows: np.ndarray, draw: Draw, importance: Importance, seed: int, trial: int = 0
) -> Tensor:
    """The sparsified rows: Algorithm 2, lines 7 to 10."""
    index = torch.from_numpy(rows)
    w = work.layer.read(index)
    s = importance(work, index, w).float()
    keys = (
        (np.uint64(trial) << np.uint64(48))
        + (np.uint64(work.index) << np.uint64(32))
        + rows.astype(np.uint64)
    )
    counts = torch.as_tensor(
        multinomial(torch.copysign(s, w.to(s.dtype)).cpu(), draw.m, seed, keys), device=w.device
    )
    positive = w > 0
    values = w * counts / s * _by_sign(draw.scale, positive, w)
    values = torch.where(counts > 0, values, 0.0)
    if draw.exact.any():
        values = torch.where(_by_sign(draw.exact, positive, w).bool(), w, values)
    return values


def _by_sign(pairs: np.ndarray, positive: Tensor, like: Tensor) -> Tensor:
    column = torch.as_tensor(pairs, device=like.device).to(like.dtype)
    return torch.where(positive, column[:, :1], column[:, 1:])


Sampler = Callable[[np.ndarray, Draw], Tensor]  # (rows, how to draw them) -> their new values


def rewrite(work: Work, rows: np.ndarray, draw: Draw, sampler: Sampler) -> int:
    """Put newly drawn rows into the copy; how many parameters they hold. Exact ones are there already."""
    index = torch.from_numpy(rows)
    if draw.exact.all():
        return int(torch.count_nonzero(work.layer.read(index)))
    values = sampler(rows, draw)
    work.layer.write(index, values)
    return int(torch.count_nonzero(values))


def fixed(work: Work, parts: Parts, m: np.ndarray, sampler: Sampler) -> None:
    """Theory mode: the draws are given; nothing is solved."""
    exact_rows, drawn = 0, 0
    m = np.where(parts.active() | (parts.n == 0), m, 0)
    for rows in np.array_split(np.arange(len(m)), -(-len(m) // ROWS_AT_ONCE)):
        draw = exact_or(m[rows], parts, rows)
        rewrite(work, rows, draw, sampler)
        exact_rows += int(draw.exact.all(axis=1).sum())
        drawn += int(draw.m.sum())
    work.line.rows_exact, work.line.draws = exact_rows, drawn


class BySign:
    """Each row's positive and negative edges are a part each: CoreNet, and uniform sampling in its place."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def expected(self, rows: np.ndarray, s: Tensor, w: Tensor) -> Callable[[float], float]:
        """c -> how many distinct edges of these rows are expected to stay: sum of 1 - (1 - q_j)^m."""
        S, n = self.parts.S[rows].ravel(), self.parts.n[rows].ravel()
        row, column = torch.nonzero((s > 0) & (w != 0), as_tuple=True)
        part = (2 * row + (w[row, column] < 0)).cpu().numpy()
        with np.errstate(divide="ignore"):
            log_miss = np.log1p(-np.minimum(1.0, s[row, column].cpu().numpy() / S[part])).astype(np.float32)

        def count(c: float) -> float:
            m = np.ceil(np.minimum(c * S, 2.0**60))
            missed = np.exp(m.astype(np.float32)[part] * log_miss)
            exact = m >= n
            if not exact.any():
                return float(len(part) - missed.sum())
            drawn = ~exact[part]
            return float(drawn.sum() - missed[drawn].sum() + n[exact & (S > 0)].sum())

        return count

    def at_most(self, rows: np.ndarray) -> Callable[[float], float]:
        """c -> more edges than this cannot stay."""
        S, n = self.parts.S[rows], self.parts.n[rows]
        return lambda c: float(np.minimum(np.ceil(c * S), n)[S > 0].sum())

    def least(self, rows: np.ndarray) -> int:
        """One draw a part: fewer and some part would always vanish."""
        return int(self.parts.active()[rows].sum())

    def allocate(self, rows: np.ndarray, c: np.ndarray, rng: np.random.Generator) -> Draw:
        S = self.parts.S[rows]
        return exact_or(np.where(S > 0, np.ceil(np.minimum(c[:, None] * S, 2.0**60)), 0), self.parts, rows)

    def scarce(self, rows: np.ndarray, left: int, rng: np.random.Generator) -> Draw:
        """Less than a draw a part: part i gets its draw with probability pi = min(1, c S), and weighs 1/pi more.

        One random number serves them all (systematic sampling), so that the draws add up to what is left.
        """
        S = self.parts.S[rows]
        total = max(left, 0.5)  # never 0: what has no chance to stay cannot be unbiased
        c = solve(lambda c: float(np.minimum(1, c * S).sum()), total)
        pi = np.minimum(1, c * S)
        pi = np.minimum(1, pi * total / max(pi.sum(), 1e-300))  # c is good to one part in a thousand
        m = np.diff(np.floor(np.cumsum(pi) + rng.random()), prepend=0.0).astype(np.int64).reshape(S.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            return Draw(m, np.where(m > 0, S / pi, 0.0), np.zeros(S.shape, bool))


class Pooled:
    """All edges of a layer are one part: the matrix sparsifiers, which know no rows and no signs."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def expected(self, rows: np.ndarray, s: Tensor, w: Tensor) -> Callable[[float], float]:
        p = s[s > 0].cpu().numpy()
        return lambda c: float(len(p) - np.exp(np.float32(-c) * p).sum())

    def at_most(self, rows: np.ndarray) -> Callable[[float], float]:
        mass = self.parts.S[rows].sum()
        return lambda c: float(np.floor(c * mass))

    def least(self, rows: np.ndarray) -> int:
        return 1

    def allocate(self, rows: np.ndarray, c: np.ndarray, rng: np.random.Generator) -> Draw:
        S = self.parts.S[rows]
        return self._spread(S, int(min(max(1.0, float(c @ S.sum(axis=1))), 2.0**40)), rng)

    def scarce(self, rows: np.ndarray, left: int, rng: np.random.Generator) -> Draw:
        """Not even one draw for sure: one with probability 1/2, which weighs twice as much."""
        return self._spread(self.parts.S[rows], int(rng.random() < 0.5), rng, chance=0.5)

    def _spread(self, S: np.ndarray, m: int, rng: np.random.Generator, chance: float = 1.0) -> Draw:
        """How m draws from all edges fall to the rows."""
        mass = S.sum()
        drawn = np.zeros(S.shape, np.int64)
        if m and mass > 0:
            drawn = rng.multinomial(m, (S / mass).ravel()).reshape(S.shape)
        return Draw(drawn, np.full(S.shape, mass / max(m, 1) / chance), np.zeros(S.shape, bool))


Parting = BySign | Pooled


@dataclass
class Forecast:
    """c -> the edges that a row is expected to keep, from a random few of the layer's rows."""

    count: Callable[[float], float]
    rows: int

    @classmethod
    def of(cls, work: Work, parting: Parting, importance: Importance, order: np.ndarray) -> Forecast:
        some = order[-max(1, EDGES_TO_SOLVE_ON // work.layer.shape[1]) :]
        index = torch.from_numpy(some)
        w = work.layer.read(index)
        return cls(parting.expected(some, importance(work, index, w).float(), w), len(some))

    def __call__(self, c: float, rows: int) -> float:
        return self.count(c) * rows / self.rows


def order(parting: Parting, work: Work, job: Job) -> np.ndarray:
    """The rows in the order in which they will be drawn."""
    return job.rng(2, work.index).permutation(len(parting.parts.S))


def to_size(
    work: Work, parting: Parting, importance: Importance, target: int, job: Job, sampler: Sampler
) -> None:
    """Rewrite the layer so that about `target` of its parameters stay, and hardly ever more."""
    rng, rest = job.rng(3, work.index), order(parting, work, job)
    forecast = Forecast.of(work, parting, importance, rest)
    left, drawn, exact_rows, c = target, 0, 0, np.ones(1)
    kept = foreseen = 0.0
    while len(rest):
        everything = left >= parting.parts.n[rest].sum()
        scarce = left < parting.least(rest)
        last = everything or scarce or len(rest) == 1 or left <= LAST_BLOCK * target
        block = rest if last else rest[: max(1, 3 * len(rest) // 4)]
        if everything:
            draw = exact_or(parting.parts.n[block], parting.parts, block)
        elif scarce:
            draw = parting.scarce(block, left, rng)
        else:
            luck = kept / foreseen if foreseen else 1.0  # the few rows of the forecast are not the others
            low, high, part = _scale(parting, forecast, luck, rest, left, last, float(c[-1]))
            foreseen += (1 - part) * forecast(low, len(block)) + part * forecast(high, len(block))
            c = np.where(np.arange(len(block)) < round(part * len(block)), high, low)
            draw = parting.allocate(block, c, rng)
        for rows in np.array_split(np.arange(len(block)), -(-len(block) // ROWS_AT_ONCE)):
            some = Draw(draw.m[rows], draw.scale[rows], draw.exact[rows])
            stayed = rewrite(work, block[rows], some, sampler)
            left, kept = left - stayed, kept + stayed
        drawn += int(draw.m.sum())
        exact_rows += int(draw.exact.all(axis=1).sum())
        rest = rest[len(block) :]
    work.line.draws, work.line.rows_exact = drawn, exact_rows


def _scale(
    parting: Parting, forecast: Forecast, luck: float, rest: np.ndarray, left: int, last: bool, guess: float
) -> tuple[float, float, float]:
    """Two scales close to each other and the share of rows that takes the higher one, to fill what is left.

    Where many rows turn exact at the same c, the count jumps there; the share makes up for it.
    """

    def expected(c: float) -> float:
        return luck * forecast(c, len(rest))

    if (
        last
    ):  # 4 sigma away from too much, as Var(distinct) <= left / 4; or so few draws that it cannot be too much
        c = max(
            between(expected, left - 2 * np.sqrt(left), guess)[0],
            between(parting.at_most(rest), left, guess)[0],
        )
        return c, c, 0.0
    low, high = between(expected, left, guess)
    least, most = expected(low), expected(high)
    return low, high, min(1.0, max(0.0, (left - least) / (most - least))) if most > least else 0.0


def solve(count: Callable[[float], float], target: float, guess: float = 1.0) -> float:
    """The largest c, to one part in a thousand, at which a rising `count` does not exceed the target.

    >>> round(solve(lambda c: 10 * c, 25), 2)
    2.5
    """
    return between(count, target, guess)[0]


def between(count: Callable[[float], float], target: float, guess: float = 1.0) -> tuple[float, float]:
    """Two c, one part in a thousand apart, between which a rising `count` passes the target."""
    low = high = guess
    step = 1.05
    while (least := count(low)) > target and low > 1e-30:
        low, high, step = low / step, low, step * step
    if high == low:
        while (most := count(high)) <= target and high < 1e30:
            low, least, high, step = high, most, high * step, step * step
    most = count(high)
    for i in range(60):
        if high <= low * 1.001:
            break
        part = 0.5
        if (
            i % 3 < 2 and 0 < least < target and most > 1.0001 * least
        ):  # most counts are nearly a power of c, but not all
            part = min(max(np.log(target / least) / np.log(most / least), 0.01), 0.99)
        middle = low * (high / low) ** part
        here = count(middle)
        if here <= target:
            low, least = middle, here
        else:
            high, most = middle, here
    return float(low), float(high)
