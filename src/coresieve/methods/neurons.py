"""Neuron pruning (CoreNet+, section 3.3): a neuron that is 0 on all of S leaves with its incoming and outgoing edges.

Which row feeds which edge is read off the data: a layer whose inputs are always exactly the ReLU of the outputs of the
layer that ran before. A pair shrinks only if the network then still answers the same on points of S; else it is put
back (its dead edges are never drawn anyway) and the report says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from coresieve.calibration import Answers, answers_of
from coresieve.errors import ForwardError
from coresieve.layers import Layer
from coresieve.methods.method import Job, Work


def prune(job: Job) -> None:
    """Shrink every pair of layers that has dead neurons between them."""
    for before, after in pairs(job):
        dead = after.seen.statistics.largest == 0
        if not bool(dead.any()):
            before.line.dead_neurons = 0
            continue
        if bool(dead.all()):
            dead[0] = False  # a layer without a neuron would be no layer
        alive = torch.nonzero(~dead).flatten()
        undo = shrink(before.layer, after.layer, alive)
        if same(job):
            before.rows = after.edges = alive.cpu()
            before.line.dead_neurons = int(dead.sum())
        else:
            undo()
            job.notes.append(
                f"{int(dead.sum())} dead neurons of {before.layer.name} stay: without them the model's forward fails "
                "or answers differently, so its outputs go elsewhere too"
            )


def absorb(job: Job) -> None:
    """After a choice of edges: a neuron without outgoing edges leaves, and so does one without incoming edges, whose
    constant the biases after it take over. No answer changes."""
    for before, after in pairs(job):
        weight, outgoing = before.layer.weight.detach(), after.layer.weight.detach()
        bias = before.layer.module.bias
        silent = (outgoing == 0).all(dim=0)
        constant = (weight == 0).all(dim=1)
        level = torch.zeros_like(weight[:, 0]) if bias is None else bias.detach().clamp(min=0)
        if after.layer.module.bias is None:
            constant &= level == 0
        gone = silent | constant
        if bool(gone.all()):
            gone[0] = False
        if not bool(gone.any()):
            continue
        answers = [answers_of(job.model, {}, batch) for batch in job.observed.measuring.inputs]
        added = outgoing[:, gone & constant] @ level[gone & constant]
        undo = shrink(before.layer, after.layer, torch.nonzero(~gone).flatten())
        if after.layer.module.bias is not None:
            after.layer.module.bias.add_(added)
        if same(job, answers):
            alive = torch.nonzero(~gone).flatten().cpu()
            before.rows = after.edges = alive if before.rows is None else before.rows[alive]
            before.line.dead_neurons = (before.line.dead_neurons or 0) + int(gone.sum())
        else:
            if after.layer.module.bias is not None:
                after.layer.module.bias.sub_(added)
            undo()


def pairs(job: Job) -> Iterator[tuple[Work, Work]]:
    """Layers that run once and feed exactly one other through a ReLU."""
    works = {work.layer.name: work for work in job.works}
    for before in job.works:
        links = before.seen.feeds
        if len(links) == 1 and all(links.values()):
            after = works.get(next(iter(links)))
            if after is not None and all(w.seen.calls == job.observed.forwards for w in (before, after)):
                yield before, after


def shrink(before: Layer, after: Layer, alive: Tensor) -> Callable[[], None]:
    """Keep only these neurons between the two layers; returns how to undo it."""
    modules = before.module, after.module
    saved = [(m, m.weight, m.bias, m.in_features, m.out_features) for m in modules]
    first, second = modules
    with torch.no_grad():
        first.weight = _like(first.weight, first.weight[alive])
        if first.bias is not None:
            first.bias = _like(first.bias, first.bias[alive])
        second.weight = _like(second.weight, second.weight[:, alive])
    first.out_features = second.in_features = len(alive)
    before.refresh()
    after.refresh()

    def undo() -> None:
        for m, weight, bias, m.in_features, m.out_features in saved:
            m.weight, m.bias = weight, bias
        before.refresh()
        after.refresh()

    return undo


def _like(old: Tensor, values: Tensor) -> nn.Parameter:
    return nn.Parameter(values.clone(), requires_grad=old.requires_grad)


def same(job: Job, answers: Sequence[Answers] | None = None) -> bool:
    """Does the copy still answer so (as the original, by default) on the points kept for measuring? To rounding."""
    kept = job.observed.measuring
    coarse = max(torch.finfo(p.dtype).eps for p in job.model.parameters() if p.is_floating_point())
    try:
        return all(
            _close(answers_of(job.model, {}, batch).outputs, old.outputs, coarse)
            for batch, old in zip(kept.inputs, answers or kept.answers, strict=True)
        )
    except ForwardError:
        return False


def _close(new: list[Tensor], old: list[Tensor], coarse: float) -> bool:
    if [x.shape for x in new] != [x.shape for x in old]:
        return False
    for x, y in zip(new, old, strict=True):
        tolerance = 200 * max(coarse, torch.finfo(y.dtype).eps) * (float(y.abs().max()) if y.numel() else 0.0)
        if bool(((x - y).abs() > tolerance).any()):
            return False
    return True
