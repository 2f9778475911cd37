"""coresieve: smaller neural networks, and how far their answers may be from the original's.

>>> import coresieve as cs, torch
>>> from torch import nn
>>> _ = torch.manual_seed(0)
>>> model = nn.Sequential(nn.Linear(20, 50), nn.ReLU(), nn.Linear(50, 3))
>>> small = cs.compress(model, torch.rand(300, 20), keep=0.5, method="corenet")
>>> small.report.parameters_before, small.report.kept <= 0.5
(1203, True)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0.dev0"

if TYPE_CHECKING:
    from coresieve import errors
    from coresieve.certificate import Certificate, Claim
    from coresieve.certification import certify, verify
    from coresieve.compression import Compressed, Ready, calibrate, compress, from_onnx, load
    from coresieve.finetuning import finetune
    from coresieve.methods import L1, L1L2, L2, SVD, CoreNet, Magnitude, Sieve, SparseGPT, Uniform, Wanda
    from coresieve.search import smallest
    from coresieve.sparse import accelerate

_HOMES = {
    "coresieve.certificate": ("Certificate", "Claim"),
    "coresieve.certification": ("certify", "verify"),
    "coresieve.finetuning": ("finetune",),
    "coresieve.search": ("smallest",),
    "coresieve.sparse": ("accelerate",),
    "coresieve.compression": ("Compressed", "Ready", "calibrate", "compress", "from_onnx", "load"),
    "coresieve.methods": (
        "L1",
        "L1L2",
        "L2",
        "SVD",
        "CoreNet",
        "Magnitude",
        "Sieve",
        "SparseGPT",
        "Uniform",
        "Wanda",
    ),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names} | {"errors": "coresieve"}

__all__ = [
    "L1", "L1L2", "L2", "SVD", "Certificate", "Claim", "Compressed", "CoreNet", "Magnitude", "Ready", "Sieve",
    "SparseGPT", "Uniform", "Wanda", "accelerate", "calibrate", "certify", "compress", "errors", "finetune",
    "from_onnx", "load", "smallest", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that importing coresieve does not import torch."""
    if name == "errors":
        return importlib.import_module("coresieve.errors")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'coresieve' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
