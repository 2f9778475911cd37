"""A 1000 x 784 layer on disk, in bytes beside what nothing can beat, and how fast it is read again.

    python -m benchmarks.files            CoreNet on random weights and inputs of unequal columns
    python -m benchmarks.files --mnist    every method, on the first layer of 784-1000-1000-10 trained on MNIST

Bounds: `32-bit` is 32 bits for each weight that stays and log2 C(n, k) for where they are; `8-bit` the entropy of the
8-bit values and log2 C(n, k). Dense, CSR and gaps (one byte each, the bytes of the values shuffled) are what others do;
zstandard is used where it is installed, else deflate. Speeds are of the processor's time, from the file to a dense
float32 matrix, digest checked. Exits with 1 where a bar is missed: lossless 0.88 of its bound and 8-bit 1.05 of its own
at 10 %, 300 MB of dense weights a second everywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import coresieve as cs
from coresieve.compact import pack
from coresieve.compact.positions import bound
from coresieve.rounding import Rounding, rounded
from coresieve.storage import load_model, save_model

DENSITIES = (0.02, 0.05, 0.1, 0.2, 0.5)
LOSSLESS, EIGHT, SPEED = 0.88, 1.05, 300.0
KINDS = {"lossless": None, "float16": Rounding(dtype="float16"), "bfloat16": Rounding(dtype="bfloat16"),
         "8-bit": Rounding(bits=8), "6-bit": Rounding(bits=6), "4-bit": Rounding(bits=4)}  # fmt: skip


def synthetic() -> tuple[nn.Module, Tensor]:
    g = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(784, 1000))
    model[0].weight.data = torch.randn(1000, 784, generator=g) * torch.rand(1000, 784, generator=g)
    return model, torch.rand(300, 784, generator=g) * torch.rand(784, generator=g) ** 2


def mnist() -> tuple[nn.Module, Tensor]:
    from coresieve.lab import data, train

    torch.manual_seed(0)
    parts, model = data.load("mnist"), train.build((784, 1000, 1000, 10))
    train.fit(model, parts.train, parts.train_labels, 4)
    return model, parts.train[:2000]


def squeezed(raw: bytes) -> int:
    try:
        import zstandard
    except ImportError:
        return len(zlib.compress(raw, 9))
    return len(zstandard.ZstdCompressor(19).compress(raw))


def others(w: np.ndarray) -> dict[str, int]:
    index = np.flatnonzero(w)
    values, gaps = w.ravel()[index], np.minimum(np.diff(index, prepend=-1) - 1, 255).astype(np.uint8)
    shuffled = values.view(np.uint8).reshape(-1, 4).T.tobytes()
    return {
        "dense": w.nbytes,
        "dense, squeezed": squeezed(w.tobytes()),
        "CSR": 8 * len(values) + 4 * (len(w) + 1),
        "gaps, squeezed": squeezed(gaps.tobytes() + shuffled),
    }


def entropy(values: np.ndarray) -> float:
    counts = np.unique(values, return_counts=True)[1]
    return float(counts @ np.log2(counts.sum() / counts)) if len(counts) else 0.0


def ideal(w: Tensor, how: str) -> float:
    """In bytes; for steps the entropy of the whole numbers, all rows together."""
    k, width = int(w.count_nonzero()), {"lossless": 32.0, "float16": 16.0, "bfloat16": 16.0}.get(how)
    if width is None:
        most = 2 ** (int(how[0]) - 1) - 1
        step = w.abs().amax(dim=1, keepdim=True).clamp(min=1e-30) / most
        bits = entropy((w / step).round()[w != 0].numpy())
    else:
        bits = k * width
    return (bits + bound(w.numel(), k)) / 8


def speed(w: Tensor, path: Path, repeats: int) -> float:
    """MB of dense weights a second, the median."""
    layer, skeleton = (
        nn.Linear(w.shape[1], w.shape[0], bias=False),
        nn.Linear(w.shape[1], w.shape[0], bias=False),
    )
    layer.weight.data = w
    save_model(path, layer, {}, compact=True)
    taken = []
    for _ in range(repeats + 1):
        start = time.process_time()
        load_model(path, skeleton)
        taken.append(time.process_time() - start)
    assert torch.equal(skeleton.weight, w)
    return w.nbytes / 1e6 / statistics.median(taken[1:])


def measure(trained: bool, repeats: int) -> list[dict]:
    model, x = mnist() if trained else synthetic()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for method in ("corenet", "uniform", "l1", "l2", "l1l2", "magnitude") if trained else ("corenet",):
            ready = cs.calibrate(model, x, method=method, points=256)
            for keep in DENSITIES:
                small = ready.compress(keep=keep).model
                w = small.get_submodule("0").weight.detach().contiguous()
                row = {"method": method, "keep": keep, "kept": int(w.count_nonzero()), **others(w.numpy())}
                row["bound"] = ideal(w, "lossless")
                for how, rounding in KINDS.items():
                    coarse = w if rounding is None else rounded(w, rounding)
                    row[how] = len(pack(coarse).code)
                    row[f"{how} of bound"] = row[how] / ideal(coarse, how)
                    row[f"{how} MB/s"] = speed(coarse, Path(folder) / "file", repeats)
                rows.append(row)
    return rows


def met(row: dict) -> bool:
    small = row["lossless of bound"] <= LOSSLESS and row["8-bit of bound"] <= EIGHT
    return (small or row["keep"] != 0.1) and min(row[f"{how} MB/s"] for how in KINDS) >= SPEED


def show(rows: list[dict]) -> str:
    plain = ("kept", "dense, squeezed", "CSR", "gaps, squeezed", "bound")
    lines = ["| method | keep | " + " | ".join((*plain, *KINDS)) + " | slowest MB/s |"]
    lines.append("|" + "---|" * (len(plain) + len(KINDS) + 3))
    for row in rows:
        cells = [f"{row[name]:,.0f}" for name in plain]
        cells += [f"{row[how]:,} ({row[f'{how} of bound']:.2f})" for how in KINDS]
        slowest = min(row[f"{how} MB/s"] for how in KINDS)
        lines.append(
            f"| {row['method']} | {row['keep']:.0%} | {' | '.join(cells)} | {slowest:,.0f} |"
            + "  MISSED" * (not met(row))
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", action="store_true", help="a trained network, every method")
    parser.add_argument("--json", action="store_true", help="the numbers, for programs")
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = measure(arguments.mnist, arguments.repeats)
    print(json.dumps(rows) if arguments.json else show(rows))
    return 0 if all(map(met, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
