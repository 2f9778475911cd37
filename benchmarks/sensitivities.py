"""What the paper's sensitivities cost, in multiples of one matrix product of the same shape.

    python -m benchmarks.sensitivities [--json] [--repeats 21]

One thread, float32, medians of repeats that take turns in one run. Times are processor time, which does not
count the turns of other jobs. The pass visits as many points as the data make it visit, so it is measured on
several kinds of data. Leaves with status 1 when a bar is missed; there is none for data that tie throughout, which
are marked "no bar": they show the worst case. The second table doubles one dimension at a time: a cost linear
in each reads 2 everywhere.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

from coresieve.kernels.max_times import denominators, fast_path, max_times, reciprocal

SHAPES = [(1000, 784, 256), (1000, 1000, 256), (4096, 4096, 512)]  # rows, edges, points
BARS = {"pass": 2.5, "all": 5.0}  # the (max, times) pass; with its denominators and reciprocals
KINDS: dict[str, Callable[[Tensor], Tensor]] = {  # normal numbers to activations
    "relu": torch.relu,
    "uniform": torch.special.ndtr,
    "heavy tails": lambda x: (2 * x).exp(),
    "uneven points": lambda x: x.relu() * x[:, :1].exp(),
    "constant": torch.ones_like,
    "0 or 1": lambda x: (x > 0).to(x.dtype),
    "parallel": lambda x: x[:, :1].exp().expand_as(x).contiguous(),
}
NO_BAR = ("0 or 1", "parallel")  # many points tie for every edge: the worst cases, shown without a bar
BASE = (1000, 1000, 256)
DOUBLED = {"points": (1000, 1000, 512), "rows": (2000, 1000, 256), "edges": (1000, 2000, 256)}

Task = Callable[[], object]


def main() -> int:
    options = _options()
    torch.set_num_threads(1)  # the compiled kernel takes its number of threads from torch
    ratios = [against_product(shape, kind, options.repeats) for shape in SHAPES for kind in KINDS]
    growth = when_doubled(options.repeats)
    if options.json:
        print(json.dumps({"ratios": ratios, "growth": growth}, indent=2))
    else:
        _print_tables(ratios, growth)
    return 0 if all(row["met"] for row in ratios) else 1


def against_product(shape: tuple[int, int, int], kind: str, repeats: int) -> dict:
    """The pass, and all of it, as multiples of w @ a.T: medians and quartiles."""
    times = in_turns(tasks(shape, kind), repeats)
    product = statistics.median(times.pop("product"))
    row: dict = {"shape": shape, "data": kind, "product_ms": 1e3 * product, "met": True}
    for name, seconds in times.items():
        low, middle, high = (t / product for t in statistics.quantiles(seconds, n=4))
        row[name] = {"median": middle, "quartiles": [low, high], "bar": BARS.get(name)}
        row["met"] &= kind in NO_BAR or middle <= BARS.get(name, middle)
    return row


def when_doubled(repeats: int) -> dict[str, float]:
    """How many times longer all of it takes when one dimension doubles."""
    shapes = {"base": BASE, **DOUBLED}
    times = in_turns({name: tasks(shape)["all"] for name, shape in shapes.items()}, repeats)
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    return {name: medians[name] / medians["base"] for name in DOUBLED}


def tasks(shape: tuple[int, int, int], kind: str = "relu") -> dict[str, Task]:
    """What is timed: the product, the denominators, the pass, and all of it."""
    rows, edges, points = shape
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(rows, edges, generator=generator)
    a = KINDS[kind](torch.randn(points, edges, generator=generator))
    r, s = [reciprocal(z) for z in denominators(w, a)], torch.zeros_like(w)

    def everything() -> None:
        max_times(w, a, *(reciprocal(z) for z in denominators(w, a)), s)

    return {
        "product": lambda: w @ a.T,
        "denominators": lambda: denominators(w, a),
        "pass": lambda: max_times(w, a, *r, s),
        "all": everything,
    }


def in_turns(tasks: dict[str, Task], repeats: int) -> dict[str, list[float]]:
    """Seconds of processor time of each task, the tasks taking turns; the first turn only warms up."""
    times: dict[str, list[float]] = {name: [] for name in tasks}
    for turn in range(repeats + 1):
        for name, task in tasks.items():
            start = time.process_time()
            task()
            if turn:
                times[name].append(time.process_time() - start)
    return times


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Cost of the sensitivities in matrix products.")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")
    parser.add_argument("--repeats", type=int, default=21, help="turns of each task (at least 2)")
    return parser.parse_args()


def _print_tables(ratios: list[dict], growth: dict[str, float]) -> None:
    how = "compiled" if fast_path(torch.empty(0), torch.empty(0)) else "plain torch"
    print(f"In matrix products of the same shape ({how}, one thread, float32): median (quartiles; bar)\n")
    print(
        f"{'rows x edges x points':23}{'data':14}{'denominators':>13}"
        + "".join(f"{x:>7}{'':20}" for x in BARS)
    )
    for row in ratios:
        shape = " x ".join(map(str, row["shape"]))
        cells = "".join(_cell(row[name]) for name in BARS)
        verdict = " no bar" if row["data"] in NO_BAR else "" if row["met"] else " MISSED"
        print(f"{shape:23}{row['data']:14}{row['denominators']['median']:13.2f}{cells}{verdict}")
    print("\nTime when one dimension doubles: ", end="")
    print(", ".join(f"{name} {ratio:.2f}" for name, ratio in growth.items()))


def _cell(value: dict) -> str:
    low, high = value["quartiles"]
    spread = f"({low:.2f}-{high:.2f}; {value['bar']})"
    return f"{value['median']:7.2f} {spread:20}"


if __name__ == "__main__":
    sys.exit(main())
