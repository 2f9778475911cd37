"""Compression methods side by side: the same network, the same sizes, the same inputs none of them saw.

Each method reads the calibration inputs once; then each size is drawn once per seed, and the answers f_hat of
the small network are held against the original's f on held-out inputs x_1 .. x_n:

    l1_error   mean over i of ||f_hat(x_i) - f(x_i)||_1       the paper's error, in the units of the output
    error      sum_i ||f_hat(x_i) - f(x_i)||_1 / sum_i ||f(x_i)||_1     the same, without units
    flips      share of inputs whose largest output is another one
    accuracy   share of inputs whose largest output is the label; accuracy_drop = original's - small network's

Differs from the paper: (1) its "acc" averages mistakes; here accuracy averages the right answers. (2) It
repeats each size 50 times; here as often as there are seeds.

>>> import torch
>>> f = torch.tensor([[3.0, 1.0], [0.0, 2.0]])
>>> judge(f, f + torch.tensor([[0.5, 0.5], [0.0, -1.0]]))["error"]
0.3333333333333333
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coresieve.calibration import check_finite
from coresieve.compression import Ready, calibrate
from coresieve.errors import CoresieveError, SampleError
from coresieve.judge import classes, first_answers
from coresieve.lab.quick import quick
from coresieve.methods import METHODS, resolve

MEASURES = ("kept", "parameters", "l1_error", "error", "flips", "accuracy", "accuracy_drop", "seconds")

Row = dict[str, Any]


def cells(
    methods: Sequence[str], keeps: Sequence[float], seeds: Sequence[int]
) -> list[tuple[str, float, int]]:
    """Every (method, keep, seed) that `compare` measures, in its order.

    >>> cells(["svd", "l1"], [0.5], [0, 1])
    [('svd', 0.5, 0), ('l1', 0.5, 0), ('l1', 0.5, 1)]
    """
    return [
        (method, keep, seed)
        for method in methods
        for keep in keeps
        for seed in (seeds if resolve(method).random else seeds[:1])  # nothing drawn: one run says all
    ]


def compare(
    model: nn.Module,
    calibration: Any,
    heldout: Sequence[Tensor],
    *,
    methods: Sequence[str] = tuple(METHODS),
    keeps: Sequence[float],
    seeds: Sequence[int] = (0, 1, 2),
    labels: Tensor | None = None,
) -> Iterator[Row]:
    """One row per cell, as soon as it is measured. A cell that fails stays, with its reason in `failed`."""
    before = outputs(model, heldout)
    if labels is not None and (before.shape[:-1] != labels.shape or before.shape[-1] < 2):
        given = f"labels of shape {tuple(labels.shape)} for outputs of shape {tuple(before.shape)}"
        raise SampleError(given, "a class for each output", "no labels, where the model is no classifier")
    if labels is not None:
        classes(labels, before.shape[-1])  # refuses those that are none
    check_finite(before, "the original's answers to the inputs that judge")
    for method in methods:
        start = time.perf_counter()
        ready = calibrate(model, calibration, method=method, seed=seeds[0])
        wait = time.perf_counter() - start
        for _, keep, seed in cells([method], keeps, seeds):
            cell: Row = {"method": method, "keep": keep, "seed": seed, "calibration_seconds": wait}
            measured = measure(ready, keep, seed, before, heldout, labels)
            yield cell | dict.fromkeys(MEASURES) | {"failed": None} | measured


def measure(
    ready: Ready, keep: float, seed: int, before: Tensor, heldout: Sequence[Tensor], labels: Tensor | None
) -> Row:
    """One small network, drawn and judged; one that cannot be made is told by `failed`."""
    start = time.perf_counter()
    try:
        small = ready.compress(keep=keep, seed=seed)
    except CoresieveError as reason:
        return {"failed": str(reason)}
    cost = {"seconds": time.perf_counter() - start, "kept": small.report.kept}
    cost["parameters"] = small.report.parameters_after
    return cost | judge(before, outputs(quick(small.model), heldout), labels)


def judge(before: Tensor, after: Tensor, labels: Tensor | None = None) -> Row:
    """The measures of the table above, from the two networks' outputs over the same inputs."""
    gap = (
        (after.double() - before.double()).abs().nan_to_num(nan=torch.inf, posinf=torch.inf).sum().item()
    )  # NaN is off by infinity
    scale = before.double().abs().sum().item()
    answer: Row = {"l1_error": gap / len(before), "error": gap / scale if scale > 0 else None}
    if before.ndim >= 2 and before.shape[-1] >= 2:  # one number per input is no vote among classes
        was, now = before.argmax(-1), after.argmax(-1)
        answer["flips"] = (was != now).double().mean().item()
        if labels is not None:
            right, kept = (was == labels).double().mean().item(), (now == labels).double().mean().item()
            answer |= {"accuracy": kept, "accuracy_drop": right - kept}
    return answer


def accuracy(model: nn.Module, heldout: Sequence[Tensor], labels: Tensor) -> float:
    return (outputs(model, heldout).argmax(-1) == labels).double().mean().item()


def outputs(model: nn.Module, batches: Iterable[Any]) -> Tensor:
    """f(x) over all batches, in eval mode. Of a model that answers with several tensors, the first counts."""
    return first_answers(model, list(batches), "network")[0]


def summary(rows: Iterable[Row]) -> list[Row]:
    """Mean and standard deviation over the seeds: one entry per (method, keep), in the rows' order.

    >>> rows = [{"method": "l1", "keep": 0.5, "seed": s, "error": e} for s, e in enumerate([0.1, 0.3])]
    >>> summary(rows)[0]["error"], round(summary(rows)[0]["error_std"], 3)
    (0.2, 0.141)
    """
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["keep"]), []).append(row)
    return [_summarise(method, keep, group) for (method, keep), group in groups.items()]


def _summarise(method: str, keep: float, group: Sequence[Row]) -> Row:
    answer: Row = {"method": method, "keep": keep, "runs": len(group)}
    for name in MEASURES:
        values = [row[name] for row in group if row.get(name) is not None]
        answer[name] = statistics.fmean(values) if values else None
        tells = len(values) > 1 and all(map(math.isfinite, values))
        answer[f"{name}_std"] = statistics.stdev(values) if tells else None
    answer["failed"] = next((row["failed"] for row in group if row.get("failed")), None)
    return answer
