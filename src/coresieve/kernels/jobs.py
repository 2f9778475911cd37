"""Running a compiled loop on as many threads as torch may use: torch's own, so that none wait for the others.

A task is a compiled function of one address, that of a job: a few numbers, the first of them a counter from which
each thread takes its own number. torch's OpenMP threads spin for a while after each parallel region, and threads of
ours would have to share the cores with them; so the task is handed to the very OpenMP that torch was linked with.
Where there is none to be found (other systems), Python's threads do, for the task holds no lock of the interpreter.

>>> cores(work=10, threads=8), cores(work=10 * WORTH, threads=8)
(1, 8)
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

WORTH = 1 << 18  # multiply-adds that are worth one more thread: some 50 microseconds

Task = Callable[[Any], None]


def cores(work: int, threads: int) -> int:
    """How many threads to use for so many multiply-adds, of those allowed."""
    return max(1, min(threads, work // WORTH))


def share(task: Any, job: Any, threads: int) -> None:
    """Run `task(job)` on each of so many threads."""
    if threads == 1:
        task(job)
    elif (parallel := _torch_threads()) is not None:
        parallel(task, job, threads, 0)
    else:
        with ThreadPoolExecutor(threads - 1) as pool:
            others = [pool.submit(task, job) for _ in range(threads - 1)]
            task(job)
            [other.result() for other in others]


@functools.cache
def _torch_threads() -> Any:
    """GOMP_parallel of the OpenMP that torch uses: GNU's has it, and LLVM's and Intel's for its sake."""
    import torch

    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel = library.GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes, parallel.restype = (
        (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint),
        None,
    )
    return parallel
