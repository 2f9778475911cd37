"""The held-out inputs as judges: the original's answers to them beside the small network's, input by input.

NaN counts as a violation, never as a missing value; an infinity counts as right only where the original's is the same.

>>> f, f_hat = torch.tensor([[1.0, 2.0], [4.0, 0.0]]), torch.tensor([[1.5, 2.0], [4.0, torch.nan]])
>>> seen = compare(f, f_hat)
>>> seen.deviation.tolist(), seen.flipped.tolist()
([0.5, inf], [False, True])
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler

from coresieve import digests
from coresieve.calibration import eval_mode, forward, tensors, uncompiled
from coresieve.compression import Compressed
from coresieve.errors import ClaimError, CoresieveWarning, ForwardError, SampleError
from coresieve.layers import check_loaded
from coresieve.sample import Sample, as_tensor, batches, private_randomness, size


@dataclass
class Measured:
    """Of each held-out input: how far it is off, and what became of its prediction. NaN is off by infinity."""

    deviation: np.ndarray  # max over the entries of |f_hat - f| / |f|
    error: np.ndarray  # ||f_hat - f||_1 / ||f||_1
    flipped: np.ndarray | None  # None: the outputs are no scores of classes
    lost: np.ndarray | None = None  # right before, wrong now; None without labels
    gained: np.ndarray | None = None

    @property
    def points(self) -> int:
        return len(self.deviation)


class Judge:
    """The held-out inputs, read once, with the original's answers to them."""

    def __init__(self, original: nn.Module, heldout: Sample, labels: Any = None, warn: bool = True):
        original = original.model if isinstance(original, Compressed) else original
        if not isinstance(original, nn.Module):
            raise ClaimError(
                f"an original of type {type(original).__name__}", "a torch.nn.Module", "the network itself"
            )
        original = uncompiled(original)
        check_loaded(original)
        if labels is not None and not _in_order(heldout):
            raise ClaimError(
                "labels beside a DataLoader that gives the inputs in an order of its own",
                "the inputs in the order of their labels",
                "DataLoader(..., shuffle=False), or the inputs as one tensor",
            )
        with private_randomness(heldout, 0):
            self.batches = [batch for batch in batches(heldout) if size(batch)]
        if not self.batches:
            raise SampleError("no held-out inputs", "some, that were not used to compress",
                              "a few thousand inputs of the kind to come")  # fmt: skip
        self.original = original
        self.rows = np.concatenate([digests.rows(batch) for batch in self.batches])
        self.answers, self.several = first_answers(original, self.batches, "original")
        self.labels = None if labels is None else _labels(labels, self.answers)
        self.notes = self._notes(warn)

    @property
    def points(self) -> int:
        return len(self.rows)

    def _notes(self, warn: bool) -> list[str]:
        notes = []
        if repeated := self.points - len(np.unique(self.rows)):
            notes.append(
                f"{repeated:,} of {self.points:,} held-out inputs repeat others: unless the inputs to come repeat as "
                "often, they are not independent draws and the bounds are too good by an unknown amount"
            )
            if warn:
                warnings.warn(CoresieveWarning(f"{notes[-1]}. Give each input once."), stacklevel=4)
        if self.several:
            notes.append("the model answers with several tensors; the first is judged")
        return notes

    def refuse(self, compressed: Any) -> None:
        """Raise when rows that made the network are to judge it."""
        if isinstance(compressed, Compressed) and compressed.rows is not None:
            self.refuse_rows(compressed.rows)

    def refuse_rows(self, rows: digests.KnownRows) -> None:
        if n := rows.overlap(self.rows):
            raise SampleError(
                f"{n:,} of {self.points:,} held-out inputs, which the calibration also holds",
                "inputs that played no part in the compression",
                "split the data once, before compress(), and certify on the other part",
            )

    def measure(self, model: nn.Module) -> Measured:
        if not isinstance(model, nn.Module):
            raise ClaimError(f"a compressed network of type {type(model).__name__}",
                             "what compress() returned, or a torch.nn.Module", "small or small.model")  # fmt: skip
        check_loaded(model)
        answers, _ = first_answers(model, self.batches, "compressed network")
        return compare(self.answers, answers, self.labels)

    def refuse_chooser(self, compressed: Any) -> None:
        """Raise when some of these inputs chose the network: `smallest` tested sizes on them."""
        rows = compressed.rows if isinstance(compressed, Compressed) else None
        if rows is not None and (n := rows.chose(self.rows)):
            raise SampleError(
                f"{n:,} of {self.points:,} held-out inputs, on which smallest() chose this network",
                "inputs that played no part in choosing it",
                "other inputs; the certificate that smallest() gave it holds, and says all that these prove",
            )

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.rows.astype("<u8").tobytes()).hexdigest()

    def digests(self, model: nn.Module) -> dict[str, str]:
        made = {"original": digests.weights(self.original), "compressed": digests.weights(uncompiled(model))}
        made["heldout"] = self.digest
        if self.labels is not None:
            made["labels"] = hashlib.sha256(self.labels.numpy().astype("<i8").tobytes()).hexdigest()
        return made


