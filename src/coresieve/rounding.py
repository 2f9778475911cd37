"""Coarser numbers for the weights that stay: whole multiples of a step of each row, or a narrower type's.

With b bits a row's weights are q s, q a whole number of at most 2^(b-1) - 1 either way, and s the smallest number of 9
bits that reaches the largest weight: q s is exact in float32, and rounding once more changes nothing. The tensors stay
of the type they were. Biases stay as they are; they are few.

>>> row = torch.tensor([[0.5, -0.26, 0.001, 1.27]])
>>> rounded(row, Rounding(bits=8)).mul(100).round().tolist()
[[50.0, -26.0, 0.0, 127.0]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coresieve.errors import DomainError, NonFiniteError
from coresieve.layers import ROWS_AT_ONCE
from coresieve.report import LayerReport

BITS = (8, 6, 4)
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
STEP = 9  # bits of a step: enough that the largest weight is the largest multiple again
DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


@dataclass(frozen=True)
class Rounding:
    """To how many bits a weight, or to which type; at most one of them."""

    bits: int | None = None
    dtype: str | None = None

    @classmethod
    def of(cls, bits: Any = None, dtype: Any = None) -> Rounding | None:
        """Checked; None where neither is given."""
        name = str(dtype).removeprefix("torch.") if dtype is not None else None
        if bits is not None and dtype is not None:
            raise DomainError(f"bits={bits!r}, dtype={dtype!r}", "one of them", "bits=8")
        if bits is not None and (isinstance(bits, bool) or bits not in BITS):
            raise DomainError(f"bits={bits!r}", "8, 6 or 4", "bits=8")
        if name is not None and name not in DTYPES:
            raise DomainError(f"dtype={dtype!r}", '"float16" or "bfloat16"', "leave it out for all bits")
        return None if bits is None and name is None else cls(bits, name)

    def __str__(self) -> str:
        return f"{self.bits} bits" if self.bits else str(self.dtype)


def bits_of(rounding: Rounding | None) -> float:
    """About what a value costs in a compact file."""
    if rounding is None:
        return 26.0
    return rounding.bits - 1.0 if rounding.bits else {"float16": 13.0, "bfloat16": 10.0}[str(rounding)]


def rounded(w: Tensor, rounding: Rounding) -> Tensor:
    """A copy, of the same type."""
    if rounding.bits is None:
        return w.to(DTYPES[rounding.dtype or ""]).to(w.dtype) + 0.0  # what is too small is 0.0, not -0.0
    blocks = w.flatten(1).split(ROWS_AT_ONCE)
    return torch.cat([_to_steps(block, rounding.bits) for block in blocks]).view_as(w)


def _to_steps(w: Tensor, bits: int) -> Tensor:
    most = 2 ** (bits - 1) - 1
    fraction, exponent = torch.frexp(w.double().abs().amax(dim=1, keepdim=True) / most)
    digits = 2.0 ** max(1, min(STEP, DIGITS[w.dtype] - bits + 1))
    step = torch.ldexp((fraction * digits).ceil() / digits, exponent)
    return ((w / torch.where(step > 0, step, 1.0)).round() * step + 0.0).to(w.dtype)


def round_layers(model: nn.Module, lines: list[LayerReport], rounding: Rounding) -> None:
    """Round the weights of these layers in place; each line is told by how much, and what turned to 0."""
    for line in lines:
        off = size = 0.0
        for weight in model.get_submodule(line.name).parameters():
            if weight.ndim < 2 or not weight.numel():
                continue
            with torch.no_grad():
                new = rounded(weight, rounding)
                if not bool(torch.isfinite(new).all()):
                    raise NonFiniteError(f"weights too large for {rounding} in layer {line.name}",
                                         "a wider range", 'dtype="bfloat16", or bits=8')  # fmt: skip
                off += float((new.double() - weight.double()).abs().sum())
                size += float(weight.double().abs().sum())
                line.after -= int(weight.count_nonzero() - new.count_nonzero())
                weight.copy_(new)
        line.rounding = off / size if size else 0.0
