"""Uniform edge sampling: every edge of a row and sign equally likely, in place of the sensitivities (the paper's
first baseline). Unbiased like CoreNet, with more variance.

>>> str(Uniform())
'uniform'
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from coresieve.methods.drawing import Draw, Parts, sample
from coresieve.methods.method import Job, Method, Work, split_evenly
from coresieve.methods.sizing import BySign, to_size


@dataclass(frozen=True)
class Uniform(Method):
    name: ClassVar[str] = "uniform"

    def compress(self, job: Job) -> None:
        assert job.budget.keep is not None
        for work, target in zip(job.works, split_evenly(job.works, job.budget.keep), strict=True):

            def sampler(rows: np.ndarray, draw: Draw, work: Work = work) -> Tensor:
                return sample(work, rows, draw, one_for_all, job.seed)

            to_size(work, BySign(Parts.of(work, one_for_all)), one_for_all, target, job, sampler)


def one_for_all(work: Work, rows: Tensor, w: Tensor) -> Tensor:
    """The same importance for every edge that is there."""
    return (w != 0).to(w.dtype)
