"""compress(keep=0.1, method="corenet") against Algorithm 2 looped over neurons in numpy, side by side in one run.

    python -m benchmarks.compression           784-1000-1000-10 with 256 points
    python -m benchmarks.compression --linear  time against |S|, rows and columns: linear in each

Two baselines. "literal": every line of Algorithm 2 as it is written, so a loop over the edges of each neuron too, numpy
for the points; the bar of 50 is against it. "a neuron at a time": a loop over neurons only, each line one numpy
expression over all its edges, in float32; no bar, for comparison. Both are given
the number of draws, which we solve for.

One thread for all. Interleaved repeats, medians. Exits with 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time

import numpy as np
import torch
from torch import nn

import coresieve as cs

BAR = 50.0
WIDTHS = (784, 1000, 1000, 10)
POINTS = 256


def network(widths: tuple[int, ...]) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = itertools.pairwise(widths)
    layers = [part for n, m in pairs for part in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def sparsify_literally(
    edges: np.ndarray, w: np.ndarray, a: np.ndarray, c: float, rng: np.random.Generator
) -> np.ndarray:
    """Algorithm 2, its lines as they are; m = c S."""
    z = np.zeros(len(a), a.dtype)  # the denominator, which line 2 writes out for each edge, only once
    for k in edges:
        z += w[k] * a[:, k]
    z[z == 0] = np.inf
    s = {}
    for j in edges:  # lines 1 and 2
        s[j] = np.max(w[j] * a[:, j] / z)
    S = sum(s.values())  # line 3
    w_hat = np.zeros_like(w)
    if S == 0:
        return w_hat
    q = {}
    for j in edges:  # lines 4 and 5
        q[j] = s[j] / S
    m = int(np.ceil(c * S))  # line 6
    p = np.fromiter(q.values(), np.float64, len(edges))
    for j in rng.choice(edges, size=m, p=p / p.sum()):  # lines 7 to 10
        w_hat[j] += w[j] / (m * q[j])
    return w_hat


def sparsify_at_once(
    edges: np.ndarray, w: np.ndarray, a: np.ndarray, c: float, rng: np.random.Generator
) -> np.ndarray:
    """Algorithm 2, each line one expression over all edges."""
    g = w[edges] * a[:, edges]
    z = g.sum(axis=1, keepdims=True)
    s = np.divide(g, z, out=np.zeros_like(g), where=z > 0).max(axis=0)
    w_hat = np.zeros_like(w)
    if s.sum() > 0:
        q = s.astype(np.float64) / s.sum(dtype=np.float64)
        m = int(np.ceil(c * s.sum()))
        w_hat[edges] = rng.multinomial(m, q) * w[edges] / (m * np.maximum(q, 1e-300))
    return w_hat


def loop(sparsify, model: nn.Sequential, points: torch.Tensor, c: float, seed: int) -> list[np.ndarray]:
    """Algorithm 1's main loop."""
    rng = np.random.default_rng(seed)
    a, answer = points.numpy(), []
    for layer in [m for m in model if isinstance(m, nn.Linear)]:
        W = np.hstack([layer.weight.detach().numpy(), layer.bias.detach().numpy()[:, None]])
        a = np.hstack([a, np.ones((len(a), 1), a.dtype)])
        columns = np.asfortranarray(a)  # an edge's activations side by side
        W_hat = np.zeros_like(W)
        for i, w in enumerate(W):
            plus, minus = np.flatnonzero(w > 0), np.flatnonzero(w < 0)
            W_hat[i] = sparsify(plus, w, columns, c, rng) - sparsify(minus, -w, columns, c, rng)
        answer.append(W_hat)
        a = np.maximum(a @ W.T, 0)
    return answer


def timed(work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def scale(model: nn.Sequential, points: torch.Tensor) -> float:
    """The c that our own run needed: draws over sums of sensitivities, so that both do the same amount of drawing."""
    layers = cs.compress(model, points, keep=0.1, method="corenet", points=POINTS).report.layers
    return sum(x.draws or 0 for x in layers) / sum((x.sensitivity_mean or 0) * x.rows for x in layers)


def ratio(repeats: int) -> dict:
    model, points = network(WIDTHS), torch.rand(POINTS, WIDTHS[0], generator=torch.Generator().manual_seed(1))
    c = scale(model, points)
    seconds: dict[str, list[float]] = {"compress": [], "literal": [], "a neuron at a time": []}
    for seed in range(repeats):
        for again in range(5):
            seconds["compress"].append(timed(lambda s=5 * seed + again: ours(model, points, s)))
        for name, sparsify in (("literal", sparsify_literally), ("a neuron at a time", sparsify_at_once)):
            seconds[name].append(timed(lambda s=seed, f=sparsify: loop(f, model, points, c, s)))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {name: medians[name] / medians["compress"] for name in medians if name != "compress"}
    return {"seconds": medians, "ratios": ratios, "bar": BAR}


def ours(model: nn.Sequential, points: torch.Tensor, seed: int) -> cs.Compressed:
    return cs.compress(model, points, keep=0.1, method="corenet", points=len(points), seed=seed)


def linear(repeats: int) -> list[dict]:
    """Seconds when |S|, rows or columns double from a base of 256 points and a 1000 x 1000 layer."""
    cases = {"base": (256, 1000, 1000)}
    for k in (2, 4):
        cases |= {
            f"|S| x {k}": (256 * k, 1000, 1000),
            f"rows x {k}": (256, 1000 * k, 1000),
            f"columns x {k}": (256, 1000, 1000 * k),
        }
    runs = {}
    for name, (points, rows, columns) in cases.items():
        model, x = network((columns, rows)), torch.rand(points, columns)
        runs[name] = lambda model=model, x=x, n=points: cs.compress(
            model, x, keep=0.1, method="corenet", points=n
        )
    seconds = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            seconds[name].append(timed(run))
    base = statistics.median(seconds["base"])
    return [
        {"case": name, "seconds": statistics.median(s), "ratio": statistics.median(s) / base}
        for name, s in seconds.items()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--linear", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result = linear(arguments.repeats) if arguments.linear else ratio(arguments.repeats)
    met = isinstance(result, list) or result["ratios"]["literal"] >= BAR
    if arguments.json:
        print(json.dumps(result))
    elif isinstance(result, list):
        for row in result:
            print(f"{row['case']:14} {row['seconds'] * 1000:8.1f} ms   x {row['ratio']:.2f}")
    else:
        for name, seconds in result["seconds"].items():
            print(f"{name:20} {seconds * 1000:9.1f} ms   {seconds / result['seconds']['compress']:6.1f} x")
        print(f"bar: {BAR:g} x against the literal loop, {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
