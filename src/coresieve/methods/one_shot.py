"""Pruning methods of others that look at a layer once: its weights W, and H, the second moments of what it gets.

Layer after layer, each fed by those pruned before it; every layer keeps the same share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from coresieve.methods.magnitude import keep_largest
from coresieve.methods.method import Job, Method, split_evenly
from coresieve.methods.moments import Teacher, moments


@dataclass(frozen=True)
class OneShot(Method):
    wants_sample: ClassVar[bool] = True
    random: ClassVar[bool] = False

    def compress(self, job: Job) -> None:
        assert job.budget.keep is not None
        original = Teacher.original(job)
        for work, size in zip(job.works, split_evenly(job.works, job.budget.keep), strict=True):
            if size >= work.line.before:
                continue
            fit, aside = moments(job, work, original)
            work.layer.write(slice(None), self.pruned(work.layer.read(slice(None)), (fit + aside).H, size))
            keep_largest([work], size)  # a weight that was 0 may have become one

    def pruned(self, W: Tensor, H: Tensor, size: int) -> Tensor:
        """W with about `size` entries left."""
        raise NotImplementedError
