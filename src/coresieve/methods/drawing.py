"""Draw edges by importance and reweigh them: the steps of Algorithm 2 that all sampling methods share.

A part is a set of edges with a distribution of its own: Algorithm 2 is called once for each row and sign. With m draws
from q = s / S an edge that came up k times weighs k w / (m q), so E[w_hat] = w whatever m is. Who chooses m: the theory
(`fixed`), or a size that is to be met (`sizing.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coresieve.kernels.multinomial import multinomial
from coresieve.layers import ROWS_AT_ONCE
from coresieve.methods.method import Work

# (work, rows, their weights) -> s >= 0, of the same shape
Importance = Callable[[Work, Tensor, Tensor], Tensor]


@dataclass
class Parts:
    """Every row's two parts, positive and negative edges: (rows, 2) each."""

    S: np.ndarray  # sums of s
    n: np.ndarray  # edges that are not zero

    @classmethod
    def of(cls, work: Work, importance: Importance) -> Parts:
        S, n = [], []
        for rows in work.layer.blocks():
            index = torch.arange(rows.start, rows.stop, device="cpu")
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


def note_draws(work: Work, draw: Draw, active: np.ndarray) -> None:
    """For the report: how many draws, how many exact rows, and the largest S/m of the parts that were sampled."""
    line, sampled = work.line, active & ~draw.exact
    line.draws = (line.draws or 0) + int(draw.m.sum())
    line.rows_exact = (line.rows_exact or 0) + int(draw.exact.all(axis=1).sum())
    per_draw = np.where(draw.m > 0, draw.scale, np.inf)[sampled]
    work.per_draw = max(work.per_draw, float(per_draw.max(initial=0.0)))


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
    m = np.where(parts.active() | (parts.n == 0), m, 0)
    for rows in np.array_split(np.arange(len(m)), -(-len(m) // ROWS_AT_ONCE)):
        draw = exact_or(m[rows], parts, rows)
        rewrite(work, rows, draw, sampler)
        note_draws(work, draw, parts.active()[rows])
