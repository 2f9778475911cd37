"""Sieve: the most accurate network of a size that we know how to find without labels.

    1. How many edges each layer keeps    their problems compete for one size, in what errors cost at
                                          the output (`moments.costs`)
    2. Which ones, layer after layer      ADMM on the layer's least-squares problem (`selection.py`), fed by what the
                                          compressed layers before it really produce
    3. What they weigh                    the exact solution on these edges (`refit.py`), drawn a little toward the
                                          original weights; how much, inputs held aside decide
    4. Neurons without inputs or outputs leave, and the biases after them take over what they added (`neurons.py`)
    5. Polish                             all weights that are left, together, toward the original's outputs
                                          (`polish.py`); a small size is reached in steps, with polish after each

>>> Sieve(polish=0)
Sieve(polish=0, toward='predictions')
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from coresieve.calibration import first_tensor, forward
from coresieve.errors import MethodError
from coresieve.methods import neurons
from coresieve.methods.distance import temperature
from coresieve.methods.method import Job, Method, Work
from coresieve.methods.moments import Moments, Teacher, costs, moments
from coresieve.methods.polish import polish
from coresieve.methods.refit import refit
from coresieve.methods.selection import Problem, choose_edges

RIDGES = (1e-4, 1e-3, 1e-2, 1e-1)  # in mean squares of an input
RIDGE = 1e-3  # while edges are chosen
ROWS_JUDGED = 64  # rows of a layer, at most, on which the ridge is chosen
ROWS_SHARING = 128  # of a layer, at most, that compete for the size
WHOLE = 0.4  # of the parameters: the size that steps begin at, at most


@dataclass(frozen=True)
class Sieve(Method):
    """`polish` is how many times all inputs are gone through in the last step; 0 leaves it out. `toward` tells what
    polish is to meet: the "predictions" of a classifier first, or all numbers of the "outputs" alike."""

    polish: int = 10
    toward: Literal["predictions", "outputs"] = "predictions"

    name: ClassVar[str] = "sieve"
    wants_sample: ClassVar[bool] = True
    random: ClassVar[bool] = False

    def __post_init__(self):
        if isinstance(self.polish, bool) or not isinstance(self.polish, int) or self.polish < 0:
            raise MethodError(f"polish={self.polish!r}", "a whole number of epochs, 0 or more", "polish=10")
        if self.toward not in ("predictions", "outputs"):
            raise MethodError(
                f"toward={self.toward!r}", "'predictions' or 'outputs'", 'Sieve(toward="outputs")'
            )

    def __str__(self) -> str:
        return "sieve" if self.polish else "sieve without polish"

    def compress(self, job: Job) -> None:
        if job.target() >= sum(work.line.before for work in job.works):
            return
        teacher, rounds = Teacher.original(job), sizes(job, self.polish > 0)
        T = temperature(answers(job)) if self.polish and self.toward == "predictions" else None
        for left, size in enumerate(rounds, 1 - len(rounds)):
            self.thin(job, teacher, size, T)
            if self.polish:
                polish(job, max(1, self.polish // 4) if left else self.polish, T)
                teacher = Teacher.copy_of(job) if left else teacher

    def thin(self, job: Job, teacher: Teacher, size: int, T: float | None) -> None:
        """Down to this size, layer after layer."""
        c = costs(job, teacher, T)
        shares = share(job, teacher, c, size)
        for work in job.works:
            reconstruct(job, work, teacher, c[work.layer.name], shares[work.layer.name])
        neurons.absorb(job)


def answers(job: Job) -> Iterator[Tensor | None]:
    return (first_tensor(forward(job.original, batch)) for batch in job.observed.sample)


def sizes(job: Job, in_steps: bool) -> list[int]:
    """The sizes to go through: a half and a half again before a small one, when polish mends between them."""
    target, before = job.target(), sum(work.line.before for work in job.works)
    steps = [k for k in (4, 2) if in_steps and k * target <= WHOLE * before]
    return [k * target for k in (*steps, 1)]


def share(job: Job, teacher: Teacher, c: dict[str, Tensor], size: int) -> dict[str, int]:
    """How many edges each layer keeps: the layers' own problems, each fed by the teacher, compete for one size.

    Some rows stand for all of a large layer.
    """
    problems = []
    for work in job.works:
        fit, _ = moments(job, work, teacher)
        some = evenly(len(c[work.layer.name]), ROWS_SHARING)
        problems.append(problem(fit, work, RIDGE, c[work.layer.name], some))
    masks = choose_edges(problems, size)
    wanted = {
        work.layer.name: float(mask.sum()) * p.times
        for work, mask, p in zip(job.works, masks, problems, strict=True)
    }
    return whole(job, wanted, size)


def whole(job: Job, wanted: dict[str, float], left: int) -> dict[str, int]:
    """Whole numbers in these proportions that add up to what is left, none above what its layer has."""
    room = {work.layer.name: work.layer.nonzero() for work in job.works}
    sizes: dict[str, int] = {}
    for name in sorted(
        wanted, key=lambda name: -wanted[name] / max(1, room[name])
    ):  # those that may be full come first
        total = sum(wanted[other] for other in wanted if other not in sizes)
        sizes[name] = min(room[name], round(left * wanted[name] / total) if total else left)
        left -= sizes[name]
    return sizes


def reconstruct(job: Job, work: Work, teacher: Teacher, c: Tensor, size: int) -> None:
    """Choose `size` edges of the layer and solve for their weights."""
    if size >= work.layer.nonzero():
        return
    fit, aside = moments(job, work, teacher)
    one = problem(fit, work, RIDGE, c)
    (stay,) = choose_edges([one], size)
    W = work.layer.read(slice(None))
    ridge = best_ridge(fit, aside, W, stay, c)
    H, G, scale = scaled(fit + aside, W, ridge)
    work.layer.write(slice(None), refit(H, G, stay) / scale)


def problem(m: Moments, work: Work, ridge: float, c: Tensor, some: Tensor | None = None) -> Problem:
    """A layer's problem, or that of some of its rows, in edges that have one scale."""
    W = work.layer.read(slice(None) if some is None else some)
    G = m.G if some is None else m.G[some]
    H, G, scale = scaled(Moments(m.H, G, m.lines), W, ridge)
    return Problem(H, G, W * scale, c if some is None else c[some], len(c) / len(W))


