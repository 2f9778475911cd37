"""Sieve with one of its parts turned off or exchanged: what each of them earns (experiments/sieve/ablations.toml).

    PYTHONPATH=experiments/sieve coresieve lab run experiments/sieve/ablations.toml

The variants are made of the same functions as the method; only what is named differs.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coresieve.methods import Sieve, neurons, sieve
from coresieve.methods.method import Job, Work, split_evenly
from coresieve.methods.moments import Moments, Teacher, costs, moments
from coresieve.methods.selection import choose_edges, largest


@dataclass(frozen=True)
class Variant(Sieve):
    points: int = 5000  # of the calibration inputs
    choice: Literal["admm", "size", "wanda", "sensitivity", "sensitivity, then admm"] = "admm"
    refit: bool = True  # off: the chosen edges keep their weights
    ridge: Literal["chosen", "none"] = "chosen"
    sharing: Literal["competing", "equal"] = "competing"
    costs: bool = True  # off: all rows of all layers count alike, in shares of what the layer says
    fed: Literal["small", "original"] = "small"  # which network's layers hand over the inputs
    steps: bool = True  # off: a small size is reached at once

    name: ClassVar[str] = "sieve variant"
    wants_sensitivities: ClassVar[bool] = True

    def compress(self, job: Job) -> None:
        job.observed = dataclasses.replace(job.observed, sample=list(first(job.observed.sample, self.points)))
        if not self.steps:
            whole, sieve.WHOLE = sieve.WHOLE, 0.0
            try:
                return super().compress(job)
            finally:
                sieve.WHOLE = whole
        return super().compress(job)

    def thin(self, job: Job, teacher: Teacher, size: int, T: float | None) -> None:
        c = costs(job, teacher, T) if self.costs else alike(job, teacher)
        if self.sharing == "equal":
            share = size / sum(work.line.before for work in job.works)
            sizes = {w.layer.name: n for w, n in zip(job.works, split_evenly(job.works, share), strict=True)}
        else:
            sizes = sieve.share(job, teacher, c, size)
        for work in job.works:
            self.rewrite(job, work, teacher, c[work.layer.name], sizes[work.layer.name])
        neurons.absorb(job)

    def rewrite(self, job: Job, work: Work, teacher: Teacher, c: Tensor, size: int) -> None:
        if size >= work.layer.nonzero():
            return None
        fit, aside = self.seen(job, work, teacher)
        W = work.layer.read(slice(None))
        stay = self.chosen(fit, work, W, c, size)
        if not self.refit:
            return work.layer.write(slice(None), torch.where(stay, W, 0.0))
        ridge = 1e-9 if self.ridge == "none" else sieve.best_ridge(fit, aside, W, stay, c)
        H, G, scale = sieve.scaled(fit + aside, W, ridge)
        return work.layer.write(slice(None), sieve.refit(H, G, stay) / scale)

    def seen(self, job: Job, work: Work, teacher: Teacher) -> tuple[Moments, Moments]:
        if self.fed == "small":
            return moments(job, work, teacher)
        theirs = dataclasses.replace(work, layer=teacher.layers[work.layer.name])
        fit, aside = moments(dataclasses.replace(job, model=teacher.model), theirs, teacher)
        if fit.H.shape[0] == work.layer.shape[1]:
            return fit, aside
        return moments(job, work, teacher)  # neurons have left: the inputs are others

    def chosen(self, fit: Moments, work: Work, W: Tensor, c: Tensor, size: int) -> Tensor:
        one = sieve.problem(fit, work, sieve.RIDGE, c)
        if self.choice == "admm":
            return choose_edges([one], size)[0]
        root = c.sqrt()[:, None]
        score = {"size": W.abs(), "wanda": one.start.abs() * root}.get(self.choice)
        if score is None:
            score = sensitivities(work) * root
        stay = largest([score], [1.0], size)[0]
        if self.choice != "sensitivity, then admm":
            return stay
        return choose_edges([dataclasses.replace(one, start=one.start * stay)], size)[0]


def sensitivities(work: Work) -> Tensor:
    """CoreNet's, of the rows and edges that are left."""
    rows = torch.arange(work.layer.shape[0])
    return work.sensitivities(rows)


def alike(job: Job, teacher: Teacher) -> dict[str, Tensor]:
    """No costs at the output: a layer's error counts in shares of what its outputs are."""
    c = {}
    for work in job.works:
        fit, _ = moments(job, work, teacher)
        w = work.layer.read(slice(None)).double()
        power = float(((w @ fit.H) * w).sum()) / fit.lines
        c[work.layer.name] = torch.full((work.layer.shape[0],), 1 / max(power, 1e-30), dtype=torch.float32)
    return c


def first(sample, points: int):
    for batch in sample:
        if points <= 0:
            return None
        yield batch[:points]
        points -= len(batch)


FULL = Variant()
