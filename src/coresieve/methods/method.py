"""What a method is: a frozen configuration that rewrites the chosen layers of a copy of the model, in place.

A method sees a `Job`. Each `Work` in it is one layer of the copy with what its inputs have shown; `read` and `write`
give and take its rows as [W | b], so that a method never asks what kind of layer it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from coresieve.budget import Budget
from coresieve.calibration import Observed, Seen, inputs_of
from coresieve.errors import MethodError
from coresieve.layers import Layer
from coresieve.methods.promise import Promise
from coresieve.report import LayerReport


@dataclass
class Work:
    """One layer of the copy, to be rewritten."""

    index: int
    layer: Layer
    seen: Seen
    line: LayerReport
    rows: Tensor | None = None  # of the original's rows, those that are left (None: all)
    edges: Tensor | None = None  # of the original's edges, those that are left (None: all)
    per_draw: float = (
        0.0  # the largest S/m of its sampled parts: 0 where all is exact, inf where nothing was drawn
    )

    def sensitivities(self, rows: Tensor) -> Tensor:
        """s for some of the rows that are left, biases last: as `layer.read(rows)` lays out the weights."""
        return self.seen.statistics.read(rows if self.rows is None else self.rows[rows], self.edges)

    def left(self, z: Tensor) -> Tensor:
        """Of the original's answers those of the rows that are left."""
        return z if self.rows is None else z[:, self.rows]


# (work, its inputs on T with ones for the biases, the original's answers to T)
Rewrite = Callable[[Work, Tensor | None, Tensor | None], None]


@dataclass
class Job:
    """One compression: a copy of the model, the budget, and what the sample has shown."""

    original: nn.Module
    model: nn.Module
    works: list[Work]
    observed: Observed
    budget: Budget
    seed: int
    notes: list[str]
    promise: Promise | None  # Algorithm 1's constants, for methods that have a theory

    def judge(self, rewrite: Rewrite) -> None:
        """Rewrite each layer in turn, shown T as those rewritten so far hand it over, and what the original says."""
        for work in self.works:
            seen = [
                (inputs_of(self.model, work.layer, batch), answers.layers.get(work.layer.name))
                for batch, answers in zip(
                    self.observed.judging.inputs, self.observed.judging.answers, strict=True
                )
            ]
            pairs = [(a, z) for a, z in seen if a is not None and z is not None and len(a) == len(z)]
            a, z = (torch.cat(x) for x in zip(*pairs, strict=True)) if pairs else (None, None)
            rewrite(work, a, z)

    def replace(self, old: nn.Module, new: nn.Module) -> None:
        """Put another module in a layer's place, under all its names; it may be the whole model."""
        for name in [n for n, module in self.model.named_modules(remove_duplicate=False) if module is old]:
            if name:
                self.model.set_submodule(name, new)
            else:
                self.model = new

    def tell(self, note: str) -> None:
        """A line for the report, once although a step that has it to say is taken more than once."""
        if note not in self.notes:
            self.notes.append(note)

    def target(self) -> int:
        """How many parameters may stay, over all works."""
        return self.budget.parameters(sum(work.line.before for work in self.works))

    def rng(self, *stream: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, *stream])


@dataclass(frozen=True)
class Method:
    """Base of all methods."""

    name: ClassVar[str] = ""
    wants_sensitivities: ClassVar[bool] = False
    wants_sample: ClassVar[bool] = False  # reads the inputs again, layer after layer
    random: ClassVar[bool] = True

    def __str__(self) -> str:
        return self.name

    def trials(self, eta: int, delta: float, in_theory: bool) -> int:
        """How many candidates are drawn for each row; those of more than one are judged on points of their own."""
        return 1

    @property
    def wants_judges(self) -> bool:
        return False

    def compress(self, job: Job) -> None:
        raise NotImplementedError

    def check(self, budget: Budget) -> None:
        """Only a method whose theory bounds the error turns eps into a size."""
        if budget.eps is not None:
            raise MethodError(f"eps={budget.eps} with method {self}", "corenet, corenet+ or corenet++ with eps=",
                              f"keep=0.1 with {self}, or eps= with corenet")  # fmt: skip


def split_evenly(works: list[Work], keep: float) -> list[int]:
    """The same share of every layer, in whole parameters that never add up to more than the share of all."""
    exact = np.array([keep * work.line.before for work in works])
    parts = np.floor(exact + 1e-9).astype(int)
    missing = int(np.floor(exact.sum() + 1e-9)) - parts.sum()
    parts[np.argsort(parts - exact, kind="stable")[:missing]] += 1
    return parts.tolist()
