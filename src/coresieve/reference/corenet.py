"""Algorithm 1, CoreNet, line by line: a chain of (W, b) layers with ReLU between them, made sparse.

Layers are numbered as in the paper: the input is layer 1, `layers[0]` leads to layer 2, and L is the output.
The bias is one more edge, the last one, whose input is always 1. Inputs of both signs (Remarks on Negative
Activations) are split into a_pos and a_neg, two points in place of one, when Sparsify looks at them.

>>> W, b = np.array([[1.0, 2.0], [-1.0, 3.0]]), np.array([0.5, 0.0])
>>> points = np.array([[1.0, 1.0], [2.0, 0.5]])
>>> small = corenet([(W, b)], points, eps=0.9, delta=0.5, rng=np.random.default_rng(0), m=10)
>>> [round(float(x), 3) for x in small.s[0][0]]  # edge by edge, the bias last: 2/3.5, 2/3.5, 0.5/3.5
[0.571, 0.571, 0.143]
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from coresieve import theory
from coresieve.reference.sparsify import Sparsified, sparsify

Layer = tuple[np.ndarray, np.ndarray]


class CoreNet(NamedTuple):
    """The compressed layers and every intermediate of Algorithm 1. Lists have one entry per layer 2..L."""

    layers: list[Layer]
    sample: np.ndarray  # S, one point per line
    eta: int
    eta_star: int
    K: float
    kappa: float
    a: list[np.ndarray]  # what enters the layer: [point, edge], the bias last
    signed: list[bool]
    Delta: list[np.ndarray]  # Delta_i(x): [point, neuron]
    delta_hats: list[float]
    eps_l: list[float]
    parts: list[list[tuple[Sparsified, Sparsified]]]  # [layer][neuron] -> (W+, W-)

    @property
    def s(self) -> list[np.ndarray]:
        """Sensitivities: [neuron, edge] per layer; W+ and W- do not overlap, so they fit into one row."""
        return [np.array([plus.s + minus.s for plus, minus in rows]) for rows in self.parts]

    @property
    def S(self) -> list[list[float]]:
        """S = S+ + S- per layer and neuron."""
        return [[plus.S + minus.S for plus, minus in rows] for rows in self.parts]


def corenet(
    layers: Sequence[Layer],
    points: np.ndarray,
    eps: float,
    delta: float,
    rng: np.random.Generator,
    *,
    sample_size: int | None = None,
    m: int | None = None,
    K: float | None = None,
    K_prime: float | None = None,
    lambda_star: float | None = None,
) -> CoreNet:
    """Algorithm 1. `sample_size` replaces |S| in line 2 and `m` the draws in line 6 of Algorithm 2.

    When there are fewer points than |S|, all of them are S.
    """
    matrices = [np.column_stack([W, b]).astype(np.float64) for W, b in layers]  # the bias is one more edge
    points = np.asarray(points, dtype=np.float64)

    # line 1
    widths = [len(W) for W in matrices]  # eta^2 .. eta^L
    eta, eta_star = sum(widths), max(widths)  # differs from the paper: the output counts in eta_star
    widest = max(
        eta_star, *(W.shape[1] for W in matrices)
    )  # differs from the paper: fan-in of the union bound
    K = theory.default_K(eta, eta_star) if K is None else K
    K_prime = theory.default_K(eta, eta_star) if K_prime is None else K_prime

    # line 2
    if sample_size is None:
        sample_size = theory.sample_points(eta, widest, delta, K_prime=K_prime, lambda_star=lambda_star)
    picked = rng.choice(len(points), size=min(sample_size, len(points)), replace=False)
    sample = points[picked]

    entering: list[list[np.ndarray]] = [[] for _ in matrices]
    Delta: list[list[list[float]]] = [[] for _ in matrices]
    for x in sample:  # lines 3 and 4
        a = x
        for layer, W in enumerate(matrices):  # line 5
            a = np.append(a, 1.0)  # the bias's input
            entering[layer].append(a)
            Delta[layer].append([delta_of(w, a) for w in W])  # line 6
            z = np.array([sum(float(w[k] * a[k]) for k in range(len(a))) for w in W])
            a = np.maximum(z, 0.0)  # line 6; after the last layer nobody looks

    # lines 7 to 9, for all layers first: eps_l needs the Delta-hat of the later ones
    kappa = theory.kappa(eta, eta_star, delta, K_prime=K_prime, lambda_star=lambda_star)
    delta_hats = []
    for per_point in Delta:
        means = [sum(column) / len(sample) for column in zip(*per_point, strict=True)]
        delta_hats.append(theory.delta_hat(max(means), kappa))  # line 8
    eps_l = theory.layer_epsilons(eps, delta_hats)  # line 9

    compressed, parts, signs = [], [], []
    for layer, W in enumerate(matrices):  # line 7
        a = np.array(entering[layer])
        signed = bool((a < 0).any())
        seen = np.concatenate([np.maximum(a, 0.0), np.maximum(-a, 0.0)]) if signed else a  # {a_pos, a_neg}
        W_hat = np.zeros_like(W)  # line 9
        rows = []
        for i, w in enumerate(W):  # line 10
            W_plus = [j for j in range(len(w)) if w[j] > 0]  # line 11
            W_minus = [j for j in range(len(w)) if w[j] < 0]
            plus = sparsify(
                W_plus, w, eps_l[layer], delta, seen, rng, eta=eta, K=K, signed=signed, m=m
            )  # line 12
            minus = sparsify(W_minus, -w, eps_l[layer], delta, seen, rng, eta=eta, K=K, signed=signed, m=m)
            W_hat[i] = plus.w_hat - minus.w_hat  # line 13
            rows.append((plus, minus))
        compressed.append((W_hat[:, :-1], W_hat[:, -1]))
        parts.append(rows)
        signs.append(signed)

    return CoreNet(  # line 14
        compressed,
        sample,
        eta,
        eta_star,
        K,
        kappa,
        [np.array(rows) for rows in entering],
        signs,
        [np.array(rows) for rows in Delta],
        delta_hats,
        eps_l,
        parts,
    )


def delta_of(w: np.ndarray, a: np.ndarray) -> float:
    """Delta(x) = (z+ + z-) / |z|, where z+ and z- collect the positive and the negative terms w_k a_k(x).

    So it holds for inputs of either sign: z+ = z_pos+ + z_neg-, z- = z_neg+ + z_pos-. Differs from the paper:
    1 when all terms are 0, inf when they cancel.

    >>> delta_of(np.array([2.0, -1.0]), np.array([1.0, 1.0]))
    3.0
    >>> delta_of(np.array([1.0, -1.0]), np.array([1.0, 1.0])), delta_of(np.array([1.0]), np.array([0.0]))
    (inf, 1.0)
    """
    z_plus = z_minus = 0.0
    for k in range(len(w)):
        term = float(w[k] * a[k])
        if term > 0:
            z_plus += term
        else:
            z_minus -= term
    if z_plus + z_minus == 0:
        return 1.0
    if z_plus == z_minus:
        return math.inf
    return (z_plus + z_minus) / abs(z_plus - z_minus)
