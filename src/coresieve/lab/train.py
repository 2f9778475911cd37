"""The networks of the paper's experiments: fully-connected, ReLU, trained as its appendix says.

Adam at 0.001, batches of 300, 30 epochs, normalised inputs. A trained network is kept as safetensors under a name that
is a hash of all that made it, and found again.

>>> widths("3x1000-pyramid", 784, 10), widths("2x300", 784, 10), widths("300-100", 784, 10)
((784, 1000, 670, 340, 10), (784, 300, 300, 10), (784, 300, 100, 10))
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

from coresieve.errors import DomainError, FileError
from coresieve.lab import data

RECIPE = 1  # of the training below: another number when networks of the same seed come out different
LEARNING_RATE, BATCH, EPOCHS = 0.001, 300, 30  # the paper's appendix, "Additional Results"

_FORM = re.compile(r"(\d+)x(\d+)(-pyramid)?|\d+(-\d+)*")


def widths(architecture: str, inputs: int, classes: int) -> tuple[int, ...]:
    """All widths of "LxW" (L hidden layers of W), "LxW-pyramid" (falling linearly from W to the classes) or "W-W-W"."""
    form = _FORM.fullmatch(architecture)
    hidden: list[int] = []
    if form and form[1]:
        layers, first = int(form[1]), int(form[2])
        fall = (first - classes) / layers if form[3] else 0
        hidden = [round(first - fall * k) for k in range(layers)]
    elif form:
        hidden = [int(width) for width in architecture.split("-")]
    if not hidden or min(hidden) < 1:
        raise DomainError(f"architecture {architecture!r}", '"LxW", "LxW-pyramid" or "W-W-W"', '"2x300"')
    return (inputs, *hidden, classes)


def build(sizes: tuple[int, ...]) -> nn.Sequential:
    """An untrained network with ReLU between its layers."""
    layers = [part for n, m in itertools.pairwise(sizes) for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


@dataclass(frozen=True)
class Network:
    """All that makes a trained network; `images` is the digest of the set."""

    dataset: str
    images: str
    architecture: str
    seed: int
    epochs: int = EPOCHS

    @property
    def id(self) -> str:
        made = asdict(self) | {"recipe": RECIPE, "lr": LEARNING_RATE, "batch": BATCH}
        return hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16]

    def path(self, folder: Path) -> Path:
        return folder / f"{self.dataset}-{self.architecture}-{self.seed}-{self.id}.safetensors"


Tick = Callable[[int, float], None]  # (epochs done, accuracy on the training batches of the last one)


def trained(network: Network, folder: Path, tick: Tick = lambda epoch, accuracy: None) -> nn.Sequential:
    """The network from its file; trained and kept there when it is not there yet."""
    path = network.path(folder)
    if not path.exists():
        train(network, path, tick)
    return restored(network, path)


def restored(network: Network, path: Path) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):  # a skeleton's weights are drawn only to be overwritten
        model = build(widths(network.architecture, *_shape(network.dataset)))
    try:
        load_model(model, path)
    except Exception as reason:  # the library raises its own errors, and torch's
        raise FileError(f"{path} ({reason})", "a network that was trained and kept", f"rm {path}") from reason
    return model.eval()


def _shape(dataset: str) -> tuple[int, int]:
    if dataset == "digits":
        return 64, 10
    channels, height, width = data.source(dataset).shape
    return channels * height * width, 10


def train(network: Network, path: Path, tick: Tick) -> None:
    """Train, then write the file in one step. torch's global random state is put back as it was."""
    parts = data.load(network.dataset)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(network.seed)
        model = build(widths(network.architecture, *_shape(network.dataset)))
        fit(model, parts.train, parts.train_labels, network.epochs, tick=tick)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_model(model, str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def fit(
    model: nn.Module,
    x: Tensor,
    labels: Tensor,
    epochs: int,
    *,
    learning_rate: float = LEARNING_RATE,
    batch: int = BATCH,
    tick: Tick = lambda epoch, accuracy: None,
) -> None:
    """Adam on the cross-entropy, in an order drawn from torch's generator."""
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate, fused=True)
    for epoch in range(epochs):
        right = 0
        for chosen in torch.randperm(len(x)).split(batch):
            optimizer.zero_grad()
            answer = model(x[chosen])
            nn.functional.cross_entropy(answer, labels[chosen]).backward()
            optimizer.step()
            right += int((answer.detach().argmax(1) == labels[chosen]).sum())
        tick(epoch + 1, right / len(x))
    model.eval()
