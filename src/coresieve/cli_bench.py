"""The command bench: an original and a small network side by side, as they run and as they are stored.

coresieve bench nets:build small.safetensors --weights w.safetensors --batch 1,8,64,512
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from coresieve.cli_arguments import Json, Key, Model, Page, Weights, Whole, converted, names, trained, whole
from coresieve.cli_certificates import Compact
from coresieve.errors import BudgetError, SampleError
from coresieve.terminal import escape, print_json, progress, say, size_of, table

if TYPE_CHECKING:
    from rich.table import Table
    from torch import Tensor, nn

EVEN = 0.05  # a ratio this near to 1 is no difference
Batches = Annotated[
    tuple[int, ...],
    Parameter(metavar="SIZES", converter=converted(lambda text: tuple(map(whole, names(text)))), n_tokens=1,
              negative=(), help="Batch sizes: 1,8,64,512."),
]  # fmt: skip


def bench(
    original: Model,
    compressed: Compact,
    /,
    *,
    weights: Weights = None,
    batch: Batches = (1, 8, 64, 512),
    data: Path | None = None,
    data_key: Key = None,
    threads: Whole = 1,
    seconds: float = 1.0,
    page: Page = None,
    json: Json = False,
) -> None:
    """Time a small network against its original: latency, throughput, memory and file size.

    coresieve bench nets:build small.safetensors --weights w.safetensors --batch 1,64

    The small network is timed as it is and accelerated (see `coresieve.accelerate`), with the same threads for all,
    which take turns; "times faster" is the median over turns, with its quartiles.

    Parameters
    ----------
    data
        Inputs to run on, one per row [default: random numbers].
    threads
        Threads that torch may use.
    seconds
        How long to time each batch size.
    """
    if not batch or min(batch) < 1 or threads < 1:
        raise BudgetError(f"--batch {','.join(map(str, batch))} --threads {threads}",
                          "whole numbers of at least 1", "--batch 1,8,64,512 --threads 1")  # fmt: skip
    file = trained(original, weights)
    if page is not None:
        from coresieve.lab import network_page

        network_page.check(page)
    with progress() as bar:
        bar.step("loading torch")
        import torch

        from coresieve import sparse
        from coresieve.cli_certificates import _load_small
        from coresieve.inputs import load_model

        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            net = load_model(original, weights)
            loaded = _load_small(compressed, net)
            small = loaded.model
            inputs = _inputs(net, data, data_key)
            bar.step("finding the fastest way for each layer")
            fast = sparse.accelerate(small.eval(), batch=batch)
            bar.step("timing", total=len(batch))
            rows = []
            for n in sorted(set(batch)):
                x = inputs[torch.arange(n) % len(inputs)]
                rows.append(_one(net.eval(), small, fast, x, seconds))
                bar.advance(f"batch of {n}")
        finally:
            torch.set_num_threads(before)
    bytes_ = {
        "memory": [sparse.memory(net), sparse.memory(fast)],
        "file": [file.stat().st_size, compressed.stat().st_size],
    }
    told = _verdict(rows, bytes_)
    if page is not None:
        from coresieve.lab import network_page

        asked = {"--weights": weights, "--batch": ",".join(map(str, batch)), "--data": data, "--data-key": data_key,
                 "--threads": threads, "--seconds": f"{seconds:g}", "--page": page}  # fmt: skip
        command = ["coresieve", "bench", original, str(compressed)]
        command += [word for name, value in asked.items() if value is not None for word in (name, str(value))]
        network_page.write(
            page,
            compressed,
            shlex.join(command),
            report=loaded.report,
            certificate=loaded.certificate,
            timing=network_page.Timing(rows, bytes_, threads, told, fast.acceleration),  # pyright: ignore
        )
    if json:
        report = fast.acceleration.to_dict()  # pyright: ignore
        print_json(
            {"threads": threads, "rows": rows, "bytes": bytes_, "verdict": told, "acceleration": report}
        )
        return
    say(_times(rows, threads))
    say(_sizes(bytes_))
    say(escape(str(fast.acceleration)))  # pyright: ignore
    say(f"\n[bold]{escape(told)}[/]")
    if page is not None:
        say(f"Page  {escape(str(page))}")


def _inputs(net: nn.Module, data: Path | None, key: str | None) -> Tensor:
    import torch
    from torch import nn

    from coresieve.inputs import load_inputs

    if data is not None:
        batches = load_inputs(data, net, key)
        if not torch.is_tensor(batches[0]):
            raise SampleError(
                f"{data} with several arguments", "one array of inputs", "--data-key NAME, or no --data"
            )
        return torch.cat(batches)
    first = next((m for m in net.modules() if isinstance(m, nn.Linear)), None)
    if first is None:
        raise SampleError("a network without nn.Linear and no --data", "inputs to run it on", "--data x.npy")
    return torch.rand(512, first.in_features, generator=torch.Generator().manual_seed(0))


def _one(net: nn.Module, small: nn.Module, fast: nn.Module, x: Tensor, seconds: float) -> dict[str, Any]:
    import statistics

    import torch

    from coresieve import sparse
    from coresieve.errors import ForwardError

    runners = {sparse.DENSE: net, "small": small, "fast": fast}
    with torch.inference_mode():
        try:
            off = float((fast(x) - small(x)).abs().max())
            times = sparse.race(runners, x, seconds)
        except (RuntimeError, TypeError, IndexError) as error:
            raise ForwardError(f"inputs of shape {tuple(x.shape)}, on which the network raised {error}",
                               "inputs that it takes", "--data x.npy") from error  # fmt: skip
    medians = {name: statistics.median(t) for name, t in times.items()}
    return {
        "batch": len(x),
        "milliseconds": {
            "original": 1e3 * medians[sparse.DENSE],
            "compressed": 1e3 * medians["small"],
            "accelerated": 1e3 * medians["fast"],
        },
        "per_second": {"original": len(x) / medians[sparse.DENSE], "accelerated": len(x) / medians["fast"]},
        "compressed_faster": sparse.ratios(times, "small"),
        "accelerated_faster": sparse.ratios(times, "fast"),
        "largest_difference": off,
    }


def _times(rows: list[dict[str, Any]], threads: int) -> Table:
    shown = table(["batch", "original ms", "as it is", "accelerated", "times faster", "inputs/s"])
    shown.title = f"Latency, {threads} thread{'s' * (threads > 1)}"
    for row in rows:
        low, middle, high = row["accelerated_faster"]
        times = [f"{value:.3g}" for value in row["milliseconds"].values()]
        spread = f"{middle:.2f} ({low:.2f}-{high:.2f})"
        shown.add_row(str(row["batch"]), *times, spread, f"{row['per_second']['accelerated']:,.0f}")
    return shown


def _sizes(bytes_: dict[str, list[int]]) -> Table:
    shown = table(["", "original", "small", "share"])
    for what, (before, after) in bytes_.items():
        name = "weights in memory" if what == "memory" else what
        shown.add_row(name, size_of(before), size_of(after), f"{100 * after / max(1, before):.1f} %")
    return shown


def _verdict(rows: list[dict[str, Any]], bytes_: dict[str, list[int]]) -> str:
    """
    >>> row = {"batch": 1, "accelerated_faster": (3.9, 4.0, 4.2)}
    >>> _verdict([row], {"memory": [100, 30], "file": [100, 100]})
    'Batch of 1: 4.0 times faster than the original. Memory: 30 % of its. File: no smaller.'
    """
    told = [f"Batch of {row['batch']}: {_words(*row['accelerated_faster'])}." for row in rows]
    for what, (before, after) in bytes_.items():
        share = after / max(1, before)
        told.append(
            f"{what.capitalize()}: {f'{100 * share:.0f} % of its' if share < 1 - EVEN else 'no smaller'}."
        )
    return " ".join(told)


def _words(low: float, middle: float, high: float) -> str:
    if low > 1 and middle > 1 + EVEN:
        return f"{middle:.1f} times faster than the original"
    if high < 1 and middle < 1 - EVEN:
        return f"{1 / middle:.1f} times slower than the original"
    return "no faster and no slower"
