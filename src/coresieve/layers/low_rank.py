"""A linear layer as two thin ones: W x + b = U (V x + v), with U of shape (out, r) and V of shape (r, in).

The bias is embedded as one more input, as everywhere in the paper: [W | b] = U [V | v], so the bias column of
the right factor is the bias of the first thin layer, and the second has none. The size is the number of
entries of the factors, r (in + 1 + out) with a bias and r (in + out) without.

>>> import torch
>>> left, right = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 4.0, 5.0]])     # [W | b] of rank 1
>>> layer = LowRank.from_factors(left, right, bias=True)
>>> layer(torch.tensor([10.0, 100.0])).tolist()      # W x + b = [435, 870]
[435.0, 870.0]
>>> layer
LowRank(in_features=2, out_features=2, rank=1, bias=True)
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
from torch import nn

from coresieve.errors import DomainError

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor


class LowRank(nn.Sequential):
    """Linear(in, r) followed by Linear(r, out, bias=False); the same forward on (..., features)."""

    down: nn.Linear
    up: nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        down = _thin(in_features, rank, bias, device, dtype)
        up = _thin(rank, out_features, False, device, dtype)
        super().__init__(OrderedDict(down=down, up=up))

    @classmethod
    def from_factors(
        cls, left: Float[Tensor, "out rank"], right: Float[Tensor, "rank edges"], *, bias: bool
    ) -> LowRank:
        """The layer whose [W | b] is `left @ right`; with `bias`, the last column of `right` is the bias's.

        The factors are copied, and keep their dtype and device.
        """
        columns = right.shape[1] - bias if right.ndim == 2 else -1
        if left.ndim != 2 or columns < 0 or left.shape[1] != right.shape[0]:
            given = f"factors of shapes {tuple(left.shape)} and {tuple(right.shape)}, bias={bias}"
            expected = f"(out, rank) and (rank, {'in + 1' if bias else 'in'})"
            raise DomainError(given, expected, "left = U * s, right = Vh of the matrix [W | b]")
        if (left.dtype, left.device) != (right.dtype, right.device):
            given = f"factors in {left.dtype} on {left.device} and {right.dtype} on {right.device}"
            raise DomainError(given, "one dtype and one device", "right.to(left)")
        # Built without memory, then given its factors: drawing weights only to overwrite them would move
        # the global random state.
        layer = cls(columns, left.shape[0], left.shape[1], bias, device="meta")
        layer.down.weight = nn.Parameter(
            right[:, :columns].detach().clone(memory_format=torch.contiguous_format)
        )
        if bias:
            layer.down.bias = nn.Parameter(
                right[:, columns].detach().clone(memory_format=torch.contiguous_format)
            )
        layer.up.weight = nn.Parameter(left.detach().clone(memory_format=torch.contiguous_format))
        return layer

    @property
    def weight(self) -> Tensor:
        """U V, for code that reads a linear layer's weight past its forward (torch's transformer layers do)."""
        return self.up.weight @ self.down.weight

    @property
    def bias(self) -> Tensor | None:
        return None if self.down.bias is None else self.up.weight @ self.down.bias

    @property
    def in_features(self) -> int:
        return self.down.in_features

    @property
    def out_features(self) -> int:
        return self.up.out_features

    @property
    def rank(self) -> int:
        return self.up.in_features

    def __repr__(self) -> str:
        bias = self.down.bias is not None
        return (
            f"LowRank(in_features={self.in_features}, out_features={self.out_features}, "
            f"rank={self.rank}, bias={bias})"
        )


def _thin(in_features, out_features, bias, device, dtype) -> nn.Linear:
    with warnings.catch_warnings():
        # rank 0 is a layer too: the constant 0. Its weights are empty, of which torch warns.
        warnings.filterwarnings("ignore", message="Initializing zero-element tensors")
        return nn.Linear(in_features, out_features, bias=bias, device=device, dtype=dtype)
