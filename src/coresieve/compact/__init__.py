"""One tensor as few bytes: which entries are not 0 (`positions`), and their bits (`values`), coded by `rans`.

Bit for bit: an entry is left out when all its bits are 0, so -0.0 stays, as NaN does with what it carries. A tensor of
any shape is a matrix here, its first dimension the rows; a vector is one row.

>>> weight = torch.where(torch.rand(100, 100) < 0.1, torch.randn(100, 100), 0.0)
>>> code = pack(weight)
>>> code.kept == int(weight.count_nonzero()), len(code.code) < weight.nbytes / 7
(True, True)
>>> torch.equal(unpack(code.code, weight.dtype, weight.shape), weight)
True
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coresieve.compact import positions, values
from coresieve.compact.side import Reader, Writer


@dataclass(frozen=True)
class Packed:
    code: bytes
    kept: int  # entries whose bits are not all 0
    positions: int  # bytes, about, that tell which they are


def pack(tensor: Tensor) -> Packed:
    bits, out = _bits(tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()), Writer()
    matrix = bits.reshape(_matrix(tensor.shape))
    entries = positions.encode(out, matrix != 0)
    told = len(out.whole())
    rows = values.Rows(entries.index, matrix.shape[1], matrix.shape[0])
    values.encode(out, bits[entries.index], tensor.dtype, entries.by_column, rows)
    return Packed(out.whole(), len(entries.index), told)


def unpack(code: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The tensor that was packed; ValueError for what is no code of a tensor of this type and shape."""
    height, width = _matrix(shape)
    read, tensor = Reader(code), torch.zeros(tuple(shape), dtype=dtype, device="cpu")
    entries = positions.decode(read, height, width)
    rows = values.Rows(entries.index, width, height)
    _bits(tensor)[entries.index] = values.decode(read, dtype, entries.by_column, rows)
    read.end()
    return tensor


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return (1, math.prod(shape)) if len(shape) < 2 else (shape[0], math.prod(shape[1:]))


def _bits(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory, as whole numbers."""
    return tensor.reshape(-1).view(torch.uint8).numpy().view(values.unsigned(tensor.dtype))
