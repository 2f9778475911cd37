"""How long an experiment would take: counted operations over this machine's speed.

    training    6 operations a parameter, image and epoch: forward, and twice that backward
    judging     2 operations a parameter and test image, for each cell
    drawing     seconds a million parameters, by method, as measured on 784-1000-1000-10 (`DRAWING`)

An estimate to a factor of two or so: small matrices run slower than large ones.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from coresieve.lab import data
from coresieve.lab.experiment import Choice, Experiment
from coresieve.lab.results import Store
from coresieve.lab.train import widths

DRAWING = {"magnitude": 0.01, "svd": 0.17, "corenet++": 0.17, "wanda": 0.5, "sparsegpt": 2, "sieve": 30}
USUAL = 0.035  # seconds a million parameters for every other method
IMAGES = {"digits": (1000, 500)}


@dataclass(frozen=True)
class Plan:
    """What there is to do, in cells and core-hours."""

    networks: int
    trained: int
    cells: int
    stored: int
    training: float
    judging: float
    drawing: float
    retraining: float

    @property
    def core_hours(self) -> float:
        """Of what is left to do."""
        return self.training + self.judging + self.drawing + self.retraining


def plan(experiment: Experiment, store: Store, networks: Path) -> Plan:
    trained = experiment.trained()
    stored, cells, left = store.ids(), 0, []
    for cell in experiment.cells(trained):
        cells += 1
        if cell.id not in stored:
            left.append(cell)
    missing = [network for network in trained if not network.path(networks).exists()]
    wanted = {cell.network for cell in left}  # a network without a cell to do is not trained
    speed = operations_a_second()
    choices = {choice.told: choice for choice in experiment.choices}
    hours = {"training": 0.0, "judging": 0.0, "drawing": 0.0, "retraining": 0.0}
    for network in wanted.intersection(missing):
        size, (train, _) = parameters(network.dataset, network.architecture), images(network.dataset)
        hours["training"] += 6 * size * train * network.epochs / speed
    for cell in left:
        size, (train, test) = parameters(cell.dataset, cell.architecture), images(cell.dataset)
        hours["judging"] += 2 * size * test / speed
        hours["drawing"] += cell.rounds * drawing(choices[cell.method]) * size / 1e6
        hours["retraining"] += 6 * size * train * cell.epochs * cell.rounds / speed
    hours = {name: seconds / 3600 for name, seconds in hours.items()}
    return Plan(len(trained), len(trained) - len(missing), cells, cells - len(left), **hours)


def drawing(choice: Choice) -> float:
    return DRAWING.get(choice.name, USUAL)


def parameters(dataset: str, architecture: str) -> int:
    shape = (1, 8, 8) if dataset == "digits" else data.source(dataset).shape
    sizes = widths(architecture, shape[0] * shape[1] * shape[2], 10)
    return sum((n + 1) * m for n, m in itertools.pairwise(sizes))


def images(dataset: str) -> tuple[int, int]:
    """That train, that judge."""
    if dataset in IMAGES:
        return IMAGES[dataset]
    train, test = data.source(dataset).images
    return train - data.CALIBRATION, test


def operations_a_second() -> float:
    """Of one thread, in matrix products of the size that the experiments have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x, w = torch.rand(1000, 784), torch.rand(500, 784)
        times = []
        for _ in range(9):
            start = time.perf_counter()
            torch.mm(x, w.T)
            times.append(time.perf_counter() - start)
        return 2 * 1000 * 784 * 500 / sorted(times)[4]
    finally:
        torch.set_num_threads(threads)
