"""The version of the code that matters to a result: what a method does, not how it is written.

A small fixed network is compressed at two sizes; the weights that come out, to three digits, are hashed together with
`MEASURES`. A method that is only rewritten keeps its version, and the results that it made stand; one that
draws or weighs otherwise gets another, and its results are made anew.

>>> from coresieve.methods import resolve
>>> one, other = version(resolve("magnitude")), version(resolve("uniform"))
>>> len(one), one == other, one == version(resolve("magnitude"))
(8, False, True)
"""

from __future__ import annotations

import functools
import hashlib
import warnings

import numpy as np
import torch
from torch import nn

from coresieve.compression import calibrate
from coresieve.errors import CoresieveError
from coresieve.methods import Method

MEASURES = 1  # of what a result holds: another number when a measure is defined otherwise
SIZES = (0.3, 0.04)


@functools.cache
def version(method: Method) -> str:
    """Eight digits; the same on every machine, but for a rounding on the edge of a digit."""
    digest = hashlib.sha256(f"{MEASURES} {method!r}".encode())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for values in _weights(method):
            digest.update(values)
    finally:
        torch.set_num_threads(threads)
    return digest.hexdigest()[:8]


def _weights(method: Method):
    """What the method makes of the probe: inputs of both signs, dead neurons, more rows than one block."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 60), nn.ReLU(), nn.Linear(60, 5))
        with torch.no_grad():
            next(model.children()).bias[:7] = -100.0  # pyright: ignore[reportIndexIssue]
        x = torch.randn(400, 40)
        try:
            ready = calibrate(model, x, method=method)
            for keep in SIZES:
                small = ready.compress(keep=keep, seed=1).model
                for parameter in small.parameters():
                    yield _rounded(parameter.detach().double().numpy()).tobytes()
        except (
            Exception
        ) as reason:  # a method may refuse the probe, or break on it: that is how it behaves, then
            yield f"{type(reason).__name__ * (not isinstance(reason, CoresieveError))}{reason}".encode()


def _rounded(x: np.ndarray) -> np.ndarray:
    """Three significant digits."""
    with np.errstate(divide="ignore"):
        scale = 10.0 ** (np.floor(np.log10(np.abs(x), where=x != 0, out=np.zeros_like(x))) - 2)
    return np.round(np.round(x / scale) * scale, 12) + 0.0
