"""Algorithm 2, Sparsify, line by line: keep a few of a row's edges of one sign, and reweigh them.

Letters as in the paper: w the row, a(x) the activations that enter it, s_j = max over x of
w_j a_j(x) / sum_k w_k a_k(x) the sensitivity of edge j, S their sum, q_j = s_j / S, m the draws. The answer
is unbiased on every edge that can be drawn: E[w_hat_j] = w_j where s_j > 0.

>>> rng = np.random.default_rng(0)
>>> w, a = np.array([3.0, 1.0, 2.0]), np.array([[1.0, 1.0, 0.0]])
>>> part = sparsify([0, 1, 2], w, 0.9, 0.5, a, rng, eta=1, K=2.0)
>>> part.s.tolist(), part.S, part.m  # the last edge is silent on the sample: it is never drawn
([0.75, 0.25, 0.0], 1.0, 55)
>>> float(part.w_hat[2])
0.0
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coresieve.errors import DomainError
from coresieve.theory import draws

MOST_DRAWS = 10**7  # more than a loop should do


class Sparsified(NamedTuple):
    """What Algorithm 2 returns, and what it computed on the way (zero outside of its index set)."""

    w_hat: np.ndarray
    s: np.ndarray
    S: float
    q: np.ndarray
    m: int | float  # inf: no number of draws is enough, and w_hat is w itself


def sparsify(
    indices: Sequence[int],
    w: np.ndarray,
    eps: float,
    delta: float,
    activations: np.ndarray,
    rng: np.random.Generator,
    *,
    eta: int,
    K: float,
    signed: bool = False,
    m: int | None = None,
) -> Sparsified:
    """Algorithm 2 on the edges `indices` of the row `w`, all of one sign (w > 0 there).

    `activations[x, j]` is a_j(x) >= 0, one line per point of S. `signed` says that these lines are the
    positive and the negative parts of inputs of both signs. `m` replaces line 6.
    """
    w = np.asarray(w, dtype=np.float64)
    activations = np.asarray(activations, dtype=np.float64)
    s, q, w_hat = np.zeros_like(w), np.zeros_like(w), np.zeros_like(w)

    for j in indices:  # line 1
        for a in activations:
            total = sum(float(w[k] * a[k]) for k in indices)
            if total > 0:  # differs from the paper: a point with total 0 contributes 0
                s[j] = max(s[j], w[j] * a[j] / total)  # line 2
    S = float(sum(s[j] for j in indices))  # line 3
    if S == 0:  # differs from the paper: no edge is ever active, none is drawn
        return Sparsified(w_hat, s, S, q, 0)

    for j in indices:  # line 4
        q[j] = s[j] / S  # line 5
    wanted = draws(S, K, eps, eta, delta, signed=signed) if m is None else m  # line 6
    if wanted == math.inf:  # differs from the paper: eps = 0, the limit of ever more draws
        for j in indices:
            w_hat[j] = w[j]
        return Sparsified(w_hat, s, S, q, math.inf)
    if wanted > MOST_DRAWS:
        raise DomainError(f"m={wanted}", f"at most {MOST_DRAWS} draws, one by one", "m=1000, or a larger eps")

    chosen = rng.choice(len(w), size=int(wanted), replace=True, p=q / q.sum())  # line 7
    # line 8: w_hat starts at 0, above
    for j in chosen:  # line 9
        w_hat[j] = w_hat[j] + w[j] / (wanted * q[j])  # line 10
    return Sparsified(w_hat, s, S, q, wanted)  # line 11
