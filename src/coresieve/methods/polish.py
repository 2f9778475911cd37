"""Polish: all weights that are left, together, toward the original network's outputs. No labels; zeros stay zero.

Adam on the distance of the outputs (`distance.py`) over the calibration inputs, with steps that fall along a cosine
from a share of what a layer's weights are, so their scale does not matter. A part of the inputs is held aside: the
weights that do best there stay, those before the first step among them, so polish does no harm there. Only compressed
layers move.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from coresieve.calibration import Batch, first_tensor, forward
from coresieve.layers import working_dtype
from coresieve.methods.distance import distance
from coresieve.methods.method import Job
from coresieve.sample import merged, size, take

STEP = 0.02  # of the root mean square of the layer's weights that are not zero
BATCH = 128
PIECE = 1024  # points at once where nothing is learned
ASIDE = 10  # one of so many inputs is held aside


Pair = tuple[Batch, Tensor]  # inputs, the original's answer


@dataclass
class Weight:
    """One parameter of the copy, and the wide numbers that are moved in its place."""

    parameter: nn.Parameter
    wide: Tensor
    alive: Tensor
    step: float

    def put(self) -> None:
        self.parameter.copy_(self.wide)


def polish(job: Job, epochs: int, T: float | None) -> None:
    """Move the weights of the copy's compressed layers, in place."""
    weights = list(_weights(job))
    rng = np.random.default_rng(6)  # the same order for every seed: nothing here is drawn
    train, aside = _parted(job, rng)
    if not (weights and train and aside):
        job.tell("not polished: there are too few inputs, or no weights or no output to move them by")
        return
    steps = epochs * sum(-(-size(x) // BATCH) if _can_take(x) else 1 for x, _ in train)
    adam = torch.optim.Adam([{"params": [w.wide], "lr": w.step} for w in weights])
    falling = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda k: 0.5 * (1 + math.cos(math.pi * min(1, k / steps)))
    )
    least, best = _off(job.model, aside, T), [w.wide.clone() for w in weights]
    with _only(job.model, weights):
        for _ in range(epochs):
            for batch in _shuffled(train, rng):
                if not _step(job.model, weights, adam, batch, T):
                    job.tell("polish ended early: an output had no gradient, or was no number")
                    break
                falling.step()
            off = _off(job.model, aside, T)
            if off < least:
                least, best = off, [w.wide.clone() for w in weights]
    for w, values in zip(weights, best, strict=True):
        w.wide = values
        w.put()


def _weights(job: Job) -> Iterator[Weight]:
    for work in job.works:
        w = work.layer.weight.detach()
        alive = int(w.count_nonzero())
        step = STEP * float(w.double().norm()) / math.sqrt(max(alive, 1))
        parameters = (p for m in work.layer.modules.values() for p in (m.weight, m.bias) if p is not None)
        for p in dict.fromkeys(parameters):
            if step > 0 and bool(p.count_nonzero()):
                assert isinstance(p, nn.Parameter)
                yield Weight(p, p.detach().to(working_dtype(p), copy=True), p.detach() != 0, step)


def _parted(job: Job, rng: np.random.Generator) -> tuple[list[Pair], list[Pair]]:
    """(to learn from, held aside), with the original's answers."""
    train: list[Pair] = []
    aside: list[Pair] = []
    for batch in merged(job.observed.sample, 2**62):
        answers = [first_tensor(forward(job.original, part)) for part in _pieces(batch, PIECE)]
        if any(a is None for a in answers):
            continue
        answer = torch.cat(answers)  # pyright: ignore[reportArgumentType]
        if _can_take(batch) and len(answer) == size(batch):
            order = torch.from_numpy(rng.permutation(size(batch)))
            cut = size(batch) // ASIDE
            for index, part in ((order[:cut], aside), (order[cut:], train)):
                if len(index):
                    part.append((take(batch, index), answer[index]))
        else:
            (aside if len(train) >= (ASIDE - 1) * (len(aside) + 1) else train).append((batch, answer))
    return train, aside


def _can_take(batch: Batch) -> bool:
    """Whether points can be taken out of a batch without changing what it means."""
    return isinstance(batch, Tensor) or all(torch.is_tensor(x) and x.ndim for x in batch.values())


def _pieces(batch: Batch, points: int) -> Iterator[Batch]:
    n = size(batch)
    if not _can_take(batch) or n <= points:
        yield batch
    else:
        for index in torch.arange(n).split(points):
            yield take(batch, index)


def _shuffled(pairs: Sequence[Pair], rng: np.random.Generator) -> Iterator[Pair]:
    for i in rng.permutation(len(pairs)):
        batch, answer = pairs[i]
        if not _can_take(batch) or len(answer) != size(batch):
            yield batch, answer
            continue
        for index in torch.from_numpy(rng.permutation(size(batch))).split(BATCH):
            yield take(batch, index), answer[index]


@contextmanager
def _only(model: nn.Module, weights: Sequence[Weight]) -> Iterator[None]:
    """Gradients reach these parameters and no others; afterwards flags are as they were."""
    ours = {id(w.parameter) for w in weights}
    flags = [(p, p.requires_grad) for p in model.parameters()]
    try:
        for p, _ in flags:
            p.requires_grad_(id(p) in ours)
        yield
    finally:
        for p, flag in flags:
            p.grad = None
            p.requires_grad_(flag)


def _step(
    model: nn.Module, weights: Sequence[Weight], adam: torch.optim.Adam, pair: Pair, T: float | None
) -> bool:
    batch, answer = pair
    for w in weights:
        w.parameter.grad = None
    with torch.enable_grad():
        output = first_tensor(forward(model, batch))
        if output is None or not output.requires_grad or output.shape != answer.shape:
            return False
        loss = distance(answer.float(), output.float(), T)
        if not bool(torch.isfinite(loss)):
            return False
        loss.backward()
    for w in weights:
        gradient = w.parameter.grad
        w.wide.grad = None if gradient is None else torch.where(w.alive, gradient.to(w.wide.dtype), 0.0)
    adam.step()
    for w in weights:
        w.put()
    return True


def _off(model: nn.Module, pairs: Sequence[Pair], T: float | None) -> float:
    """The mean distance on these inputs; infinite where it is no number."""
    total, points = 0.0, 0
    for batch, answer in pairs:
        start = 0
        for piece in _pieces(batch, PIECE):
            output = first_tensor(forward(model, piece))
            if output is None:
                return math.inf
            n = len(output)
            total += n * float(distance(answer[start : start + n].double(), output.double(), T))
            start, points = start + n, points + n
    return total / points if math.isfinite(total) else math.inf
