"""How far the outputs g of a small network are from the original's f, without labels.

Toward "outputs" it is their mean square. Toward "predictions" it is, of the classes that f votes for,

    T^2 KL(softmax(f / T) || softmax(g / T)) + PIN |g - f|^2 / (2 classes)

with T a third of the spread of f's votes: a distillation (Hinton et al. 2015) in which nearly lost classes count less;
the second term keeps what all votes have in common. `direction` is that distance seen from near: for a small change
d of the outputs, the mean of (direction . d)^2 is twice the distance, times the classes where there is no T.

>>> f = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
>>> [round(float(distance(f, f + 0.3 * f, T)), 3) for T in (None, 1.0)]
[0.225, 0.023]
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

SPREAD, PIN = 3.0, 0.1


def distance(f: Tensor, g: Tensor, T: float | None) -> Tensor:
    """Votes for classes at temperature T, or plain numbers without one. A mean over inputs."""
    square = (g - f).square().mean()
    if T is None:
        return square
    f, g = ((x / T).log_softmax(-1).flatten(0, -2) for x in (f, g))
    return T * T * nn.functional.kl_div(g, f, log_target=True, reduction="batchmean") + PIN / 2 * square


def direction(f: Tensor, T: float | None, generator: torch.Generator) -> Tensor:
    """At random, of a mean square that is the distance's curvature at f."""

    def signs() -> Tensor:
        return torch.randint(0, 2, f.shape, generator=generator).to(f) * 2 - 1

    if T is None:
        return signs()
    p = (f / T).softmax(-1)
    votes = p.sqrt() * signs()  # a mean square of p, and of p - p p' without what they have in common
    return votes - p * votes.sum(-1, keepdim=True) + (PIN / f.shape[-1]) ** 0.5 * signs()


def temperature(answers: Iterable[Tensor | None]) -> float | None:
    """None where the outputs are no votes, or all alike."""
    votes = [f for f in answers if f is not None]
    if not votes or any(f.ndim < 2 or f.shape[-1] < 2 for f in votes):
        return None
    spread = torch.cat([(f - f.mean(-1, keepdim=True)).flatten() for f in votes]).double().std()
    return float(spread) / SPREAD or None