def _in_order(sample: Sample) -> bool:
    """False for a DataLoader that shuffles or samples: labels given beside it would fall to other inputs."""
    if not isinstance(sample, DataLoader) or isinstance(sample.dataset, IterableDataset):
        return True
    batched = sample.batch_sampler
    if batched is None:
        return isinstance(sample.sampler, SequentialSampler)
    return type(batched) is BatchSampler and isinstance(batched.sampler, SequentialSampler)


def compare(before: Tensor, after: Tensor, labels: Tensor | None = None) -> Measured:
    """Input by input, in float64."""
    if before.shape != after.shape:
        raise ForwardError(
            f"outputs of shape {tuple(after.shape)} where the original's have shape {tuple(before.shape)}",
            "the same outputs for the same inputs",
            "the compressed network that belongs to this original",
        )
    f, f_hat = before.double().flatten(1), after.double().flatten(1)
    off = torch.where(f == f_hat, 0.0, (f_hat - f).abs())  # equal infinities are equal
    scale = f.abs()
    deviation = torch.where(off == 0, 0.0, off / scale).nan_to_num(nan=torch.inf, posinf=torch.inf)
    total = torch.where(scale.isfinite(), scale, 0.0).sum(dim=1)
    error = torch.where((off == 0).all(dim=1), 0.0, off.sum(dim=1) / total).nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )
    worst = deviation.amax(dim=1) if f.shape[1] else f.new_zeros(len(f))
    answer = Measured(worst.numpy(), error.numpy(), None)
    if before.ndim >= 2 and before.shape[-1] >= 2:
        broken = (f.isnan() | f_hat.isnan()).any(dim=1)
        was, now = before.argmax(dim=-1), after.argmax(dim=-1)
        answer.flipped = ((was != now).reshape(len(f), -1).any(dim=1) | broken).numpy()
        if labels is not None:
            right, still = was == labels, now == labels
            answer.lost = ((right & ~still) | broken).numpy()
            answer.gained = (~right & still & ~broken).numpy()
    return answer


def first_answers(model: nn.Module, given: Sequence[Any], who: str) -> tuple[Tensor, bool]:
    """The answers, a line an input, on the CPU; and whether the model answers with several tensors."""
    found: list[list[Tensor]] = []
    with eval_mode(model), torch.no_grad():
        for batch in given:
            answers = tensors(forward(model, batch, f" (held out, {who})"))
            if not answers:
                raise ForwardError(f"an answer of the {who} that holds no floating-point tensor",
                                   "a tensor, or a tuple or dict that starts with one",
                                   "a model whose forward returns its outputs")  # fmt: skip
            if not answers[0].ndim or len(answers[0]) != size(batch):
                raise ForwardError(
                    f"outputs of shape {tuple(answers[0].shape)} for {size(batch)} inputs (the {who})",
                    "an answer for each input, along the first dimension",
                    "a model that answers each input by itself",
                )
            found.append([answer.detach().cpu() for answer in answers])
    first = [answers[0] for answers in found]
    shapes = sorted({tuple(answer.shape[1:]) for answer in first})
    if len(shapes) > 1:
        given = f"outputs of shapes {shapes} for different inputs (the {who})"
        raise ForwardError(given, "one shape for all", "inputs of one size")
    return torch.cat(first), any(len(answers) > 1 for answers in found)


def _labels(given: Any, answers: Tensor) -> Tensor:
    """Whole numbers, one an input, each a class of the outputs."""
    try:
        labels = torch.as_tensor(as_tensor(given)).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        reason = error.given if isinstance(error, SampleError) else error
        raise ClaimError(f"labels of type {type(given).__name__} ({reason})", "whole numbers",
                         "labels=torch.tensor([...])") from error  # fmt: skip
    if answers.ndim != 2 or answers.shape[1] < 2:
        raise ClaimError(
            f"labels for outputs of shape {tuple(answers.shape)}",
            "a score for each of several classes, (inputs, classes)",
            "no labels: coreset and output_error need none",
        )
    if labels.numel() != len(answers) or labels.numel() != max(labels.shape, default=0):
        raise ClaimError(
            f"labels of shape {tuple(labels.shape)} for {len(answers):,} held-out inputs",
            "one for each input",
            "the labels of the held-out part, in its order",
        )
    return classes(labels, answers.shape[1])


def classes(labels: Tensor, count: int) -> Tensor:
    """Labels as whole numbers from 0 to count - 1, and nothing else.

    >>> classes(torch.tensor([[1.0], [0.0]]), 2)
    tensor([1, 0])
    """
    labels = labels.flatten()
    whole = labels.real.long()
    bad = (whole < 0) | (whole >= count)
    if labels.is_floating_point() or labels.is_complex():
        bad |= labels != whole
    if bool(bad.any()):
        given = f"labels with {labels[bad][0].item()}"
        raise ClaimError(given, f"classes from 0 to {count - 1}", "the index of the right output")
    return whole
