"""Drawing edges: ours beside four other ways, in multiples of one float32 matrix product, one thread.

`python -m benchmarks.drawing` prints the table and fails where ours is slower than the best of the four or
than 20 products; `--json` prints the numbers. The matrix is 1000 x 784 with heavy tails and both signs; the
ratio is draws per edge, half of them for each sign. What takes more than 60 products at one ratio is left out
at larger ones, for its time only grows. Times are the processor's, so a busy machine disturbs them less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable

import numba
import numpy as np
import torch

from coresieve.kernels.multinomial import multinomial

ROWS, EDGES, CAP, HOPELESS = 1000, 784, 20.0, 60.0
RATIOS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000)


def numpy_rows(q: np.ndarray, m: int, rng: np.random.Generator) -> np.ndarray:
    """`Generator.multinomial` on the edges of each row and sign."""
    counts = np.zeros(q.shape, np.int32)
    for i, row in enumerate(q):
        for part in (row, -row):
            edges = np.flatnonzero(part > 0)
            p = part[edges].astype(np.float64)
            counts[i, edges] = rng.multinomial(m, p / p.sum())
    return counts


def torch_scatter(q: torch.Tensor, m: int, generator: torch.Generator) -> torch.Tensor:
    """`torch.multinomial` for each sign, then counted by `scatter_add_`."""
    counts = torch.zeros(q.shape, dtype=torch.int32)
    for part in (q.clamp(min=0), q.neg().clamp_(min=0)):
        drawn = torch.multinomial(part, m, replacement=True, generator=generator)
        counts.scatter_add_(1, drawn, torch.ones(1, dtype=torch.int32).expand(drawn.shape))
    return counts


@numba.njit(nogil=True, error_model="numpy")
def _part(row, sign, p, edges):
    n, total = 0, 0.0
    for j in range(row.size):
        x = sign * row[j]
        p[n], edges[n] = x, j
        n += 1 if x > 0 else 0
        total += x if x > 0 else 0.0
    return n, total


@numba.njit(nogil=True, error_model="numpy")
def alias_tables(q, m, rng):
    """Walker's alias table (by Vose) for each row and sign, then two numbers for each draw."""
    counts = np.zeros(q.shape, np.int32)
    p, edges, other = (
        np.empty(q.shape[1] + 1),
        np.empty(q.shape[1] + 1, np.int64),
        np.zeros(q.shape[1], np.int64),
    )
    small, large = np.empty(q.shape[1], np.int64), np.empty(q.shape[1], np.int64)
    for i in range(q.shape[0]):
        for sign in (1.0, -1.0):
            n, total = _part(q[i], sign, p, edges)
            smalls = larges = 0
            for k in range(n):
                p[k] *= n / total
                if p[k] < 1:
                    small[smalls] = k
                    smalls += 1
                else:
                    large[larges] = k
                    larges += 1
            while smalls and larges:
                smalls -= 1
                a, b = small[smalls], large[larges - 1]
                other[a] = b
                p[b] -= 1 - p[a]
                if p[b] < 1:
                    larges -= 1
                    small[smalls] = b
                    smalls += 1
            for k in range(smalls):
                p[small[k]] = 1.0
            for k in range(larges):
                p[large[k]] = 1.0
            for _ in range(m):
                u = rng.random() * n
                k = int(u)
                counts[i, edges[k if u - k < p[k] else other[k]]] += 1
    return counts


@numba.njit(nogil=True, error_model="numpy")
def conditional_binomials(q, m, rng):
    """N_1 ~ Binomial(m, p_1), N_2 ~ Binomial(m - N_1, p_2 / (1 - p_1)), and so on."""
    counts = np.zeros(q.shape, np.int32)
    p, edges = np.empty(q.shape[1] + 1), np.empty(q.shape[1] + 1, np.int64)
    for i in range(q.shape[0]):
        for sign in (1.0, -1.0):
            n, mass = _part(q[i], sign, p, edges)
            left = m
            for k in range(n - 1):
                if left == 0:
                    break
                drawn = rng.binomial(left, min(p[k] / mass, 1.0))
                counts[i, edges[k]] = drawn
                left -= drawn
                mass -= p[k]
            counts[i, edges[n - 1]] += left
    return counts


def contenders(q: torch.Tensor) -> dict[str, Callable[[int], object]]:
    """Each takes the draws per row and sign. The last four are those to beat."""
    rng, generator, keys = np.random.default_rng(0), torch.Generator().manual_seed(0), torch.arange(ROWS)
    other, rows = torch.randn(EDGES, 256, generator=generator), q.numpy()
    return {
        "product": lambda m: q @ other,
        "ours": lambda m: multinomial(q, torch.full((ROWS, 2), m), 0, keys),
        "numpy": lambda m: numpy_rows(rows, m, rng),
        "torch": lambda m: torch_scatter(q, m, generator),
        "alias": lambda m: alias_tables(rows, m, rng),
        "binomials": lambda m: conditional_binomials(rows, m, rng),
    }


def medians(runs: dict[str, Callable[[int], object]], m: int, repeats: int) -> dict[str, float]:
    """Seconds, each the median of repeats that take turns; what is slow has fewer of them."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            if sum(times[name]) < 1.0:
                start = time.process_time()
                run(m)
                times[name].append(time.process_time() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def measure(repeats: int) -> list[dict[str, float | bool | None]]:
    """One row per ratio: every contender in products, the bar, and whether ours meets it."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((ROWS, EDGES)) * rng.exponential(size=(ROWS, EDGES))
    runs = contenders(torch.from_numpy(q.astype(np.float32)))
    for run in runs.values():
        run(1)  # compiles
    table = []
    for ratio in RATIOS:
        seconds = medians(runs, max(1, round(ratio * EDGES / 2)), repeats)
        product = seconds.pop("product")
        row: dict = {name: taken / product for name, taken in seconds.items()}
        for name in [name for name in row if name != "ours" and row[name] > HOPELESS]:
            del runs[name]
        row["bar"] = min(CAP, *(taken for name, taken in row.items() if name != "ours"))
        table.append({"ratio": ratio, **row, "met": row["ours"] <= row["bar"]})
    return table


def show(table: list[dict]) -> str:
    names = ("ratio", "ours", "bar", "numpy", "torch", "alias", "binomials")
    lines = ["".join(f"{name:>11}" for name in names)]
    for row in table:
        cells = (f"{row[name]:>11.2f}" if name in row else f"{'-':>11}" for name in names)
        lines.append("".join(cells) + ("" if row["met"] else "  MISSED"))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="the numbers, for programs")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    table = measure(options.repeats)
    print(json.dumps(table, indent=1) if options.json else show(table))
    return 0 if all(row["met"] for row in table) else 1


if __name__ == "__main__":
    sys.exit(main())
