"""Which edges stay: ADMM on least-squares problems under a bound on the number of edges.

    min over W, D of  sum_i c_i (w_i H w_i - 2 g_i w_i)   with  W = D  and at most k entries of D not zero

in turns, with a penalty rho that rises (Boyd et al. 2011; for pruning: Boza 2024, and ALPS, Meng et al. 2024):

    W = (G + rho (D - U)) (H + rho)^-1          one eigendecomposition of H serves every rho
    D = the k entries of W + U that are largest, by sqrt(c_i) |.|
    U = U + W - D

Several problems, one a layer, may share one k: their edges then compete, and that is how a size falls to layers. Edges
are scaled so that H has ones on its diagonal: a weight then counts by what it carries. Only the choice is taken from
here; what the edges weigh is solved exactly afterwards (`refit.py`).

>>> one = Problem(torch.eye(3), torch.tensor([[3.0, -1.0, 2.0]]), torch.tensor([[3.0, -1.0, 2.0]]), torch.ones(1))
>>> choose_edges([one], 2)
[tensor([[ True, False,  True]])]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDS, RHO, RISE = 40, 0.03, 1.15
SAMPLE = 8192  # scores that tell about where the k-th lies


@dataclass
class Problem:
    """One layer, or some of its rows that stand for `times` as many."""

    H: Tensor  # (edges, edges), ones on its diagonal
    G: Tensor  # (rows, edges)
    start: Tensor  # (rows, edges): weights to begin with
    c: Tensor  # (rows,)
    times: float = 1.0


def choose_edges(
    problems: Sequence[Problem], k: int, rounds: int = ROUNDS, rise: float = RISE
) -> list[Tensor]:
    """A mask for each problem; together they have k entries, as near as their `times` allow."""
    roots = [p.c.sqrt()[:, None] for p in problems]
    times = [p.times for p in problems]

    def project(Z: Sequence[Tensor]) -> list[Tensor]:
        return largest([z.abs().mul_(root) for z, root in zip(Z, roots, strict=True)], times, k)

    stay = project([p.start for p in problems])
    if k >= sum(p.times * p.G.numel() for p in problems):
        return stay
    bases = [_eigen(p.H) for p in problems]
    GQ = [p.G @ Q for p, (_, Q) in zip(problems, bases, strict=True)]
    D = [p.start * mask for p, mask in zip(problems, stay, strict=True)]
    U = [torch.zeros_like(d) for d in D]
    rho = RHO
    for _ in range(rounds):
        Z = [
            torch.addmm(gq, d.sub_(u), Q, alpha=rho).div_(size + rho).mm(Q.T).add_(u)
            for gq, d, u, (size, Q) in zip(GQ, D, U, bases, strict=True)
        ]
        stay = project(Z)
        D = [z * mask for z, mask in zip(Z, stay, strict=True)]
        U = [z.sub_(d).div_(rise) for z, d in zip(Z, D, strict=True)]  # in units of 1/rho
        rho *= rise
    return stay


def _eigen(H: Tensor) -> tuple[Tensor, Tensor]:
    size, Q = torch.linalg.eigh(H)
    return size.clamp_(min=0), Q


def largest(scores: Sequence[Tensor], times: Sequence[float], k: int) -> list[Tensor]:
    """Masks of the largest entries, each of which counts so many times, up to k. One tensor that counts once gets
    exactly k: of equals the first stay.

    >>> largest([torch.tensor([[1.0, 4.0]]), torch.tensor([[3.0], [2.0]])], [1.0, 2.0], 3)
    [tensor([[False,  True]]), tensor([[ True], [False]])]
    """
    if len(scores) == 1 and times[0] == 1:
        return [_largest(scores[0], k)]
    low, high = 0.0, max(float(s.max()) for s in scores)
    for _ in range(40):
        middle = (low + high) / 2 if low == 0 and high == 0 else max((low * high) ** 0.5, high / 1000)
        count = sum(n * int((s > middle).sum()) for s, n in zip(scores, times, strict=True))
        low, high = (middle, high) if count > k else (low, middle)
        if high <= low * 1.0001:
            break
    return [s > high for s in scores]


def _largest(score: Tensor, k: int) -> Tensor:
    flat = score.flatten()
    if k <= 0 or k >= len(flat):
        return torch.full_like(score, k > 0, dtype=torch.bool)
    least = _kth(flat, k)
    stay = flat > least
    missing = k - int(stay.sum())
    stay[torch.nonzero(flat == least).flatten()[:missing]] = True
    return stay.view_as(score)


def _kth(flat: Tensor, k: int) -> Tensor:
    """The k-th largest. A sample tells first about where it lies, and only what lies there is looked at."""
    some = flat[:: max(1, len(flat) // SAMPLE)].sort(descending=True).values
    middle, off = len(some) * k / len(flat), len(some) // 50
    high, low = some[max(0, int(middle) - off)], some[min(len(some) - 1, int(middle) + off)]
    near = flat[(flat <= high) & (flat >= low)]
    rank = k - int((flat > high).sum())
    if not 1 <= rank <= len(near):  # the sample deceived
        near, rank = flat, k
    return torch.kthvalue(near, len(near) - rank + 1).values
