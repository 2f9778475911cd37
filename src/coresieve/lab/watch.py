"""The progress of a run, live: cells done, failed, left, and the time to go. Silent when not a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from coresieve.terminal import console, drawable

if TYPE_CHECKING:
    from coresieve.lab.run import Progress


@contextmanager
def watched() -> Iterator[Callable[[Progress], None]]:
    """What a run tells its progress to."""
    import sys

    err = console(stderr=True)
    if not drawable(err):
        with redirect_stdout(sys.stderr):
            yield lambda _: None
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    start = time.monotonic()
    words = "{task.fields[counts]}\n[dim]{task.fields[doing]}"  # two lines, so that both fit 80 columns
    columns = (BarColumn(bar_width=20), TextColumn(words))
    with Bar(*columns, console=err, transient=True) as bar:
        task = bar.add_task("", total=None, counts="starting", doing="")

        def show(state: Progress) -> None:
            counts = told(state, time.monotonic() - start)
            bar.update(
                task, total=state.total or None, completed=state.done, counts=counts, doing=state.doing
            )

        yield show


def told(state: Progress, elapsed: float) -> str:
    """
    >>> from coresieve.lab.run import Progress
    >>> told(Progress(total=100, done=50, before=40), 60.0)
    '50 done, 50 left, 0 failed, about 5:00 to go'
    """
    now = state.done - state.before
    left = state.total - state.done
    text = f"{state.done:,} done, {left:,} left, {state.failed:,} failed"
    return text + (f", about {_clock(elapsed * left / now)} to go" if now and left else "")


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
