"""Truncated SVD: each matrix as two thin ones, W ~ U (Sigma V^T), the bias a column of W (the paper's baseline).

One rank r serves all layers, as in the paper; a layer with fewer parameters than its factors stays exact, which is what
becomes of the output layer. A rank costs rows + edges parameters, so the size lands on a whole number of ranks. What is
left over goes to the layers where one more rank removes most of the relative error a parameter.

>>> str(SVD())
'svd'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coresieve.layers.low_rank import LowRank
from coresieve.methods.method import Job, Method, Work


@dataclass(frozen=True)
class SVD(Method):
    name: ClassVar[str] = "svd"
    random: ClassVar[bool] = False

    def compress(self, job: Job) -> None:
        left = job.target()
        factors = {
            work.layer.name: torch.linalg.svd(work.layer.read(slice(None)), full_matrices=False)
            for work in job.works
        }
        ranks = one_rank(job.works, left)
        left -= sum(size(work, ranks[work.layer.name]) for work in job.works)
        top_up(
            job.works,
            ranks,
            {name: f[1].double().square().cpu().numpy() for name, f in factors.items()},
            left,
        )
        for work in job.works:
            name = work.layer.name
            replace(job, work, ranks[name], *factors[name])


def cost(work: Work) -> int:
    """Parameters of one rank."""
    return sum(work.layer.shape)


def most(work: Work) -> int:
    """The largest rank that is smaller than the matrix: beyond it the matrix itself is the better answer."""
    return min(*work.layer.shape, max(0, (work.line.before - 1) // cost(work)))


def size(work: Work, rank: int | None) -> int:
    return work.line.before if rank is None else rank * cost(work)


def one_rank(works: list[Work], target: int) -> dict[str, int | None]:
    """The largest r that all layers can have together; a layer that is no larger than its factors stays exact."""

    def ranks(r: int) -> dict[str, int | None]:
        return {w.layer.name: None if r * cost(w) >= w.line.before else min(r, most(w)) for w in works}

    def fits(r: int) -> bool:
        return sum(size(work, ranks(r)[work.layer.name]) for work in works) <= target

    low, high = 0, 1 + max(min(work.layer.shape) for work in works)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return ranks(high if fits(high) else low)


def top_up(works: list[Work], ranks: dict[str, int | None], energy: dict[str, np.ndarray], left: int) -> None:
    """Spend what is left, a rank at a time, where it removes most of ||W - W_r||_F^2 / ||W||_F^2 a parameter."""
    while True:
        best, gain = None, 0.0
        for work in works:
            name, rank = work.layer.name, ranks[work.layer.name]
            if rank is not None and rank < most(work) and cost(work) <= left:
                here = energy[name][rank] / max(energy[name].sum(), 1e-300) / cost(work)
                if here > gain:
                    best, gain = work, here
        if best is None:
            return
        ranks[best.layer.name] = (ranks[best.layer.name] or 0) + 1
        left -= cost(best)


def replace(job: Job, work: Work, rank: int | None, U: Tensor, sigma: Tensor, Vt: Tensor) -> None:
    """Put the two thin layers where the one was; a rank of 0 leaves a layer of zeros."""
    if rank is None:
        work.line.rank = min(work.layer.shape)
        return
    work.line.rank = rank
    if rank == 0:
        work.layer.write(slice(None), torch.zeros(work.layer.shape, device=U.device))
        return
    edges, dtype = work.layer.weight.shape[1], work.layer.weight.dtype
    left, right = U[:, :rank].to(dtype), (sigma[:rank, None] * Vt[:rank]).to(dtype)
    work.layer.check_fits(right)  # sigma may be far larger than any weight
    first = None
    for module in work.layer.modules.values():
        column = work.layer.bias_column(module)
        columns = [right[:, :edges]] + ([] if column is None else [right[:, edges + column, None]])
        thin = LowRank.from_factors(left, torch.cat(columns, dim=1), bias=column is not None)
        if first is not None:  # tied weights stay tied
            thin.down.weight, thin.up.weight = first.down.weight, first.up.weight
        first = first or thin
        thin.requires_grad_(module.weight.requires_grad)
        job.replace(module, thin)
