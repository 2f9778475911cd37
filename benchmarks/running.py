"""A sparse layer against dense torch: how many times faster, by density and batch size, and where they break even.

    python -m benchmarks.running [--json] [--seconds 1.0] [--part layers|network|threads|break-even]

float32, one thread pinned to one core, dense `F.linear` and every way of ours (and dense onnxruntime, where it is
installed) taking turns in one run; medians, and quartiles of the ratio within a turn. Turning the inputs and the
answers counts. Times are processor time (but in "threads"), which does not count the turns of other jobs, and each
turn repeats a quick call for a millisecond, its weights in the caches. Leaves with status 1 when a bar is missed. The
part "threads" wants an idle machine with two cores. What a machine without AVX-512 would do:

    NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+fma,+bmi,+bmi2,+f16c,+sse4.2 python -m benchmarks.running
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import coresieve as cs
from benchmarks.compression import WIDTHS, network
from coresieve import sparse
from coresieve.kernels import sparse_product

SHAPES = ((1000, 784), (4096, 4096))
DENSITIES = (0.5, 0.2, 0.1, 0.05, 0.02)
BATCHES = (1, 8, 64, 512)
AVX512 = sparse_product.available() and sparse_product.lanes() == 16
BARS = {  # density, batch -> times faster than dense torch, on both shapes
    (0.1, 1): 5.0 if AVX512 else 2.0,
    (0.1, 8): 4.0,
    (0.1, 64): 4.0,
    (0.2, 64): 2.3,
    **({(0.02, 1): 12.0, (0.02, 64): 8.5} if AVX512 else {}),
}
NETWORK_BARS = {1: 4.0, 64: 3.5} if AVX512 else {}
THREADS_BAR = 1.7
GRID = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)

Run = Callable[[Tensor], Any]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each cell")
    parser.add_argument("--part", choices=list(PARTS), action="append")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    met, told = True, {}
    for name in options.part or PARTS:
        pin(cores if name == "threads" else cores[-1:])
        torch.set_num_threads(1)
        with torch.inference_mode():
            rows = told[name] = PARTS[name](options.seconds, show=not options.json)
        met &= all(row.get("met", True) for row in rows)
    if options.json:
        print(json.dumps(told, indent=2))
    return 0 if met else 1


def pin(cores: list[int]) -> None:
    if cores:
        os.sched_setaffinity(0, cores)


# ---- the parts --------------------------------------------------------------------------------------------


def layers(seconds: float, show: bool) -> list[dict]:
    """Each shape, density and batch size."""
    rows = []
    say(show, f"{'rows x inputs':14}{'density':>8}{'batch':>6}{'dense us':>10}{'ours us':>10}{'times faster':>26}  "
              f"{'bar':>5}  {'onnxruntime':>11}  way")  # fmt: skip
    for shape in SHAPES:
        for density in DENSITIES:
            w = weights(shape, density)
            for batch in BATCHES:
                rows.append(one(w, density, batch, seconds))
                say(show, line(rows[-1]))
    return rows


def network_part(seconds: float, show: bool) -> list[dict]:
    """784-1000-1000-10 at 10 %, accelerated: what a user gets, modules and activations included."""
    rows = []
    model = network(WIDTHS).eval()
    small = cs.compress(model, torch.rand(256, WIDTHS[0]), keep=0.1, method="magnitude").model
    say(show, "\n784-1000-1000-10, 10 % of the weights, modules and ReLU included")
    for batch, bar in {**dict.fromkeys(BATCHES, None), **NETWORK_BARS}.items():
        fast = cs.accelerate(small, batch=batch, seconds=seconds)
        x = torch.rand(batch, WIDTHS[0])
        runners: dict[str, Run] = {sparse.DENSE: model, "ours": fast, **onnx(model, x)}
        row = {"batch": batch, **told(sparse.race(runners, x, seconds), "ours", bar)}
        rows.append(row)
        say(show, f"batch {batch:4}   dense {row['dense_us']:9.1f} us   ours {row['ours_us']:8.1f} us   {faster(row)}"
                  f"   onnxruntime dense {row['onnxruntime'] or float('nan'):.2f}")  # fmt: skip
    return rows


def threads(seconds: float, show: bool) -> list[dict]:
    """One thread against two: the fastest call of each. On a busy machine two threads wait for the later one."""
    rows = []
    if len(os.sched_getaffinity(0)) < 2:
        say(show, "\ntwo threads: this machine has one core")
        return rows
    say(show, "\ntwo threads against one, 10 %")
    for shape, batch in (((1000, 784), 64), ((1000, 784), 512), ((4096, 4096), 8), ((4096, 4096), 64)):
        x, rows_of = torch.randn(batch, shape[1]), sparse_product.csr(weights(shape, 0.1))
        width = 8 if batch == 8 else 32 if AVX512 else 16
        product = sparse_product.Panels(rows_of, None, width)

        times: dict[int, list[float]] = {1: [], 2: []}
        for _, count in itertools.product(range(20), times):
            torch.set_num_threads(count)
            product(x)
            for _ in range(20):
                start = time.perf_counter()
                product(x)
                times[count].append(time.perf_counter() - start)
        torch.set_num_threads(1)
        best = min(times[1]) / min(times[2])
        middle = statistics.median(times[1]) / statistics.median(times[2])
        rows.append(
            {"shape": shape, "batch": batch, "scaling": best, "median": middle, "met": best >= THREADS_BAR}
        )
        say(show, f"{shape[0]} x {shape[1]}, batch {batch:3}: {best:.2f} (of the medians {middle:.2f}; "
                  f"bar {THREADS_BAR}{'' if rows[-1]['met'] else ', MISSED'})")  # fmt: skip
    return rows


def break_even(seconds: float, show: bool) -> list[dict]:
    """The density from which on dense is faster, between two of the grid."""
    rows = []
    say(show, "\nbreak-even density, 1000 x 784 and 4096 x 4096")
    for shape in SHAPES:
        for batch in BATCHES:
            if shape == SHAPES[1] and batch == BATCHES[-1]:
                continue  # minutes, and no other answer than for a batch of 64
            before = GRID[0]
            for density in GRID:
                if one(weights(shape, density), density, batch, seconds / 2)["ratio"][1] < 1:
                    break
                before = density
            rows.append({"shape": shape, "batch": batch, "faster_at": before})
            say(show, f"{shape[0]} x {shape[1]}, batch {batch:3}: faster up to {100 * before:.0f} %")
    return rows


PARTS = {"layers": layers, "network": network_part, "threads": threads, "break-even": break_even}


# ---- one cell -----------------------------------------------------------------------------------------------


def weights(shape: tuple[int, int], density: float) -> np.ndarray:
    rng = np.random.default_rng(0)
    w = rng.standard_normal(shape, dtype=np.float32)
    return np.where(rng.random(shape) < density, w, np.float32(0))


def one(w: np.ndarray, density: float, batch: int, seconds: float) -> dict:
    rows, bias = sparse_product.csr(w), np.zeros(len(w), np.float32)
    x = torch.randn(batch, w.shape[1], generator=torch.Generator().manual_seed(0))
    dense, b = torch.from_numpy(w), torch.from_numpy(bias)
    known = sparse.ways(rows)
    ours = {name: known[name](rows, bias) for name in sparse._candidates(rows, batch)}
    exact = x.double() @ dense.double().T
    for name, run in ours.items():
        assert torch.allclose(run(x).double(), exact, atol=1e-3), name
    runners = {sparse.DENSE: lambda x: F.linear(x, dense, b), **ours, **onnx(linear(dense, b), x)}
    times = sparse.race(runners, x, seconds)
    full = {name: t for name, t in times.items() if name in ours and len(t) == len(times[sparse.DENSE])}
    best = min(full or ours, key=lambda name: statistics.median(times[name]))
    return {"shape": list(w.shape), "density": density, "batch": batch, "way": best,
            **told(times, best, BARS.get((density, batch)))}  # fmt: skip


def told(times: dict[str, list[float]], name: str, bar: float | None) -> dict:
    ratio, other = sparse.ratios(times, name), times.get("onnxruntime")
    return {
        "dense_us": 1e6 * statistics.median(times[sparse.DENSE]),
        "ours_us": 1e6 * statistics.median(times[name]),
        "ratio": ratio,
        "bar": bar,
        "met": bar is None or ratio[1] >= bar,
        "onnxruntime": statistics.median(times[sparse.DENSE]) / statistics.median(other) if other else None,
    }


def linear(w: Tensor, b: Tensor) -> nn.Linear:
    layer = nn.Linear(w.shape[1], w.shape[0], device="meta")
    layer.weight, layer.bias = nn.Parameter(w), nn.Parameter(b)
    return layer


def onnx(model: nn.Module, x: Tensor) -> dict[str, Run]:
    """The same dense layers in onnxruntime, one thread."""
    try:
        import onnxruntime
        from onnx import TensorProto, helper, numpy_helper
    except ImportError:
        return {}
    nodes, arrays, at = [], [], "x"
    for k, layer in enumerate(m for m in model.modules() if isinstance(m, nn.Linear)):
        if k:
            nodes.append(helper.make_node("Relu", [at], [f"r{k}"]))
            at = f"r{k}"
        arrays += [
            numpy_helper.from_array(p.detach().numpy(), f"{n}{k}") for n, p in layer.named_parameters()
        ]
        nodes.append(helper.make_node("Gemm", [at, f"weight{k}", f"bias{k}"], [f"y{k}"], transB=1))
        at = f"y{k}"
    ends = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in ("x", at)]
    graph = helper.make_graph(nodes, "dense", ends[:1], ends[1:], arrays)
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    settings = onnxruntime.SessionOptions()
    settings.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(made.SerializeToString(), settings, ["CPUExecutionProvider"])
    return {"onnxruntime": lambda x: session.run(None, {"x": x.numpy()})}


def say(show: bool, text: str) -> None:
    if show:
        print(text, flush=True)


def faster(row: dict) -> str:
    low, middle, high = row["ratio"]
    bar = "" if row["bar"] is None else f"; bar {row['bar']:g}{'' if row['met'] else ', MISSED'}"
    return f"{middle:.1f} ({low:.1f}-{high:.1f}{bar})"


def line(row: dict) -> str:
    low, middle, high = row["ratio"]
    bar = "" if row["bar"] is None else f"{row['bar']:g}"
    other = "" if row["onnxruntime"] is None else f"{row['onnxruntime']:.2f}"
    shape = "{} x {}".format(*row["shape"])
    missed = "" if row["met"] else "  MISSED"
    return (
        f"{shape:14}{100 * row['density']:6g} %{row['batch']:6}{row['dense_us']:10.1f}{row['ours_us']:10.1f}"
        f"{f'{middle:.1f} ({low:.1f}-{high:.1f})':>26}  {bar:>5}  {other:>11}  {row['way']}{missed}"
    )


if __name__ == "__main__":
    sys.exit(main())