def evenly(rows: int, most: int) -> Tensor:
    """Up to so many rows, evenly spread."""
    return torch.linspace(0, rows - 1, min(rows, most)).round().long().unique()


def scaled(m: Moments, W: Tensor, ridge: float) -> tuple[Tensor, Tensor, Tensor]:
    """H, G with a pull of this strength toward W, for weights times `scale`: H has ones on its diagonal then."""
    H, G = (x / max(1, m.lines) for x in (m.H, m.G))
    pull = ridge * float(H.diagonal().mean()) or 1.0
    H.diagonal().add_(pull)
    G += pull * W
    scale = H.diagonal().sqrt()
    return (H / scale / scale[:, None]).to(W.dtype), (G / scale).to(W.dtype), scale.to(W.dtype)


def best_ridge(fit: Moments, aside: Moments, W: Tensor, stay: Tensor, c: Tensor) -> float:
    """The strength with the least error on inputs held aside, on some of the rows."""
    if not aside.lines:
        return RIDGE
    some = evenly(len(W), ROWS_JUDGED).to(W.device)

    def error(ridge: float) -> float:
        H, G, scale = scaled(Moments(fit.H, fit.G[some], fit.lines), W[some], ridge)
        w = (refit(H, G, stay[some]) / scale).double()
        return float((c[some] * ((w @ aside.H) * w - 2 * w * aside.G[some]).sum(dim=1)).sum())

    return min(RIDGES, key=error)
