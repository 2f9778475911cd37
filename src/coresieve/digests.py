"""Content hashes: which rows a network was made from or judged on, and which weights it holds.

Rows are equal when their numbers are, whatever tensor, array or dict they come in: floats count in float32, in which
most models see them, and whole numbers as they are. A row's digest is 64 bits of SHA-256: of ten thousand rows beside
a hundred thousand others two differing ones meet by chance once in ten thousand million times.

>>> a, b = torch.arange(6.0).reshape(3, 2), np.array([[2.0, 3.0], [7.0, 7.0]])
>>> np.isin(rows(torch.from_numpy(b)), rows(a)).tolist()
[True, False]
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coresieve.errors import stored
from coresieve.sample import Batch, size

ROWS_REMEMBERED = 2**16  # half a megabyte; bounds the memory, whatever the number of points
ROWS_AT_ONCE = 64  # copied to be digested


def rows(batch: Batch) -> np.ndarray:
    """One number for each point of a batch, from all that it holds of the point."""
    n = size(batch)
    named = {"": batch} if isinstance(batch, Tensor) else batch
    parts = [x for _, x in sorted(named.items()) if torch.is_tensor(x) and x.ndim and x.shape[0] == n]
    digests: list[bytes] = []
    for first in range(0, n, ROWS_AT_ONCE):
        digests += _digests([part[first : first + ROWS_AT_ONCE].detach().cpu() for part in parts])
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _digests(parts: list[Tensor]) -> list[bytes]:
    split = [_split(part.reshape(len(part), -1)) for part in parts]
    values, rest = (np.ascontiguousarray(np.concatenate(x, axis=1)) for x in zip(*split, strict=True))
    digests = [hashlib.sha256(line).digest()[:8] for line in values]
    for i in np.flatnonzero(rest.any(axis=1)):
        digests[i] = hashlib.sha256(values[i].tobytes() + rest[i].tobytes()).digest()[:8]
    return digests


def _split(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Numbers in float32, and what of whole numbers float32 does not hold."""
    x = torch.view_as_real(x).flatten(1) if x.is_complex() else x
    single = x.float() + 0.0  # so that -0.0 is 0.0
    if x.is_floating_point():
        return single.numpy(), np.empty((len(x), 0), np.float32)
    return single.numpy(), (x.double() - single.double()).float().numpy()


class Witness:
    """Remembers which rows of a sample were used, and which others were there: up to ROWS_REMEMBERED of each."""

    def __init__(self):
        self.used: list[np.ndarray] = []
        self.others: list[np.ndarray] = []
        self.room = {True: ROWS_REMEMBERED, False: ROWS_REMEMBERED}

    def see(self, batch: Batch, used: np.ndarray) -> None:
        """A batch of the sample; `used` says for each row whether it will be."""
        if not any(self.room[bool(kind)] for kind in np.unique(used)):
            return
        digests = rows(batch)
        for kind, kept in ((True, self.used), (False, self.others)):
            kept.append(digests[used == kind][: self.room[kind]])
            self.room[kind] -= len(kept[-1])

    def known(self) -> KnownRows:
        none = np.empty(0, np.uint64)
        return KnownRows(np.concatenate([none, *self.used]), np.concatenate([none, *self.others]))


class KnownRows:
    """The rows of a sample that compression used, others that it was given, and held-out ones that chose its size."""

    def __init__(
        self, used: np.ndarray, others: np.ndarray | None = None, choosing: np.ndarray | None = None
    ):
        self.used = used
        self.others = np.empty(0, np.uint64) if others is None else others
        self.choosing = np.empty(0, np.uint64) if choosing is None else choosing

    def overlap(self, judging: np.ndarray) -> int:
        """How many of the rows that judge are among these."""
        return int(np.isin(judging, np.concatenate([self.used, self.others])).sum())

    def chose(self, judging: np.ndarray) -> int:
        """How many of the rows that judge have chosen already."""
        return int(np.isin(judging, self.choosing).sum())

    def joined(self, rows: np.ndarray) -> KnownRows:
        """These and more rows that were used."""
        return KnownRows(np.concatenate([self.used, rows]), self.others, self.choosing)

    def chosen_by(self, rows: np.ndarray) -> KnownRows:
        """These, of a network that was chosen by more rows."""
        return KnownRows(self.used, self.others, np.concatenate([self.choosing, rows])[:ROWS_REMEMBERED])

    def to_texts(self) -> dict[str, str]:
        """For a file: the rows that were used, and those that chose where some did."""
        told = {"calibration_rows": _text(self.used), "choosing_rows": _text(self.choosing)}
        return {name: text for name, text in told.items() if text or name == "calibration_rows"}

    @classmethod
    def from_texts(cls, used: str, choosing: str) -> KnownRows:
        with stored("list of calibration rows"):
            return cls(_rows(used), None, _rows(choosing))


def _text(rows: np.ndarray) -> str:
    return base64.b64encode(np.sort(rows).astype("<u8").tobytes()).decode()


def _rows(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), "<u8").astype(np.uint64)


def weights(model: nn.Module) -> str:
    """SHA-256 of all parameters and buffers that the model would save, with their names, types and shapes.

    >>> layer = nn.Linear(2, 2)
    >>> before = weights(layer)
    >>> layer.bias.data[0] += 1
    >>> len(before), weights(layer) == before
    (64, False)
    """
    own = state(model.state_dict())
    # a graph that was exported from a module is told by that module's digest, as long as its weights are those
    return getattr(model, "stands_for", {}).get(own, own)


def state(tensors: Mapping[str, Any]) -> str:
    """The same of a state dict."""
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        if torch.is_tensor(value):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)};".encode())
            flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
        else:
            digest.update(f"{name} {value!r};".encode())
    return digest.hexdigest()
