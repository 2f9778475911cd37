"""Entry-wise matrix sparsifiers: sample the entries of the whole matrix by their size (the paper's baselines).

    l1      p_ij = |w_ij| / ||W||_1                          Achlioptas, Karnin, Liberty 2013
    l2      p_ij = w_ij^2 / ||W||_F^2                        Drineas, Zouzias 2011
    l1l2    the mean of the two                              Kundu, Drineas 2014

with replacement and reweighted, so that the sparse matrix is unbiased. They see no data.

>>> [str(m) for m in (L1(), L2(), L1L2())]
['l1', 'l2', 'l1l2']
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from coresieve.methods.drawing import Draw, Importance, Parts, sample
from coresieve.methods.method import Job, Method, Work, split_evenly
from coresieve.methods.sizing import Pooled, to_size


@dataclass(frozen=True)
class _Norms(Method):
    def compress(self, job: Job) -> None:
        assert job.budget.keep is not None
        for work, target in zip(job.works, split_evenly(job.works, job.budget.keep), strict=True):
            p = self.probabilities(work)

            def sampler(rows: np.ndarray, draw: Draw, work: Work = work, p: Importance = p) -> Tensor:
                return sample(work, rows, draw, p, job.seed)

            to_size(work, Pooled(Parts.of(work, p)), p, target, job, sampler)

    def probabilities(self, work: Work) -> Importance:
        raise NotImplementedError


def l1(work: Work) -> float:
    """||W||_1, entry by entry, the bias a column of W."""
    return sum(float(work.layer.read(rows).abs().sum(dtype=torch.float64)) for rows in work.layer.blocks())


def l2(work: Work) -> float:
    """||W||_F^2."""
    return sum(float(work.layer.read(rows).double().square().sum()) for rows in work.layer.blocks())


@dataclass(frozen=True)
class L1(_Norms):
    name: ClassVar[str] = "l1"

    def probabilities(self, work: Work) -> Importance:
        total = l1(work) or 1.0
        return lambda work, rows, w: w.abs() / total


@dataclass(frozen=True)
class L2(_Norms):
    name: ClassVar[str] = "l2"

    def probabilities(self, work: Work) -> Importance:
        root = (
            math.sqrt(l2(work)) or 1.0
        )  # divided by before squares are taken, lest they leave float32's range
        return lambda work, rows, w: (w / root).square()


@dataclass(frozen=True)
class L1L2(_Norms):
    name: ClassVar[str] = "l1l2"

    def probabilities(self, work: Work) -> Importance:
        total, root = l1(work) or 1.0, math.sqrt(l2(work)) or 1.0
        return lambda work, rows, w: (w.abs() / total + (w / root).square()) / 2
