"""What a person sees while a command runs: tables on stdout, progress and warnings on stderr.

Progress draws only on a terminal: in a pipe, a log or a cron job nothing but the answer is written.
rich is imported at first use, so that `--help` stays quick.

>>> spread(0.9724, 0.0041, percent=True), spread(0.31415, 0.02, percent=False), spread(None, None)
('97.2±0.4', '0.314±0.020', '-')
"""

from __future__ import annotations

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TYPE_CHECKING, Any

from coresieve.errors import CoresieveWarning, FileError
from coresieve.report import new_console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

NARROWEST = 40  # columns
WIDTHS = {"float64": 8, "int64": 8, "uint64": 8, "complex64": 8, "float32": 4, "int32": 4, "uint32": 4,
          "float16": 2, "bfloat16": 2, "int16": 2, "uint16": 2}  # fmt: skip


def console(*, stderr: bool = False) -> Console:
    """A console on the stream of this moment (tests and pipes replace `sys.stdout`)."""
    answer = new_console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    answer.width = max(NARROWEST, answer.width)  # COLUMNS=0 would print nothing at all
    return answer


def say(what: RenderableType) -> None:
    """Print the answer, for a person. A long line is left whole: file names can be copied."""
    with answering():
        console().print(what, soft_wrap=isinstance(what, str))


def print_json(answer: Any) -> None:
    import json

    with answering():
        print(json.dumps(_finite(answer), indent=2, allow_nan=False, default=str))


@contextmanager
def answering() -> Iterator[None]:
    """Write to stdout, all of it, now. A reader who has left (`| head`) is no fault: the exit code tells the rest."""
    stdout = sys.stdout
    try:
        yield
        if stdout is not None:
            stdout.flush()
    except SystemExit as stop:  # so rich ends a program whose pipe is closed, having turned it to /dev/null
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
    except OSError as error:
        if stdout is not None:  # else the interpreter complains at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            given = f"the answer, which could not be written ({error.strerror})"
            raise FileError(given, "a stdout that takes it", "a disk with room, or another file") from error


