"""CoreNet: sample the edges into each neuron by their sensitivity (Algorithms 1 and 2).

For each row and each sign, with s_j the sensitivity of edge j and S their sum (`statistics.py`):

    q_j = s_j / S,    m = ceil(8 S K log(8 eta / delta) / eps_l^2) draws,    w_hat_j = (times drawn) * w_j / (m q_j)

    CoreNet     the above
    CoreNet+    first, neurons that never fire on S leave with all their edges (section 3.3, `neurons.py`)
    CoreNet++   also, of tau draws of each row the best on fresh points T stays (section 3.3, "Amplification")

>>> CoreNet(prune_neurons=True, amplify=8)
CoreNet(prune_neurons=True, amplify=8)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, SupportsIndex

import numpy as np
import torch
from torch import Tensor

from coresieve import theory
from coresieve.budget import Budget
from coresieve.errors import MethodError
from coresieve.methods import neurons
from coresieve.methods.drawing import Parts, Sampler, fixed, sample
from coresieve.methods.method import Job, Method, Rewrite, Work
from coresieve.methods.sizing import BySign, order, solve, to_size

TRIALS_IN_SIZE_MODE = 8  # candidates a row when a size is asked for and `amplify` is left to us


@dataclass(frozen=True)
class CoreNet(Method):
    """`amplify` is tau, the candidates drawn for each row; None asks for the theorem's own number (8 with keep=)."""

    prune_neurons: bool = False
    amplify: int | None = 1

    wants_sensitivities: ClassVar[bool] = True

    def __post_init__(self):
        tau = self.amplify
        if tau is not None and (isinstance(tau, bool) or not isinstance(tau, SupportsIndex) or tau < 1):
            raise MethodError(f"amplify={tau!r}", "a whole number of candidates, 1 or more", "amplify=8")
        if not isinstance(self.prune_neurons, bool):
            raise MethodError(f"prune_neurons={self.prune_neurons!r}", "True or False", "prune_neurons=True")

    def __str__(self) -> str:
        return "corenet" + "+" * self.prune_neurons + "+" * self.wants_judges

    @property
    def wants_judges(self) -> bool:
        return self.amplify != 1

    def trials(self, eta: int, delta: float, in_theory: bool) -> int:
        if self.amplify is not None:
            return self.amplify
        return theory.amplification_trials(eta, delta) if in_theory else TRIALS_IN_SIZE_MODE

    def check(self, budget: Budget) -> None:
        """Both budgets are ours."""

    def compress(self, job: Job) -> None:
        if self.prune_neurons:
            neurons.prune(job)
        parts = {work.layer.name: Parts.of(work, sensitivity) for work in job.works}
        for work in job.works:
            S = parts[work.layer.name].S.sum(axis=1)
            work.line.sensitivity_mean, work.line.sensitivity_max = float(S.mean()), float(S.max())
        rewrite = self._in_theory(job, parts) if job.budget.eps is not None else self._to_size(job, parts)
        if self.wants_judges:
            job.judge(rewrite)
        else:
            for work in job.works:
                rewrite(work, None, None)

    def _to_size(self, job: Job, parts: dict[str, Parts]) -> Rewrite:
        targets = share(job, {name: BySign(p) for name, p in parts.items()})
        tau = self.trials(0, job.budget.delta, in_theory=False)
        unused = 0  # by the layers before: what they could not fill falls to the next

        def rewrite(work: Work, a: Tensor | None, z: Tensor | None) -> None:
            nonlocal unused
            target, parting = targets[work.layer.name] + unused, BySign(parts[work.layer.name])
            unused = to_size(work, parting, sensitivity, target, job, best_of(tau, work, job.seed, a, z))

        return rewrite

    def _in_theory(self, job: Job, parts: dict[str, Parts]) -> Rewrite:
        assert job.promise is not None
        promise = job.promise
        for work in job.works:
            work.line.eps = promise.eps[work.layer.name]

        def rewrite(work: Work, a: Tensor | None, z: Tensor | None) -> None:
            p = parts[work.layer.name]
            m = promise.draws(work.seen, p.S)
            job.notes.append(what_theory_says(work, p, m, job))
            fixed(work, p, m, best_of(promise.trials, work, job.seed, a, z))

        return rewrite


