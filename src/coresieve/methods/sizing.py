"""How many draws each row gets so that the network ends at a given size.

One scale c serves every part, m = ceil(c S), as one eps would (m is proportional to S in Algorithm 2, line 6). c is
solved so that the expected number of distinct edges is what is left of the budget. Rows are drawn in blocks, each three
quarters of what remains, and c is solved anew for each block: the last blocks absorb the luck of the first. Given the
blocks before it m is fixed, so every row stays unbiased.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from coresieve.layers import ROWS_AT_ONCE
from coresieve.methods.drawing import Draw, Importance, Parts, Sampler, exact_or, note_draws, rewrite
from coresieve.methods.method import Job, Work

EDGES_TO_SOLVE_ON = 2**13  # a few rows tell how many distinct edges a draw brings
POWERS = 48  # of 2, that shares of a layer are told apart by
LAST_BLOCK = 0.004  # of the budget: from here on rows are drawn so that they cannot exceed what is left

Count = Callable[[float, np.ndarray], float]  # (c, rows) -> how many edges of these rows are expected to stay


class Forecast(NamedTuple):
    """How many edges of some rows stay at a scale c: its mean and its standard deviation.

    D, the number of distinct edges among m draws, has Var(D) close to sum of e_j (1 - e_j), less m (sum of q_j e_j)^2,
    with e_j = (1 - q_j)^m: at most 0.16 of the mean where edges are about even, and all of it where one edge takes
    nearly all draws and each other draw brings a new one.
    """

    mean: Count
    deviation: Count

    def __call__(self, c: float, rows: np.ndarray) -> float:
        return self.mean(c, rows)


class BySign:
    """Each row's positive and negative edges are a part each: CoreNet, and uniform sampling in its place."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def forecast(self, work: Work, importance: Importance, rows: np.ndarray) -> Forecast:
        """The sum of 1 - (1 - q_j)^m over a part's edges: exact for the last few rows, which are in random order, at as
        many a draw for the others."""
        some = rows[-max(1, EDGES_TO_SOLVE_ON // work.layer.shape[1]) :]
        index = torch.from_numpy(some)
        w = work.layer.read(index)
        s = importance(work, index, w).float()
        S, n = self.parts.S[some].ravel(), self.parts.n[some].ravel()
        row, column = torch.nonzero((s > 0) & (w != 0), as_tuple=True)
        part = (2 * row + (w[row, column] < 0)).cpu().numpy()
        q = np.minimum(1.0, s[row, column].cpu().numpy() / S[part])
        with np.errstate(divide="ignore"):
            log_miss = np.log1p(-q).astype(np.float32)

        def distinct_a_draw(c: float) -> float:
            m = draws(c, S)
            drawn = m < n
            missed = np.exp(m.astype(np.float32)[part] * log_miss)[drawn[part]]
            return (len(missed) - float(missed.sum())) / max(1.0, m[drawn].sum())

        def variance_a_draw(c: float) -> float:
            m = draws(c, S)
            drawn = m < n
            missed = np.exp(m[part] * log_miss) * drawn[part]
            alone = float((missed * (1 - missed)).sum())
            together = m * np.bincount(part, q * missed, len(S)) ** 2
            return max(0.0, alone - float(together[drawn].sum())) / max(1.0, m[drawn].sum())

        def count(c: float, rows: np.ndarray) -> float:
            S, n = self.parts.S[rows], self.parts.n[rows]
            m = draws(c, S)
            exact = m >= n
            return float(n[exact & (S > 0)].sum() + distinct_a_draw(c) * m[~exact].sum())

        def deviation(c: float, rows: np.ndarray) -> float:
            m = draws(c, self.parts.S[rows])
            return float(np.sqrt(variance_a_draw(c) * m[m < self.parts.n[rows]].sum()))

        return Forecast(count, deviation)

    def at_most(self, c: float, rows: np.ndarray) -> float:
        """More edges than this cannot stay."""
        S, n = self.parts.S[rows], self.parts.n[rows]
        return float(np.minimum(draws(c, S), n).sum())

    def least(self, rows: np.ndarray) -> int:
        """One draw a part: fewer and some part would always vanish."""
        return int(self.parts.active()[rows].sum())

    def allocate(self, rows: np.ndarray, c: np.ndarray, rng: np.random.Generator) -> Draw:
        return exact_or(draws(c[:, None], self.parts.S[rows]), self.parts, rows)

    def scarce(self, rows: np.ndarray, left: int, rng: np.random.Generator) -> Draw:
        """Less than a draw a part: part i gets its draw with probability pi = min(1, c S), and weighs 1/pi more.

        One random number serves them all (systematic sampling), so that the draws add up to what is left.
        """
        S = self.parts.S[rows]
        total = max(left, 0.5)  # never 0: what has no chance to stay cannot be unbiased
        pi = np.minimum(1, solve(lambda c: float(np.minimum(1, c * S).sum()), total) * S)
        pi = np.minimum(1, pi * total / max(pi.sum(), 1e-300))  # c is good to one part in a thousand
        m = np.diff(np.floor(np.cumsum(pi) + rng.random()), prepend=0.0).astype(np.int64).reshape(S.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            return Draw(m, np.where(m > 0, S / pi, 0.0), np.zeros(S.shape, bool))


def draws(c: float | np.ndarray, S: np.ndarray) -> np.ndarray:
    """m = ceil(c S), kept within what integers hold."""
    return np.ceil(np.minimum(c * S, 2.0**60))


class Pooled:
    """All edges of a layer are one part: the matrix sparsifiers, which know no rows and no signs."""

    def __init__(self, parts: Parts):
        self.parts = parts

    def forecast(self, work: Work, importance: Importance, rows: np.ndarray) -> Forecast:
        """The sum of 1 - exp(-c p). Rows differ by more than a few of them tell, so each is told by itself: how many of
        its entries lie between two powers of 2, and what they add up to, which is right to a hundredth."""
        many, mass = np.zeros((2, len(self.parts.S), POWERS))
        for block in work.layer.blocks():
            index = torch.arange(block.start, block.stop)
            p = importance(work, index, work.layer.read(block)).double().cpu().numpy()
            power = np.clip(1 - np.frexp(p)[1], 0, POWERS - 1)
            for i, (here, s) in enumerate(zip(power, p, strict=True), block.start):
                many[i], mass[i] = np.bincount(here, s > 0, POWERS), np.bincount(here, s, POWERS)

        def told(c: float, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            k, total = many[rows].sum(axis=0), mass[rows].sum(axis=0)
            return k, total, np.exp(-c * total / np.maximum(k, 1))

        def count(c: float, rows: np.ndarray) -> float:
            k, _, missed = told(c, rows)
            return float(k @ (1 - missed))

        def deviation(c: float, rows: np.ndarray) -> float:
            k, total, missed = told(c, rows)
            together = c * (total @ missed) ** 2 / max(total.sum(), 1e-300)
            return float(np.sqrt(max(0.0, k @ (missed * (1 - missed)) - together)))

        return Forecast(count, deviation)

    def at_most(self, c: float, rows: np.ndarray) -> float:
        return float(np.floor(c * self.parts.S[rows].sum()))

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


def order(parting: Parting, work: Work, job: Job) -> np.ndarray:
    """The rows in the order in which they will be drawn."""
    return job.rng(2, work.index).permutation(len(parting.parts.S))


def to_size(
    work: Work, parting: Parting, importance: Importance, target: int, job: Job, sampler: Sampler
) -> int:
    """Rewrite the layer so that about `target` of its parameters stay, hardly ever more; how many of it are unused."""
    rng, rest = job.rng(3, work.index), order(parting, work, job)
    expected = parting.forecast(work, importance, rest)
    left, c = target, np.ones(1)
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
            c = _scales(parting, expected, rest, len(block), left, last, float(c[-1]))
            draw = parting.allocate(block, c, rng)
        for rows in np.array_split(np.arange(len(block)), -(-len(block) // ROWS_AT_ONCE)):
            left -= rewrite(
                work, block[rows], Draw(draw.m[rows], draw.scale[rows], draw.exact[rows]), sampler
            )
        note_draws(work, draw, parting.parts.active()[block])
        rest = rest[len(block) :]
    return left


def _scales(
    parting: Parting, expected: Forecast, rest: np.ndarray, block: int, left: int, last: bool, guess: float
) -> np.ndarray:
    """A scale for each row of the block, at which the rows that remain are expected to fill what is left."""
    if last:
        # 4 sigma away from too much (Var(distinct) <= left / 4, mostly); or so few draws that it cannot be too much
        careful = solve(lambda c: expected(c, rest), left - 2 * np.sqrt(left), guess)
        if 4 * expected.deviation(careful, rest) > 2 * np.sqrt(left):
            careful = solve(lambda c: expected(c, rest) + 4 * expected.deviation(c, rest), left, guess)
        return np.full(block, max(careful, solve(lambda c: parting.at_most(c, rest), left, guess)))
    low, high = between(lambda c: expected(c, rest), left, guess)
    least, most = expected(low, rest), expected(high, rest)
    # where many rows turn exact at the same c the count jumps: then a share of them does
    part = min(1.0, max(0.0, (left - least) / (most - least))) if most > least else 0.0
    turned, room = round(part * block), left * (1 + LAST_BLOCK)
    while turned and expected(high, rest[:turned]) + expected(low, rest[turned:]) > room:
        turned -= 1 + turned // 20  # a single row may jump by more than all that is left
    return np.where(np.arange(block) < turned, high, low)


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
        if i % 3 < 2 and 0 < least < target and most > 1.0001 * least:  # nearly a power of c, mostly
            part = min(max(np.log(target / least) / np.log(most / least), 0.01), 0.99)
        middle = low * (high / low) ** part
        here = count(middle)
        if here <= target:
            low, least = middle, here
        else:
            high, most = middle, here
    return float(low), float(high)
