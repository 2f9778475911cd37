"""What a trial costs beside its judging: 50 draws of 10 sizes on 784-1000-1000-10, judged on 10,000 inputs.

    python -m benchmarks.trials [--json] [--trials 50] [--method corenet]

The bar: drawing and writing the small networks, all sizes and trials together, takes at most a quarter of the time
that the matrix products of the same evaluations take in dense torch. One thread, processor time, the two interleaved
trial by trial. The profile tells where the overhead goes. Leaves with status 1 when the bar is missed.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import coresieve as cs
from benchmarks.compression import WIDTHS, network

BAR = 0.25
SIZES = (0.8, 0.5, 0.4, 0.3, 0.2, 0.15, 0.1, 0.07, 0.04, 0.02)
TESTS, AT_ONCE = 10_000, 500


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--method", default="corenet")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result = measure(options.method, options.trials)
    if options.json:
        print(json.dumps(result, indent=2))
        return 0 if result["met"] else 1
    print(f"{options.method}, {options.trials} trials of {len(SIZES)} sizes, processor time of one thread\n")
    print("kept        drawing and writing    dense products    ratio")
    for row in result["sizes"]:
        print(
            f"{100 * row['keep']:4g} %{row['overhead']:20.1f} s {row['products']:16.1f} s {row['ratio']:8.3f}"
        )
    print(f"\nin all: {result['ratio']:.3f}; bar {BAR}, {'met' if result['met'] else 'MISSED'}")
    print("\nwhere the overhead goes:")
    for name, share in result["profile"].items():
        print(f"{100 * share:5.1f} %  {name}")
    return 0 if result["met"] else 1


def measure(method: str, trials: int) -> dict:
    model = network(WIDTHS)
    generator = torch.Generator().manual_seed(1)
    ready = cs.calibrate(model, torch.randn(1000, WIDTHS[0], generator=generator), method=method)
    tests = torch.randn(TESTS, WIDTHS[0], generator=generator).split(AT_ONCE)
    ready.compress(keep=0.1), products(model, tests)  # compiled and warm
    profile, sizes = cProfile.Profile(), []
    for keep in SIZES:
        spent = {"overhead": 0.0, "products": 0.0}
        for trial in range(trials):
            made: list[nn.Module] = []
            spent["overhead"] += timed(
                lambda k=keep, t=trial, m=made: m.append(ready.compress(keep=k, seed=t).model)
            )
            spent["products"] += timed(lambda m=made: products(m[0], tests))
        profile.enable()
        ready.compress(keep=keep, seed=trials)
        profile.disable()
        sizes.append({"keep": keep, **spent, "ratio": spent["overhead"] / spent["products"]})
    ratio = sum(row["overhead"] for row in sizes) / sum(row["products"] for row in sizes)
    return {"sizes": sizes, "ratio": ratio, "bar": BAR, "met": ratio <= BAR, "profile": by_file(profile)}


def timed(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def products(model: nn.Module, tests: tuple[torch.Tensor, ...]) -> None:
    """The matrix products of an evaluation, with nothing between them but what feeds the next."""
    assert isinstance(model, nn.Sequential)
    with torch.no_grad():
        for x in tests:
            for layer in model:
                x = layer(x) if isinstance(layer, nn.Linear) else x.clamp_(min=0)


def by_file(profile: cProfile.Profile) -> dict[str, float]:
    """Shares of the time by file of ours; what torch and numpy do counts for who called them last."""
    spent: dict[str, float] = defaultdict(float)
    stats = pstats.Stats(profile).stats  # pyright: ignore[reportAttributeAccessIssue]
    for (file, _, _), (_, _, own, _, callers) in stats.items():
        if "coresieve" in file:
            spent[Path(file).name] += own
        for (caller, _, _), (_, _, part, _) in callers.items() if "coresieve" not in file else ():
            spent[Path(caller).name if "coresieve" in caller else "inside torch, numpy and Python"] += part
    total = sum(spent.values())
    return dict(sorted(((name, own / total) for name, own in spent.items()), key=lambda item: -item[1])[:8])


if __name__ == "__main__":
    sys.exit(main())
