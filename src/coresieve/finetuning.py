"""finetune(): train a small network on, with labels, its zeros kept zero.

Every parameter of a compressed layer that is 0 gets no gradient, so Adam never moves it and the size stays. The inputs
that trained are remembered beside those that calibrated: they cannot certify the network.

>>> import coresieve as cs
>>> model, x = nn.Linear(20, 3), torch.rand(64, 20)
>>> small = cs.compress(model, x, keep=0.5, method="magnitude")
>>> tuned = finetune(small, [(x, torch.randint(3, (64,)))], epochs=2)
>>> before, after = small.model.weight, tuned.model.weight
>>> torch.equal(before == 0, after == 0), torch.equal(before, after)
(True, False)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coresieve.calibration import first_tensor, moved
from coresieve.compression import Compressed, check_seed
from coresieve.digests import KnownRows, Witness
from coresieve.errors import DomainError, ForwardError, NonFiniteError, SampleError
from coresieve.sample import private_randomness, size

Loss = Callable[[Tensor, Tensor], Tensor]
Tick = Callable[[int, float], None]  # (epochs done, mean loss of the last one)


def finetune(
    small: Compressed,
    loader: Iterable[Any],
    *,
    epochs: int = 1,
    learning_rate: float = 1e-3,
    loss: Loss = nn.functional.cross_entropy,
    seed: int = 0,
    tick: Tick = lambda epoch, loss: None,
) -> Compressed:
    """A copy of `small`, trained by Adam on batches (x, labels) for some epochs; zeros stay zero.

    loader: any re-iterable of (x, y); x as in `compress`. loss: of (outputs, y).
    """
    if not isinstance(small, Compressed):
        raise SampleError(
            f"a network of type {type(small).__name__}", "what compress() returned", "cs.compress(...)"
        )
    if isinstance(epochs, bool) or not isinstance(epochs, int) or epochs < 0:
        raise DomainError(f"epochs={epochs!r}", "a whole number, 0 or more", "epochs=5")
    if not 0 < learning_rate < np.inf:
        raise DomainError(f"learning_rate={learning_rate!r}", "a finite number above 0", "learning_rate=1e-3")
    if not any(parameter.requires_grad for parameter in small.model.parameters()):
        raise DomainError("a network none of whose parameters takes a gradient", "one that can be trained",
                          "model.requires_grad_(); an ONNX model is trained where it came from")  # fmt: skip
    model, seen = copy.deepcopy(small.model), Witness()
    was_training = [(module, module.training) for module in model.modules()]
    hold = held_at_zero(model, {line.name for line in small.report.layers})
    with torch.inference_mode(False), torch.enable_grad(), private_randomness(loader, check_seed(seed)):
        try:
            descend(model, loader, epochs, learning_rate, loss, tick, seen)
        finally:
            for handle in hold:
                handle.remove()
    for module, training in was_training:
        module.training = training
    for parameter in model.parameters():
        parameter.grad = None
    note = f"trained on for {epochs} epochs with labels, zeros kept zero: errors above were measured before"
    report = replace(small.report, notes=[*small.report.notes, note])
    return Compressed(model, report, _together(small.rows, seen.known()), example=small.example)


def held_at_zero(model: nn.Module, names: set[str]) -> list[Any]:
    """Hooks that give no gradient to what is 0 in these layers (in all linear ones, where nobody told which)."""
    found = [
        m for name, m in model.named_modules() if isinstance(m, nn.Linear) and (name in names or not names)
    ]
    zero = {id(p): p for module in found for p in module.parameters() if p.requires_grad}
    return [_masked(parameter) for parameter in zero.values()]


def _masked(parameter: nn.Parameter) -> Any:
    alive = parameter.detach() != 0
    return parameter.register_hook(lambda gradient: torch.where(alive, gradient, 0.0))


def descend(
    model: nn.Module,
    loader: Iterable[Any],
    epochs: int,
    learning_rate: float,
    loss: Loss = nn.functional.cross_entropy,
    tick: Tick = lambda epoch, loss: None,
    seen: Witness | None = None,
) -> None:
    """Adam. The model is left in training mode."""
    model.train()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    for epoch in range(epochs):
        total, points = 0.0, 0
        for x, y in map(_pair, loader):
            if seen is not None and epoch == 0:
                seen.see(x, np.ones(size(x), bool))
            total += size(x) * _step(model, optimizer, x, y, loss)
            points += size(x)
        if not points:
            raise SampleError(
                "a loader without a batch", "batches of (x, labels)", "a re-iterable, not a generator"
            )
        tick(epoch + 1, total / points)


def _pair(batch: Any) -> tuple[Any, Tensor]:
    if not isinstance(batch, tuple | list) or len(batch) < 2 or not torch.is_tensor(batch[1]):
        raise SampleError(f"a batch of type {type(batch).__name__}", "(x, labels), both tensors",
                          "DataLoader(TensorDataset(x, y), batch_size=300, shuffle=True)")  # fmt: skip
    return batch[0], batch[1]


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Tensor, loss: Loss) -> float:
    optimizer.zero_grad()
    x = moved(model, x)
    try:
        output = first_tensor(model(**x) if isinstance(x, dict) else model(x))
        assert output is not None, "the model answered without a floating-point tensor"
        value = loss(output, y.to(output.device))
    except Exception as error:
        raise ForwardError(f"{type(error).__name__} while training on {size(x)} points ({error})",
                           "batches and labels that the model and the loss take",
                           "loss(model(x), y) on one batch yourself") from error  # fmt: skip
    if not bool(torch.isfinite(value)):
        raise NonFiniteError(
            f"a loss of {float(value.detach())}", "finite numbers", "a smaller learning_rate"
        )
    value.backward()
    optimizer.step()
    return float(value.detach())


def _together(one: KnownRows | None, other: KnownRows) -> KnownRows:
    if one is None:
        return other
    others = np.concatenate([one.others, other.others])
    return KnownRows(np.concatenate([one.used, other.used]), others, one.choosing)