def sensitivity(work: Work, rows: Tensor, w: Tensor) -> Tensor:
    """s_j = max over S of w_j a_j(x) / sum_k w_k a_k(x), from the one pass over the sample."""
    return work.sensitivities(rows)


def share(job: Job, partings: dict[str, BySign]) -> dict[str, int]:
    """How the budget falls to the layers when one scale c, that is one eps, serves them all."""
    layers = [(work, partings[work.layer.name]) for work in job.works]
    rows = [order(parting, work, job) for work, parting in layers]
    target = job.target()
    if target < sum(parting.least(r) for r, (_, parting) in zip(rows, layers, strict=True)):
        return whole(job, np.array([parting.parts.S.sum() for _, parting in layers]), target)
    counts = [parting.forecast(work, sensitivity, r) for r, (work, parting) in zip(rows, layers, strict=True)]

    def expected(c: float) -> np.ndarray:
        return np.array([count(c, r) for r, count in zip(rows, counts, strict=True)])

    return whole(job, expected(solve(lambda c: float(expected(c).sum()), target)), target)


def whole(job: Job, expected: np.ndarray, target: int) -> dict[str, int]:
    """Whole numbers close to these that add up to the target; what is left over goes where there is room."""
    before = np.array([work.layer.nonzero() for work in job.works], float)
    expected = np.minimum(expected * min(1.0, target / max(expected.sum(), 1e-300)), before)
    room = before - expected
    expected += room * min(1.0, (target - expected.sum()) / max(room.sum(), 1e-300))
    sizes = np.diff(np.floor(np.cumsum(expected) + 1e-6), prepend=0).astype(int)
    return {work.layer.name: int(size) for work, size in zip(job.works, sizes, strict=True)}


def best_of(tau: int, work: Work, seed: int, a: Tensor | None, z: Tensor | None) -> Sampler:
    """Of tau candidates for each row the one with the least mean |z_hat / z - 1| over T.

    z is the original network's answer, z_hat the candidate's on inputs that the layers compressed before hand over.
    Points where z is 0 have no relative error and are left out.
    """

    def one(rows: np.ndarray, draw, trial: int = 0) -> Tensor:
        return sample(work, rows, draw, sensitivity, seed, trial)

    if tau == 1 or a is None or z is None:
        return one
    return lambda rows, draw: _best(tau, rows, lambda trial: one(rows, draw, trial), work, a, z)


def _best(tau: int, rows: np.ndarray, candidate, work: Work, a: Tensor, z: Tensor) -> Tensor:
    truth = work.left(z)[:, torch.from_numpy(rows)].T
    usable = truth != 0
    best = least = None
    for trial in range(tau):
        values = candidate(trial)
        off = torch.where(usable, (values.to(a.dtype) @ a.T / truth - 1).abs(), 0.0).sum(dim=1)
        if best is None or least is None:
            best, least = values, off
        else:
            better = off < least
            best[better], least = values[better], torch.minimum(off, least)
    assert best is not None
    return best


def what_theory_says(work: Work, parts: Parts, m: np.ndarray, job: Job) -> str:
    """In words: does the theory allow a saving in this layer, and if not, by how much it misses."""
    sampled = (m < parts.n) & parts.active()
    rows, where = len(m), f"in layer {work.layer.name} at {job.budget}"
    if sampled.any():
        return f"the theory allows a saving {where} in {int(sampled.any(axis=1).sum()):,} of {rows:,} rows"
    if not parts.active().any():
        return f"no edge ever carries anything {where}: there is nothing to draw"
    best = np.unravel_index(np.argmin(np.where(parts.active(), m / np.maximum(parts.n, 1), np.inf)), m.shape)
    asks = (
        "infinitely many"
        if np.isinf(m[best])
        else f"{int(m[best]):,}"
        if m[best] < 1e15
        else f"{m[best]:.1e}"
    )
    exact = int((m >= parts.n).all(axis=1).sum())
    stay = f"all {rows:,} rows stay exact" if rows > 1 else "its one row stays exact"
    if exact < rows:
        stay = f"{exact:,} of {rows:,} rows stay exact, the others all but their edges that are silent on the sample"
    return (
        f"the theory allows no saving {where}: it asks for {asks} draws over {parts.n[best]:,} edges "
        f"where it asks for least; {stay}"
    )
