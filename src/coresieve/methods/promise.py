"""Algorithm 1's constants for this network and sample, and in words what they promise.

eta, eta*, K, Delta-hat and eps_l come from what the pass over the sample has shown; the formulas are `theory.py`'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from coresieve import theory
from coresieve.budget import Budget
from coresieve.calibration import Observed, Seen
from coresieve.layers import Layer


def widths(layers: Sequence[Layer]) -> tuple[int, int, int]:
    """eta, eta* and the widest fan-in (biases counted) of layers 2..L."""
    rows = [layer.shape[0] for layer in layers]
    return sum(rows), max(rows), max(layer.shape[1] for layer in layers)


def points_needed(layers: Sequence[Layer], delta: float) -> int:
    """|S|, with the widest fan-in in place of an eta* that is smaller (docs/theory.md, differs from the paper)."""
    eta, eta_star, fan_in = widths(layers)
    K = theory.default_K(eta, eta_star)
    return theory.sample_points(eta, max(eta_star, fan_in), delta, K_prime=K)


@dataclass
class Promise:
    """What Algorithm 1 computes before its main loop."""

    budget: Budget
    observed: Observed
    trials: int  # tau
    delta: float  # delta' with which the constants are computed
    eta: int
    K: float
    delta_hats: dict[str, float]
    eps: dict[str, float]
    points_needed: int

    @classmethod
    def of(cls, observed: Observed, budget: Budget, trials: int, points_given: int) -> Promise:
        layers = [seen.layer for seen in observed.seen]
        eta, eta_star, _ = widths(layers)
        delta = budget.delta
        if trials > 1:
            delta = theory.amplification_delta(delta, points_given, trials)
        hats = delta_hats(observed.seen, eta, eta_star, delta)
        eps = theory.layer_epsilons(budget.eps or 0.5, list(hats.values()))
        return cls(budget, observed, trials, delta, eta, theory.default_K(eta, eta_star), hats,
                   dict(zip(hats, eps, strict=True)), points_needed(layers, delta))  # fmt: skip

    def draws(self, seen: Seen, S: np.ndarray) -> np.ndarray:
        """m of Algorithm 2, line 6, for each sum of sensitivities; inf where no number of draws would do."""
        name, signed = seen.layer.name, seen.statistics.signed
        m = [theory.draws(s, self.K, self.eps[name], self.eta, self.delta, signed=signed) for s in S.ravel()]
        return np.array([float(x) if x < 10**300 else np.inf for x in m]).reshape(S.shape)

    def a_priori(self, per_draw: dict[str, float]) -> float:
        """The eps that the theorem gives for the draws that were made: S/m at its largest, for each layer."""
        eps_l = []
        for seen in self.observed.seen:
            largest, signed = per_draw.get(seen.layer.name, 0.0), seen.statistics.signed
            eps_l.append(theory.eps_of_draws(largest, self.K, self.eta, self.delta, signed=signed))
        return theory.eps_of_layers(eps_l, list(self.delta_hats.values()))

    def missing(self) -> list[str]:
        """What the theorem assumes and this network or sample does not have."""
        missing = []
        if not self.observed.is_chain:
            missing.append("the theorem is proved for Linear layers with ReLU between them and nothing else")
        if self.observed.points < self.points_needed:
            missing.append(
                f"the sensitivities and Delta need a sample of {self.points_needed} points "
                f"and had {self.observed.points}"
            )
        if any(seen.statistics.points != self.observed.points for seen in self.observed.seen):
            missing.append("an input has several positions here, and the theorem speaks of one at a time")
        return missing

    def sentence(self) -> str:
        """What is promised, with its assumptions beside it; or what is missing."""
        if missing := self.missing():
            return f"Nothing is promised: {'; '.join(missing)}."
        return (
            "Proved, for a fresh input and this draw together: with probability at least "
            f"{_one_minus(self.budget.delta)} every output is within a factor 1 ± {self.budget.eps:.10g} of the "
            "original's. "
            "Assumed: the sample is independent of the weights (not the training set), and the paper's "
            f"assumptions 1 and 2 hold with K = {self.K:.3g}."
        )


def _one_minus(delta: float) -> str:
    """1 - delta in digits that never round it up.

    >>> _one_minus(0.05), _one_minus(1e-9)
    ('0.95', '1 - 1e-09')
    """
    return f"{1 - delta:.10g}" if delta >= 1e-6 else f"1 - {delta:g}"


def delta_hats(seen: Sequence[Seen], eta: int, eta_star: int, delta: float) -> dict[str, float]:
    """Delta-hat of each layer: the largest mean of Delta_i(x) over S, plus kappa (Algorithm 1, line 8)."""
    kappa = theory.kappa(eta, eta_star, delta)
    return {s.layer.name: theory.delta_hat(s.statistics.largest_delta(), kappa) for s in seen}