def _finite(value: Any) -> Any:
    """JSON knows no NaN and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def complain(label: str, message: str, err: Console | None = None) -> None:
    """A message on stderr: wrapped at words for a person, one line for a log."""
    err = err or console(stderr=True)
    with suppress(OSError, SystemExit):  # a stderr that cannot be written changes no exit code
        err.print(f"{label} {escape(message)}", soft_wrap=not err.is_terminal)


class Progress:
    """A progress bar with one line. Every method is safe, and silent, when stderr is not a terminal."""

    def __init__(self, bar: Any = None):
        self.bar = bar
        self.task = None if bar is None else bar.add_task("starting", total=None)

    def step(self, what: str, *, total: float | None = None) -> None:
        """Begin something new: of `total` steps, or of unknown length."""
        if self.bar is not None:
            self.bar.reset(self.task, description=what, total=total)

    def advance(self, what: str | None = None) -> None:
        if self.bar is not None:
            self.bar.update(self.task, advance=1, **({} if what is None else {"description": what}))

    def reach(self, amount: float) -> None:
        """So much of the total is done."""
        if self.bar is not None:
            self.bar.update(self.task, completed=amount)

    def over(self, batches: Sequence[Any], what: str, *, then: str) -> Counted:
        """`batches`, each pass over which the bar shows as `what`, and its end as the start of `then`."""
        return Counted(batches, self, what, then)


class Counted(list[Any]):
    """Batches that can be iterated again and again; each pass moves the bar from its start."""

    def __init__(self, batches: Sequence[Any], progress: Progress, what: str, then: str):
        super().__init__(batches)
        self.progress, self.what, self.then = progress, what, then

    def __iter__(self) -> Iterator[Any]:
        self.progress.step(self.what, total=len(self))
        for batch in super().__iter__():
            yield batch
            self.progress.advance()
        self.progress.step(self.then)


@contextmanager
def progress() -> Iterator[Progress]:
    """A bar on stderr, gone when the work is done; our warnings appear above it as one clean line each."""
    err = console(stderr=True)
    with warnings.catch_warnings():
        warnings.showwarning = _warn(err)
        if not drawable(err):
            with redirect_stdout(sys.stderr):  # what a model's own code prints is not our answer
                yield Progress()
            return
        from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as Bar

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", style="none"),
            BarColumn(bar_width=28),
            TaskProgressColumn(),
            TimeElapsedColumn(),
        )
        with Bar(*columns, console=err, transient=True) as bar:
            yield Progress(bar)


def drawable(err: Console) -> bool:
    """A terminal, where a line can be drawn anew. FORCE_COLOR asks for colours in a log, not for bars."""
    return err.is_terminal and err.file.isatty()


def _warn(err: Console) -> Any:
    plain = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *rest: Any, **more: Any) -> None:
        if issubclass(category, CoresieveWarning):
            complain("[yellow]warning:[/]", str(message), err)
        else:
            plain(message, category, *rest, **more)

    return show


def escape(text: str) -> str:
    from rich.markup import escape as rich_escape

    return rich_escape(text)


def spread(mean: float | None, std: float | None, *, percent: bool = False) -> str:
    """`mean±std`, short enough for eight columns. Without a spread (one draw) only the mean."""
    if mean is None:
        return "-"
    scale, digits = (100.0, 1) if percent else (1.0, 3 if mean < 10 else 1)
    text = f"{scale * mean:.{digits}f}"
    return text if std is None else f"{text}±{scale * std:.{digits}f}"


def share(value: float) -> str:
    """
    >>> share(0.1), share(0.125), share(0.005)
    ('10 %', '12.5 %', '0.5 %')
    """
    return f"{100 * value:.4g} %"


def size_of(count: int) -> str:
    """
    >>> size_of(512), size_of(34_110), size_of(5_300_000)
    ('512 B', '34.1 kB', '5.3 MB')
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000 or unit == "GB":
            break
        value /= 1000
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def table(columns: Iterable[str]) -> Table:
    """A table without vertical lines; the first column is text, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    answer = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for position, name in enumerate(columns):
        answer.add_column(name, justify="right" if position else "left", no_wrap=True)
    return answer


def bytes_table(about: dict[str, Any]) -> Table:
    """Where the bytes of a file went: a line for each tensor, and one for the header."""
    answer = table(["tensor", "kept", "positions", "values", "bytes", "dense"])
    payload = dense = 0
    for name, tensor in about["tensors"].items():
        size, positions = tensor["bytes"], tensor.get("positions")
        full = math.prod(tensor["shape"]) * WIDTHS.get(tensor["dtype"], 1)
        parts = ("", "") if positions is None else (size_of(positions), size_of(size - positions))
        kept = f"{tensor['kept']:,}" if "kept" in tensor else "all"
        answer.add_row(escape(name), kept, *parts, size_of(size), size_of(full))
        payload, dense = payload + size, dense + full
    answer.add_section()
    answer.add_row("header", "", "", "", size_of(about["bytes"] - payload), "")
    answer.add_row("total", "", "", "", size_of(about["bytes"]), size_of(dense), style="bold")
    return answer


def accuracy_table(summary: Sequence[dict[str, Any]]) -> Table:
    """Methods down, sizes across; the best of each size stands out."""
    at = {(entry["method"], entry["keep"]): entry for entry in summary}
    methods, sizes = (list(dict.fromkeys(pair[i] for pair in at)) for i in (0, 1))
    best = {size: max(at[m, size]["accuracy"] or 0.0 for m in methods) for size in sizes}
    answer = table(["kept", *map(share, sizes)])
    for method in methods:
        entries = [at[method, size] for size in sizes]
        told = [spread(e["accuracy"], e["accuracy_std"], percent=True) for e in entries]
        styles = ["[bold green]" if e["accuracy"] == best[e["keep"]] else "" for e in entries]
        answer.add_row(method, *(style + text for style, text in zip(styles, told, strict=True)))
    return answer


def compare_table(summary: Sequence[dict[str, Any]]) -> Table:
    """A section for each size, a line for each method; columns only for what could be measured."""
    labelled = any(entry["accuracy"] is not None for entry in summary)
    voting = any(entry["flips"] is not None for entry in summary)
    columns = ["", "reached", "error", *["flips %"] * voting, *["accuracy %"] * labelled, "seconds"]
    answer = table(columns)
    for keep in dict.fromkeys(entry["keep"] for entry in summary):
        answer.add_row(f"[bold]{share(keep)} asked[/]")
        for entry in (entry for entry in summary if entry["keep"] == keep):
            answer.add_row(f"  {escape(entry['method'])}", *_compare_cells(entry, voting, labelled))
        answer.add_section()
    return answer


def _compare_cells(entry: dict[str, Any], voting: bool, labelled: bool) -> list[str]:
    kept = "-" if entry["kept"] is None else f"{100 * entry['kept']:.2f} %"
    return [
        kept,
        spread(entry["error"], entry["error_std"]),
        *[spread(entry["flips"], entry["flips_std"], percent=True)] * voting,
        *[spread(entry["accuracy"], entry["accuracy_std"], percent=True)] * labelled,
        spread(entry["seconds"], None),
    ]
