"""What a worker does: train a network, or measure the cells of one network and method.

It finds the images itself (CORESIEVE_DATA where it runs), gets the trained weights as bytes, and tells each result as
soon as it has it: `tell` is the way to whoever asked. A cell that fails is a result too, with its reason.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from coresieve.compression import Compressed, Ready, calibrate
from coresieve.errors import CoresieveError, FileError
from coresieve.finetuning import finetune
from coresieve.lab import data
from coresieve.lab.compare import MEASURES, Row, judge, measure, outputs
from coresieve.lab.experiment import Cell, Choice
from coresieve.lab.train import BATCH, LEARNING_RATE, Network, restored, train
from coresieve.methods import Method

Tell = Callable[[Row], None]
BATCH_JUDGED = 500  # test images at once: enough to be fast, small enough for a cache


def trained_bytes(network: Network, tell: Tell) -> bytes:
    """Train it here; its weights as the bytes of a safetensors file."""
    torch.set_num_threads(1)
    _check_images(network)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "network.safetensors"
        train(network, path, lambda epoch, accuracy: tell({"epoch": epoch, "accuracy": accuracy}))
        return path.read_bytes()


def _check_images(network: Network) -> None:
    if (found := data.digest(network.dataset)) != network.images:
        raise FileError(f"other images of {network.dataset} here ({found})", f"those of {network.images}",
                        "CORESIEVE_DATA with the same files for every worker")  # fmt: skip


def measure_all(cells: Sequence[Cell], choice: Choice, weights: bytes, tell: Tell) -> list[tuple[str, Row]]:
    """(id, what was measured) of each cell; all are of one network and one method."""
    torch.set_num_threads(1)
    bench = _bench(
        cells[0].network, weights
    )  # without it nothing can be said of any cell: an error of the task
    done = []
    for cell in cells:
        done.append((cell.id, measured(cell, choice, bench)))
        tell({"id": cell.id, "measured": done[-1][1]})
    return done


def measured(cell: Cell, choice: Choice, bench: Bench) -> Row:
    try:
        found = _retrained(cell, choice, bench) if cell.epochs else _drawn(cell, choice, bench)
    except Exception as reason:  # whatever it is, it stays as this cell's result, and the others go on
        told = str(reason) if isinstance(reason, CoresieveError) else f"{type(reason).__name__}: {reason}"
        found = {"failed": told[:500]}
    return dict.fromkeys(MEASURES) | {"failed": None} | {key: _plain(value) for key, value in found.items()}


def _plain(value: Any) -> Any:
    """Six digits say all that a measurement can; what is infinite is no number that JSON knows."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if abs(value) < float("inf") else None


class Bench:
    """A trained network with the images that calibrate and judge, and the original's answers to the latter."""

    def __init__(self, network: Network, weights: bytes):
        _check_images(network)
        self.network = network
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "network.safetensors"
            path.write_bytes(weights)
            self.model: nn.Module = restored(network, path)
        self.parts = data.load(network.dataset, train=False)
        self.test = self.parts.test.split(BATCH_JUDGED)
        self.before = outputs(self.model, self.test)

    def points(self, calibration: int | None) -> Tensor:
        """Images that trained nothing; where more are asked for, those that trained, without their labels."""
        own = self.parts.calibration
        if calibration is not None and calibration > len(own):
            own = torch.cat([own, data.load(self.network.dataset).train])
        return own[:calibration]


@functools.lru_cache(maxsize=1)
def _bench(network: Network, weights: bytes) -> Bench:
    return Bench(network, weights)


@functools.lru_cache(maxsize=1)
def _ready(bench: Bench, method: Method, calibration: int | None) -> Ready:
    """Calibrated once for all sizes and trials."""
    points = bench.points(calibration)
    return calibrate(bench.model, points, method=method, points=len(points) if method.wants_sample else None)


def _drawn(cell: Cell, choice: Choice, bench: Bench) -> Row:
    ready = _ready(bench, choice.method(), cell.calibration)
    return measure(ready, cell.keep, cell.trial, bench.before, bench.test, bench.parts.test_labels)


# --- With retraining ----------------------------------------------------------------------------------------


def _retrained(cell: Cell, choice: Choice, bench: Bench) -> Row:
    """Shrink to size in `rounds` steps of one ratio, with `epochs` of training on labels after each."""
    parts = data.load(cell.dataset)
    loader = Shuffled(parts.train, parts.train_labels)
    small, before = None, bench.model
    for round in range(1, cell.rounds + 1):
        keep = cell.keep ** (round / cell.rounds)
        small = _shrunk(before, small, keep, cell, choice, bench)
        small = finetune(small, loader, epochs=cell.epochs, learning_rate=LEARNING_RATE, seed=cell.trial)
        before = small.model
    assert small is not None
    left = sum(int(torch.count_nonzero(p)) for p in small.model.parameters())
    whole = sum(int(torch.count_nonzero(p)) for p in bench.model.parameters())
    found = judge(bench.before, outputs(small.model, bench.test), parts.test_labels)
    return found | {"kept": left / whole, "parameters": left}


def _shrunk(
    model: nn.Module, last: Compressed | None, keep: float, cell: Cell, choice: Choice, bench: Bench
) -> Compressed:
    """`keep` of the original's parameters, from the network as the rounds before have left it."""
    already = 1.0
    if last is not None:
        whole = sum(int(torch.count_nonzero(p)) for p in bench.model.parameters())
        already = sum(int(torch.count_nonzero(p)) for p in model.parameters()) / whole
    points = bench.points(cell.calibration)
    return calibrate(model, points, method=choice.method()).compress(
        keep=min(1.0, keep / already), seed=cell.trial
    )


class Shuffled:
    """Batches of (x, labels) in another order each time, drawn from torch's generator."""

    def __init__(self, x: Tensor, labels: Tensor):
        self.x, self.labels = x, labels

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for chosen in torch.randperm(len(self.x)).split(BATCH):
            yield self.x[chosen], self.labels[chosen]
